"""One experiment in its own process, with its own servers, database and data folder, which it deletes afterwards.

    python -m tests.faults.experiment_process NAME SEED MINUTES RESULT

It writes its counts to the file RESULT, and its progress to standard error.
"""

import importlib
import os
import sys
from contextlib import ExitStack
from pathlib import Path

import django

from keyvault.management.supervisor import StopRequestedError, stopping_on_signals
from tests import environment
from tests.faults import servers
from tests.faults.catalog import EXPERIMENTS, Experiment
from tests.faults.results import Options, Result

UNLIMITED = {"KEYVAULT_SANDBOX_LIMIT": "1000000/1", "KEYVAULT_PRODUCTION_LIMIT": "1000000/1"}
"""Limits so high that none refuses a request."""


def main(name: str, seed: str, minutes: str, result: str) -> int:
    experiment = next(each for each in EXPERIMENTS if each.name == name)
    try:
        with stopping_on_signals(), ExitStack() as stack:
            names = sorted(experiment.servers - servers.STARTED_BY_THEMSELVES)
            started = {name: stack.enter_context(servers.running(name)) for name in names}
            folder = _prepare_environment(experiment, started)
            _set_up()
            options = Options(folder, int(seed), float(minutes), experiment.choice, started)
            done: Result = importlib.import_module(f"tests.faults.{experiment.module}").run(options)
            done.write(Path(result))
            _close_connections()
    except StopRequestedError as stop:
        return 128 + stop.number
    return 0


def _prepare_environment(experiment: Experiment, started: dict[str, servers.Restartable]) -> Path:
    """Set the environment of this process and of all that it starts."""
    os.environ[environment.DATABASE] = experiment.database
    if "postgres" in started:
        servers.make_database(started["postgres"].url)
        os.environ[environment.POSTGRES_URL] = started["postgres"].url
    place = environment.lay()
    os.environ.update(UNLIMITED)
    for broker in ("redis", "rabbitmq"):
        if broker in started:
            os.environ["KEYVAULT_BROKER_URL"] = started[broker].url
    return place.data_dir


def _set_up() -> None:
    django.setup()
    from django.core.management import call_command

    call_command("setup", verbosity=0, stdout=sys.stderr)


def _close_connections() -> None:
    from django.db import connections

    connections.close_all()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
