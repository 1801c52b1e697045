"""Sign operators in whom the identity provider has authenticated: find or create the operator, set roles, audit.

An operator is found by issuer and subject, never by name or e-mail address. The identity provider's groups decide the
roles at each sign-in, and such an operator has no password here. No token of the provider is stored. A new operator
has no access until two persons give it a scope, and with it state whether its person has another operator.
"""

import re
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any

from allauth.socialaccount.models import SocialAccount
from django.conf import settings

from keyvault.access.permissions import Permission
from keyvault.access.principals import SINGLE_SIGN_ON
from keyvault.access.scopes import NOWHERE
from keyvault.access.single_sign_on import FederatedIdentity, IdentityProvider, SignOnFault
from keyvault.backends import meters
from keyvault.backends.identity_provider import IdentityProviderClient
from keyvault.domain.errors import NotFoundError, PermissionMissingError
from keyvault.domain.notifications import NoticeKind
from keyvault.models import Operator
from keyvault.services.operators.operators import create_operator, is_single_sign_on, set_roles
from keyvault.services.recording.authorization import authorize, operator_principal
from keyvault.services.recording.notifications import announce
from keyvault.services.recording.transaction import recorded
from keyvault.services.sessions.devices import KnownDevice, read_device, write_device
from keyvault.services.sessions.refusals import sign_in_refusals

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,149}")
"""A `preferred_username` that may become an operator's name. ASCII, so that no name looks like another."""

_UNEXPECTED = "The identity provider's reply was not accepted. Sign in again from the sign-in page."

_DETAILS = {
    SignOnFault.STATE_INVALID: "This sign-in was used before, has expired or began in another browser. Sign in again "
    "from the sign-in page.",
    SignOnFault.PROVIDER_REFUSED: "The identity provider did not sign you in. Sign in again from the sign-in page.",
    SignOnFault.PROVIDER_UNAVAILABLE: "The identity provider does not reply. Try again later.",
    SignOnFault.NO_ROLE: "None of your groups at the identity provider has a role here. Ask for membership in such a "
    "group, then sign in again.",
    SignOnFault.NAME_INVALID: "Your user name at the identity provider cannot be an operator's name: 1 to 150 "
    "characters of a-z, A-Z, 0-9 and @ . + - _ are accepted. Ask for another user name there.",
    SignOnFault.NAME_TAKEN: "Another operator has your user name, and is not linked to your identity. Ask the host "
    "administrator, or ask for another user name at the identity provider.",
    SignOnFault.OPERATOR_DISABLED: "This operator is disabled. Ask the host administrator.",
}
"""Texts for the refused person. All other faults share one text: they are an attack, or a fault of the provider."""


class SignOnRefusedError(PermissionMissingError):
    """A refused single sign-on. It is counted for the audit log when it is created by `refuse`."""

    def __init__(self, fault: SignOnFault) -> None:
        super().__init__(_DETAILS.get(fault, _UNEXPECTED), internal=fault)
        self.fault = fault


@dataclass(frozen=True, slots=True)
class SignedOn:
    """An operator, and the device cookie of a complete sign-in; None: our own second factor is next.

    `last_sign_in_at`: the previous complete sign-in; None: there was none.
    """

    operator: Operator
    device: str | None
    last_sign_in_at: datetime | None


def configured_provider() -> IdentityProvider:
    """Return the configured provider. Raises NotFoundError without one."""
    if settings.IDENTITY_PROVIDER is None:
        raise NotFoundError
    return settings.IDENTITY_PROVIDER


@cache
def identity_provider_client() -> IdentityProviderClient:
    """Return this process's client of the configured provider."""
    return IdentityProviderClient(configured_provider().issuer)


def refuse(
    fault: SignOnFault, address: str | None, now: datetime, operator: Operator | None = None
) -> SignOnRefusedError:
    """Count a refused sign-in for the audit log, and return the error to raise."""
    name = None if operator is None else operator.username
    meters.note_sign_in_refusal("single_sign_on")
    sign_in_refusals.note(name, address, now, is_locked=False, reason=fault)
    return SignOnRefusedError(fault)


