"""Shared by every chapter: the running service, the report, and waiting with a time limit."""

import http.client
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from keyvault.domain.plaintext import Plaintext
from keyvault.management.service import ADDRESS, SERVER, WORKER
from keyvault.management.supervisor import Supervisor
from rotation.management.demo.report import DemoReport
from rotation.management.demo.verifier import DemoVerifier

POLL_INTERVAL_SECONDS = 0.1

T = TypeVar("T")


class DemoError(Exception):
    """An expectation of the demo failed. `program`: the process whose log may show why."""

    def __init__(self, text: str, program: str | None = None) -> None:
        super().__init__(text)
        self.program = program


@dataclass(slots=True)
class DemoContext:
    """The running demo. `secrets`: everything issued so far that no file may hold."""

    report: DemoReport
    service: Supervisor
    port: int
    secrets: list[Plaintext] = field(default_factory=list)
    token: Plaintext | None = None

    def until(self, what: str, poll: Callable[[], T | None], *, seconds: float, program: str = WORKER) -> T:
        """Call `poll` until it returns a value other than None, and return that. Raises DemoError after `seconds`."""
        deadline = time.monotonic() + seconds
        with self.report.waiting(f"waiting for {what} …"):
            while True:
                self.service.restart_ended()
                seen = poll()
                if seen is not None:
                    return seen
                if time.monotonic() > deadline:
                    raise DemoError(f"Timed out after {seconds:.0f} s waiting for {what}.", program)
                self.service.wait(POLL_INTERVAL_SECONDS)

    def connect(self) -> DemoVerifier:
        if self.token is None:
            raise DemoError("There is no service token yet.")
        return DemoVerifier(ADDRESS, self.port, self.token)

    def expect(self, what: str, key: Plaintext, *codes: str | None, **more: Any) -> dict[str, Any]:
        """Verify the key over HTTP and require one of the verdicts `codes`; None stands for allowed."""
        verifier = self.connect()
        try:
            decision = verifier.ask(key, **more)
        except (OSError, http.client.HTTPException) as error:
            raise DemoError(f"{what}: there was no verdict, {error}.", SERVER) from None
        finally:
            verifier.close()
        verdict = "allowed" if decision["allowed"] else f"{decision['status']} {decision['code']}"
        if decision["code"] not in codes or decision["allowed"] is not (decision["code"] is None):
            right = " or ".join(code or "allowed" for code in codes)
            raise DemoError(f"{what}: the verdict was {verdict}, and should have been {right}.", SERVER)
        self.report.step(f"{what}: {verdict}")
        return decision
