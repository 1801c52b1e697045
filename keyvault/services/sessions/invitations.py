"""Invitations: one-time links at which a new operator sets a password and its first second factor.

The database has the digest of the link's token only. An operator has at most one invitation.
"""

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.domain.errors import Fault, NotFoundError, RequestInvalidError, StateConflictError
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.plaintext import Plaintext
from keyvault.domain.timestamps import format_timestamp
from keyvault.models import Operator
from keyvault.services.operators.operators import choose_password, is_single_sign_on, swap_operator
from keyvault.services.recording.authorization import authorize, operator_principal
from keyvault.services.recording.notifications import announce
from keyvault.services.recording.transaction import recorded
from keyvault.services.sessions.second_factors import (
    TOTP,
    WRONG_FACTOR,
    NewFactor,
    encrypt_seed,
    has_second_factor,
    new_recovery_codes,
    new_totp_seed,
    remove_all,
    store_second_factor,
)
from keyvault.services.sessions.sign_in import may_sign_in

INVITATION_LIFETIME: Final = timedelta(hours=72)

_TOKEN_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class PreparedSignIn:
    """A password and the seed of an authenticator app (Base32), with which an operator can sign in immediately."""

    password: Plaintext
    totp_seed: Plaintext


def invite(grant: Grant, operator: Operator) -> Plaintext:
    """Return the token of a new invitation, which replaces an earlier one, and raise an alarm.

    The operator's sessions end.

    Raises StateConflictError for a disabled operator, and for one with a second factor.
    """
    if not operator.is_active:
        raise StateConflictError(f"Operator {operator.username} is disabled. Invite a new one.")
    if has_second_factor(operator):
        raise StateConflictError(f"Operator {operator.username} has a second factor. Reset its second factors first.")
    token = Plaintext(secrets.token_urlsafe(_TOKEN_BYTES))
    expires_at = grant.at + INVITATION_LIFETIME
    until = format_timestamp(expires_at, "seconds")
    with recorded(
        grant, Permission.OPERATORS_ENROLL, "operator.invited", username=operator.username, expires_at=until
    ) as record:
        swap_operator(record, operator, invitation_digest=_digest(token), invitation_expires_at=expires_at)
        announce(grant, NoticeKind.OPERATOR_INVITED, None, operator.username[:64], expires_at=until)
    return token


def enrolment_url(token: Plaintext, origin: str) -> Plaintext:
    """Return the link of an invitation to the console at an origin.

    The token is in the query string, which no log of the service contains.
    """
    return Plaintext(f"{origin}/admin/invitation/?token={token.reveal()}")


def find_invited(token: Plaintext, now: datetime) -> Operator:
    """Return the operator of an open invitation. Raises NotFoundError: unknown, used or expired."""
    row: Operator | None = Operator.objects.filter(
        invitation_digest=_digest(token), invitation_expires_at__gt=now
    ).first()
    if row is None or not may_sign_in(row):
        raise NotFoundError("This invitation is not valid. It was used, replaced, or has expired. Ask for a new one.")
    return row


def accept_invitation(
    operator: Operator, password: Plaintext | None, prove: Callable[[], NewFactor | None], now: datetime
) -> list[Plaintext]:
    """Set the password and the second factor of an invited operator, and use the invitation up.

    Returns the recovery codes.

    Args:
        operator: the row that `find_invited` returned.
        password: None for an operator of single sign-on, and for no other.
        prove: called once the password is accepted; returns the factor if the operator has proved to have it.

    Raises:
        RequestInvalidError: the password is too weak, or the factor is not proved.
        StateConflictError: the invitation was used meanwhile.
    """
    if password is not None or not is_single_sign_on(operator):
        choose_password(operator, password or Plaintext(""))
    factor = prove()
    if factor is None:
        raise RequestInvalidError("The second factor was not accepted.", [Fault("/second_factor", WRONG_FACTOR)])
    codes, texts = new_recovery_codes()
    grant = authorize(operator_principal(operator), Permission.SESSIONS_WRITE, now=now)
    with recorded(
        grant, Permission.SESSIONS_WRITE, "operator.enrolled", username=operator.username, factor=factor.kind
    ) as record:
        used_up = {"invitation_digest": None, "invitation_expires_at": None}
        swap_operator(record, operator, password=operator.password, last_login=now, **used_up)
        remove_all(operator)
        store_second_factor(operator, factor, now)
        store_second_factor(operator, codes, now)
    return texts


def prepare_sign_in(grant: Grant, operator: Operator) -> PreparedSignIn:
    """Give an operator a new random password and an authenticator app as its only second factor. Its sessions end."""
    prepared = PreparedSignIn(Plaintext(secrets.token_urlsafe(18)), new_totp_seed())
    choose_password(operator, prepared.password)
    factor = NewFactor(TOTP, {"secret": encrypt_seed(prepared.totp_seed)})
    with recorded(
        grant, Permission.OPERATORS_ENROLL, "operator.sign_in_prepared", username=operator.username, factor=factor.kind
    ) as record:
        swap_operator(record, operator, password=operator.password)
        remove_all(operator)
        store_second_factor(operator, factor, grant.at)
    return prepared


def _digest(token: Plaintext) -> str:
    """Return the digest of a token with 256 random bits, which needs neither salt nor pepper."""
    return hashlib.sha256(token.reveal().encode()).hexdigest()
