"""`python -m tests.simulator [engine] [--seed N] [--steps N]`; exit 1 when an invariant is violated. See README.md."""

import argparse
import os
import secrets
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tests import environment

if TYPE_CHECKING:
    from tests.simulator.fleet import FleetOptions
    from tests.simulator.simulation import Simulation

STEPS = {"memory": 1_000_000, "engine": 20_000}
CREDENTIALS = {"memory": 2_000, "engine": 40}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulator")
    parser.add_argument("level", nargs="?", choices=STEPS, default="memory")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--credentials", type=int, default=None)
    asked = parser.parse_args(arguments)
    asked.seed = secrets.randbelow(10**9) if asked.seed is None else asked.seed
    asked.steps = asked.steps or STEPS[asked.level]
    asked.credentials = asked.credentials or CREDENTIALS[asked.level]
    return asked


def main(arguments: Sequence[str]) -> int:
    """Run the simulation; Django is set up."""
    from tests.simulator.fleet import FleetOptions

    asked = parse(arguments)
    sys.stdout.write(f"seed {asked.seed}\n")
    sys.stdout.flush()
    options = FleetOptions(credentials=asked.credentials)
    return _run_engine(asked, options) if asked.level == "engine" else _run_in_memory(asked, options)


def _run_in_memory(asked: argparse.Namespace, options: "FleetOptions") -> int:
    from tests.simulator.simulation import Simulation

    return _run(Simulation(asked.seed, options), asked.steps)


def _run_engine(asked: argparse.Namespace, options: "FleetOptions") -> int:
    from tests.simulator.service.place import create_database, service
    from tests.simulator.service.simulation import ServiceSimulation

    create_database()
    with service() as backend:
        return _run(ServiceSimulation(asked.seed, backend, options), asked.steps)


def _run(simulation: "Simulation", steps: int) -> int:
    from tests.simulator.report import format_result

    began = time.monotonic()
    result = simulation.run(steps)
    sys.stdout.write(format_result(result, simulation.began_at, time.monotonic() - began))
    return 0 if result.violation is None else 1


if __name__ == "__main__":
    if parse(sys.argv[1:]).level == "engine":
        os.environ[environment.DATABASE] = "postgres"
    environment.lay()
    import django

    django.setup()
    sys.exit(main(sys.argv[1:]))
