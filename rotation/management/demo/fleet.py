"""The merchant's servers: each presents the key that it read from the secret backend, many times a second.

A real fleet does not switch keys simultaneously. Each server polls the secret backend and starts to use a new version
some time after it was published; until then it keeps the old one.
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

THREADS_PER_SERVER = 2
POLL_INTERVAL_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class MerchantServer:
    """One of the merchant's own servers. `lag_seconds`: delay before it uses a published version."""

    name: str
    client_ip: str
    lag_seconds: float


@dataclass(frozen=True, slots=True)
class Request:
    """One verification as the caller saw it. `code` None: allowed. `fault`: why there was no verdict."""

    server: str
    key_id: str
    sent_at: float
    answered_at: float
    code: str | None = None
    fault: str = ""


@dataclass(slots=True)
class Fleet:
    """A context manager that sends `rate` requests a second in total and keeps every one.

    `read_published`: how a server reads the merchant's secret.
    """

    servers: Sequence[MerchantServer]
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
        self.keys = {server.name: published for server in self.servers}
        threads = len(self.servers) * THREADS_PER_SERVER
        for number in range(threads):
            server = self.servers[number % len(self.servers)]
            # Staggered, so that the requests are evenly spaced.
            self._start(self._present, server, number / self.rate, threads / self.rate)
        for server in self.servers:
            self._start(self._follow, server)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def using(self) -> dict[str, str]:
        """Return the id of the key that each server presents now."""
        return {name: secret.labels["key_id"] for name, secret in self.keys.items()}

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _follow(self, server: MerchantServer) -> None:
        """Switch to a published version `lag_seconds` after it was first seen."""
        seen_at: float | None = None
        while not self._stop.wait(POLL_INTERVAL_SECONDS):
            try:
                published = self.read_published()
            except DependencyUnavailableError:
                continue  # as a real server would: keep the current version and poll again
            if published is None or published.version == self.keys[server.name].version:
                seen_at = None
            elif seen_at is None:
                seen_at = time.monotonic()
            elif time.monotonic() - seen_at >= server.lag_seconds:
                self.keys[server.name] = published

    def _present(self, server: MerchantServer, first_pause: float, pause: float) -> None:
        verifier = self.connect()
        due_at = time.monotonic() + first_pause
        while not self._stop.wait(due_at - time.monotonic()):
            self.requests.append(self._ask(verifier, server))
            due_at = max(due_at + pause, time.monotonic() - pause)  # after a pause, no burst of missed requests
        verifier.close()

    def _ask(self, verifier: DemoVerifier, server: MerchantServer) -> Request:
        secret = self.keys[server.name]
        key_id, sent_at = secret.labels["key_id"], time.monotonic()
        code, fault = None, ""
        try:
            decision = verifier.ask(
                secret.secret, client_ip=server.client_ip, user_agent=f"{server.name}/1.0", merchant="acme"
            )
            code = None if decision["allowed"] is True else str(decision["code"])
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            fault = f"{type(error).__name__}: {error}"
        return Request(server.name, key_id, sent_at, time.monotonic(), code, fault)
