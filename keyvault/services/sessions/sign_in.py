"""Sign operators in to the console: count every attempt before its password is checked, and audit every outcome.

The right password alone opens only the page of the second factor, see `services.sessions.second_factors`.
"""

from dataclasses import dataclass
from datetime import datetime

from django.contrib.auth.hashers import UNUSABLE_PASSWORD_PREFIX, make_password, verify_password

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.domain.plaintext import Plaintext
from keyvault.models import Operator
from keyvault.services.operators.operators import swap_operator
from keyvault.services.recording.authorization import authorize, operator_principal
from keyvault.services.recording.transaction import recorded
from keyvault.services.sessions.devices import KnownDevice, read_device
from keyvault.services.sessions.lockout import PASSWORD, LockoutAttempt, SignInRefusedError
from keyvault.services.sessions.low_priority import run_at_low_priority


@dataclass(frozen=True, slots=True)
class SignInAttempt:
    """A submitted form. `address` is None unless a trusted proxy supplies one; `device` is "" without a cookie."""

    username: str
    password: Plaintext
    address: str | None
    device: str = ""


def sign_in(presented: SignInAttempt, now: datetime) -> Operator:
    """Check a name and a password, and record the outcome. Return the operator, whose second factor is next.

    Raises SignInRefusedError, or SignInLockedError after 10 failures for 30 minutes.
    """
    row = Operator.objects.filter(username=presented.username).first()
    device = None if row is None else read_device(row, presented.device)
    counted = LockoutAttempt(row, presented.username, PASSWORD, presented.address, device, now)
    counted.count()
    is_right, is_hash_weak = run_at_low_priority(verify_password, presented.password.reveal(), _stored_hash(row))
    if row is None or not is_right or not may_sign_in(row):
        raise counted.fail("Wrong user name or password. Both are case-sensitive.")
    counted.succeed()
    _record_password(row, presented, device, now, is_hash_weak=is_hash_weak)
    return row


def may_sign_in(row: Operator) -> bool:
    return row.is_active and row.is_staff and bool(row.roles)


def sign_out(grant: Grant) -> None:
    """Record that an operator ended a session."""
    with recorded(grant, Permission.SESSIONS_WRITE, "operator.signed_out"):
        pass


def _stored_hash(row: Operator | None) -> str:
    """Return the stored hash. An unknown name gets an unusable one, for which Django spends the same time."""
    return UNUSABLE_PASSWORD_PREFIX if row is None else row.password


def _record_password(
    row: Operator, presented: SignInAttempt, device: KnownDevice | None, now: datetime, *, is_hash_weak: bool
) -> None:
    """Audit the right password. Raises SignInRefusedError if the operator changed since it was checked."""
    grant = authorize(operator_principal(row), Permission.SESSIONS_WRITE, now=now)
    address, known = presented.address or "unknown", "new" if device is None else "known"
    event = "operator.password_accepted"
    with recorded(grant, Permission.SESSIONS_WRITE, event, address=address, device=known) as record:
        if is_hash_weak:
            swap_operator(record, row, password=run_at_low_priority(make_password, presented.password.reveal()))
        elif not Operator.objects.filter(pk=row.pk, version=row.version).exists():
            raise SignInRefusedError("This operator was changed just now. Sign in again.")
