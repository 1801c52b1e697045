"""What the benchmarks say while they run."""

import sys


def tell(line: str = "") -> None:
    """At once, also into a pipe."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
