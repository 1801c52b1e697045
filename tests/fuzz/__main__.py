"""The fuzz at length: `python -m tests.fuzz --count 100000 --seed 1`. Exit 1 when something was found.

Works on a database and data folder of its own. A request that was found is made again by its seed, with
`--count 1`; its keys are new ones, its shape is the same.
"""

import argparse
import secrets
import sys
import tempfile
from pathlib import Path

from tests import environment

MOST_SHOWN = 20


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=None)
    asked = parser.parse_args()
    first = secrets.randbelow(10**9) if asked.seed is None else asked.seed
    _set_up()
    # After Django is.
    from .drive import UNLIMITED, make_keys, surprises
    from .served import serving

    known, shown = make_keys(), 0
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), **UNLIMITED) as port:
        for found in surprises(port, known, iter(range(first, first + asked.count))):
            shown += 1
            sys.stdout.write(f"{found}\n")
            if shown == MOST_SHOWN:
                break
    sys.stdout.write(f"{asked.count} requests from seed {first}: {shown} surprises\n")
    return 1 if shown else 0


def _set_up() -> None:
    environment.lay()
    import django
    from django.core.management import call_command

    django.setup()
    call_command("setup", verbosity=0, stdout=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
