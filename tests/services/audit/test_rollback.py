"""Accepting an audit log that a restored backup set back, after which the worker signs it again."""

import errno
from collections.abc import Callable
from unittest import mock

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST
from keyvault.access.roles import Role
from keyvault.domain.errors import IntegrityError, PermissionMissingError, RequestInvalidError, StateConflictError
from keyvault.models import AuditChain, AuditCheckpoint, AuditEntry, BreakGlass, Notice
from keyvault.services.audit.checkpoint_marks import read_marks
from keyvault.services.audit.checkpoints import sign_due
from keyvault.services.audit.rollback import accept_rollback
from keyvault.services.operators.operators import find_operator
from tests.factories import grant, make_operator, now
from tests.services.audit.test_checkpoint_marks import numbers, sign_twice, verify
from tests.services.audit.test_checkpoints import CHAIN, STEP, tampering, write
from tests.starting_rows import start_with

pytestmark = [pytest.mark.database, pytest.mark.django_db]

Accept = Callable[..., list[str]]


@pytest.fixture
def signed(db: None) -> None:
    """Two sandbox checkpoints."""
    start_with(sign_twice)


def roll_back() -> None:
    with tampering():
        AuditCheckpoint.objects.filter(number=2).delete()


@pytest.fixture
def accept() -> Accept:
    make_operator("admin", Role.KEY_ADMINISTRATOR)
    make_operator("approver", Role.APPROVER)

    def act(
        reason: str = "restored the backup of Monday", by: str = "admin", approved_by: str = "approver"
    ) -> list[str]:
        operator, approver = find_operator(by, "root"), find_operator(approved_by, "root")
        return accept_rollback(grant(HOST, P.REVOCATIONS_REPLAY), operator, approver, reason)

    return act


def test_accepted_rollback_is_audited_and_signed_again(signed: None, accept: Accept) -> None:
    roll_back()
    sign_due(now() + 2 * STEP)
    assert numbers() == [1]
    assert "sandbox" in accept()
    entry = AuditEntry.objects.get(event="audit.rollback_accepted")
    assert b"restored the backup of Monday" in bytes(entry.body)
    assert b"checkpoint 2 was recorded outside the database" in bytes(entry.body)
    assert Notice.objects.get(kind="audit.rollback_accepted").is_alarm
    assert sign_due(now() + 3 * STEP) >= 1
    assert numbers() == [1, 2]
    assert verify().broken is None


def test_accepted_rollback_records_entries_as_unsigned_since_the_first_one(signed: None, accept: Accept) -> None:
    """Chains are signed in the order in which their first unsigned entries were written."""
    roll_back()
    accept()
    chain, first = AuditChain.objects.get(name=CHAIN), AuditEntry.objects.get(chain_id=CHAIN, sequence=1)
    assert (chain.signed_in, chain.signed_sequence, chain.unsigned_since) == (0, 0, first.at)
    assert chain.newest_at != first.at


def test_accept_rollback_needs_a_second_person_who_may_approve(signed: None, accept: Accept) -> None:
    """One person with a shell cannot make the worker sign a log that was cut."""
    make_operator("admin-second-login", Role.APPROVER, person=find_operator("admin", "root").person)
    make_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER)
    roll_back()
    for approver in ("admin", "admin-second-login"):
        with pytest.raises(StateConflictError, match="second person"):
            accept(approved_by=approver)
    with pytest.raises(PermissionMissingError):
        accept(approved_by="tam")
    assert not AuditEntry.objects.filter(event="audit.rollback_accepted").exists()
    accept()
    act = BreakGlass.objects.get()
    assert (act.event, act.operator.username, act.is_claimed) == ("audit.rollback_approved", "approver", True)
    assert act.requester_person == find_operator("admin", "root").person


def test_accept_rollback_of_a_forged_newest_checkpoint_is_refused(signed: None, accept: Accept) -> None:
    roll_back()
    with tampering():
        AuditCheckpoint.objects.filter(scope="sandbox").update(signature=bytes(64))
    with pytest.raises(IntegrityError):
        accept()
    marks = read_marks("sandbox")
    assert marks.stored is not None
    assert marks.stored.number == 2


def test_accept_rollback_does_not_record_a_checkpoint_of_another_signer(signed: None, accept: Accept) -> None:
    roll_back()
    with tampering():
        AuditCheckpoint.objects.filter(scope="sandbox").update(signer="vault:elsewhere/audit")
    accept()
    assert [mark.number for mark in read_marks("sandbox")] == []
    write()
    sign_due(now() + 3 * STEP)
    assert [mark.number for mark in read_marks("sandbox")] == [2]


def test_accepted_loss_of_every_checkpoint_starts_anew(signed: None, accept: Accept) -> None:
    with tampering():
        AuditCheckpoint.objects.all().delete()
    accept()
    assert verify().broken is None
    sign_due(now() + 2 * STEP)
    assert numbers() == [1]
    assert verify().broken is None


def test_accept_rollback_of_an_intact_log_is_refused(signed: None, accept: Accept) -> None:
    with pytest.raises(StateConflictError):
        accept()
    assert not AuditEntry.objects.filter(event="audit.rollback_accepted").exists()


def test_accept_rollback_without_a_reason_is_refused(signed: None, accept: Accept) -> None:
    roll_back()
    with pytest.raises(RequestInvalidError):
        accept(" ")


def test_accept_rollback_killed_midway_is_repeated(signed: None, accept: Accept) -> None:
    with tampering():
        AuditCheckpoint.objects.all().delete()
    full = mock.patch("keyvault.services.audit.rollback.append_lines", side_effect=OSError(errno.ENOSPC, "full"))
    with full, pytest.raises(OSError, match="full"):
        accept()
    accept()
    assert verify().broken is None
    with pytest.raises(StateConflictError):
        accept()
