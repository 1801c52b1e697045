"""Service tokens: hashed like keys, scoped, expiring, rotated with an overlap."""

import secrets
from collections.abc import Iterable, Sequence
from datetime import timedelta

from django.conf import settings

from keyvault.access.decision import Grant
from keyvault.access.permissions import SERVICE_PERMISSIONS, Permission
from keyvault.access.principals import OperatorPrincipal, is_claimed
from keyvault.domain.digests import PepperSet
from keyvault.domain.errors import Fault, RequestInvalidError, StateConflictError
from keyvault.domain.free_text import find_text_fault
from keyvault.domain.keystring import StringKind, StringScope, mint_keystring
from keyvault.domain.plaintext import Plaintext
from keyvault.domain.timestamps import format_timestamp
from keyvault.models import Merchant, ServiceToken
from keyvault.models.tokens import MAX_READERS, MAX_STALENESS_SECONDS
from keyvault.services.operators.operators import operator_row
from keyvault.services.peppers.ring import load_peppers, refresh_peppers
from keyvault.services.recording.changes import notify_host
from keyvault.services.recording.transaction import recorded

MAX_DAYS = 366
DEFAULT_DAYS = 90
MAX_OVERLAP_HOURS = 168
MOST_READERS = 10_000
LEAST_STALENESS_SECONDS, MOST_STALENESS_SECONDS = 4, 60


def create_service_token(
    grant: Grant,
    *,
    name: str,
    scope: StringScope,
    permissions: Iterable[Permission],
    merchants: Iterable[str] | None = None,
    lifetime_days: int = DEFAULT_DAYS,
    is_probe: bool = False,
    max_readers: int = MAX_READERS,
    max_staleness_seconds: int = MAX_STALENESS_SECONDS,
) -> tuple[ServiceToken, Plaintext]:
    """Create a token; return its row and its string, which is not stored and cannot be shown again.

    `merchants` None: all merchants. `is_probe`: verifications with this token do not count as key usage.
    `max_readers`, `max_staleness_seconds`: see `ServiceToken`.
    Raises RequestInvalidError with faults.
    """
    wanted = sorted(set(permissions))
    chosen = None if merchants is None else sorted(set(merchants))
    faults = [Fault("/permission", f"a service token cannot hold {p}") for p in wanted if p not in SERVICE_PERMISSIONS]
    if (fault := find_text_fault(name, 100)) is not None:
        faults.append(Fault("/name", fault))
    if not wanted:
        faults.append(Fault("/permission", "at least one permission"))
    if not 1 <= lifetime_days <= MAX_DAYS:
        faults.append(Fault("/lifetime_days", f"1 to {MAX_DAYS}"))
    if not 1 <= max_readers <= MOST_READERS:
        faults.append(Fault("/max_readers", f"1 to {MOST_READERS}"))
    if not LEAST_STALENESS_SECONDS <= max_staleness_seconds <= MOST_STALENESS_SECONDS:
        fault = f"{LEAST_STALENESS_SECONDS} to {MOST_STALENESS_SECONDS}"
        faults.append(Fault("/max_staleness_seconds", fault))
    if chosen is not None:
        known = set(Merchant.objects.filter(merchant_id__in=chosen).values_list("merchant_id", flat=True))
        faults += [Fault("/merchant", f"there is no merchant {unknown}") for unknown in chosen if unknown not in known]
    if faults:
        raise RequestInvalidError("The token cannot be created.", faults)
    token, text = _mint(
        grant,
        name=name,
        scope=scope,
        permissions=wanted,
        merchants=chosen,
        lifetime=timedelta(days=lifetime_days),
        is_probe=is_probe,
        max_readers=max_readers,
        max_staleness_seconds=max_staleness_seconds,
    )
    with recorded(
        grant,
        Permission.TOKENS_WRITE,
        "service_token.created",
        account=token.access_scope,
        token_id=token.token_id,
        name=name,
        scope=scope,
        permissions=wanted,
        merchants=chosen,
        is_probe=is_probe,
        max_readers=max_readers,
        max_staleness_seconds=max_staleness_seconds,
    ):
        token.save()
    return token, text


