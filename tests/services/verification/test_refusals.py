"""Records of denied requests: kept by request id, at no cost to a request."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from logging import LogRecord
from typing import Any
from unittest import mock

import pytest
from django.db import OperationalError

from keyvault.access.decision import Check, Denial
from keyvault.access.principals import KeyHolder
from keyvault.domain.environments import Environment
from keyvault.domain.errors import ErrorCode
from keyvault.domain.keys import KeyKind
from keyvault.models import Refusal
from keyvault.services.catalog.catalog import find_endpoint
from keyvault.services.usage.recorder import UsageLog
from keyvault.services.verification import refusals
from keyvault.services.verification.judging import Judgement, VerificationRequest, judge_presented
from keyvault.services.verification.refusals import RefusalLog, forget_old
from keyvault.services.work import deletion
from tests.clocks import MonotonicClock
from tests.domain.minting import mint
from tests.factories import SANDBOX, issue, now
from tests.services.conftest import Scene

pytestmark = pytest.mark.database

HOLDER = KeyHolder("K" * 16, "crd_1", KeyKind.PRIVATE, Environment.SANDBOX, "acme")


def denied(
    holder: KeyHolder | None = None, detail: str = "no", internal: str = "", code: ErrorCode = ErrorCode.KEY_REVOKED
) -> Judgement:
    denial = Denial(code, detail, internal, holder)
    return Judgement(denial, holder, trace=[Check(ErrorCode.CREDENTIAL_INVALID, True), Check(denial.code, False)])


def note(log: RefusalLog, judgement: Judgement, request_id: str = "R1", **options: Any) -> None:
    fields: dict[str, Any] = {
        "entry_point": "verify",
        "environment": SANDBOX,
        "endpoint": "orders.retrieve",
        "source": "192.0.2.7",
    }
    log.note(judgement, request_id=request_id, **{"at": now(), **fields, **options})


@pytest.fixture
def clock() -> MonotonicClock:
    return MonotonicClock()


@pytest.fixture
def log(db: None, clock: MonotonicClock) -> RefusalLog:
    return RefusalLog(clock)


def holder(key_id: str) -> KeyHolder:
    return replace(HOLDER, key_id=key_id.ljust(16, "x"))


def stored_ids() -> set[str]:
    return set(Refusal.objects.values_list("request_id", flat=True))


def logged_denials(caplog: pytest.LogCaptureFixture) -> list[LogRecord]:
    return [record for record in caplog.records if record.message == "denied"]


def logged_ids(caplog: pytest.LogCaptureFixture) -> list[Any]:
    """Return the request ids of the logged denials."""
    return [getattr(line, "request_id", None) for line in logged_denials(caplog)]


def dropped(caplog: pytest.LogCaptureFixture) -> list[Any]:
    """Return the number of dropped refusals in each warning."""
    return [record.dropped for record in caplog.records if hasattr(record, "dropped")]


class Outage:
    """Fail the database writes with these numbers, and record all of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *failing: int) -> None:
        self.written: list[list[str]] = []
        self.during_failure: Callable[[], None] = lambda: None
        self._failing = failing
        self._write = Refusal.objects.bulk_create
        monkeypatch.setattr(Refusal.objects, "bulk_create", self._write_or_fail)

    def _write_or_fail(self, rows: list[Refusal], **options: Any) -> object:
        self.written.append([row.request_id for row in rows])
        if len(self.written) - 1 in self._failing:
            self.during_failure()
            raise OperationalError("gone")
        return self._write(rows, **options)


def test_refusal_is_found_by_its_request_id(log: RefusalLog) -> None:
    note(log, denied(HOLDER, internal="the key is deactivated"))
    assert not Refusal.objects.filter(pk="R1").exists(), "the request path must not write"
    log.flush()
    found = Refusal.objects.filter(pk="R1").first()
    assert found is not None
    assert (found.code, found.key_id, found.merchant_id) == ("key_revoked", "K" * 16, "acme")
    assert (found.entry_point, found.endpoint, found.source) == ("verify", "orders.retrieve", "192.0.2.7")
    assert found.trace == [["credential_invalid", True], ["key_revoked", False]]
    assert found.internal == "the key is deactivated"


