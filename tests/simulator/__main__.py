"""`python -m tests.simulator [--seed N] [--steps N]`; exit 1 when an invariant is violated. See README.md."""

import argparse
import secrets
import sys
import time
from collections.abc import Sequence

from tests import environment

STEPS = 1_000_000


def main(arguments: Sequence[str]) -> int:
    # Imported here because the services need Django's settings.
    from tests.simulator.fleet import FleetOptions
    from tests.simulator.report import format_result
    from tests.simulator.simulation import Simulation

    parser = argparse.ArgumentParser(prog="python -m tests.simulator")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--credentials", type=int, default=FleetOptions().credentials)
    parser.add_argument("--slow-parts", action="store_true", help="add hosts that README.md names as a limit")
    asked = parser.parse_args(arguments)
    seed = secrets.randbelow(10**9) if asked.seed is None else asked.seed
    sys.stdout.write(f"seed {seed}\n")
    sys.stdout.flush()
    began = time.monotonic()
    simulation = Simulation(seed, FleetOptions(credentials=asked.credentials, slow_parts=asked.slow_parts))
    result = simulation.run(asked.steps)
    sys.stdout.write(format_result(result, simulation.began_at, time.monotonic() - began))
    return 0 if result.violation is None else 1


if __name__ == "__main__":
    environment.lay()
    import django

    django.setup()
    sys.exit(main(sys.argv[1:]))
