"""A client whose host has a wrong clock: it waits, reports and judges as with a right one."""

import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import anyio
import pytest
from keyvault_client import AsyncMerchantClient, MerchantClient, merchant
from keyvault_client.effects import HttpReply, SendRequest
from keyvault_client.local import LocalVerifier, memory, reader
from keyvault_client.local.memory import LocalMiss, clock
from keyvault_client.transport import SyncRunner
from keyvault_client.verifier import ServiceAddress

from .feed_service import TOKEN, FeedService, feed_service, key_string
from .scripted_server import ScriptedServer, scripted_server
from .test_local import is_local, question, until, warm

HOUR = 3600.0
OFF = pytest.mark.parametrize("ahead", [-HOUR, HOUR], ids=["behind", "ahead"])
"""How far the host's clock is ahead of the right time, in seconds."""

CREATED = {"status": 201, "body": {"order_token": "ord_1"}}


# --- retries ----------------------------------------------------------------------------------------------------


class WallClock:
    """The host's clock, as `time.time()` and `datetime.now()` of the client show it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ahead: float) -> None:
        self.ahead = ahead
        host = self

        class HostTime(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]  # the client uses the result only
                return datetime.now(tz) + timedelta(seconds=host.ahead)

        real = time.time
        monkeypatch.setattr(merchant, "datetime", HostTime)
        monkeypatch.setattr(time, "time", lambda: real() + self.ahead)


def create_order(server: ScriptedServer, mode: str, clock: WallClock) -> list[float]:
    """Create an order. Returns the waits. In each wait the host's clock changes by hours, in turn back and forth."""
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        clock.ahead = -2 * clock.ahead

    async def wait_async(seconds: float) -> None:
        wait(seconds)

    async def run() -> None:
        async with AsyncMerchantClient(f"{server.url}/sandbox", "sandbox", key_string(1)) as client:
            client._runner.sleep = wait_async
            await client.create_order(1250, "EUR")

    if mode == "async":
        anyio.run(run)
    else:
        with MerchantClient(f"{server.url}/sandbox", "sandbox", key_string(1)) as client:
            client._runner.sleep = wait
            client.create_order(1250, "EUR")
    return waits


@OFF
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_clock_of_the_host_changes_no_retry_and_no_deadline(
    monkeypatch: pytest.MonkeyPatch, mode: str, ahead: float
) -> None:
    """Guarantee: with a wrong clock, and one that is set back and forth, a call is repeated until its deadline."""
    with scripted_server({"fault": "cut"}, {"status": 503, "text": ""}, CREATED) as server:
        assert len(create_order(server, mode, WallClock(monkeypatch, ahead))) == 2


@OFF
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_date_of_retry_after_counts_from_the_date_of_the_answer(
    monkeypatch: pytest.MonkeyPatch, mode: str, ahead: float
) -> None:
    """Guarantee: a wait until a date is as long as the service means it."""
    headers = {"Date": "Fri, 27 Nov 2026 12:00:00 GMT", "Retry-After": "Fri, 27 Nov 2026 12:00:03 GMT"}
    with scripted_server({"status": 503, "text": "", "headers": headers}, CREATED) as server:
        assert create_order(server, mode, WallClock(monkeypatch, ahead)) == [3.0]


# --- decisions from memory --------------------------------------------------------------------------------------


@pytest.fixture
def served() -> Iterator[tuple[FeedService, str]]:
    with feed_service() as found:
        yield found


def local_uses(verifier: LocalVerifier, service: FeedService, most: int = 200) -> int:
    """Decide, also after the key is known. Returns how many decisions came from memory."""
    warm(verifier, service)
    # The decision that ended the warming was one from memory.
    return 1 + sum(is_local(verifier, service, question()) for _ in range(most))


def reported(service: FeedService) -> int:
    return sum(use["count"] for report in service.reports.values() for use in report["uses"])


@OFF
def test_uses_on_a_host_with_a_wrong_clock_are_reported_in_the_service_s_time(
    served: tuple[FeedService, str], ahead: float
) -> None:
    """Guarantee: a wrong clock makes the service refuse no report, and no use is counted at another time."""
    service, url = served
    service.seconds_ahead = -ahead
    service.expires_at = service.now + timedelta(minutes=30)
    with closing(LocalVerifier(url, "sandbox", TOKEN, timeout=30)) as verifier:
        began = service.now
        local = local_uses(verifier, service)
    assert (reported(service), service.refused_reports) == (local, 0)
    for report in service.reports.values():
        for use in report["uses"]:
            assert abs(datetime.fromisoformat(use["first_at"]) - began) < timedelta(minutes=2)


def test_late_reply_does_not_set_a_right_clock_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: no key lives longer because a reply with the service's date was under way for long."""
    now = clock()
    for module in (memory, reader):
        monkeypatch.setattr(module, "clock", lambda: now)

    def reply_late(request: SendRequest) -> HttpReply:
        nonlocal now
        date = format_datetime(datetime.fromtimestamp(time.time() + now - began, UTC), usegmt=True)
        now += 9
        return HttpReply(200, {"date": date}, b'{"sequence": 1}')

    began = now
    known = memory.LocalMemory("sandbox")
    right = known._unix_time() - now
    runner = SyncRunner(None, None)
    monkeypatch.setattr(runner, "send", reply_late)
    follower = reader.LocalFeedReader(ServiceAddress("http://127.0.0.1:1", "sandbox", TOKEN), runner, known)
    follower._ask("GET", "/v1/changes", None)
    assert known._unix_time() - now == right
    for earliest, latest, moved in ((60.0, 70.0, 60.0), (-70.0, -60.0, -60.0), (4.0, 5.0, 0.0)):
        known = memory.LocalMemory("sandbox")
        at = known._unix_time()
        known.set_service_time(at + earliest, at + latest)
        assert known._unix_time() - at == pytest.approx(moved)


def test_uses_are_kept_while_the_service_refuses_the_clock(served: tuple[FeedService, str]) -> None:
    """Guarantee: reports that the service refuses for their time lose no use, and are stored once it is right."""
    service, url = served
    service.sends_date, service.seconds_ahead = False, -HOUR
    with closing(LocalVerifier(url, "sandbox", TOKEN, timeout=30)) as verifier:
        local = local_uses(verifier, service)
        until(lambda: service.refused_reports >= 2)
        assert service.reports == {}
        service.seconds_ahead = 0
    assert reported(service) == local


def test_expired_key_is_not_authorized_on_a_host_whose_clock_is_behind(served: tuple[FeedService, str]) -> None:
    """Guarantee: a key expires by the service's time, also before a change of the feed says so."""
    service, url = served
    service.expires_at = datetime.now(UTC) + timedelta(minutes=30)
    with closing(LocalVerifier(url, "sandbox", TOKEN, timeout=30)) as verifier:
        warm(verifier, service)
        service.change("customer_token", "tok_1", lambda: setattr(service, "seconds_ahead", HOUR))
        assert service.receipt.wait(60)
        found = verifier._logic.memory.decide(question())
        # A miss with a lease lacks tokens only.
        assert isinstance(found, LocalMiss)
        assert found.lease is None
        assert verifier.verify(question()).code == "key_expired"
