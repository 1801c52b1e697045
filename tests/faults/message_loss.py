"""Loss and duplication of messages, for beats and workers: a fifth is lost, another fifth is delivered twice.

The share is exact in each five consecutive messages of a process, because a campaign sends too few for random shares.
"""

import json
import os
import random
import threading
from pathlib import Path
from typing import Any

from keyvault.project.celery import app

FATES = (0, 2, 1, 1, 1)
"""Number of deliveries of each of five messages; their order is random."""

SEED = "FAULTS_LOSS"
TALLY = "FAULTS_LOSS_TALLY"
"""Environment variable with the file to which each process adds its messages, one JSON line each."""


def lose_messages() -> None:
    """Lose messages of this process from now on, if the environment names a seed. The sender sees no error."""
    seed = os.environ.get(SEED)
    if seed is None:
        return
    rng = random.Random(f"{seed} {os.getpid()}")  # noqa: S311  not for secrets
    tally = Path(os.environ[TALLY])
    amqp: Any = app.amqp
    send = amqp.send_task_message
    drawn: list[int] = []
    turn = threading.Lock()

    def sent(producer: Any, name: str, message: Any, **options: Any) -> Any:
        with turn:
            if not drawn:
                drawn.extend(rng.sample(FATES, len(FATES)))
            times = drawn.pop()
        with tally.open("ab", buffering=0) as file:
            file.write(json.dumps({"task": name, "times": times}).encode() + b"\n")
        answer = None
        for _ in range(times):
            answer = send(producer, name, message, **options)
        return answer

    amqp.send_task_message = sent
