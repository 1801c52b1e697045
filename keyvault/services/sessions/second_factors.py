"""Second factors of operators: authenticator apps (TOTP, RFC 6238), passkeys (WebAuthn) and recovery codes.

allauth has the rows, the codes and the WebAuthn protocol. This module writes the rows, each in one transaction with
its audit entry, and counts every check. The secret backend encrypts and decrypts seeds outside of transactions.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Final

from allauth.mfa.adapter import get_adapter
from allauth.mfa.models import Authenticator
from allauth.mfa.recovery_codes.internal.auth import RecoveryCodes
from allauth.mfa.totp.internal.auth import format_hotp_value, generate_totp_secret, hotp_value
from django.conf import settings
from django.utils.crypto import constant_time_compare

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.backends.base import BackendError, BackendInvalidError
from keyvault.domain.errors import StateConflictError
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.plaintext import Plaintext
from keyvault.models import Operator
from keyvault.services.operators.approving_persons import list_second_factor_rows, require_approvers_remain
from keyvault.services.operators.operators import CHANGING, swap_operator
from keyvault.services.recording.authorization import authorize, operator_principal
from keyvault.services.recording.notifications import announce
from keyvault.services.recording.transaction import recorded
from keyvault.services.sessions.devices import KnownDevice, read_device, write_device
from keyvault.services.sessions.lockout import FACTOR, LockoutAttempt, SignInRefusedError

TOTP: Final = Authenticator.Type.TOTP.value
PASSKEY: Final = Authenticator.Type.WEBAUTHN.value
RECOVERY_CODES: Final = Authenticator.Type.RECOVERY_CODES.value

MAX_PASSKEYS: Final = 10
"""Maximum passkeys of an operator."""

_PERIOD_SECONDS: Final = 30
_CODE_DIGITS: Final = 6
_RECOVERY_CODE_DIGITS: Final = 8

WRONG_FACTOR = "Wrong code, or a code that was already used. Wait for the next code, or use another second factor."
UNREADABLE_FACTOR = (
    "Your codes cannot be checked: they were set up with another secret backend or master key. Use a passkey, or have "
    "your second factors reset (manage.py reset_operator_factors)."
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NewFactor:
    """A second factor that is not stored yet: `data` as allauth stores it, with an encrypted seed."""

    kind: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class FactorAttempt:
    """A presented second factor. `device` is the device cookie, "" without one.

    `is_step_up`: the session is signed in already, and an action requires a recent factor.
    """

    operator: Operator
    address: str | None
    device: str = ""
    is_step_up: bool = False


def has_second_factor(operator: Operator) -> bool:
    """Whether the operator can pass the page of the second factor; recovery codes alone do not count."""
    return bool(list_second_factor_rows().filter(user_id=operator.pk).exists())


def list_with_second_factor(operators: Iterable[Operator]) -> set[int]:
    """Return the primary keys of those operators that have a second factor, see `has_second_factor`."""
    return set(list_second_factor_rows().filter(user__in=operators).values_list("user_id", flat=True))


def list_second_factors(operator: Operator) -> list[Authenticator]:
    return list(Authenticator.objects.filter(user_id=operator.pk).order_by("created_at", "pk"))


def count_recovery_codes(factor: Authenticator) -> int:
    """Return how many codes are unused."""
    return int(settings.MFA_RECOVERY_CODE_COUNT) - int(factor.data["used_mask"]).bit_count()


# --------------------------------------------------------------------------------------------------- new ones


def new_totp_seed() -> Plaintext:
    return Plaintext(generate_totp_secret())


def totp_code(seed: Plaintext, now: datetime) -> str:
    """Return the current code of a seed. Raises ValueError for text that is not Base32."""
    return str(format_hotp_value(hotp_value(seed.reveal(), int(now.timestamp()) // _PERIOD_SECONDS)))


def encrypt_seed(seed: Plaintext) -> str:
    """Return the ciphertext of a seed, for the session in which it is set up."""
    return str(get_adapter().encrypt(seed.reveal()))


def decrypt_seed(ciphertext: str) -> Plaintext:
    return Plaintext(get_adapter().decrypt(ciphertext))


def confirm_totp(ciphertext: str, code: str, now: datetime) -> NewFactor | None:
    """Return the factor of an encrypted seed if the code proves that the operator has it. The code is used up."""
    counter = _match_totp(decrypt_seed(ciphertext), code, now)
    return None if counter is None else NewFactor(TOTP, {"secret": ciphertext, "last_counter": counter})


def new_recovery_codes() -> tuple[NewFactor, list[Plaintext]]:
    """Return new recovery codes, encrypted and as text."""
    factor = NewFactor(RECOVERY_CODES, {"seed": get_adapter().encrypt(RecoveryCodes.generate_seed()), "used_mask": 0})
    return factor, _list_codes(factor.data)


def add_second_factor(grant: Grant, operator: Operator, factor: NewFactor) -> None:
    """Add a second factor. One of a kind that an operator has once replaces the earlier one and ends the sessions.

    Raises StateConflictError beyond MAX_PASSKEYS.
    """
    is_replaced = factor.kind != PASSKEY and any(each.type == factor.kind for each in list_second_factors(operator))
    with recorded(
        grant,
        Permission.SESSIONS_WRITE,
        "operator.second_factor_added",
        username=operator.username,
        factor=factor.kind,
        name=factor.data.get("name", ""),
        replaced=is_replaced,
    ) as record:
        if is_replaced:
            swap_operator(record, operator)
        store_second_factor(operator, factor, grant.at)


def store_second_factor(operator: Operator, factor: NewFactor, now: datetime) -> None:
    """Write the row, inside the `recorded` block of the caller."""
    rows = Authenticator.objects.filter(user_id=operator.pk, type=factor.kind)
    if factor.kind != PASSKEY:
        for row in rows:
            row.delete()
    elif rows.count() >= MAX_PASSKEYS:
        raise StateConflictError(f"You have {MAX_PASSKEYS} passkeys. Remove one first.")
    Authenticator(user=operator, type=factor.kind, data=factor.data, created_at=now).save()


def remove_second_factor(grant: Grant, operator: Operator, factor_id: int) -> None:
    """Remove one of the operator's own factors, and end the operator's sessions.

    Raises StateConflictError for the last factor besides the recovery codes.
    """
    factors = {factor.pk: factor for factor in list_second_factors(operator)}
    factor = factors.get(factor_id)
    if factor is None:
        raise StateConflictError("This second factor is already removed.")
    others = [other for other in factors.values() if other.pk != factor_id and other.type != RECOVERY_CODES]
    if not others:
        raise StateConflictError("This is your only second factor. Add another one first.")
    with recorded(
        grant,
        Permission.SESSIONS_WRITE,
        "operator.second_factor_removed",
        username=operator.username,
        factor=factor.type,
        name=factor.data.get("name", ""),
    ) as record:
        # Concurrent removals of the last two factors conflict in the operator's version.
        swap_operator(record, operator)
        factor.delete()


def reset_second_factors(grant: Grant, operator: Operator) -> None:
    """Remove all second factors of an operator, and end its sessions. It enrolls again with an invitation.

    Raises StateConflictError if too few approving persons would remain.
    """
    with recorded(grant, CHANGING, "operator.second_factors_reset", username=operator.username) as record:
        require_approvers_remain(operator, roles=operator.roles, scope=operator.access_scope, keeps_factors=False)
        swap_operator(record, operator)
        remove_all(operator)


def remove_all(operator: Operator) -> None:
    """Delete the rows of an operator, inside the `recorded` block of the caller."""
    for row in list_second_factors(operator):
        row.delete()


# --------------------------------------------------------------------------------------------------- checks


def check_code(attempt: FactorAttempt, code: str, now: datetime) -> str:
    """Check a code of an authenticator app, or a recovery code, and record the outcome. Return the device's cookie.

    Each code is accepted once. Raises SignInRefusedError, SignInLockedError after 10 failures, BackendError, and
    StateConflictError for a factor of another secret backend.
    """
    return _check(attempt, now, lambda: _find_code_use(attempt.operator, _normalize(code), now))


def check_passkey(attempt: FactorAttempt, verify: Callable[[], Authenticator | None], now: datetime) -> str:
    """Check a passkey with `verify`, which returns its row, and record the outcome. Return the device's cookie.

    Raises the errors of `check_code`.
    """

    def find_use() -> "_Use | None":
        row = verify()
        return None if row is None else _Use(row.pk, PASSKEY, _keep)

    return _check(attempt, now, find_use)


@dataclass(frozen=True, slots=True)
class _Use:
    """The use of a factor. `advance` returns the row's new data; None: the code was used meanwhile."""

    factor_id: int
    kind: str
    advance: Callable[[Mapping[str, Any]], dict[str, Any] | None]


