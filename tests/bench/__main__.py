"""`python -m tests.bench [verify|revoke|growth|signin|scale]`: measures, writes JSON and table, prints the table.

Exit 1 when a target that was measured is not met. Everything it starts ends with it, and it keeps no data but results.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from keyvault.management.supervisor import StopRequestedError, stopping_on_signals

from . import growth, results, revoke, scale, signin, verify
from .environments import PLACE
from .launch import StartError
from .machine import Cores, choose_cores, describe, name_machine, require_linux
from .openbao import find_bao
from .servers import SERVERS
from .site import NotRunError, Site
from .telling import tell

PARTS = ("verify", "revoke", "growth", "signin", "scale")

DEFAULT_PARTS = PARTS[:-1]
"""The parts that run unless one is named; `scale` loads a million credentials first."""


def main() -> int:
    asked = _read_arguments()
    if asked.list:
        for server in SERVERS:
            tell(f"{server.name:<30} {', '.join(server.cases)}")
        return 0
    require_linux()
    now, cores = datetime.now(UTC), choose_cores()
    if cores.load is not None:
        # With everything that is started from here and not pinned elsewhere: databases, generators, writers.
        os.sched_setaffinity(0, {cores.load})
    tell(f"{cores.words}; wrk or not, every server is checked before it is measured")
    path = asked.json or results.file_for(asked.machine or name_machine(), now)
    chosen = DEFAULT_PARTS if asked.part is None else (asked.part,)
    whole: dict[str, Any] = {}
    try:
        with stopping_on_signals():
            for part in chosen:
                tell(f"\n=== {part} ===")
                told = _perform(part, cores, asked)
                whole = results.add(path, part, told, describe(PLACE if PLACE.exists() else None, _bao()))
                (path.parent / results.TABLE.name).write_text(results.page(whole, path.name))
    except StopRequestedError as stop:
        sys.stderr.write(f"Stopped by {stop}.\n")
        return 128 + stop.number
    tell("\n" + "\n".join(results.targets_table(whole)))
    tell(f"\nAll figures: {path} and {results.TABLE.name} beside it")
    return 0 if results.is_met(whole) else 1


def _perform(part: str, cores: Cores, asked: argparse.Namespace) -> dict[str, Any]:
    """Each on a site of its own, so that none finds what another left."""
    makers: dict[str, Callable[[Site], Any]] = {
        "verify": lambda site: verify.Verify(site, cores, asked),
        "revoke": lambda site: revoke.Revoke(site, cores, asked),
        "growth": lambda site: growth.Growth(site, cores, asked),
        "signin": lambda site: signin.SignIn(site, cores, asked),
        "scale": lambda site: scale.Scale(site, cores, asked),
    }
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-bench-")))
        to_revoke = asked.revocations * len(revoke.PLACES) if part == "revoke" else 0
        # The part `scale` loads its own keys, in proportion to the other rows.
        keys = 0 if part == "scale" else asked.keys
        site = Site(folder, stack, keys=keys, listed=asked.listed, to_revoke=to_revoke)
        try:
            told: dict[str, Any] = makers[part](site).run()
        except (NotRunError, StartError, RuntimeError, OSError) as error:
            # The other parts, and what an earlier run has measured of them, are worth having without it.
            told = {"failed": str(error)}
            tell(f"{part} failed: {error}")
        return told


def _bao() -> Path | None:
    try:
        return Path(find_bao())
    except NotRunError:
        return None


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("part", nargs="?", choices=PARTS, default=None, help="default: all but scale")
    parser.add_argument("--json", type=Path, default=None, help="else tests/bench/results/<date>-<machine>.json")
    parser.add_argument("--machine", default="", help="its name in the file's; else its processor's")
    parser.add_argument("--list", action="store_true", help="the table of servers, and nothing else")
    verify.add_options(parser.add_argument_group("verify"))
    revoke.add_options(parser.add_argument_group("revoke"))
    growth.add_options(parser.add_argument_group("growth"))
    signin.add_options(parser.add_argument_group("signin"))
    scale.add_options(parser.add_argument_group("scale"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
