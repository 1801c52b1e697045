"""Count guesses of passwords and second factors, lock after too many, and record each lock.

A known device has a counter of its own. An attacker who locks a name or an address does not lock that device. Unknown
names are counted and locked like existing ones.
"""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from django.utils.crypto import salted_hmac

from keyvault.access.decision import Grant
from keyvault.access.limits import SIGN_IN_FAILURES, SIGN_IN_FAILURES_KEPT_SECONDS, SIGN_IN_LOCK_SECONDS
from keyvault.access.permissions import Permission
from keyvault.access.principals import CONSOLE
from keyvault.backends import meters
from keyvault.domain.errors import ErrorCode, KeyvaultError, PermissionMissingError
from keyvault.domain.notifications import NoticeKind
from keyvault.models import Notice, Operator
from keyvault.services.limits.limiter import source_of
from keyvault.services.limits.sign_in_attempts import attempts
from keyvault.services.recording.authorization import authorize
from keyvault.services.recording.notifications import announce
from keyvault.services.recording.transaction import recorded
from keyvault.services.sessions.devices import KnownDevice
from keyvault.services.sessions.refusals import sign_in_refusals

PASSWORD = "sign-in"  # noqa: S105  the name of a counter
FACTOR = "second-factor"

# The name of an earlier module: processes of two releases that run side by side share the counters.
_NAME_SALT = "keyvault.services.sessions.guessing.name"


class SignInRefusedError(PermissionMissingError):
    """The name, the password or the second factor is wrong, or the operator may not sign in."""


class SignInLockedError(KeyvaultError):
    """Too many failures. The password or the second factor was not checked."""

    code = ErrorCode.RATE_LIMITED

    def __init__(self, detail: str, *, retry_after_seconds: int) -> None:
        super().__init__(detail)
        self.retry_after_seconds = retry_after_seconds


@dataclass(frozen=True, slots=True)
class _Counter:
    """A failure counter. `kind` is "name", "address" or "device". `lock_seconds`: duration of a lock by a failure."""

    kind: str
    key: str
    lock_seconds: int = 0

    @property
    def kept_seconds(self) -> int:
        """How long a failure counts. A shared address is not locked for the typing errors of a whole day."""
        return SIGN_IN_LOCK_SECONDS if self.kind == "address" else SIGN_IN_FAILURES_KEPT_SECONDS


@dataclass(slots=True)
class LockoutAttempt:
    """One counted attempt: `succeed`, `fail` or `give_back` ends it.

    Args:
        row: the operator; None for an unknown name.
        what: PASSWORD or FACTOR, which are counted separately.
        address: None unless a trusted proxy supplies one.
        device: the known device; None for any other.
    """

    row: Operator | None
    username: str
    what: str
    address: str | None
    device: KnownDevice | None
    now: datetime
    _locking: tuple[_Counter, ...] = ()

    def count(self) -> None:
        """Count the attempt. Raises SignInLockedError, and then counts nothing."""
        locking: list[_Counter] = []
        taken: list[_Counter] = []
        for counter in self._counters():
            attempt = attempts().take(counter.key, counter.kept_seconds)
            if attempt.is_locked:
                for earlier in taken:
                    attempts().give_back(earlier.key)
                meters.note_sign_in_refusal("locked")
                sign_in_refusals.note(self._known_name(), self.address, self.now, is_locked=True)
                raise self._locked(attempt.retry_after_seconds)
            taken.append(counter)
            if attempt.is_last:
                locking.append(replace(counter, lock_seconds=attempt.retry_after_seconds))
        self._locking = tuple(locking)

    def give_back(self) -> None:
        """Remove the attempt from the counters: it could not be checked."""
        for counter in self._counters():
            attempts().give_back(counter.key)

    def succeed(self) -> None:
        """Remove the attempt from the counters, and the earlier failures of this operator, but not of the address."""
        for counter in self._counters():
            attempts().give_back(counter.key, is_right=counter.kind != "address")

    def fail(self, detail: str) -> SignInRefusedError | SignInLockedError:
        """Record a failure and a lock that it starts. Return the error to raise."""
        meters.note_sign_in_refusal("password" if self.what == PASSWORD else "second_factor")
        sign_in_refusals.note(self._known_name(), self.address, self.now, is_locked=False)
        for counter in self._locking:
            _record_lock(counter, self.what, self.row, self.address, self.now)
        if self._locking:
            return self._locked(max(counter.lock_seconds for counter in self._locking))
        return SignInRefusedError(detail)

    def _known_name(self) -> str | None:
        return None if self.row is None else self.row.username

    def _counters(self) -> list[_Counter]:
        prefix = f"kv:{self.what}"
        if self.device is not None:
            return [_Counter("device", f"{prefix}:device:{self.device.name}")]
        # The operator's version makes a reset password start a new counter. The name is hashed because it may be a
        # password.
        name = f"{self.username}\0{'' if self.row is None else self.row.version}"
        counters = [_Counter("name", f"{prefix}:name:{salted_hmac(_NAME_SALT, name, algorithm='sha256').hexdigest()}")]
        source = source_of(self.address)
        return counters if source is None else [*counters, _Counter("address", f"{prefix}:address:{source}")]

    def _locked(self, seconds: int) -> SignInLockedError:
        until = (self.now + timedelta(seconds=seconds)).strftime("%H:%M")
        minutes = -(-seconds // 60)
        what = "password" if self.what == PASSWORD else "second factor"
        return SignInLockedError(
            "Too many failed sign-ins for this name, device or network. "
            f"No {what} is checked until {until} UTC ({minutes} minute{'' if minutes == 1 else 's'}). "
            "Try again then, or sign in on a device that you have signed in with before.",
            retry_after_seconds=seconds,
        )


# --------------------------------------------------------------------------------------------------- recording


def _record_lock(counter: _Counter, what: str, row: Operator | None, address: str | None, now: datetime) -> None:
    """Audit a lock and raise an alarm: one per operator, and one for all addresses, until an operator marks it as seen.

    Anyone can lock any number of unknown names and addresses. An unknown name gets no entry. Addresses above
    MAX_ADDRESS_LOCKS per minute share one entry, except an address that raises the alarm.
    """
    grant = authorize(CONSOLE, Permission.SESSIONS_WRITE, now=now)
    details: dict[str, Any] = {"address": address or "unknown", "failures": SIGN_IN_FAILURES}
    details |= {"seconds": counter.lock_seconds, "checked": what.replace("-", "_")}
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
"""Subject of the alarm about locked addresses. At most one such alarm is unseen."""


def _is_alarm_unseen(kind: NoticeKind, subject: str) -> bool:
    return Notice.objects.filter(kind=kind, subject=subject, seen_at__isnull=True).exists()
