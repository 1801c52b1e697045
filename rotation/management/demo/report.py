"""The demo's output: live on a terminal, plain lines elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.status import Status
from rich.text import Text

from keyvault.domain.redaction import redact

STATUS_INTERVAL_SECONDS = 5.0
"""Interval between status lines of a wait without a terminal, in seconds."""


class DemoReport:
    """The demo's output. All of it is redacted, since a demo must not leak secrets."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._began = time.monotonic()
        self._sections = 0
        self._status: Status | None = None
        self._printed_at = 0.0

    def title(self, text: str) -> None:
        self._print(text, style="bold")

    def section(self, text: str) -> None:
        self._sections += 1
        self._print(f"\n{self._sections}. {text}", style="bold cyan")

    def step(self, text: str) -> None:
        """Print something that was done or observed as expected."""
        self._print(f"  {self.elapsed:5.1f} s  {text}")

    def aside(self, text: str) -> None:
        self._print(f"           {text}", style="dim")

    def figure(self, name: str, value: str) -> None:
        self._print(f"  {name:<34} {value}")

    def success(self, text: str) -> None:
        self._print(f"\n{text}", style="bold green")

    def failure(self, text: str) -> None:
        self._print(f"\n{text}", style="bold red")

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._began

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Show an animated status line during a wait; `now` changes its text."""
        self._printed_at = time.monotonic()
        with self._console.status(Text(redact(text))) as self._status:
            try:
                yield
            finally:
                self._status = None

    def now(self, text: str) -> None:
        if self._status is not None:
            self._status.update(Text(redact(text)))
        if not self._console.is_terminal and time.monotonic() - self._printed_at > STATUS_INTERVAL_SECONDS:
            self._printed_at = time.monotonic()
            self.aside(f"… {text}")

    def _print(self, text: str, style: str | None = None) -> None:
        self._console.print(redact(text), style=style, markup=False)