def _check(attempt: FactorAttempt, now: datetime, find_use: Callable[[], _Use | None]) -> str:
    row, device = attempt.operator, read_device(attempt.operator, attempt.device)
    counted = LockoutAttempt(row, row.username, FACTOR, attempt.address, device, now)
    counted.count()
    try:
        use = find_use()
    except BackendError as error:
        counted.give_back()
        if isinstance(error, BackendInvalidError):
            _log.error("a second factor cannot be decrypted", extra={"operator": row.username, "why": error.internal})
            raise StateConflictError(UNREADABLE_FACTOR) from error
        raise
    if use is None or not _record_use(attempt, use, device, now):
        raise counted.fail(WRONG_FACTOR)
    counted.succeed()
    return write_device(row, device, attempt.address)


def _record_use(attempt: FactorAttempt, use: _Use, device: KnownDevice | None, now: datetime) -> bool:
    """Use the factor up and audit it, in one transaction. Return False if the code was used meanwhile."""
    row = attempt.operator
    grant = authorize(operator_principal(row), Permission.SESSIONS_WRITE, now=now)
    event = "operator.second_factor_confirmed" if attempt.is_step_up else "operator.signed_in"
    details: dict[str, Any] = {"address": attempt.address or "unknown", "device": "new" if device is None else "known"}
    try:
        with recorded(grant, Permission.SESSIONS_WRITE, event, factor=use.kind, **details):
            factor = Authenticator.objects.select_for_update().filter(pk=use.factor_id, user_id=row.pk).first()
            data = None if factor is None else use.advance(factor.data)
            if factor is None or data is None:
                raise _UsedMeanwhileError
            factor.data, factor.last_used_at = data, now
            factor.save(update_fields=["data", "last_used_at"])
            if not attempt.is_step_up:
                _note_sign_in(row, now)
                if device is None or device.address != attempt.address:
                    announce(grant, NoticeKind.UNFAMILIAR_SIGN_IN, None, row.username[:64], factor=use.kind, **details)
    except _UsedMeanwhileError:
        return False
    return True


