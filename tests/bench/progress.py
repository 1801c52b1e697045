"""Progress messages of the benchmarks."""

import sys


def report(line: str = "") -> None:
    """Print a line and flush it, also into a pipe."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
