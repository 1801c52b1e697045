"""The input of an experiment, and its counts."""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.servers import Restartable

MOST_KEPT = 20


@dataclass(frozen=True, slots=True)
class Options:
    """The input. `folder`: for its files and logs. `minutes`: its maximum duration. `seed`: of all its random choices.

    `servers` are running, by name, and may be stopped and started again.
    """

    folder: Path
    seed: int
    minutes: float
    choice: str = ""
    servers: Mapping[str, Restartable] = field(default_factory=dict)


@dataclass(slots=True)
class Result:
    """`n` trials of `unit`, with further `counts`. Every violation counts; the report quotes the first ones."""

    unit: str
    n: int = 0
    counts: dict[str, float] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    number_of_violations: int = 0

    def must_be_none(self, name: str, found: list[str] | tuple[str, ...]) -> None:
        """Count these under the name. Each of them is a violation."""
        self.counts[name] = self.counts.get(name, 0) + len(found)
        self.number_of_violations += len(found)
        self.violations += [f"{name}: {each}" for each in found][: max(0, MOST_KEPT - len(self.violations))]

    def must_be(self, holds: bool, what: str) -> None:
        if not holds:
            self.number_of_violations += 1
            self.violations.append(what)

    def write(self, path: Path, **more: Any) -> None:
        path.write_text(json.dumps(asdict(self) | more))


_BEGAN = time.monotonic()


def say(text: str) -> None:
    """Print a line of progress."""
    sys.stderr.write(f"  {time.monotonic() - _BEGAN:6.1f} s  {text}\n")
    sys.stderr.flush()
