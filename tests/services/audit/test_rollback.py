"""Accepting an audit log that a restored backup set back, after which the worker signs it again."""

import errno
from collections.abc import Callable
from unittest import mock

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST
from keyvault.domain.errors import RequestInvalidError, StateConflictError
from keyvault.models import AuditCheckpoint, AuditEntry, Notice
from keyvault.services.audit.checkpoints import sign_due
from keyvault.services.audit.rollback import accept_rollback
from tests.factories import grant, make_merchant, make_operator, now
from tests.services.audit.test_checkpoint_marks import numbers, verify
from tests.services.audit.test_checkpoints import STEP, tampering, write

pytestmark = [pytest.mark.database, pytest.mark.django_db]

Accept = Callable[..., list[str]]


@pytest.fixture
def signed(db: None) -> None:
    """Two sandbox checkpoints."""
    make_merchant("acme")
    for turn in range(2):
        write()
        sign_due(now() + turn * STEP)


def roll_back() -> None:
    with tampering():
        AuditCheckpoint.objects.filter(number=2).delete()


@pytest.fixture
def accept() -> Accept:
    admin = make_operator("admin")

    def act(reason: str = "restored the backup of Monday") -> list[str]:
        return accept_rollback(grant(HOST, P.REVOCATIONS_REPLAY), admin, reason)

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
