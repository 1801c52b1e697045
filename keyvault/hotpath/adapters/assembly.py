"""Assemble an engine from the services. Only this module and `stores` import Django in this package.

load_blocking() -> ThreadedAssembly    for threads: the ordinary server process
load_async() -> AssembledVerifier      for an event loop: the dedicated verifier
"""

import logging
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from functools import cache
from typing import Final, Protocol

from django.conf import settings
from django.db import connection

from keyvault.access.decision import Denial
from keyvault.access.verification import TokenRecord, find_exposed
from keyvault.backends import meters
from keyvault.domain.digests import Peppers, PepperSet
from keyvault.domain.environments import Environment
from keyvault.domain.errors import ErrorCode
from keyvault.domain.keys import KeyRecord
from keyvault.domain.keystring import KeyString
from keyvault.hotpath.adapters.stores import DatabaseStore, PostgresStore, ShortTimeoutThread, ThreadStore
from keyvault.hotpath.engine.engine import Engine
from keyvault.hotpath.engine.freshness import SWITCH_SECONDS, Freshness
from keyvault.hotpath.engine.ports import EngineVerdict, Ports
from keyvault.hotpath.frontends.asyncio_frontend import AsyncioFrontend, AsyncStore
from keyvault.hotpath.frontends.threaded_frontend import StoreUnavailableError, ThreadedFrontend
from keyvault.hotpath.http1.protocol import Shortcut
from keyvault.hotpath.messages.pending_requests import VERIFY, is_engine_path
from keyvault.hotpath.messages.rendering import denial_problem, encode, problem_answer
from keyvault.hotpath.messages.responses import HttpResponse
from keyvault.models import Key, ServiceToken
from keyvault.models.usage import UseOutcome
from keyvault.services.catalog.base_urls import BASE_URLS
from keyvault.services.change_feed.follower import Follower
from keyvault.services.keys.rehashing import pending_rehashes
from keyvault.services.limits.budgets import budgets
from keyvault.services.limits.limiter import failed_proofs, limiter
from keyvault.services.peppers.ring import load_peppers, take_pepper
from keyvault.services.recording.changes import generation
from keyvault.services.startup.metrics import CONTENT_TYPE, expose_meters
from keyvault.services.startup.readiness import find_readiness, readiness_body
from keyvault.services.usage.recorder import Uses, usage_log
from keyvault.services.verification.judging import note_use, record_buckets
from keyvault.services.verification.refusals import refusal_log
from keyvault.wire.entry_points import VerificationEntryPoint
from keyvault.wire.headers import mint_request_id
from keyvault.wire.planes import METRICS
from keyvault.wire.problems import problem

_log = logging.getLogger(__name__)

END_SECONDS: Final = 5.0
"""Maximum time for writing recorded data after the last response, in seconds. Together with the server's drain and the
closing of connections it must stay below the supervisor's timeout."""


def make_engine(
    note_failed_proof: Callable[[str | None], int | None],
    peppers: Callable[[PepperSet], Peppers],
    adapt: Callable[[Ports], Ports] = lambda ports: ports,
) -> Engine:
    """Return an engine with an empty cache. It does not use the cache until its change feed is followed.

    `adapt`: replaces some of the ports.
    """
    ports = Ports(
        key_prefix=settings.KEY_PREFIX,
        environments=frozenset(map(Environment, settings.ENVIRONMENTS)),
        base_urls=BASE_URLS,
        generation=generation(),
        budgets=budgets(),
        monotonic=time.monotonic,
        wall=time.time,
        random_bytes=secrets.token_bytes,
        loaded_peppers=load_peppers.loaded,
        peppers=peppers,
        take_pepper=take_pepper,
        buckets=record_buckets,
        note_failed_proof=note_failed_proof,
        note_key_proof=_note_key_proof,
        note_token_proof=_note_token_proof,
        note_verdict=_note_verdict,
        note_refusal=meters.note_denial,
        note_slow_path=meters.slow_path.note,
        note_new_use=usage_log.protect,
        outcome=lambda is_probe: (UseOutcome.PROBED if is_probe else UseOutcome.ALLOWED).value,
    )
    return Engine(adapt(ports), Freshness(settings.MAX_STALENESS_SECONDS), settings.VERIFIER_KEYS)


