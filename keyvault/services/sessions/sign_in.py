"""Sign operators in to the console: count every attempt before its password is checked, and audit every outcome.

A device on which an operator has signed in before carries a signed cookie and has a counter of its own. An attacker who
locks a name or an address does not lock that device (OWASP, "Device Cookies"). Unknown names are counted, locked and
answered like existing ones.
"""

import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.contrib.auth.hashers import UNUSABLE_PASSWORD_PREFIX, make_password, verify_password
from django.core import signing
from django.utils.crypto import constant_time_compare, salted_hmac

from keyvault.access.decision import Grant
from keyvault.access.limits import SIGN_IN_FAILURES, SIGN_IN_LOCK_SECONDS
from keyvault.access.permissions import Permission
from keyvault.access.principals import CONSOLE
from keyvault.domain.errors import ErrorCode, KeyvaultError, PermissionMissingError
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.plaintext import Plaintext
from keyvault.models import Notice, Operator
from keyvault.services.limits.limiter import source_of
from keyvault.services.limits.sign_in_attempts import attempts
from keyvault.services.recording.authorization import authorize, operator_principal
from keyvault.services.recording.notifications import announce
from keyvault.services.recording.transaction import recorded
from keyvault.services.sessions.refusals import sign_in_refusals

DEVICE_LIFETIME = timedelta(days=90)
"""Lifetime of a device cookie after the device's last sign-in."""

_DEVICE_SALT = "keyvault.services.sessions.sign_in.device"
_NAME_SALT = "keyvault.services.sessions.sign_in.name"


class SignInRefusedError(PermissionMissingError):
    """The name or the password is wrong, or the operator may not sign in. All three give the same reply."""


class SignInLockedError(KeyvaultError):
    """Too many failures. The password was not checked."""

    code = ErrorCode.RATE_LIMITED

    def __init__(self, detail: str, *, retry_after_seconds: int) -> None:
        super().__init__(detail)
        self.retry_after_seconds = retry_after_seconds


@dataclass(frozen=True, slots=True)
class SignInAttempt:
    """A submitted form. `address` is None unless a trusted proxy supplies one; `device` is "" without a cookie."""

    username: str
    password: Plaintext
    address: str | None
    device: str = ""


@dataclass(frozen=True, slots=True)
class SignedIn:
    """The operator and the new value of the device cookie."""

    operator: Operator
    device: str


@dataclass(frozen=True, slots=True)
class _Counter:
    """A failure counter. `kind` is "name", "address" or "device"."""

    kind: str
    key: str


def sign_in(presented: SignInAttempt, now: datetime) -> SignedIn:
    """Check a name and a password, and record the outcome.

    Raises SignInRefusedError, or SignInLockedError after 10 failures for 30 minutes.
    """
    row = Operator.objects.filter(username=presented.username).first()
    device = None if row is None else _read_device(row, presented.device)
    locking = _take(row, presented, device, now)
    is_right, is_hash_weak = verify_password(presented.password.reveal(), _stored_hash(row))
    if row is None or not is_right or not _may_sign_in(row):
        sign_in_refusals.note(_name_of(row), presented.address, now, is_locked=False)
        for counter in locking:
            _record_lock(counter, row, presented.address, now)
        if locking:
            raise _locked(SIGN_IN_LOCK_SECONDS, now)
        raise SignInRefusedError("Wrong user name or password. Both are case-sensitive.")
    for counter in _counters(row, presented, device):
        attempts().give_back(counter.key)
    _record_sign_in(row, presented, device, now, is_hash_weak=is_hash_weak)
    return SignedIn(row, _write_device(row, device or secrets.token_urlsafe(12)))


def sign_out(grant: Grant) -> None:
    """Record that an operator ended a session."""
    with recorded(grant, Permission.SESSIONS_WRITE, "operator.signed_out"):
        pass


# --------------------------------------------------------------------------------------------------- counting


def _counters(row: Operator | None, presented: SignInAttempt, device: str | None) -> list[_Counter]:
    if device is not None:
        return [_Counter("device", f"kv:sign-in:device:{device}")]
    # The operator's version makes a reset password start a new counter. The name is hashed because it may be a
    # password.
    name = f"{presented.username}\0{'' if row is None else row.version}"
    counters = [_Counter("name", f"kv:sign-in:name:{salted_hmac(_NAME_SALT, name, algorithm='sha256').hexdigest()}")]
    source = source_of(presented.address)
    return counters if source is None else [*counters, _Counter("address", f"kv:sign-in:address:{source}")]


def _take(row: Operator | None, presented: SignInAttempt, device: str | None, now: datetime) -> list[_Counter]:
    """Count the attempt and return the counters that a failure locks.

    Raises SignInLockedError, and then counts nothing.
    """
    locking: list[_Counter] = []
    taken: list[_Counter] = []
    for counter in _counters(row, presented, device):
        attempt = attempts().take(counter.key)
        if attempt.is_locked:
            for earlier in taken:
                attempts().give_back(earlier.key)
            sign_in_refusals.note(_name_of(row), presented.address, now, is_locked=True)
            raise _locked(attempt.retry_after_seconds, now)
        taken.append(counter)
        if attempt.is_last:
            locking.append(counter)
    return locking