def test_refusal_of_an_allowed_request_is_not_recorded(log: RefusalLog, scene: Scene) -> None:
    _, text = issue(scene.sandbox)
    verification = VerificationRequest(
        key=text.reveal(), environment=SANDBOX, endpoint=find_endpoint("orders.retrieve")
    )
    note(log, judge_presented(verification, now()))
    log.flush()
    assert not Refusal.objects.exists()


def test_refusal_without_proof_names_no_key(log: RefusalLog, scene: Scene) -> None:
    """A caller who only knows a key id leaves no trace on the key."""
    issue(scene.sandbox)
    verification = VerificationRequest(key=mint(), environment=SANDBOX, endpoint=find_endpoint("orders.retrieve"))
    note(log, judge_presented(verification, now()))
    log.flush()
    found = Refusal.objects.get()
    assert (found.code, found.key_id, found.merchant_id) == ("credential_invalid", "", "")
    assert found.trace == [["credential_invalid", False]]


def test_refusal_texts_are_redacted_and_truncated(log: RefusalLog) -> None:
    secret = mint()
    note(log, denied(detail=f"{secret} " + "d" * 900, internal=secret), source=secret, endpoint=secret)
    log.flush()
    found = Refusal.objects.get()
    assert len(found.detail) == 300
    assert secret[-20:] not in f"{found.detail} {found.internal} {found.source} {found.endpoint}"


def test_refusal_recorded_twice_is_stored_once(log: RefusalLog) -> None:
    for _ in range(2):
        note(log, denied(HOLDER))
        log.flush()
    assert Refusal.objects.count() == 1


def test_refusal_log_when_full_drops_and_warns_once(log: RefusalLog, caplog: pytest.LogCaptureFixture) -> None:
    """Memory is bounded, and so are the rows of a flood without proof."""
    with mock.patch.object(refusals, "_MAX_PENDING", 5), mock.patch.object(refusals, "_MAX_UNPROVED", 2):
        for number in range(9):
            note(log, denied(), f"U{number}")
        for number in range(9):
            note(log, denied(HOLDER), f"P{number}")
        log.flush()
    assert stored_ids() == {"U0", "U1", "P0", "P1", "P2"}
    assert [record.levelname for record in caplog.records if hasattr(record, "dropped")] == ["WARNING"]
    assert dropped(caplog) == [13]


def test_refusals_of_one_key_are_limited_without_displacing_others(
    log: RefusalLog, caplog: pytest.LogCaptureFixture
) -> None:
    """A revoked key in wide use neither fills the disk nor displaces other refusals."""
    caplog.set_level("INFO", refusals.__name__)
    most = refusals._MAX_PER_KEY
    for number in range(most + 7):
        note(log, denied(HOLDER), f"R{number}")
        note(log, denied(holder(f"other{number}")), f"O{number}")
    for number in range(3):
        note(log, denied(holder("third")), f"M{number}")
    log.flush()
    expected = {f"R{number}" for number in range(most)} | {f"O{number}" for number in range(most + 7)}
    assert stored_ids() == expected | {"M0", "M1", "M2"}
    assert sorted(logged_ids(caplog)) == sorted(stored_ids() | {f"R{most + number}" for number in range(7)})
    assert dropped(caplog) == [7]