def make_follower(engine: Engine, entry_point: str) -> Follower:
    return Follower(engine.evict, engine.freshness.confirm, engine.freshness.mark_lost, entry_point)


def uses_of(engine: Engine) -> Collection[Uses]:
    """Return the uses recorded by the fast path since the last call, and update the metrics."""
    uses, counts = engine.take_uses()
    meters.note_verifications(
        {
            (VerificationEntryPoint.VERIFY, "allowed", "memory"): counts.from_memory - counts.denied_from_memory,
            (VerificationEntryPoint.VERIFY, "denied", "memory"): counts.denied_from_memory,
            (VerificationEntryPoint.VERIFY, "allowed", "database"): counts.granted_after_read,
        }
    )
    limiter().retry_lost()
    meters.note_verifier(len(engine.memory.keys.by_id), engine.freshness.age_seconds(time.monotonic()))
    return uses


def _note_key_proof(record: KeyRecord, keystring: KeyString, peppers: Peppers) -> None:
    pending_rehashes.note_proof(Key, record.key_id, keystring.text, (record.digest, record.pepper_version), peppers)


def _note_token_proof(record: TokenRecord, keystring: KeyString, peppers: Peppers) -> None:
    proved = (record.digest, record.pepper_version)
    pending_rehashes.note_proof(ServiceToken, keystring.key_id, keystring.text, proved, peppers)


def _note_verdict(verdict: EngineVerdict) -> None:
    if not verdict.is_from_memory:  # the engine counts those itself
        is_allowed = not isinstance(verdict.judgement.verdict, Denial)
        meters.note_verification(verdict.entry_point, is_allowed=is_allowed, source="rules")
    note_use(
        verdict.judgement,
        usage_log,
        source=verdict.source,
        user_agent=verdict.user_agent,
        endpoint=verdict.endpoint,
        origin=verdict.origin,
        is_probe=verdict.is_probe,
    )
    refusal_log.note(
        verdict.judgement,
        request_id=verdict.request_id,
        entry_point=verdict.entry_point,
        environment=verdict.environment,
        endpoint=verdict.endpoint,
        source=verdict.source,
        at=verdict.at,
    )


class ThreadedAssembly:
    """The engine of the ordinary server process, and its change feed follower."""

    def __init__(self) -> None:
        self.engine = make_engine(lambda address: failed_proofs().note(address), load_peppers)
        self.frontend = ThreadedFrontend(self.engine, DatabaseStore(), budgets())
        self.follower = make_follower(self.engine, "server")
        usage_log.add_counter(lambda: uses_of(self.engine))

    def start(self) -> None:
        """Follow the change feed, so that the process may answer from memory."""
        sys.setswitchinterval(SWITCH_SECONDS)
        usage_log.start()
        self.follower.start()


@cache
def load_blocking() -> ThreadedAssembly:
    """Return the assembly of this process. It reads the database for every request until it is started.

    Call it after forking: locks, threads and the source of request ids cannot be shared with a parent. Granian's
    workers do; other servers must do so too (gunicorn without --preload, uWSGI lazy-apps).
    """
    return ThreadedAssembly()


def unrouted(method: str, target: str) -> HttpResponse:
    """Answer a request that the dedicated verifier does not serve."""
    request_id = mint_request_id(secrets.token_bytes)
    exposed = find_exposed(target)
    if exposed is not None:
        return problem_answer(denial_problem(exposed, request_id), request_id)
    path = target.partition("?")[0]
    if path == _HEALTH or _is_status_path(path):
        detail = f"This path does not support {method}. Use GET or HEAD."
        return problem_answer(
            problem(ErrorCode.METHOD_NOT_ALLOWED, detail, request_id, allowed_methods=("GET", "HEAD")), request_id
        )
    return problem_answer(problem(ErrorCode.NOT_FOUND, "No resource exists at this URL.", request_id), request_id)


def _metrics() -> tuple[int, bytes, str]:
    return 200, expose_meters(), CONTENT_TYPE


_HEALTH: Final = "/healthz"
_READY: Final = "/readyz"
_STATUS_PATHS: Final = (_READY, METRICS)

Status = tuple[int, dict[str, object]]
"""Status and body of a readiness reply."""


def _is_status_path(path: str) -> bool:
    return path in _STATUS_PATHS and (path != METRICS or settings.IS_METRICS_PATH_SERVED)