def _locked(seconds: int, now: datetime) -> SignInLockedError:
    until = (now + timedelta(seconds=seconds)).strftime("%H:%M")
    minutes = -(-seconds // 60)
    return SignInLockedError(
        "Too many failed sign-ins for this name, device or network. "
        f"No password is checked until {until} UTC ({minutes} minute{'' if minutes == 1 else 's'}). "
        "Try again then, or sign in on a device that you have signed in with before.",
        retry_after_seconds=seconds,
    )


# --------------------------------------------------------------------------------------------------- judging


def _stored_hash(row: Operator | None) -> str:
    """Return the stored hash. An unknown name gets an unusable one, for which Django spends the same time."""
    return UNUSABLE_PASSWORD_PREFIX if row is None else row.password


def _may_sign_in(row: Operator) -> bool:
    return row.is_active and row.is_staff and bool(row.roles)


def _name_of(row: Operator | None) -> str | None:
    return None if row is None else row.username


# --------------------------------------------------------------------------------------------------- recording


def _record_sign_in(
    row: Operator, presented: SignInAttempt, device: str | None, now: datetime, *, is_hash_weak: bool
) -> None:
    """Audit the sign-in. Raises SignInRefusedError if the operator changed since the password was checked."""
    grant = authorize(operator_principal(row), Permission.SESSIONS_WRITE, now=now)
    address, known = presented.address or "unknown", "new" if device is None else "known"
    with recorded(grant, Permission.SESSIONS_WRITE, "operator.signed_in", address=address, device=known):
        if is_hash_weak:
            row.compare_and_swap(password=make_password(presented.password.reveal()), last_login=now)
        elif not row.swap_beside({"version": row.version}, last_login=now):
            raise SignInRefusedError("This operator was changed just now. Sign in again.")


def _record_lock(counter: _Counter, row: Operator | None, address: str | None, now: datetime) -> None:
    """Audit a lock and raise an alarm: one per operator, and one for all addresses, until an operator marks it as seen.

    Anyone can lock any number of unknown names and addresses. An unknown name gets no entry. Addresses above
    MAX_ADDRESS_LOCKS per minute share one entry, except an address that raises the alarm.
    """
    grant = authorize(CONSOLE, Permission.SESSIONS_WRITE, now=now)
    details: dict[str, Any] = {"address": address or "unknown", "failures": SIGN_IN_FAILURES}
    details |= {"seconds": SIGN_IN_LOCK_SECONDS}
    if counter.kind == "address":
        is_repeated = _is_alarm_unseen(NoticeKind.ADDRESS_LOCKED, _ADDRESSES)
        if is_repeated and not sign_in_refusals.note_address_lock(now):
            return
        with recorded(grant, Permission.SESSIONS_WRITE, "address.locked", **details):
            if not is_repeated:
                announce(grant, NoticeKind.ADDRESS_LOCKED, None, _ADDRESSES, **details)
    elif row is not None:
        with recorded(
            grant, Permission.SESSIONS_WRITE, "operator.locked", username=row.username, by=counter.kind, **details
        ):
            _announce_lock(grant, row, counter.kind, details)


def _announce_lock(grant: Grant, row: Operator, by: str, details: dict[str, Any]) -> None:
    subject = row.username[:64]
    if not _is_alarm_unseen(NoticeKind.OPERATOR_LOCKED, subject):
        announce(grant, NoticeKind.OPERATOR_LOCKED, None, subject, by=by, **details)


_ADDRESSES = "sign-in"
"""Subject of the alarm about locked addresses, of which at most one is unseen."""


def _is_alarm_unseen(kind: NoticeKind, subject: str) -> bool:
    return Notice.objects.filter(kind=kind, subject=subject, seen_at__isnull=True).exists()


# --------------------------------------------------------------------------------------------------- devices


def _write_device(row: Operator, device: str) -> str:
    return signing.dumps({"operator": row.pk, "device": device, "bound": _binding(row)}, salt=_DEVICE_SALT)


def _read_device(row: Operator, cookie: str) -> str | None:
    """Return the device in the cookie. None: forged, expired, another operator's, or from before a password change."""
    if not row.is_active:
        return None
    try:
        claims = signing.loads(cookie, salt=_DEVICE_SALT, max_age=DEVICE_LIFETIME)
    except signing.BadSignature:
        return None
    if claims["operator"] != row.pk or not constant_time_compare(claims["bound"], _binding(row)):
        return None
    return str(claims["device"])


def _binding(row: Operator) -> str:
    """Return a digest that binds the cookie to the operator's password and version, as Django binds sessions."""
    return salted_hmac(_DEVICE_SALT, row.get_session_auth_hash(), algorithm="sha256").hexdigest()[:32]
