"""Engines for tests: the real one on the test's own database, whose feed the test confirms by hand."""

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, TypeVar

import msgspec
from django.conf import settings

from keyvault.domain.ids import Subject
from keyvault.hotpath.adapters.assembly import make_engine
from keyvault.hotpath.adapters.stores import DatabaseStore
from keyvault.hotpath.engine.engine import Engine
from keyvault.hotpath.engine.freshness import Freshness
from keyvault.hotpath.engine.ports import Ports
from keyvault.hotpath.frontends.threaded_frontend import ThreadedFrontend
from keyvault.hotpath.messages.pending_requests import VERIFY, Headers
from keyvault.hotpath.messages.responses import HttpResponse
from keyvault.services.limits.budgets import LocalBudgets
from keyvault.services.limits.limiter import Limiter, failed_proofs
from keyvault.services.limits.stores import LocalStore
from keyvault.services.peppers.ring import load_peppers

encode = msgspec.json.encode

T = TypeVar("T")


def outside_the_loop(read: Callable[[], T]) -> T:
    """Run the function outside the event loop, where Django uses the connection and transaction of the test."""
    loop = asyncio.get_running_loop()
    asyncio._set_running_loop(None)
    try:
        return read()
    finally:
        asyncio._set_running_loop(loop)


@dataclass
class MachineClock:
    """The monotonic clock and the wall clock of a machine, which the test moves separately."""

    monotonic_now: float = 1_000.0
    wall_now: float = field(default_factory=time.time)

    def monotonic(self) -> float:
        return self.monotonic_now

    def wall(self) -> float:
        return self.wall_now

    def pass_seconds(self, seconds: float) -> None:
        self.monotonic_now += seconds
        self.wall_now += seconds


class Still:
    """The generation counter of a host without changes."""

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(8)).cast("Q")

    def since(self, seen: int) -> tuple[int, Iterable[Subject] | None]:
        return 0, []


@dataclass(frozen=True)
class Primed:
    """An engine and its threaded frontend. Without a cache, `ask` reads the database for each request."""

    engine: Engine
    frontend: ThreadedFrontend
    may_remember: bool

    def ask(self, token: str, asked: Mapping[str, Any], path: str = VERIFY) -> HttpResponse:
        return self.send("POST", path, {"authorization": f"Bearer {token}"}, encode(asked))

    def send(self, method: str, target: str, headers: Mapping[str, str], body: bytes = b"") -> HttpResponse:
        if self.may_remember:
            self.engine.freshness.confirm(time.monotonic(), time.time())
        if method == "POST" and target == VERIFY and "authorization" in headers:
            # As the servers do.
            known = self.frontend.verify_known(headers["authorization"].encode(), body)
            if isinstance(known, HttpResponse):
                return known
        return self.frontend.answer(method, target, Headers({"content-type": "application/json", **headers}), body)

    @property
    def from_memory(self) -> int:
        """Return the number of requests that the fast path has answered."""
        return self.engine.answered_from_memory


def prime(*, may_remember: bool = True, full: bool = True, capacity: int | None = None, **ports: Any) -> Primed:
    """Make an engine with an empty cache and its own limits: always full, or never refilled (`full` False)."""
    hours = count()
    store = LocalStore((lambda: next(hours) * 3_600_000_000_000) if full else lambda: 0)
    limiter = Limiter(store, None, 100)
    budgets = LocalBudgets(limiter, store)
    made: Ports = replace(make_engine(failed_proofs().note, load_peppers).ports, **{"budgets": budgets, **ports})
    engine = Engine(made, Freshness(settings.MAX_STALENESS_SECONDS), capacity or settings.VERIFIER_KEYS)
    return Primed(engine, ThreadedFrontend(engine, DatabaseStore(), budgets), may_remember)


def prime_by(clock: MachineClock, *, capacity: int | None = None, **ports: Any) -> Primed:
    """Make an engine whose feed is confirmed at the present time of the test's clock."""
    primed = prime(may_remember=False, capacity=capacity, monotonic=clock.monotonic, wall=clock.wall, **ports)
    primed.engine.freshness.confirm(clock.monotonic(), clock.wall())
    return primed


def decision(answer: HttpResponse) -> tuple[int, str]:
    found = json.loads(answer.body)
    return found["status"], found["code"] or "allowed"


def masked(answer: HttpResponse) -> tuple[int, tuple[tuple[str, str], ...], bytes]:
    """Return the response with its request id masked."""
    body = answer.body.replace(answer.request_id.encode(), b"*")
    return answer.status, tuple(sorted(answer.headers)), body


def unnumbered(answer: HttpResponse) -> tuple[int, bytes]:
    """Return the status and body with the ids and the remaining limits masked."""
    status, _, body = masked(answer)
    body = re.sub(rb"r=\d+;t=\d+", b"r=*;t=*", body)
    return status, re.sub(rb'"remaining":\d+,"reset_seconds":\d+', b"*", body)
