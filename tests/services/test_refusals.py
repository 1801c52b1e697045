"""What was refused: kept by request id for whoever is asked why, never at the cost of a request."""

from collections.abc import Iterator
from datetime import datetime, timedelta
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
from keyvault.services import refusals
from keyvault.services.catalog import find_endpoint
from keyvault.services.refusals import RefusalLog, find_refusal, forget_old
from keyvault.services.usage import UsageLog
from keyvault.services.verification import Judgement, Presented, judge_presented
from tests.domain.minting import mint
from tests.factories import SANDBOX, issue, now

from .conftest import Scene

pytestmark = pytest.mark.database

HOLDER = KeyHolder("K" * 16, "crd_1", KeyKind.PRIVATE, Environment.SANDBOX, "acme")


def denied(holder: KeyHolder | None = None, detail: str = "no", internal: str = "") -> Judgement:
    denial = Denial(ErrorCode.KEY_REVOKED, detail, internal, holder)
    return Judgement(denial, holder, trace=[Check(ErrorCode.CREDENTIAL_INVALID, True), Check(denial.code, False)])


def note(log: RefusalLog, judgement: Judgement, request_id: str = "R1", **more: Any) -> None:
    told: dict[str, Any] = {
        "door": "verify",
        "environment": SANDBOX,
        "endpoint": "orders.retrieve",
        "source": "192.0.2.7",
    }
    log.note(judgement, request_id=request_id, **{"at": now(), **told, **more})


@pytest.fixture
def log(db: None) -> RefusalLog:
    return RefusalLog()


def test_refusal_noted_is_found_by_its_request_id(log: RefusalLog) -> None:
    note(log, denied(HOLDER, internal="the key is deactivated"))
    assert find_refusal("R1") is None, "nothing is written on the request path"
    log.flush()
    found = find_refusal("R1")
    assert found is not None
    assert (found.code, found.key_id, found.merchant_id) == ("key_revoked", "K" * 16, "acme")
    assert (found.door, found.endpoint, found.source) == ("verify", "orders.retrieve", "192.0.2.7")
    assert found.trace == [["credential_invalid", True], ["key_revoked", False]]
    assert found.internal == "the key is deactivated"


def test_refusal_of_a_grant_is_none(log: RefusalLog, scene: Scene) -> None:
    """What was allowed leaves nothing here."""
    _, text = issue(scene.sandbox)
    presented = Presented(key=text.reveal(), environment=SANDBOX, endpoint=find_endpoint("orders.retrieve"))
    note(log, judge_presented(presented, now()))
    log.flush()
    assert not Refusal.objects.exists()


def test_refusal_before_proof_names_no_key(log: RefusalLog, scene: Scene) -> None:
    """Whoever merely names a key id leaves no trace on the key."""
    issue(scene.sandbox)
    presented = Presented(key=mint(), environment=SANDBOX, endpoint=find_endpoint("orders.retrieve"))
    note(log, judge_presented(presented, now()))
    log.flush()
    found = Refusal.objects.get()
    assert (found.code, found.key_id, found.merchant_id) == ("credential_invalid", "", "")
    assert found.trace == [["credential_invalid", False]]


def test_refusal_texts_are_kept_without_secrets_and_cut(log: RefusalLog) -> None:
    """No key string reaches the table, wherever a client may have put it."""
    secret = mint()
    note(log, denied(detail=f"{secret} " + "d" * 900, internal=secret), source=secret, endpoint=secret)
    log.flush()
    found = Refusal.objects.get()
    assert len(found.detail) == 300
    assert secret[-20:] not in f"{found.detail} {found.internal} {found.source} {found.endpoint}"


def test_refusal_noted_twice_is_kept_once(log: RefusalLog) -> None:
    for _ in range(2):
        note(log, denied(HOLDER))
        log.flush()
    assert Refusal.objects.count() == 1