class AssembledVerifier:
    """The engine of a dedicated verifier process, with the store that it reads from."""

    def __init__(self, engine: Engine, store: "ProcessStore") -> None:
        self.engine = engine
        self._store = store
        self._budgets = budgets()
        self._frontend = AsyncioFrontend(self.engine, self._store, self._budgets, failed_proofs().is_over)
        self.shortcut = Shortcut(_VERIFY, self._frontend.verify)
        self._status_threads = {path: ShortTimeoutThread(path) for path in _STATUS_PATHS}
        self._recorder_thread = ShortTimeoutThread("notes", END_SECONDS)
        usage_log.add_counter(lambda: uses_of(self.engine))

    def begin(self) -> None:
        """Follow the change feed and report uses."""
        raise NotImplementedError

    def end(self) -> None:
        """Write what was recorded and deregister the process. An error in one step does not prevent the others."""
        raise NotImplementedError

    def ready(self) -> Status:
        """Return the readiness reply."""
        raise NotImplementedError

    async def start(self) -> None:
        await self._recorder_thread.run(self.begin)
        await self._store.open()

    async def stop(self) -> None:
        """Write what was recorded and deregister the process. Bounded by END_SECONDS."""
        with suppress(StoreUnavailableError):  # loses the same uses as a crash
            await self._recorder_thread.run(self.end)
        await self._store.close()
        await self._budgets.close_async()

    def handle(
        self, method: bytes, target: bytes, headers: list[tuple[bytes, bytes]], body: bytes | None
    ) -> HttpResponse | Awaitable[HttpResponse]:
        path = target.partition(b"?")[0].decode("latin-1")
        if is_engine_path(path):
            return self._frontend.answer(method, target, headers, body)
        if method in {b"GET", b"HEAD"}:
            if path == _HEALTH:
                # Answered by the loop itself: the response proves that it is alive.
                return _respond(200, b'{"status":"ok"}', "application/json")
            if _is_status_path(path):
                return self._answer_status(path)
        return unrouted(method.decode("latin-1"), target.decode("latin-1"))

    async def _answer_status(self, path: str) -> HttpResponse:
        """Answer on the path's own thread, so that readiness, metrics and verify requests do not delay each other."""
        try:
            return _respond(*await self._status_threads[path].run(self._readyz if path == _READY else _metrics))
        except StoreUnavailableError:
            request_id = mint_request_id(secrets.token_bytes)
            detail = "The status cannot be determined right now. Try again."
            found = problem(ErrorCode.DEPENDENCY_UNAVAILABLE, detail, request_id, retry_after_seconds=1)
            return problem_answer(found, request_id)

    def _readyz(self) -> tuple[int, bytes, str]:
        status, body = self.ready()
        return status, encode(body), "application/json"


class DatabaseVerifier(AssembledVerifier):
    """A dedicated verifier with a log-in to the database."""

    def __init__(self) -> None:
        # Counted in this process: the event loop must not wait for Redis while a client guesses keys.
        engine = make_engine(failed_proofs().note_here, load_peppers.loaded)
        super().__init__(engine, PostgresStore() if connection.vendor == "postgresql" else ThreadStore())
        self._follower = make_follower(engine, "verifier")

    def begin(self) -> None:
        try:
            usage_log.start()
            self._follower.start()
        finally:
            connection.close()  # only of this thread; each started thread has its own

    def end(self) -> None:
        """Write the uses for rotations, deregister so that no receipt waits, and write the refusals."""
        try:
            for stop in (usage_log.stop, self._follower.stop, refusal_log.stop):
                try:
                    stop()
                except Exception:  # noqa: BLE001  the process ends in any case
                    _log.exception("recorded data could not be written at exit")
        finally:
            connection.close()

    def ready(self) -> Status:
        try:
            return readiness_body(find_readiness())
        finally:
            connection.close()


def load_async() -> DatabaseVerifier:
    return DatabaseVerifier()


class ProcessStore(AsyncStore, Protocol):
    """A store that lives as long as the process."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...


def _respond(status: int, body: bytes, content_type: str) -> HttpResponse:
    headers = (("Content-Type", content_type), ("Cache-Control", "no-store"))
    return HttpResponse(status, body, mint_request_id(secrets.token_bytes), headers)


_VERIFY: Final = VERIFY.encode()
