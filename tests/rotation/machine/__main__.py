"""Random event sequences against the engine, in any number.

    python -m tests.rotation.machine --sequences 10000 --seed 1 --processes 2

Prints the sequences played, their results, and each violation with the steps that led to it; exits with 1 on a
violation. Every process migrates its own database first. The same seed plays the same sequences.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass

from tests import environment
from tests.servers.guard import die_with_parent

# A share is small enough that two processes end at about the same time.
_SEQUENCES_OF_A_SHARE = 250


@dataclass(frozen=True)
class Order:
    """What one process plays: every `of`-th share, beginning with number `part`."""

    sequences: int
    seed: int
    part: int
    of: int


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rotation.machine", description=__doc__)
    parser.add_argument("--sequences", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--order", type=json.loads, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.order is not None:
        die_with_parent()
        _say(json.dumps(_played(Order(**asked.order))))
        return 0
    began_at = time.monotonic()
    orders = [Order(asked.sequences, asked.seed, part, asked.processes) for part in range(asked.processes)]
    found = [json.loads(answer) for answer in _answers(orders)]
    return _report(found, asked.seed, time.monotonic() - began_at)


def _answers(orders: list[Order]) -> list[str]:
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.rotation.machine", "--order", json.dumps(asdict(order))],
            cwd=environment.ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for order in orders
    ]
    answers = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit("a process did not finish; see above")
    return answers


def _played(order: Order) -> dict[str, object]:
    """Create a database and play; nothing that needs a database is imported earlier."""
    environment.lay()
    import django

    django.setup()
    import logging

    from django.core.management import call_command

    logging.disable(logging.CRITICAL)
    call_command("migrate", verbosity=0)
    from tests.rotation.machine.playing import SCENES, play_share, shares
    from tests.rotation.machine.rules import SequenceTally
    from tests.rotation.machine.scenes import CHAINS, VARIANTS

    each = -(-order.sequences // (len(VARIANTS) * SCENES))
    rounds = -(-each * SCENES // (len(CHAINS) * _SEQUENCES_OF_A_SHARE))
    tally = SequenceTally()
    work = [(number, variant, chain) for number in range(rounds) for variant, chain in shares()]
    for index, (_, variant, chain) in enumerate(work):
        if index % order.of == order.part:
            tally.add(play_share(variant, chain, -(-each // rounds), order.seed * 1_000 + index))
    return {
        "sequences": tally.sequences,
        "steps": tally.steps,
        "counts": dict(tally.counts),
        "violations": tally.violations,
    }


def _report(found: list[dict[str, object]], seed: int, seconds: float) -> int:

    counts: Counter[str] = Counter()
    violations: list[str] = []
    for part in found:
        counts.update(part["counts"])  # type: ignore[call-overload]  # read from JSON
        violations += part["violations"]  # type: ignore[arg-type]  # read from JSON
    for name, count in sorted(counts.items()):
        _say(f"{count:>8}  {name}")
    for violation in violations:
        _say(f"VIOLATION {violation}")
    sequences, steps = (sum(int(str(part[name])) for part in found) for name in ("sequences", "steps"))
    _say(
        f"n={sequences} sequences, {steps} steps, {len(violations)} violations, "
        f"seed {seed}, {seconds:.0f} s ({sequences / seconds:.0f} sequences/s)"
    )
    return 1 if violations else 0


def _say(text: str) -> None:
    print(text)  # noqa: T201  the command's output


if __name__ == "__main__":
    sys.exit(main())