def test_refusal_log_without_room_drops_and_says_so_once(log: RefusalLog, caplog: pytest.LogCaptureFixture) -> None:
    """Memory is bounded whatever comes in, and so is what a flood without any proof has written."""
    with mock.patch.object(refusals, "_MOST_PENDING", 5), mock.patch.object(refusals, "_MOST_UNPROVED", 2):
        for number in range(9):
            note(log, denied(), f"U{number}")
        for number in range(9):
            note(log, denied(HOLDER), f"P{number}")
        log.flush()
    kept = set(Refusal.objects.values_list("request_id", flat=True))
    assert kept == {"U0", "U1", "P0", "P1", "P2"}
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert [getattr(record, "dropped", None) for record in warnings] == [13]


def test_refusal_log_of_a_lost_database_keeps_what_it_has_room_for(log: RefusalLog) -> None:
    note(log, denied(HOLDER), "R1")
    with mock.patch.object(Refusal.objects, "bulk_create", side_effect=OperationalError("gone")):
        with pytest.raises(OperationalError):
            log.flush()
        note(log, denied(HOLDER), "R2")
    log.flush()
    assert Refusal.objects.count() == 2


def test_refusal_note_never_fails_a_request(log: RefusalLog) -> None:
    """Whatever goes wrong with the record, the answer goes out."""
    with mock.patch.object(RefusalLog, "_add", side_effect=RuntimeError("a bug")):
        note(log, denied(HOLDER))


def test_refusal_line_is_logged_with_what_support_needs(log: RefusalLog, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="keyvault.services.refusals"):
        note(log, denied(HOLDER, internal="why"))
    line = next(record for record in caplog.records if record.message == "denied")
    told = {name: getattr(line, name) for name in ("request_id", "code", "internal", "key_id")}
    assert told == {"request_id": "R1", "code": "key_revoked", "internal": "why", "key_id": "K" * 16}


def test_refusal_log_in_a_forked_child_is_empty(log: RefusalLog) -> None:
    """What the parent has pending is written once, by the parent."""
    note(log, denied(HOLDER))
    log.forget()
    log.flush()
    assert not Refusal.objects.exists()


@pytest.mark.django_db
def test_refusals_of_more_than_thirty_days_ago_are_forgotten_some_at_a_time() -> None:
    """Those without proof after a day: anybody can make them."""

    def keep(request_id: str, at: datetime, key_id: str = "0123456789abcdef") -> None:
        columns = {"door": "verify", "environment": SANDBOX, "code": "key_revoked", "detail": "no", "key_id": key_id}
        Refusal.objects.create(request_id=request_id, at=at, **columns)

    today = now()
    for number in range(4):
        keep(f"old{number}", today - timedelta(days=31 + number))
    keep("unproved", today - timedelta(days=2), key_id="")
    keep("new", today - timedelta(days=29))
    with mock.patch.object(refusals, "_MOST_FORGOTTEN", 3):
        assert [forget_old(today), forget_old(today), forget_old(today)] == [3, 2, 0]
    assert Refusal.objects.get().request_id == "new"


@pytest.fixture
def reporting(monkeypatch: pytest.MonkeyPatch) -> Iterator[RefusalLog]:
    """A log in a process that reports its uses, with a thread of its own."""
    log = RefusalLog()
    usage = UsageLog()
    monkeypatch.setattr(refusals, "usage_log", usage)
    usage.start()
    yield log
    log.stop()
    usage.stop()


@pytest.mark.django_db(transaction=True)
def test_refusal_log_of_a_process_that_reports_writes_by_itself_and_at_its_end(reporting: RefusalLog) -> None:
    """The thread starts with the first refusal; the farewell leaves nothing unwritten."""
    note(reporting, denied(HOLDER))
    assert reporting._thread is not None
    reporting.stop()
    assert find_refusal("R1") is not None
    assert reporting._thread is None


def test_refusal_log_of_a_process_without_a_door_has_no_thread(log: RefusalLog) -> None:
    note(log, denied(HOLDER))
    assert log._thread is None
