"""Session engine of the console: a session ends 15 minutes after its last use, and 8 hours after its start.

The row has the digest of the session's key, so that a copy of the database opens no session.
"""

from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any

from django.contrib.auth import SESSION_KEY
from django.contrib.sessions.backends.db import SessionStore as DatabaseSessionStore
from django.contrib.sessions.exceptions import SessionInterrupted
from django.db.models import F

from keyvault.access.limits import SESSION_IDLE_SECONDS, SESSION_SECONDS
from keyvault.models import ConsoleSession, Operator

USE_INTERVAL = timedelta(minutes=1)
"""Minimum interval between two writes that record the use of a session."""

_EXPIRY = "_session_expiry"
"""Member of the session's data: a shorter lifetime in seconds, by `set_expiry`. A sign-in under way has one."""

_STARTED = "_started_at"
"""Member of the session's data: the time when it started, in seconds. It survives a change of the key."""


read_with_session: ContextVar[Operator | None] = ContextVar("read_with_session", default=None)
"""The operator that was read with the session, while Django loads and verifies the session's user."""


def session_id(session_key: str) -> str:
    """Return the primary key of a session's row, which may be shown."""
    return sha256(session_key.encode()).hexdigest()[:40]


class SessionStore(DatabaseSessionStore):
    """A session. `address` and `browser` are the client's, as the middleware noted them."""

    def __init__(self, session_key: str | None = None) -> None:
        super().__init__(session_key)
        self.address = ""
        self.browser = ""
        self._row: ConsoleSession | None = None

    @classmethod
    def get_model_class(cls) -> type[ConsoleSession]:
        return ConsoleSession

    def extend(self) -> None:
        """Record a use of an operator's session, unless the last minute has one.

        Another request may have ended the session: then nothing is written.
        """
        row, now = self._row, datetime.now(UTC)
        if self.session_key is None or row is None or row.operator_id is None or now - row.last_used_at < USE_INTERVAL:
            return
        ConsoleSession.objects.filter(pk=row.pk, last_used_at__lt=now).update(
            last_used_at=now, expire_date=_end_of(row.started_at, now), address=self.address, browser=self.browser
        )

    def replace_key(self) -> None:
        """Give the session a new key. Raises SessionInterrupted if another request has ended the session meanwhile."""
        key, self.modified = self.session_key, True
        if key is not None and not ConsoleSession.objects.filter(pk=session_id(key)).delete()[0]:
            raise SessionInterrupted("This session was ended meanwhile. Sign in again.")
        self.cycle_key()

    def exists(self, session_key: str) -> bool:
        return ConsoleSession.objects.filter(pk=session_id(session_key)).exists()

    def delete(self, session_key: str | None = None) -> None:
        key = session_key or self.session_key
        if key is not None:
            ConsoleSession.objects.filter(pk=session_id(key)).delete()

    def create_model_instance(self, data: dict[str, Any]) -> ConsoleSession:
        """Return the row to save. It is a use of the session."""
        now = datetime.now(UTC)
        started_at = datetime.fromtimestamp(data.setdefault(_STARTED, int(now.timestamp())), UTC)
        self._row = ConsoleSession(
            session_key=session_id(self._get_or_create_session_key()),  # type: ignore[attr-defined]  # not in the stubs
            session_data=self.encode(data),
            operator_id=data.get(SESSION_KEY),
            started_at=started_at,
            last_used_at=now,
            expire_date=min(_end_of(started_at, now), now + timedelta(seconds=data.get(_EXPIRY, SESSION_SECONDS))),
            address=self.address,
            browser=self.browser,
        )
        return self._row

    def _get_session_from_db(self) -> ConsoleSession | None:
        """Read the session with its operator and the names of the operator's groups, by one query for each request."""
        if self.session_key is not None:
            current = ConsoleSession.objects.filter(pk=session_id(self.session_key), expire_date__gt=datetime.now(UTC))
            rows = list(current.select_related("operator").annotate(group_name=F("operator__groups__name")))
            self._row = rows[0] if rows else None
            if self._row is not None and self._row.operator is not None:
                self._row.operator.group_names = frozenset(filter(None, (row.group_name for row in rows)))
        if self._row is None:
            self._session_key = None
        return self._row

    @property
    def operator(self) -> Operator | None:
        """The operator as it was read with the session; None before the sign-in."""
        self._get_session()  # type: ignore[attr-defined]  # not in the stubs
        return None if self._row is None else self._row.operator


def _end_of(started_at: datetime, used_at: datetime) -> datetime:
    idle, absolute = timedelta(seconds=SESSION_IDLE_SECONDS), timedelta(seconds=SESSION_SECONDS)
    return min(used_at + idle, started_at + absolute)
