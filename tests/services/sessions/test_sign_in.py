"""Sign-in data with a limited life: refusals in memory, sessions in the database."""

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
from django.contrib.sessions.models import Session
from django.db import OperationalError

from keyvault.models import AuditEntry
from keyvault.services.maintenance import forget_due
from keyvault.services.sessions import refusals as module
from keyvault.services.sessions.refusals import SignInRefusals
from keyvault.services.sessions.sign_in import forget_expired_sessions
from keyvault.services.usage.recorder import UsageLog
from tests.factories import now

pytestmark = [pytest.mark.database, pytest.mark.django_db]


@pytest.fixture
def refusals() -> Iterator[SignInRefusals]:
    log = SignInRefusals()
    yield log
    log.forget()


def written() -> list[dict[str, Any]]:
    rows = AuditEntry.objects.filter(event="operator.sign_in_refused").order_by("pk")
    return [json.loads(bytes(row.body))["details"] for row in rows]


def make_session(name: str, expires_in: timedelta) -> None:
    Session.objects.create(session_key=name * 32, session_data="", expire_date=now() + expires_in)


def test_maintenance_deletes_expired_sessions_only() -> None:
    make_session("a", timedelta(days=-1))
    make_session("b", timedelta(hours=1))
    forget_due()
    assert [row.session_key[0] for row in Session.objects.all()] == ["b"]


def test_maintenance_deletes_a_limited_number_of_sessions_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backlog is worked off in short steps."""
    monkeypatch.setattr("keyvault.services.sessions.sign_in._MAX_DELETED", 2)
    for name, days in (("a", 1), ("b", 3), ("c", 2)):
        make_session(name, timedelta(days=-days))
    assert forget_expired_sessions(now()) == 2
    assert [row.session_key[0] for row in Session.objects.all()] == ["a"]
    assert [forget_expired_sessions(now()), forget_expired_sessions(now())] == [1, 0]


def test_sign_in_refusals_not_written_for_lack_of_a_database_are_kept(refusals: SignInRefusals) -> None:
    """A database outage hides no attack: the counts are written when it is back."""
    refusals.note("tam", "192.0.2.1", now(), is_locked=False)
    with mock.patch.object(module, "_write", side_effect=OperationalError("gone")), pytest.raises(OperationalError):
        refusals.flush()
    refusals.note("tam", "192.0.2.1", now(), is_locked=True)
    refusals.flush()
    (details,) = written()
    assert (details["count"], details["locked"]) == (2, 1)


def test_sign_in_refusals_pending_at_process_end_are_written(
    refusals: SignInRefusals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(UsageLog, "is_reporting", True)
    monkeypatch.setattr(
        "keyvault.services.sessions.refusals.connections.close_all", lambda: None
    )  # the connection holds this test's transaction
    refusals.note(None, None, now(), is_locked=False)
    assert refusals._timer is not None
    assert refusals._timer.interval == module.FLUSH_SECONDS
    refusals.stop()
    assert [(details["operator"], details["address"]) for details in written()] == [("unknown", "unknown")]
    assert refusals._timer is None


def test_sign_in_refusals_set_one_timer_a_minute(refusals: SignInRefusals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UsageLog, "is_reporting", True)
    monkeypatch.setattr("keyvault.services.sessions.refusals.connections.close_all", lambda: None)
    refusals.note("tam", None, now(), is_locked=False)
    first = refusals._timer
    refusals.note("tam", None, now(), is_locked=False)
    assert refusals._timer is first is not None
    first.cancel()
    first.function()
    assert [details["count"] for details in written()] == [2]
    refusals.note("tam", None, now(), is_locked=False)
    assert refusals._timer not in {None, first}
    refusals.stop()
