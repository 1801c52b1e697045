"""The dedicated verifier answers health checks, whatever the state of its database."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Iterator

import pytest

from keyvault.hotpath.adapters import assembly, stores
from keyvault.hotpath.adapters.assembly import DatabaseVerifier
from keyvault.hotpath.http1.server import DRAIN_SECONDS
from keyvault.hotpath.messages.responses import HttpResponse
from keyvault.management.supervisor import STOP_SECONDS
from keyvault.services.postgres.connection_timeouts import ANSWER_SECONDS
from keyvault.services.usage.recorder import usage_log

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def no_sources() -> Iterator[None]:
    """Each engine is a source of uses of the process."""
    before = usage_log._counters[:]
    yield
    usage_log._counters[:] = before


@pytest.fixture
def goes_on() -> Iterator[threading.Event]:
    """The event that `hanging` waits for, always set at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


def hanging(goes_on: threading.Event) -> tuple[int, bytes, str]:
    goes_on.wait()
    return 200, b'{"status":"ready"}', "application/json"


async def answered(answer: HttpResponse | Awaitable[HttpResponse]) -> tuple[int, str]:
    """Return the status, and the status in the body."""
    answer = answer if isinstance(answer, HttpResponse) else await answer
    found = json.loads(answer.body)
    return answer.status, found["code"] if "code" in found else found["status"]


@pytest.mark.parametrize("target", [b"/healthz", b"/healthz?x=1"])
@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
def test_health_is_answered_by_the_event_loop(method: bytes, target: bytes) -> None:
    answer = DatabaseVerifier().handle(method, target, [], b"")
    assert isinstance(answer, HttpResponse)
    assert (answer.status, answer.body) == (200, b'{"status":"ok"}')
    assert answer.all_headers()["Cache-Control"] == "no-store"


@pytest.mark.parametrize("target", [b"/healthz", b"/readyz", b"/metrics?x=1"])
def test_watched_path_accepts_only_reads(target: bytes) -> None:
    answer = DatabaseVerifier().handle(b"POST", target, [], b"")
    assert isinstance(answer, HttpResponse)
    assert (answer.status, answer.all_headers()["Allow"]) == (405, "GET, HEAD")


def test_watch_that_hangs_times_out_and_delays_no_other(
    monkeypatch: pytest.MonkeyPatch, goes_on: threading.Event
) -> None:
    """Guarantee: a lost database does not fail the health check of a verifier that still answers."""
    monkeypatch.setattr(stores, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(DatabaseVerifier, "_readyz", lambda self: hanging(goes_on))
    monkeypatch.setattr(assembly, "_metrics", lambda: (200, b'{"status":"fine"}', "application/json"))

    async def ask() -> None:
        verifier = DatabaseVerifier()
        waiting = asyncio.ensure_future(answered(verifier.handle(b"GET", b"/readyz", [], b"")))
        await asyncio.sleep(0)
        assert await answered(verifier.handle(b"GET", b"/healthz", [], b"")) == (200, "ok")
        assert await answered(verifier.handle(b"GET", b"/metrics?x=1", [], b"")) == (200, "fine")
        assert await waiting == (503, "dependency_unavailable")
        assert await answered(verifier.handle(b"GET", b"/readyz", [], b"")) == (503, "dependency_unavailable")
        goes_on.set()
        while await answered(verifier.handle(b"GET", b"/readyz", [], b"")) != (200, "ready"):
            pass

    asyncio.run(ask())


class Stopped:
    """A stand-in for the parts that are stopped at the end."""

    def __init__(self, name: str, stopped: list[str], failure: Exception | None = None) -> None:
        self.name, self.stopped, self.failure = name, stopped, failure

    def stop(self) -> None:
        self.stopped.append(self.name)
        if self.failure is not None:
            raise self.failure


def test_verifier_whose_readiness_hangs_writes_what_it_noted_when_it_stops(
    monkeypatch: pytest.MonkeyPatch, goes_on: threading.Event
) -> None:
    """Guarantee: a hanging or failed health check before SIGTERM loses no use."""
    stopped = list[str]()
    monkeypatch.setattr(DatabaseVerifier, "_readyz", lambda self: hanging(goes_on))
    verifier = DatabaseVerifier()
    monkeypatch.setattr(assembly, "usage_log", Stopped("uses", stopped, ConnectionError("the database is away")))
    monkeypatch.setattr(assembly, "refusal_log", Stopped("refusals", stopped))
    monkeypatch.setattr(verifier, "_follower", Stopped("follower", stopped))

    async def stop() -> None:
        waiting = asyncio.ensure_future(answered(verifier.handle(b"GET", b"/readyz", [], b"")))
        await asyncio.sleep(0)
        await verifier.stop()
        assert stopped == ["uses", "follower", "refusals"]
        assert not waiting.done()
        waiting.cancel()

    asyncio.run(stop())


def test_end_fits_within_what_the_supervisor_waits() -> None:
    """Guarantee: the supervisor does not kill a server before it has written its notes."""
    turn_and_job = 2 * ANSWER_SECONDS
    assert DRAIN_SECONDS + assembly.END_SECONDS + turn_and_job < STOP_SECONDS
