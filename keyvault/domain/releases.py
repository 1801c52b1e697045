"""This release, and the oldest one that may run on the same database schema."""

import re

RELEASE = "0.3.0"

OLDEST_COMPATIBLE_RELEASE = "0.2.0"
"""The oldest release that works on this release's schema, so that both run side by side during an upgrade.

Raise it with a migration that an older release cannot run on: one that removes or renames what the older release reads,
adds a column that it does not fill, or removes a trigger that it requires.
"""


def parse_release(text: str) -> tuple[int, ...]:
    """Return the numbers of a release, for comparison. Raises ValueError."""
    if re.fullmatch(r"[0-9]{1,6}(?:\.[0-9]{1,6}){2}", text) is None:
        raise ValueError(f"not a release: {text[:40]!r}")
    return tuple(map(int, text.split(".")))
