"""A real Celery worker that kills itself: right after a rotation has entered a state, or around a backend write.

    python -m tests.faults.worker STATE|put|destroy|nowhere

Everything else is the worker of `make run`.
"""

import os
import signal
import sys
from typing import Any

import django

django.setup()

from keyvault.backends.local import LocalKeystore
from keyvault.project.celery import app
from rotation.services import engine


def main(point: str) -> None:
    if point in {"put", "destroy"}:
        method: Any = getattr(LocalKeystore, point)

        def done_and_killed(*args: Any, **kwargs: Any) -> None:
            method(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(LocalKeystore, point, done_and_killed)
    elif point != "nowhere":
        run: Any = engine._Run
        enter = run._move if point != "staged" else run._stage

        def entered_and_killed(self: Any, grant: Any, rotation: Any, *rest: Any) -> None:
            enter(self, grant, rotation, *rest)
            if rotation.state == point:
                os.kill(os.getpid(), signal.SIGKILL)

        setattr(run, enter.__name__, entered_and_killed)
    app.worker_main(
        ["worker", "--pool", "threads", "--concurrency", "2", "--beat", "--without-gossip", "--without-mingle"]
    )


if __name__ == "__main__":
    main(sys.argv[1])
