"""`python -m tests.bench [PART]`: measure, write JSON and tables, print the targets.

Exit 1 when a measured target is not met. It stops every process that it starts, and keeps no data except the results.
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

from . import growth, local, processes, results, revoke, scale, signin, verify
from .launch import StartError
from .machine import Cores, choose_cores, describe, name_machine, require_linux
from .openbao import find_bao
from .peer_environment import PEERS
from .progress import report
from .servers import SERVERS
from .testbed import NotRunError, Testbed

PARTS = ("verify", "revoke", "local", "growth", "signin", "processes", "scale")

DEFAULT_PARTS = PARTS[:-1]
"""Parts that run if none is named; `scale` loads a million credentials first."""


def main() -> int:
    options = _read_arguments()
    if options.list:
        for server in SERVERS:
            report(f"{server.name:<30} {', '.join(server.cases)}")
        return 0
    require_linux()
    now, cores = datetime.now(UTC), choose_cores()
    if cores.load is not None:
        # Child processes inherit the core unless they are pinned: databases, generators, writers.
        os.sched_setaffinity(0, {cores.load})
    report(f"{cores.description}")
    path = options.json or results.file_for(options.machine or name_machine(), now)
    chosen = DEFAULT_PARTS if options.part is None else (options.part,)
    all_results: dict[str, Any] = {}
    try:
        with stopping_on_signals():
            for part in chosen:
                report(f"\n=== {part} ===")
                part_results = _perform(part, cores, options)
                all_results = results.add(path, part, part_results, describe(PEERS if PEERS.exists() else None, _bao()))
                (path.parent / results.TABLE.name).write_text(results.page(all_results, path.name))
    except StopRequestedError as stop:
        sys.stderr.write(f"Stopped by {stop}.\n")
        return 128 + stop.number
    report("\n" + "\n".join(results.targets_table(all_results)))
    report(f"\nAll figures: {path} and {results.TABLE.name} beside it")
    return 0 if results.is_met(all_results) else 1


def _perform(part: str, cores: Cores, options: argparse.Namespace) -> dict[str, Any]:
    """Run one part on its own testbed, so that parts do not affect each other."""
    parts: dict[str, Callable[[Testbed], Any]] = {
        "verify": lambda testbed: verify.VerifyBenchmark(testbed, cores, options),
        "revoke": lambda testbed: revoke.Revoke(testbed, cores, options),
        "local": lambda testbed: local.Local(testbed, cores, options),
        "growth": lambda testbed: growth.Growth(testbed, cores, options),
        "signin": lambda testbed: signin.SignIn(testbed, cores, options),
        "processes": lambda testbed: processes.Processes(testbed, cores, options),
        "scale": lambda testbed: scale.Scale(testbed, cores, options),
    }
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-bench-")))
        to_revoke = {
            "revoke": options.revocations * len(revoke.PLACES),
            "local": options.local_revocations,
        }.get(part, 0)
        # The part `scale` loads its own keys, in proportion to the other rows.
        keys = 0 if part == "scale" else options.keys
        testbed = Testbed(folder, stack, keys=keys, listed=options.listed, to_revoke=to_revoke)
        try:
            part_results: dict[str, Any] = parts[part](testbed).run()
        except (NotRunError, StartError, RuntimeError, OSError) as error:
            # The other parts, and their results of earlier runs, are valid without this one.
            part_results = {"failed": str(error)}
            report(f"{part} failed: {error}")
        return part_results


def _bao() -> Path | None:
    try:
        return Path(find_bao())
    except NotRunError:
        return None


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("part", nargs="?", choices=PARTS, default=None, help="default: all except scale")
    parser.add_argument("--json", type=Path, default=None, help="default: tests/bench/results/<date>-<machine>.json")
    parser.add_argument("--machine", default="", help="name of the machine in the file name; default: its processor")
    parser.add_argument("--list", action="store_true", help="list the servers and exit")
    verify.add_options(parser.add_argument_group("verify"))
    revoke.add_options(parser.add_argument_group("revoke"))
    local.add_options(parser.add_argument_group("local"))
    growth.add_options(parser.add_argument_group("growth"))
    signin.add_options(parser.add_argument_group("signin"))
    processes.add_options(parser.add_argument_group("processes"))
    scale.add_options(parser.add_argument_group("scale"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
