"""The merchant's backends: each presents the key that it read from the secret backend, many times a second.

A real fleet does not change keys at once. Each backend looks at the secret backend now and then, and takes a
new version into use some time after it was published; until then it goes on with the one that it has.
"""

import http.client
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from keyvault.backends.base import StoredSecret
from keyvault.domain.errors import DependencyUnavailableError
from rotation.management.demo.verifier import DemoVerifier

THREADS_PER_BACKEND = 2
LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Backend:
    """One of the merchant's own servers. `lag_seconds`: how long it takes to use what was published."""

    name: str
    client_ip: str
    lag_seconds: float


@dataclass(frozen=True, slots=True)
class Request:
    """One verification as the caller saw it. `code` None: allowed. `fault`: there was no verdict at all."""

    backend: str
    key_id: str
    sent_at: float
    answered_at: float
    code: str | None = None
    fault: str = ""


@dataclass(slots=True)
class Fleet:
    """Sends `rate` requests a second in all, from entering to leaving. Every one of them is kept.

    `read_published` is what a backend does to read the merchant's secret.
    """

    backends: Sequence[Backend]
    connect: Callable[[], DemoVerifier]
    read_published: Callable[[], StoredSecret | None]
    rate: float
    requests: list[Request] = field(default_factory=list)
    keys: dict[str, StoredSecret] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Self:
        published = self.read_published()
        if published is None:
            raise LookupError("the secret backend holds no key for the merchant")
        self.keys = {backend.name: published for backend in self.backends}
        threads = len(self.backends) * THREADS_PER_BACKEND
        for number in range(threads):
            backend = self.backends[number % len(self.backends)]
            # Out of step with each other, so that the requests come evenly.
            self._start(self._present, backend, number / self.rate, threads / self.rate)
        for backend in self.backends:
            self._start(self._follow, backend)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def using(self) -> dict[str, str]:
        """The id of the key that each backend presents now."""
        return {name: secret.labels["key_id"] for name, secret in self.keys.items()}

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _follow(self, backend: Backend) -> None:
        """Takes what is published into use, `lag_seconds` after it was first seen there."""
        seen_at: float | None = None
        while not self._stop.wait(LOOK_SECONDS):
            try:
                published = self.read_published()
            except DependencyUnavailableError:
                continue  # as a real backend would: it goes on with what it has, and looks again
            if published is None or published.version == self.keys[backend.name].version:
                seen_at = None
            elif seen_at is None:
                seen_at = time.monotonic()
            elif time.monotonic() - seen_at >= backend.lag_seconds:
                self.keys[backend.name] = published

    def _present(self, backend: Backend, first_pause: float, pause: float) -> None:
        verifier = self.connect()
        due_at = time.monotonic() + first_pause
        while not self._stop.wait(due_at - time.monotonic()):
            self.requests.append(self._ask(verifier, backend))
            due_at = max(due_at + pause, time.monotonic() - pause)  # after a stall, no flood of what was missed
        verifier.close()

    def _ask(self, verifier: DemoVerifier, backend: Backend) -> Request:
        secret = self.keys[backend.name]
        key_id, sent_at = secret.labels["key_id"], time.monotonic()
        code, fault = None, ""
        try:
            decision = verifier.ask(
                secret.secret, client_ip=backend.client_ip, user_agent=f"{backend.name}/1.0", merchant="acme"
            )
            code = None if decision["allowed"] is True else str(decision["code"])
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            fault = f"{type(error).__name__}: {error}"
        return Request(backend.name, key_id, sent_at, time.monotonic(), code, fault)