def rotate_service_token(grant: Grant, token: ServiceToken, overlap_hours: int) -> tuple[ServiceToken, Plaintext]:
    """Create a successor with the same name, permissions and original lifetime; return its row and its string.

    Both tokens are valid for `overlap_hours` (0 to 168), but the old one never longer than before. Raises
    RequestInvalidError, StateConflictError when the token is no longer valid or is already rotated.
    """
    if not 0 <= overlap_hours <= MAX_OVERLAP_HOURS:
        fault = Fault("/overlap_hours", f"0 to {MAX_OVERLAP_HOURS}")
        raise RequestInvalidError("The token cannot be rotated.", [fault])
    if token.revoked_at is not None or grant.at >= token.expires_at:
        raise StateConflictError("The token is revoked or expired. Create a new one.")
    line = list(ServiceToken.objects.filter(lineage=token.lineage).order_by("created_at"))
    for later in line:
        if later.created_at > token.created_at and later.revoked_at is None and grant.at < later.expires_at:
            raise StateConflictError(f"The token is already rotated. Rotate its successor {later.token_id}.")
    successor, text = _mint(
        grant,
        name=token.name,
        scope=StringScope(token.scope),
        permissions=token.permissions,
        merchants=token.merchants,
        # A rotation shortens the token's own lifetime, so take the longest one of its lineage.
        lifetime=max(each.expires_at - each.created_at for each in line),
        is_probe=token.is_probe,
        max_readers=token.max_readers,
        max_staleness_seconds=token.max_staleness_seconds,
        lineage=token.lineage,
    )
    ends_at = min(token.expires_at, grant.at + timedelta(hours=overlap_hours))
    with recorded(
        grant,
        Permission.TOKENS_WRITE,
        "service_token.rotated",
        account=token.access_scope,
        token_id=token.token_id,
        successor_id=successor.token_id,
        expires_at=format_timestamp(ends_at),
    ):
        token.compare_and_swap(expires_at=ends_at)
        successor.save()
    return successor, text


def revoke_service_token(grant: Grant, token: ServiceToken) -> None:
    """Revoke a token permanently. Raises StateConflictError when it is already revoked."""
    if token.revoked_at is not None:
        notify_host([token.alters()])  # the first response may have been lost after the commit
        raise StateConflictError("The token is already revoked.")
    within = token.access_scope
    with recorded(grant, Permission.TOKENS_WRITE, "service_token.revoked", account=within, token_id=token.token_id):
        token.compare_and_swap(revoked_at=grant.at)


def get_service_token(token_id: str) -> ServiceToken | None:
    token: ServiceToken | None = ServiceToken.objects.filter(token_id=token_id).first()
    return token


def _mint(
    grant: Grant,
    *,
    name: str,
    scope: StringScope,
    permissions: Sequence[str],
    merchants: Sequence[str] | None,
    lifetime: timedelta,
    is_probe: bool,
    max_readers: int,
    max_staleness_seconds: int,
    lineage: str = "",
) -> tuple[ServiceToken, Plaintext]:
    """Return an unsaved row and its string. The row's creator is accountable for the token's requests."""
    minted = mint_keystring(settings.KEY_PREFIX, StringKind.SERVICE_TOKEN, scope, secrets.token_bytes)
    refresh_peppers(PepperSet.SERVICE)
    digest, pepper_version = load_peppers(PepperSet.SERVICE).digest(minted.text)
    creator = grant.principal if isinstance(grant.principal, OperatorPrincipal) else None
    token = ServiceToken(
        token_id=minted.key_id,
        lineage=lineage or minted.key_id,
        name=name,
        digest=digest,
        pepper_version=pepper_version,
        scope=scope,
        permissions=permissions,
        merchants=merchants,
        is_probe=is_probe,
        max_readers=max_readers,
        max_staleness_seconds=max_staleness_seconds,
        creator=None if creator is None else operator_row(creator),
        creator_person=grant.principal.actor if creator is None else creator.person,
        is_creator_claimed=is_claimed(grant.principal),
        created_at=grant.at,
        expires_at=grant.at + lifetime,
    )
    return token, minted.text
