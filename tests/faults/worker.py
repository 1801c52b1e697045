"""A real Celery worker that kills itself at a named crash point. Everything else is as in `make run`.

    python -m tests.faults.worker POINT       see `crashing`; `nowhere`: it runs until SIGTERM
    python -m tests.faults.worker --preloaded   one worker after the other, each for a POINT from the input

The launcher has loaded all modules, so that its workers start immediately. It reads `POINT\\n`, and writes `PID\\n`
and, when that worker has ended, `STATUS\\n`. `FAULTS_NOTES` names a file for the crash points that are passed.
`FAULTS_LOSS` is the seed for lost and duplicate messages, see `message_loss`.
"""

import os
import sys
from pathlib import Path
from typing import NoReturn

import django

django.setup()

from keyvault.management import service
from keyvault.project.celery import app
from tests.faults.crashing import CrashInjector
from tests.faults.message_loss import lose_messages
from tests.servers.guard import die_with_parent


def work(point: str, *more: str) -> None:
    """Run a worker until it is stopped."""
    notes = os.environ.get("FAULTS_NOTES")
    CrashInjector(point, Path(notes) if notes else None).install()
    lose_messages()
    command = service.worker_program().command
    app.worker_main([*command[command.index("worker") :], *more])


def launch_workers() -> None:
    app.loader.import_default_modules()
    app.finalize()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _run_child(line.strip())
        _say(pid)
        _say(os.waitpid(pid, 0)[1])


def _run_child(point: str) -> NoReturn:
    die_with_parent()
    os.setsid()
    # Celery reads no input, and its output must not look like a line of the launcher.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    code = 1
    try:
        work(point)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    finally:
        sys.stderr.flush()
        os._exit(code)


def _say(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "--preloaded":
        launch_workers()
    else:
        work(*sys.argv[1:])
