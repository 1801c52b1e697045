"""Long fuzz runs: `python -m tests.fuzz [server|service|redaction] --count N --seed N`. Exit 1 after a finding.

`server` sends bytes that resemble HTTP to the dedicated verifier's server and to a stock one. `service` sends requests
with unusual headers and paths to the whole service, on its own database and data folder. `redaction` plants secrets in
log lines. The default is all three. The seed of a finding, with `--count 1`, reproduces it. The keys are then new, the
shapes are the same.
"""

import argparse
import secrets
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests import environment

MOST_SHOWN = 20
COUNTS = {"server": 1_000_000, "service": 100_000, "redaction": 100_000}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("part", nargs="?", choices=COUNTS)
    parser.add_argument("--count", type=int, default=None)
    parser.add_argument("--seed", type=int, default=None)
    asked = parser.parse_args()
    first = secrets.randbelow(10**9) if asked.seed is None else asked.seed
    fuzzes = {"server": _fuzz_server, "service": _fuzz_service, "redaction": _fuzz_redaction}
    parts = [asked.part] if asked.part else list(COUNTS)
    # Run each one, also after a finding of the previous one.
    return max([fuzzes[part](range(first, first + (asked.count or COUNTS[part]))) for part in parts])


def _fuzz_server(seeds: range) -> int:
    from .duel import duel

    with tempfile.TemporaryDirectory() as folder, duel(Path(folder)) as servers:
        warm = seeds[: len(seeds) // 20]
        shown = _show(servers.run(warm))
        before = servers.memory_bytes()
        if shown < MOST_SHOWN:
            shown += _show(servers.run(seeds[len(warm) :]))
        after, complaints = servers.memory_bytes(), servers.complaints()
    for what, times in sorted(servers.counted.items()):
        sys.stdout.write(f"{times:>10,} {what}\n")
    sys.stdout.write(f"memory {before / 1e6:.1f} MB after {len(warm):,} streams, {after / 1e6:.1f} MB at the end\n")
    sent = servers.counted["streams"]
    sys.stdout.write(f"server: {sent:,} streams from seed {seeds[0]}: {shown} finds\n{complaints}")
    return 1 if shown or complaints or after > before + 16_000_000 else 0


def _fuzz_service(seeds: range) -> int:
    _set_up()
    # Imported after Django's setup.
    from .drive import UNLIMITED, make_keys, surprises
    from .served import serving

    known = make_keys()
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), **UNLIMITED) as port:
        shown = _show(surprises(port, known, iter(seeds)))
    sys.stdout.write(f"service: {len(seeds):,} requests from seed {seeds[0]}: {shown} surprises\n")
    return 1 if shown else 0


def _fuzz_redaction(seeds: range) -> int:
    from .planted import SHAPES, find_leaks

    shown = _show(find_leaks(seeds))
    sys.stdout.write(f"redaction: {len(seeds):,} secrets in {len(SHAPES)} shapes from seed {seeds[0]}: {shown} left\n")
    return 1 if shown else 0


def _show(finds: Iterable[object]) -> int:
    """Print the findings and return their number. Stop after too many, because the rest is of the same kind."""
    shown = 0
    for found in finds:
        shown += 1
        sys.stdout.write(f"{found}\n")
        sys.stdout.flush()
        if shown == MOST_SHOWN:
            sys.stdout.write(f"stopped after {shown}\n")
            break
    return shown


def _set_up() -> None:
    environment.lay()
    import django
    from django.core.management import call_command

    django.setup()
    call_command("setup", verbosity=0, stdout=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
