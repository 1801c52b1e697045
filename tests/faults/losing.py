"""A post office that loses a fifth of the messages and delivers another fifth twice: for beats and workers.

Exactly so many, of each five in a row that a process sends: a campaign needs too few for a chance to be a share.
"""

import json
import os
import random
import threading
from pathlib import Path
from typing import Any

from keyvault.project.celery import app

FATES = (0, 2, 1, 1, 1)
"""How often each of five messages is delivered, in an order that is drawn."""

SEED = "FAULTS_LOSS"
TALLY = "FAULTS_LOSS_TALLY"
"""In the environment: the file that each process adds its messages to, a JSON line for each."""


def lose_messages() -> None:
    """Lose messages of this process from now on, if the environment names a seed; the sender sees no error."""
    seed = os.environ.get(SEED)
    if seed is None:
        return
    chance = random.Random(f"{seed} {os.getpid()}")  # noqa: S311  a test's own dice
    tally = Path(os.environ[TALLY])
    amqp: Any = app.amqp
    send = amqp.send_task_message
    drawn: list[int] = []
    turn = threading.Lock()

    def sent(producer: Any, name: str, message: Any, **options: Any) -> Any:
        with turn:
            if not drawn:
                drawn.extend(chance.sample(FATES, len(FATES)))
            times = drawn.pop()
        with tally.open("ab", buffering=0) as file:
            file.write(json.dumps({"task": name, "times": times}).encode() + b"\n")
        answer = None
        for _ in range(times):
            answer = send(producer, name, message, **options)
        return answer

    amqp.send_task_message = sent
