"""Refused sign-ins: counted in memory, written once a minute."""

import json
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from django.db import OperationalError

from keyvault.models import AuditEntry
from keyvault.services.sessions import refusals as module
from keyvault.services.sessions.refusals import SignInRefusals
from keyvault.services.usage.recorder import UsageLog
from tests.factories import now
from tests.services.racing import TIMEOUT_SECONDS

pytestmark = pytest.mark.django_db


@pytest.fixture
def refusals() -> Iterator[SignInRefusals]:
    log = SignInRefusals()
    yield log
    log.stop()


def written() -> list[dict[str, Any]]:
    rows = AuditEntry.objects.filter(event="operator.sign_in_refused").order_by("pk")
    return [json.loads(bytes(row.body))["details"] for row in rows]


@pytest.mark.database
def test_sign_in_refusals_not_written_for_lack_of_a_database_are_kept(refusals: SignInRefusals) -> None:
    """A database outage hides no attack: the counts are written when it is back."""
    refusals.note("tam", "192.0.2.1", now(), is_locked=False)
    with mock.patch.object(module, "_write", side_effect=OperationalError("gone")), pytest.raises(OperationalError):
        refusals.flush()
    refusals.note("tam", "192.0.2.1", now(), is_locked=True)
    refusals.flush()
    (details,) = written()
    assert (details["count"], details["locked"]) == (2, 1)


@pytest.mark.database
def test_sign_in_refusals_pending_at_process_end_are_written(
    refusals: SignInRefusals, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals.note(None, None, now(), is_locked=False)
    assert refusals._thread is None, "a process that reports no usage starts no thread"
    monkeypatch.setattr(UsageLog, "is_reporting", True)
    refusals.note(None, None, now(), is_locked=False)
    assert refusals._thread is not None
    refusals.stop()
    assert [(each["operator"], each["address"], each["count"]) for each in written()] == [("unknown", "unknown", 2)]
    assert refusals._thread is None


@pytest.mark.database
def test_sign_in_refusals_are_written_by_one_thread_once_a_minute(
    refusals: SignInRefusals, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[tuple[Callable[[], None], float]] = []
    monkeypatch.setattr(SignInRefusals, "_repeat", lambda self, work, seconds: rounds.append((work, seconds)))
    monkeypatch.setattr(UsageLog, "is_reporting", True)
    refusals.note("tam", None, now(), is_locked=False)
    thread = refusals._thread
    assert thread is not None
    thread.join(TIMEOUT_SECONDS)
    refusals.note("tam", None, now(), is_locked=False)
    ((work, seconds),) = rounds
    assert seconds == module.FLUSH_SECONDS
    work()
    assert [details["count"] for details in written()] == [2]
    refusals.note("tam", None, now(), is_locked=False)
    assert refusals._thread is thread
    work()
    assert [details["count"] for details in written()] == [2, 1]
    refusals.stop()
