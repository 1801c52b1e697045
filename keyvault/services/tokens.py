"""Service tokens: hashed like keys, scoped, expiring."""

import secrets
from collections.abc import Iterable
from datetime import timedelta

from django.conf import settings

from keyvault.access.decision import Grant
from keyvault.access.permissions import SERVICE_PERMISSIONS, Permission
from keyvault.access.principals import Operator
from keyvault.domain.digests import PepperSet
from keyvault.domain.errors import Fault, RequestInvalidError, StateConflictError
from keyvault.domain.free_text import find_text_fault
from keyvault.domain.keystring import StringKind, StringScope, mint_keystring
from keyvault.domain.plaintext import Plaintext
from keyvault.models import Merchant, ServiceToken
from keyvault.services.operators import operator_row
from keyvault.services.peppers import load_peppers
from keyvault.services.recording import recorded

LONGEST_DAYS = 366
DEFAULT_DAYS = 90


def create_service_token(
    grant: Grant,
    *,
    name: str,
    scope: StringScope,
    permissions: Iterable[Permission],
    merchants: Iterable[str] | None = None,
    lifetime_days: int = DEFAULT_DAYS,
) -> tuple[ServiceToken, Plaintext]:
    """The token's row, and the token itself, which is nowhere else and cannot be had again.

    `merchants` None: all of them. Raises RequestInvalidError, listing what does not fit.
    """
    wanted = sorted(set(permissions))
    chosen = None if merchants is None else sorted(set(merchants))
    faults = [Fault("/permission", f"a service token cannot hold {p}") for p in wanted if p not in SERVICE_PERMISSIONS]
    if (fault := find_text_fault(name, 100)) is not None:
        faults.append(Fault("/name", fault))
    if not wanted:
        faults.append(Fault("/permission", "at least one permission"))
    if not 1 <= lifetime_days <= LONGEST_DAYS:
        faults.append(Fault("/lifetime_days", f"1 to {LONGEST_DAYS}"))
    if chosen is not None:
        known = set(Merchant.objects.filter(merchant_id__in=chosen).values_list("merchant_id", flat=True))
        faults += [Fault("/merchant", f"there is no merchant {unknown}") for unknown in chosen if unknown not in known]
    if faults:
        raise RequestInvalidError("The token cannot be made like that.", faults)
    minted = mint_keystring(settings.KEY_BRAND, StringKind.SERVICE_TOKEN, scope, secrets.token_bytes)
    digest, pepper_version = load_peppers(PepperSet.SERVICE).digest(minted.text)
    creator = grant.principal if isinstance(grant.principal, Operator) else None
    token = ServiceToken(
        token_id=minted.key_id,
        name=name,
        digest=digest,
        pepper_version=pepper_version,
        scope=scope,
        permissions=wanted,
        merchants=chosen,
        creator=None if creator is None else operator_row(creator),
        creator_person=grant.principal.actor if creator is None else creator.person,
        created_at=grant.at,
        expires_at=grant.at + timedelta(days=lifetime_days),
    )
    with recorded(
        grant,
        Permission.TOKENS_WRITE,
        "service_token.created",
        token_id=token.token_id,
        name=name,
        scope=scope,
        permissions=wanted,
        merchants=chosen,
    ):
        token.save()
    return token, minted.text


def revoke_service_token(grant: Grant, token: ServiceToken) -> None:
    """At once and for ever."""
    if token.revoked_at is not None:
        raise StateConflictError("The token was revoked already.")
    with recorded(grant, Permission.TOKENS_WRITE, "service_token.revoked", token_id=token.token_id):
        token.compare_and_swap(revoked_at=grant.at)
