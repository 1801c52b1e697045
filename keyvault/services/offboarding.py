"""Offboard a merchant: end everything that grants access, and count what is left.

The merchant's status changes first. From that commit on its requests are denied and nothing can be added to it. Its
assets are then ended one by one, each in its own transaction. The run may be killed at any point and run again.

It needs neither the secret backend nor the broker. Workers destroy copies, discard staged keys and close open rotations
later.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from django.db import transaction
from django.db.models import Exists, OuterRef, Q, QuerySet

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.backends.base import VersionState
from keyvault.domain.canonical import JsonValue
from keyvault.domain.environments import Environment
from keyvault.domain.errors import StateConflictError
from keyvault.domain.free_text import clean_text
from keyvault.domain.issuance import IssuanceState
from keyvault.domain.keys import DEAD_STATES, KeyState
from keyvault.domain.revocation import RevocationReason
from keyvault.models import (
    Account,
    Credential,
    CustomerToken,
    IssuanceRequest,
    Key,
    Material,
    Merchant,
    MerchantStatus,
    ServiceToken,
    WebhookEndpoint,
)
from keyvault.models.row_count import RowCount
from keyvault.services.issuance.requests import end_issuance
from keyvault.services.keys.lifecycle import revoke_key
from keyvault.services.merchants.merchants import scope_of_merchant
from keyvault.services.recording.authorization import authorize
from keyvault.services.recording.transaction import recorded
from keyvault.services.secrets.backend import MOUNT, secret_backend
from keyvault.services.secrets.provider_connections import list_connections, remove_connection
from keyvault.services.webhooks.endpoints import host_of
from keyvault.services.work.row_turns import batch_after

_BATCH = 200
"""Rows read in one query, and customer tokens revoked in one transaction."""

_MAX_IDLE_ROUNDS = 5
"""Maximum rounds that end no row, because other writers change the rows concurrently."""

_REASON = "the merchant was offboarded"


@dataclass(frozen=True, slots=True)
class AccountAssets:
    """Counts of an account's assets that still grant access."""

    keys: int = 0
    customer_tokens: int = 0
    issuance_requests: int = 0
    webhook_endpoints: int = 0
    connections: int = 0

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) for field in fields(self))

    def format_counts(self) -> str:
        """Format the counts as "2 keys, 1 webhook endpoint", or "nothing"."""
        counts = {field.name.replace("_", " "): getattr(self, field.name) for field in fields(self)}
        parts = [f"{count} {name[:-1] if count == 1 else name}" for name, count in counts.items() if count]
        return ", ".join(parts) or "nothing"


@dataclass(frozen=True, slots=True)
class MerchantAssets:
    """Counts of a merchant's assets that still grant access. `service_tokens`: tokens for this merchant only."""

    accounts: Mapping[Environment, AccountAssets]
    service_tokens: int = 0

    def __bool__(self) -> bool:
        return bool(self.service_tokens) or any(self.accounts.values())

    def as_json(self) -> dict[str, JsonValue]:
        accounts: dict[str, JsonValue] = {
            environment.value: {field.name: getattr(held, field.name) for field in fields(held)}
            for environment, held in self.accounts.items()
        }
        return {**accounts, "service_tokens": self.service_tokens}

    def format_counts(self) -> str:
        parts = [f"{environment}: {held.format_counts()}" for environment, held in self.accounts.items()]
        if self.service_tokens:
            parts.append(f"service tokens for this merchant only: {self.service_tokens}")
        return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class Offboarding:
    """The objects that this run ended, and those that it left because of concurrent writers."""

    merchant_id: str
    ended: MerchantAssets
    left: MerchantAssets


def offboard_merchant(grant: Grant, merchant: Merchant, why: str) -> Offboarding:
    """End every key, customer token, request, webhook endpoint and service token of the merchant, permanently.

    The grant is for the merchant. Repeatable, also after an interruption. The merchant row stays with its history and
    never becomes active again.
    """
    reason = clean_text(why, 300)
    _mark_offboarded(grant, merchant, reason)
    ended = MerchantAssets(
        {Environment(account.environment): _end_account(grant, account) for account in _accounts(merchant)},
        service_tokens=_end_each(_service_tokens(merchant, grant.at), lambda token: _revoke_token(grant, token)),
    )
    left = count_assets(merchant, grant.at)
    with recorded(
        grant,
        P.MERCHANTS_OFFBOARD,
        "merchant.offboarded",
        account=scope_of_merchant(merchant),
        merchant_id=merchant.merchant_id,
        why=reason,
        ended=ended.as_json(),
        left=left.as_json(),
    ):
        pass
    return Offboarding(merchant.merchant_id, ended, left)