def test_refusals_are_limited_by_time_not_by_writes(
    log: RefusalLog, clock: MonotonicClock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database that fails or hangs suppresses no refusal."""
    caplog.set_level("INFO", refusals.__name__)
    database, most = Outage(monkeypatch, 0), refusals._MAX_PER_KEY
    for period in range(3):
        for number in range(most + 1):
            note(log, denied(HOLDER), f"R{period}.{number}")
        if period == 0:
            with pytest.raises(OperationalError):
                log.flush()
        clock.seconds += refusals.FLUSH_SECONDS
    log.flush()
    assert len(logged_ids(caplog)) == 3 * (most + 1)
    assert stored_ids() == {f"R{period}.{number}" for period in range(3) for number in range(most)}
    assert dropped(caplog) == [1, 2]
    assert len(database.written) == 2


def test_refusals_of_one_key_are_limited_per_reason(log: RefusalLog) -> None:
    """A key that is always over its limit does not hide a single request from a browser."""
    most, unproved = refusals._MAX_PER_KEY, refusals._MAX_UNPROVED
    for number in range(most + 3):
        note(log, denied(HOLDER, code=ErrorCode.RATE_LIMITED), f"R{number}")
        note(log, denied(code=ErrorCode.CREDENTIAL_INVALID), f"U{number}")
    note(log, denied(HOLDER, code=ErrorCode.PRIVATE_KEY_IN_BROWSER), "browser")
    note(log, denied(code=ErrorCode.VERIFIER_STALE), "stale")
    log.flush()
    expected = {f"R{number}" for number in range(most)} | {f"U{number}" for number in range(unproved)}
    assert stored_ids() == expected | {"browser", "stale"}


def test_refusal_log_lines_are_limited_per_key_and_in_total(
    log: RefusalLog, clock: MonotonicClock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line costs the request path about a tenth of a millisecond."""
    caplog.set_level("INFO", refusals.__name__)
    monkeypatch.setattr(refusals, "_MAX_LINES", 3)
    monkeypatch.setattr(refusals, "_MAX_TOTAL_LINES", 5)
    for period in range(2):
        for name, key_holder in (("R", HOLDER), ("O", holder("other"))):
            for number in range(4):
                note(log, denied(key_holder), f"{name}{period}.{number}")
        clock.seconds += refusals.FLUSH_SECONDS
    expected = [
        [f"R{period}.{number}" for number in range(3)] + [f"O{period}.0", f"O{period}.1"] for period in range(2)
    ]
    assert logged_ids(caplog) == expected[0] + expected[1]


def test_refusals_of_several_batches_are_logged_and_written_in_order(
    log: RefusalLog, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", refusals.__name__)
    monkeypatch.setattr(refusals, "_WRITE_BATCH", 3)
    database = Outage(monkeypatch)
    for number in range(8):
        note(log, denied(HOLDER), f"R{number}")
    log.flush()
    log.flush()
    assert database.written == [["R0", "R1", "R2"], ["R3", "R4", "R5"], ["R6", "R7"]]
    assert logged_ids(caplog) == [f"R{number}" for number in range(8)]
    assert stored_ids() == set(logged_ids(caplog))


def test_refusals_of_a_failed_batch_are_kept_with_all_later_ones(
    log: RefusalLog, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written batches are not repeated, and each refusal is logged once."""
    caplog.set_level("INFO", refusals.__name__)
    monkeypatch.setattr(refusals, "_WRITE_BATCH", 2)
    database = Outage(monkeypatch, 1, 2)
    database.during_failure = lambda: note(log, denied(HOLDER), f"later{len(database.written)}")
    for number in range(6):
        note(log, denied(HOLDER), f"R{number}")
    with pytest.raises(OperationalError):
        log.flush()
    assert stored_ids() == {"R0", "R1"}
    with pytest.raises(OperationalError):
        log.flush()
    log.flush()
    assert database.written == [
        ["R0", "R1"],
        ["R2", "R3"],
        ["R2", "R3"],
        ["R2", "R3"],
        ["R4", "R5"],
        ["later2", "later3"],
    ]
    assert logged_ids(caplog) == [*(f"R{number}" for number in range(6)), "later2", "later3"]
    assert stored_ids() == set(logged_ids(caplog))
    assert dropped(caplog) == []


def test_refusals_of_a_failed_batch_without_room_are_dropped(
    log: RefusalLog, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is bounded during an outage too; the next flush reports the loss."""
    monkeypatch.setattr(refusals, "_WRITE_BATCH", 2)
    monkeypatch.setattr(refusals, "_MAX_PENDING", 4)

    def fail_late(rows: list[Refusal], **_: object) -> None:
        for number in range(3):
            note(log, denied(holder("another")), f"N{number}")
        raise OperationalError("gone")

    for number in range(4):
        note(log, denied(HOLDER), f"R{number}")
    with monkeypatch.context() as outage:
        outage.setattr(Refusal.objects, "bulk_create", fail_late)
        with pytest.raises(OperationalError):
            log.flush()
    log.flush()
    assert stored_ids() == {"R0", "N0", "N1", "N2"}
    assert dropped(caplog) == [3]


def test_refusal_log_without_the_database_keeps_what_fits(log: RefusalLog) -> None:
    note(log, denied(HOLDER), "R1")
    with mock.patch.object(Refusal.objects, "bulk_create", side_effect=OperationalError("gone")):
        with pytest.raises(OperationalError):
            log.flush()
        note(log, denied(HOLDER), "R2")
    log.flush()
    assert Refusal.objects.count() == 2


def test_refusal_record_that_fails_does_not_fail_the_request(log: RefusalLog) -> None:
    with mock.patch.object(RefusalLog, "_add", side_effect=RuntimeError("a bug")):
        note(log, denied(HOLDER))


def test_refusal_log_line_has_what_support_needs(log: RefusalLog, caplog: pytest.LogCaptureFixture) -> None:
    """The line is logged immediately, whatever happens to the database."""
    caplog.set_level("INFO", refusals.__name__)
    note(log, denied(HOLDER, internal="why"))
    (line,) = logged_denials(caplog)
    found = {name: getattr(line, name) for name in ("request_id", "code", "internal", "key_id")}
    assert found == {"request_id": "R1", "code": "key_revoked", "internal": "why", "key_id": "K" * 16}


def test_refusal_log_in_a_forked_child_is_empty(log: RefusalLog) -> None:
    """The parent writes its pending refusals."""
    note(log, denied(HOLDER))
    log.forget()
    log.flush()
    assert not Refusal.objects.exists()


@pytest.mark.django_db
def test_refusals_older_than_their_retention_are_deleted_in_batches() -> None:
    """Those without proof are kept for one day, because any caller can cause them."""

    def keep(request_id: str, at: datetime, key_id: str = "0123456789abcdef") -> None:
        columns = {
            "entry_point": "verify",
            "environment": SANDBOX,
            "code": "key_revoked",
            "detail": "no",
            "key_id": key_id,
        }
        Refusal.objects.create(request_id=request_id, at=at, **columns)

    today = now()
    for number in range(4):
        keep(f"old{number}", today - timedelta(days=31 + number))
    keep("unproved", today - timedelta(days=2), key_id="")
    keep("new", today - timedelta(days=29))
    with mock.patch.object(deletion, "MAX_DELETED", 3):
        assert [forget_old(today), forget_old(today), forget_old(today)] == [4, 1, 0]
    assert Refusal.objects.get().request_id == "new"


@pytest.fixture
def reporting(monkeypatch: pytest.MonkeyPatch) -> Iterator[RefusalLog]:
    """A log with its own thread, in a process that reports usage."""
    log = RefusalLog()
    usage = UsageLog()
    monkeypatch.setattr(refusals, "usage_log", usage)
    usage.start()
    yield log
    log.stop()
    usage.stop()


@pytest.mark.django_db(transaction=True)
def test_refusal_log_of_a_reporting_process_writes_when_stopped(reporting: RefusalLog) -> None:
    """The thread starts with the first refusal."""
    note(reporting, denied(HOLDER))
    assert reporting._thread is not None
    reporting.stop()
    assert Refusal.objects.filter(pk="R1").exists()
    assert reporting._thread is None


def test_refusal_log_of_a_process_without_reporting_has_no_thread(log: RefusalLog) -> None:
    note(log, denied(HOLDER))
    assert log._thread is None
