"""Sessions of the console: how long they last, what is stored of them, and who ends them."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from django.contrib.auth import SESSION_KEY
from django.contrib.sessions.backends.base import UpdateError

from keyvault.access.limits import SESSION_IDLE_SECONDS, SESSION_SECONDS
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import OperatorPrincipal
from keyvault.access.roles import Role
from keyvault.domain.errors import NotFoundError
from keyvault.models import AuditEntry, ConsoleSession, Operator
from keyvault.services.maintenance import forget_due
from keyvault.services.sessions.sessions import (
    end_other_sessions,
    end_session,
    forget_expired_sessions,
    list_sessions,
)
from keyvault.services.sessions.store import SessionStore, session_id
from tests.factories import grant, make_operator, now
from tests.services.rows import dump_tables

IDLE, ABSOLUTE = timedelta(seconds=SESSION_IDLE_SECONDS), timedelta(seconds=SESSION_SECONDS)

pytestmark = pytest.mark.django_db


@pytest.fixture
def tam(db: None) -> OperatorPrincipal:
    return make_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER)


def start_session(operator: OperatorPrincipal, *, age: timedelta = timedelta(0)) -> tuple[str, ConsoleSession]:
    """Start a session that was last used `age` ago; return its key and its row."""
    store = SessionStore()
    store[SESSION_KEY] = str(Operator.objects.get(username=operator.username).pk)
    store.create()
    key = str(store.session_key)
    row = ConsoleSession.objects.get(pk=session_id(key))
    ConsoleSession.objects.filter(pk=row.pk).update(
        started_at=row.started_at - age, last_used_at=row.last_used_at - age, expire_date=row.expire_date - age
    )
    row.refresh_from_db()
    return key, row


def use(key: str) -> None:
    """Open a session and record its use, as a request does."""
    store = SessionStore(key)
    store.get(SESSION_KEY)
    store.extend()


def is_open(key: str) -> bool:
    return SESSION_KEY in SessionStore(key)


@pytest.mark.database
def test_session_ends_after_fifteen_minutes_without_use(tam: OperatorPrincipal) -> None:
    assert (SESSION_IDLE_SECONDS, SESSION_SECONDS) == (900, 28_800)
    assert is_open(start_session(tam, age=IDLE - timedelta(seconds=30))[0])
    assert not is_open(start_session(tam, age=IDLE)[0])


def test_session_in_use_is_extended(tam: OperatorPrincipal) -> None:
    key, row = start_session(tam, age=IDLE - timedelta(minutes=1))
    use(key)
    row.refresh_from_db()
    assert row.expire_date == row.last_used_at + IDLE
    assert now() - row.last_used_at < timedelta(minutes=1)


def test_session_in_use_ends_eight_hours_after_its_start(tam: OperatorPrincipal) -> None:
    """Neither a use nor a write, nor a new key, extends a session beyond its maximum duration."""
    key, row = start_session(tam, age=timedelta(minutes=2))
    started_at = now() - ABSOLUTE + timedelta(minutes=5)
    ConsoleSession.objects.update(started_at=started_at)
    use(key)
    row.refresh_from_db()
    assert row.expire_date == started_at + ABSOLUTE
    store = SessionStore()
    store["_started_at"] = int(started_at.timestamp())
    store.create()
    store.cycle_key()
    row = ConsoleSession.objects.get(pk=session_id(str(store.session_key)))
    assert row.expire_date == datetime.fromtimestamp(int(started_at.timestamp()), UTC) + ABSOLUTE


def test_session_use_is_written_at_most_once_a_minute(tam: OperatorPrincipal) -> None:
    key, row = start_session(tam, age=timedelta(seconds=50))
    use(key)
    assert ConsoleSession.objects.get().last_used_at == row.last_used_at
    ConsoleSession.objects.update(last_used_at=now() - timedelta(seconds=61))
    use(key)
    assert now() - ConsoleSession.objects.get().last_used_at < timedelta(seconds=30)


@pytest.mark.database
def test_session_key_is_not_stored(tam: OperatorPrincipal) -> None:
    """A copy of the database opens no session: what it has is no cookie."""
    key, row = start_session(tam)
    assert is_open(key)
    assert not is_open(row.session_key)
    assert key not in repr(dump_tables())


def test_session_that_was_ended_is_not_written_again(tam: OperatorPrincipal) -> None:
    """A request that runs while its session is ended does not restore the session."""
    key, row = start_session(tam, age=timedelta(minutes=2))
    store = SessionStore(key)
    assert SESSION_KEY in store
    end_session(grant(tam, P.SESSIONS_WRITE), row)
    store.extend()
    store["message"] = "late"
    with pytest.raises(UpdateError):
        store.save()
    assert not ConsoleSession.objects.exists()


def test_session_is_ended_by_its_own_operator_only(tam: OperatorPrincipal) -> None:
    key, row = start_session(tam)
    approver = make_operator("approver", Role.APPROVER)
    assert not list_sessions(approver, now()).exists()
    with pytest.raises(NotFoundError):
        end_session(grant(approver, P.SESSIONS_WRITE), row)
    assert is_open(key)
    end_session(grant(tam, P.SESSIONS_WRITE), row)
    assert not is_open(key)
    with pytest.raises(NotFoundError):
        end_session(grant(tam, P.SESSIONS_WRITE), row)
    body = json.loads(bytes(AuditEntry.objects.get(event="session.ended").body))
    assert body["actor"] == "operator:tam"
    assert set(body["details"]) == {"started_at", "address", "browser"}


def test_other_sessions_are_ended_and_counted(tam: OperatorPrincipal) -> None:
    key, row = start_session(tam)
    other, _ = start_session(tam)
    start_session(tam, age=IDLE)
    elsewhere, _ = start_session(make_operator("approver", Role.APPROVER))
    assert end_other_sessions(grant(tam, P.SESSIONS_WRITE), row) == 1
    assert [is_open(each) for each in (key, other, elsewhere)] == [True, False, True]
    assert end_other_sessions(grant(tam, P.SESSIONS_WRITE), row) == 0


def make_session(name: str, ends_in: timedelta) -> None:
    ConsoleSession.objects.create(
        session_key=name * 40, session_data="", started_at=now(), last_used_at=now(), expire_date=now() + ends_in
    )


def test_maintenance_deletes_expired_sessions_only() -> None:
    make_session("a", timedelta(days=-1))
    make_session("b", timedelta(minutes=1))
    forget_due()
    assert [row.session_key[0] for row in ConsoleSession.objects.all()] == ["b"]


def test_maintenance_deletes_a_limited_number_of_sessions_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backlog is worked off in short steps."""
    monkeypatch.setattr("keyvault.services.work.deletion.MAX_DELETED", 2)
    for name, days in (("a", 1), ("b", 3), ("c", 2)):
        make_session(name, timedelta(days=-days))
    assert forget_expired_sessions(now()) == 2
    assert [row.session_key[0] for row in ConsoleSession.objects.all()] == ["a"]
    assert [forget_expired_sessions(now()), forget_expired_sessions(now())] == [1, 0]