def _note_sign_in(row: Operator, now: datetime) -> None:
    """Record the time, and end an invitation: its operator has other means to sign in."""
    if not row.swap_beside(
        {"version": row.version}, last_login=now, invitation_digest=None, invitation_expires_at=None
    ):
        raise SignInRefusedError("This operator was changed just now. Sign in again.")


class _UsedMeanwhileError(Exception):
    """A concurrent request used the same code first."""


def _find_code_use(operator: Operator, code: str, now: datetime) -> _Use | None:
    kind = {_CODE_DIGITS: TOTP, _RECOVERY_CODE_DIGITS: RECOVERY_CODES}.get(len(code))
    if kind is None or not (code.isascii() and code.isdecimal()):
        return None
    factor = Authenticator.objects.filter(user_id=operator.pk, type=kind).first()
    if factor is None:
        return None
    if kind == TOTP:
        counter = _match_totp(decrypt_seed(factor.data["secret"]), code, now)
        return None if counter is None else _Use(factor.pk, kind, partial(_advance_totp, counter))
    codes = _list_codes(factor.data)
    found = [index for index, each in enumerate(codes) if constant_time_compare(each.reveal(), code)]
    return _Use(factor.pk, kind, partial(_use_recovery_code, found[0])) if found else None


def _advance_totp(counter: int, data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Accept only a later period than the last one: each code is used once (RFC 6238, section 5.2)."""
    return {**data, "last_counter": counter} if counter > data.get("last_counter", -1) else None


def _use_recovery_code(index: int, data: Mapping[str, Any]) -> dict[str, Any] | None:
    used = int(data["used_mask"])
    return None if used & 1 << index else {**data, "used_mask": used | 1 << index}


def _keep(data: Mapping[str, Any]) -> dict[str, Any]:
    return dict(data)


def _match_totp(seed: Plaintext, code: str, now: datetime) -> int | None:
    """Return the newest period whose code this is."""
    if not (code.isascii() and code.isdecimal() and len(code) == _CODE_DIGITS):
        return None
    current, tolerance = int(now.timestamp()) // _PERIOD_SECONDS, int(settings.MFA_TOTP_TOLERANCE)
    matches = [
        counter
        for counter in range(current - tolerance, current + tolerance + 1)
        if constant_time_compare(format_hotp_value(hotp_value(seed.reveal(), counter)), code)
    ]
    return matches[-1] if matches else None


def _list_codes(data: Mapping[str, Any]) -> list[Plaintext]:
    return [Plaintext(code) for code in RecoveryCodes(Authenticator(data=dict(data))).generate_codes()]


def _normalize(code: str) -> str:
    """Remove the spaces and hyphens with which people write a code."""
    return code.replace(" ", "").replace("-", "")
