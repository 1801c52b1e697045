"""Customer access tokens: a merchant's private key issues one for a customer; they are hashed like keys."""

import secrets
from datetime import datetime, timedelta

from django.conf import settings
from django.db import transaction

from keyvault.access.customers import find_customer_id_fault
from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.domain.digests import PEPPER_SET
from keyvault.domain.environments import Environment
from keyvault.domain.errors import Fault, NotFoundError, RequestInvalidError
from keyvault.domain.keystring import STRING_SCOPE, StringKind, mint_keystring
from keyvault.domain.plaintext import Plaintext
from keyvault.models import Account, CustomerToken, Key
from keyvault.services.limits.limiter import spend_repeat
from keyvault.services.peppers.ring import load_peppers
from keyvault.services.recording.changes import notify_host_again
from keyvault.services.recording.transaction import recorded
from keyvault.services.work.deletion import delete_batch

DEFAULT_SECONDS = 900
"""Default lifetime of a token, in seconds, or the account's bound if that is shorter."""


def issue_customer_token(
    grant: Grant, account: Account, key: Key, *, customer_id: str, ttl_seconds: int | None = None
) -> tuple[CustomerToken, Plaintext]:
    """Issue a token; return its row and its string, which is not stored. `key`: the private key of the request.

    Raises RequestInvalidError for an invalid customer id, or a lifetime above the account's bound.
    """
    max_length = account.customer_token_seconds
    seconds = min(DEFAULT_SECONDS, max_length) if ttl_seconds is None else ttl_seconds
    faults = []
    if (fault := find_customer_id_fault(customer_id)) is not None:
        faults.append(Fault("", f"The customer id in the path: {fault}."))
    if not 1 <= seconds <= max_length:
        faults.append(Fault("/ttl_seconds", f"1 to {max_length}, the account's bound"))
    if faults:
        raise RequestInvalidError("The token cannot be issued.", faults)
    environment = Environment(account.environment)
    minted = mint_keystring(
        settings.KEY_PREFIX, StringKind.CUSTOMER_TOKEN, STRING_SCOPE[environment], secrets.token_bytes
    )
    digest, pepper_version = load_peppers(PEPPER_SET[environment]).digest(minted.text)
    token = CustomerToken(
        token_id=minted.key_id,
        account=account,
        issued_with=key,
        customer_id=customer_id,
        digest=digest,
        pepper_version=pepper_version,
        created_at=grant.at,
        expires_at=grant.at + timedelta(seconds=seconds),
    )
    with recorded(
        grant,
        Permission.CUSTOMER_TOKENS_WRITE,
        "customer_token.issued",
        account=account,
        token_id=token.token_id,
        customer_id=customer_id,
        ttl_seconds=seconds,
    ):
        token.save()
    return token, minted.text


def forget_expired_tokens(now: datetime) -> int:
    """Delete a batch of tokens that expired long ago. Return how many. Their audit entries stay."""
    expired = CustomerToken.objects.filter(expires_at__lt=now - timedelta(days=settings.CUSTOMER_TOKEN_DAYS))
    return delete_batch(expired.order_by("expires_at"))


def revoke_customer_token(grant: Grant, account: Account, token_id: str) -> None:
    """Revoke a token permanently. Idempotent.

    A repeat counts against a limit of the key that issued the token. Raises NotFoundError for a token that is not the
    account's, RateLimitedError after too many repeats.
    """
    with transaction.atomic():
        token: CustomerToken | None = (
            CustomerToken.objects.select_for_update().filter(account=account, token_id=token_id).first()
        )
        if token is None:
            raise NotFoundError
        revoked_at = token.revoked_at
        if revoked_at is None:
            with recorded(
                grant,
                Permission.CUSTOMER_TOKENS_WRITE,
                "customer_token.revoked",
                account=account,
                token_id=token.token_id,
                customer_id=token.customer_id,
            ):
                token.compare_and_swap(revoked_at=grant.at)
    if revoked_at is not None:
        spend_repeat(token.issued_with_id, "customer_token_repeats")
        notify_host_again(token.alters(), revoked_at, grant.at)
