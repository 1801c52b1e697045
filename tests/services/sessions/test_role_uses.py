"""Uses of roles in the console: kept in memory, written once a minute, and not lost with the database."""

from datetime import timedelta
from unittest import mock

import pytest
from django.db import OperationalError

from keyvault.access.permissions import Permission as P
from keyvault.access.roles import Role
from keyvault.models import RoleUse
from keyvault.services.sessions import role_uses as module
from keyvault.services.sessions.role_uses import RoleUses
from keyvault.services.usage.recorder import UsageLog
from tests.factories import make_operator, now
from tests.services.rows import dump_tables

pytestmark = pytest.mark.django_db


@pytest.mark.database
def test_role_uses_are_written_by_a_flush_only() -> None:
    """A page costs no write: its uses are kept until the next flush, the last of each role."""
    operator, uses, first = make_operator("tam", Role.AUDITOR), RoleUses(), now()
    before = dump_tables()
    for minutes in range(3):
        uses.note(operator, [P.AUDIT_READ], first + timedelta(minutes=minutes))
    uses.note(operator, [P.KEYS_READ, P.KEYS_REVOKE], first + timedelta(minutes=9))
    assert dump_tables() == before
    uses.flush()
    assert RoleUse.objects.get().last_used_at == first + timedelta(minutes=2)


@pytest.mark.database
def test_role_uses_not_written_for_lack_of_a_database_are_kept() -> None:
    operator, uses, at = make_operator("tam", Role.AUDITOR), RoleUses(), now()
    uses.note(operator, [P.AUDIT_READ], at)
    with mock.patch.object(module, "write_uses", side_effect=OperationalError("gone")), pytest.raises(OperationalError):
        uses.flush()
    uses.flush()
    assert RoleUse.objects.get().last_used_at == at
    with mock.patch.object(module, "write_uses") as write:
        uses.flush()
    write.assert_not_called()


@pytest.mark.database
def test_role_uses_pending_at_process_end_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    operator, uses, at = make_operator("tam", Role.AUDITOR), RoleUses(), now()
    uses.note(operator, [P.AUDIT_READ], at)
    assert uses._thread is None, "a process that reports no usage starts no thread"
    monkeypatch.setattr(UsageLog, "is_reporting", True)
    uses.note(operator, [P.AUDIT_READ], at)
    assert uses._thread is not None
    uses.stop()
    assert RoleUse.objects.get().last_used_at == at