def count_assets(merchant: Merchant, now: datetime) -> MerchantAssets:
    """Count what offboarding would end, or has left. Two queries."""
    account = OuterRef("pk")
    assets = {
        "keys": _keys(account),
        "customer_tokens": _customer_tokens(account, now),
        "issuance_requests": _requests(account),
        "webhook_endpoints": _endpoints(account),
        "connections": list_connections(account),
    }
    counts = {name: RowCount(rows.order_by().values("pk")) for name, rows in assets.items()}
    counted = _accounts(merchant).annotate(**{f"count_of_{name}": count for name, count in counts.items()})
    return MerchantAssets(
        {
            Environment(each.environment): AccountAssets(**{name: getattr(each, f"count_of_{name}") for name in assets})
            for each in counted
        },
        service_tokens=_service_tokens(merchant, now).count(),
    )


# --- paths in the secret backend ----------------------------------------------------------------------------


def list_to_forget(environment: Environment, after: Credential | None = None) -> list[Credential]:
    """Return a batch of credentials of offboarded merchants whose copies are destroyed but whose path still exists."""
    left = Credential.objects.select_related("account__merchant").filter(
        account__environment=environment, account__merchant__status=MerchantStatus.OFFBOARDED, forgotten_at__isnull=True
    )
    return batch_after(left.exclude(Exists(_unfinished(OuterRef("pk")))), "created_at", after)


def may_be_forgotten(credential: Credential) -> bool:
    """Whether one credential's path may be forgotten, also a second time: a write may arrive late."""
    is_offboarded = credential.account.merchant.status == MerchantStatus.OFFBOARDED
    return is_offboarded and not _unfinished(credential.pk).exists()


def forget_path(grant: Grant, credential: Credential) -> bool:
    """Erase the backend's metadata of the credential's path, and record it.

    False, without any change, if something is still stored there. The reconciler reports it. Safe to kill and run
    again.
    """
    place = MOUNT[credential.environment], credential.backend_path
    if any(version.state is not VersionState.DESTROYED for version in secret_backend().versions(*place)):
        return False
    secret_backend().forget(*place)
    permissions = frozenset({P.ISSUANCE_EXECUTE, P.BACKEND_RECONCILE})
    with recorded(
        grant, permissions, "credential.forgotten", account=credential.account, credential_id=credential.credential_id
    ):
        credential.compare_and_swap(forgotten_at=grant.at)
    return True


def path_subject(credential: Credential) -> str:
    """Return the subject of the lease on forgetting the path."""
    return f"forget:{credential.credential_id}"


def _unfinished(credential_id: str | OuterRef) -> QuerySet[Key]:
    """Select the credential's keys that are not dead, or may still have a copy."""
    gone = Q(state__in=DEAD_STATES, material__in=[Material.NONE, Material.DESTROYED])
    rows: QuerySet[Key] = Key.objects.filter(~gone, credential_id=credential_id)
    return rows


# --- assets -------------------------------------------------------------------------------------------------


def _accounts(merchant: Merchant) -> QuerySet[Account]:
    rows: QuerySet[Account] = merchant.accounts.select_related("merchant").order_by("environment")
    return rows


def _keys(account: Account | OuterRef) -> QuerySet[Key]:
    """Select active and suspended keys.

    A staged key was never handed out, cannot become active, and ends with its request or rotation.
    """
    living = Key.objects.filter(state__in=[KeyState.ACTIVE, KeyState.SUSPENDED])
    return living.select_related("credential__account__merchant").filter(credential__account=account)


def _customer_tokens(account: Account | OuterRef, now: datetime) -> QuerySet[CustomerToken]:
    return CustomerToken.objects.filter(account=account, revoked_at__isnull=True, expires_at__gt=now)