def may_prove_second_factor(operator: Operator) -> bool:
    """Whether the identity provider may prove the operator's second factor."""
    provider = settings.IDENTITY_PROVIDER
    return provider is not None and bool(provider.second_factors) and is_single_sign_on(operator)


def sign_on(identity: FederatedIdentity, address: str | None, device: str, now: datetime) -> SignedOn:
    """Sign in the operator of an authenticated identity, and record it. Raises SignOnRefusedError.

    `device` is the device cookie, "" without one.

    The first sign-in of a subject with a role creates its operator. Later ones replace the operator's roles if its
    groups have changed, which ends its other sessions. A subject without a role loses the operator's roles, too.
    """
    link = SocialAccount.objects.filter(provider=identity.issuer, uid=identity.subject).select_related("user").first()
    operator: Operator | None = None if link is None else link.user
    if operator is not None and not operator.is_active:
        raise refuse(SignOnFault.OPERATOR_DISABLED, address, now, operator)
    if operator is not None:
        set_roles(authorize(SINGLE_SIGN_ON, Permission.OPERATORS_WRITE, now=now), operator, identity.roles)
    if not identity.roles:
        raise refuse(SignOnFault.NO_ROLE, address, now, operator)
    if operator is None:
        operator = _create(identity, address, now)
    known, last_sign_in_at = read_device(operator, device), operator.last_login
    _record(operator, identity, address, known, now)
    is_complete = identity.second_factor_at is not None
    return SignedOn(operator, write_device(operator, known, address) if is_complete else None, last_sign_in_at)


def _record(
    operator: Operator, identity: FederatedIdentity, address: str | None, known: KnownDevice | None, now: datetime
) -> None:
    """Audit the sign-in, which is complete only with a second factor at the identity provider."""
    grant = authorize(operator_principal(operator), Permission.SESSIONS_WRITE, now=now)
    details: dict[str, Any] = {"address": address or "unknown", "device": "new" if known is None else "known"}
    if identity.second_factor_at is None:
        event = "operator.single_sign_on_accepted"
        with recorded(grant, Permission.SESSIONS_WRITE, event, issuer=identity.issuer, **details):
            return
    details["factor"] = "identity_provider"
    with recorded(grant, Permission.SESSIONS_WRITE, "operator.signed_in", issuer=identity.issuer, **details):
        used_up = {"invitation_digest": None, "invitation_expires_at": None}
        if not operator.swap_beside({"version": operator.version}, last_login=now, **used_up):
            raise PermissionMissingError("This operator was changed just now. Sign in again.")
        if known is None or known.address != address:
            announce(grant, NoticeKind.UNFAMILIAR_SIGN_IN, None, operator.username[:64], **details)


def _create(identity: FederatedIdentity, address: str | None, now: datetime) -> Operator:
    """Create the operator of a subject, without a password and without access: its scope is empty.

    A name is taken regardless of its case.
    """
    if _NAME.fullmatch(identity.name) is None:
        raise refuse(SignOnFault.NAME_INVALID, address, now)
    if Operator.objects.filter(username__iexact=identity.name).exists():
        raise refuse(SignOnFault.NAME_TAKEN, address, now)
    grant = authorize(SINGLE_SIGN_ON, Permission.OPERATORS_ENROLL, now=now)
    with recorded(
        grant,
        Permission.OPERATORS_ENROLL,
        "operator.linked",
        username=identity.name,
        issuer=identity.issuer,
        subject=identity.subject,
    ):
        operator = create_operator(grant, username=identity.name, roles=identity.roles, scope=NOWHERE, password=None)
        SocialAccount.objects.create(user=operator, provider=identity.issuer, uid=identity.subject)
    return operator