def _requests(account: Account | OuterRef) -> QuerySet[IssuanceRequest]:
    undecided = IssuanceRequest.objects.filter(state__in=[IssuanceState.PENDING, IssuanceState.APPROVED])
    return undecided.select_related("account__merchant").filter(account=account)


def _endpoints(account: Account | OuterRef) -> QuerySet[WebhookEndpoint]:
    return WebhookEndpoint.objects.filter(account=account, disabled_at__isnull=True)


def _service_tokens(merchant: Merchant, now: datetime) -> QuerySet[ServiceToken]:
    own = ServiceToken.objects.filter(merchants=[merchant.merchant_id])
    return own.filter(revoked_at__isnull=True, expires_at__gt=now)


# --- ending them --------------------------------------------------------------------------------------------


def _mark_offboarded(grant: Grant, merchant: Merchant, why: str) -> None:
    """Mark the merchant as offboarded. From this commit on its requests are denied and nothing can be added to it."""
    with transaction.atomic():
        # A writer that adds to an account locks the account's row: it commits first, or sees the new status.
        list(Account.objects.select_for_update(no_key=True).filter(merchant=merchant).order_by("pk"))
        merchant.refresh_from_db(from_queryset=Merchant.objects.select_for_update(no_key=True))
        if merchant.status == MerchantStatus.OFFBOARDED:
            return
        event, within = "merchant.offboarding_began", scope_of_merchant(merchant)
        with recorded(grant, P.MERCHANTS_OFFBOARD, event, account=within, merchant_id=merchant.merchant_id, why=why):
            merchant.compare_and_swap(status=MerchantStatus.OFFBOARDED)


def _end_account(grant: Grant, account: Account) -> AccountAssets:
    own = authorize(grant.principal, P.MERCHANTS_OFFBOARD, account, now=grant.at)
    return AccountAssets(
        keys=_end_each(_keys(account), lambda key: revoke_key(own, key, RevocationReason.CESSATION_OF_OPERATION)),
        customer_tokens=_revoke_customer_tokens(own, account),
        issuance_requests=_end_each(_requests(account), lambda request: end_issuance(own, request, _REASON)),
        webhook_endpoints=_end_each(_endpoints(account), lambda endpoint: _disable(own, endpoint)),
        connections=_end_each(list_connections(account), lambda connection: remove_connection(own, connection)),
    )


def _end_each(rows: QuerySet[Any], end: Callable[[Any], object]) -> int:
    """End rows until none is left. Return how many. Rows with concurrent writers are retried for some rounds."""
    ended = idle_rounds = 0
    while idle_rounds < _MAX_IDLE_ROUNDS and (found := list(rows.order_by("pk")[:_BATCH])):
        before = ended
        for row in found:
            try:
                end(row)
            except StateConflictError:
                continue
            ended += 1
        idle_rounds += ended == before
    return ended


def _revoke_customer_tokens(grant: Grant, account: Account) -> int:
    """Revoke in batches with one audit entry each, because there may be many. Each has its own change row."""
    ended = 0
    while True:
        with transaction.atomic():
            live = _customer_tokens(account, grant.at).select_for_update(no_key=True)
            batch = list(live.order_by("pk")[:_BATCH])
            if not batch:
                return ended
            with recorded(
                grant, P.MERCHANTS_OFFBOARD, "customer_token.revoked", account=account, count=len(batch), why=_REASON
            ):
                for token in batch:
                    token.compare_and_swap(revoked_at=grant.at)
        ended += len(batch)


def _disable(grant: Grant, endpoint: WebhookEndpoint) -> None:
    """Disable the endpoint for new notices. Earlier ones are still sent, so that the merchant learns what ended."""
    account = endpoint.account
    with recorded(
        grant, P.MERCHANTS_OFFBOARD, "webhook_endpoint.disabled", account=account, host=host_of(endpoint), why=_REASON
    ):
        endpoint.compare_and_swap(disabled_at=grant.at, disabled_why=_REASON)


def _revoke_token(grant: Grant, token: ServiceToken) -> None:
    event, within = "service_token.revoked", token.access_scope
    with recorded(grant, P.MERCHANTS_OFFBOARD, event, account=within, token_id=token.token_id, why=_REASON):
        token.compare_and_swap(revoked_at=grant.at)
