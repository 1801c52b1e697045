"""A merchant leaves: everything that is good for anything of its is ended, and what is left is counted.

The merchant's status goes first, so that every request of its is refused from that commit on and nothing new is
given to it; then its things one by one, each in a transaction of its own. Killed anywhere and run again, it goes on
where it was. It needs neither the secret backend nor the broker: copies are destroyed, staged keys burned and open
rotations closed by the workers, whenever they can.
"""

from collections.abc import Callable, Iterable, Mapping
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
from keyvault.services.issuance.requests import end_issuance
from keyvault.services.keys.lifecycle import revoke_key
from keyvault.services.recording.authorization import authorize
from keyvault.services.recording.transaction import recorded
from keyvault.services.secrets.backend import MOUNT, secret_backend
from keyvault.services.secrets.provider_connections import list_connections, remove_connection
from keyvault.services.webhooks.endpoints import host_of

_BATCH = 200
"""Rows read at once, and customer tokens ended in one transaction."""

_ROUNDS = 5
"""Times that a thing is tried which somebody else writes meanwhile."""

_WHY = "the merchant was offboarded"


@dataclass(frozen=True, slots=True)
class StoredAssets:
    """How much an account has that is good for something."""

    keys: int = 0
    customer_tokens: int = 0
    issuance_requests: int = 0
    webhook_endpoints: int = 0
    connections: int = 0

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) for field in fields(self))

    def words(self) -> str:
        """`2 keys, 1 webhook endpoint`, or `nothing`."""
        counts = {field.name.replace("_", " "): getattr(self, field.name) for field in fields(self)}
        told = [f"{count} {name[:-1] if count == 1 else name}" for name, count in counts.items() if count]
        return ", ".join(told) or "nothing"


@dataclass(frozen=True, slots=True)
class MerchantAssets:
    """What a merchant has that is good for something; `service_tokens`: those that are for it alone."""

    accounts: Mapping[Environment, StoredAssets]
    service_tokens: int = 0

    def __bool__(self) -> bool:
        return bool(self.service_tokens) or any(self.accounts.values())

    def as_json(self) -> dict[str, JsonValue]:
        told: dict[str, JsonValue] = {
            environment.value: {field.name: getattr(held, field.name) for field in fields(held)}
            for environment, held in self.accounts.items()
        }
        return {**told, "service_tokens": self.service_tokens}

    def words(self) -> str:
        told = [f"{environment}: {held.words()}" for environment, held in self.accounts.items()]
        if self.service_tokens:
            told.append(f"service tokens for it alone: {self.service_tokens}")
        return "; ".join(told)


@dataclass(frozen=True, slots=True)
class Offboarding:
    """What this run ended, and what it left (nothing, unless somebody else was at work on it meanwhile)."""

    merchant_id: str
    ended: MerchantAssets
    left: MerchantAssets


def offboard_merchant(grant: Grant, merchant: Merchant, why: str) -> Offboarding:
    """Ends every key, customer token, request, webhook endpoint and service token of the merchant, for ever.

    The grant is for the platform. Repeatable, and the way to go on when it was interrupted. The merchant stays, with
    its history, and never becomes active again.
    """
    told = clean_text(why, 300)
    _shut(grant, merchant, told)
    ended = MerchantAssets(
        {Environment(account.environment): _end_account(grant, account) for account in _accounts(merchant)},
        service_tokens=_end_each(_service_tokens(merchant, grant.at), lambda token: _revoke_token(grant, token)),
    )
    left = count_belongings(merchant, grant.at)
    with recorded(
        grant,
        P.MERCHANTS_OFFBOARD,
        "merchant.offboarded",
        merchant_id=merchant.merchant_id,
        why=told,
        ended=ended.as_json(),
        left=left.as_json(),
    ):
        pass
    return Offboarding(merchant.merchant_id, ended, left)


def count_belongings(merchant: Merchant, now: datetime) -> MerchantAssets:
    """What offboarding it would end, or has left."""
    return MerchantAssets(
        {
            Environment(account.environment): StoredAssets(
                keys=_keys(account).count(),
                customer_tokens=_customer_tokens(account, now).count(),
                issuance_requests=_requests(account).count(),
                webhook_endpoints=_endpoints(account).count(),
                connections=list_connections(account).count(),
            )
            for account in _accounts(merchant)
        },
        service_tokens=_service_tokens(merchant, now).count(),
    )


# --- what the secret backend remembers of it ----------------------------------------------------------------


def list_to_forget(environment: Environment) -> list[Credential]:
    """Of merchants that have left: whose keys are all dead, their copies destroyed, and the path still remembered."""
    left = Credential.objects.select_related("account__merchant").filter(
        account__environment=environment, account__merchant__status=MerchantStatus.OFFBOARDED, forgotten_at__isnull=True
    )
    return list(left.exclude(Exists(_unfinished(OuterRef("pk")))).order_by("created_at")[:500])


def may_be_forgotten(credential: Credential) -> bool:
    """The same of one, remembered or not: what came late is forgotten again."""
    has_left = credential.account.merchant.status == MerchantStatus.OFFBOARDED
    return has_left and not _unfinished(credential.pk).exists()


def forget_path(grant: Grant, credential: Credential) -> bool:
    """Erases that the backend ever held anything for the credential. False, and nothing done: something is there
    still, which is not ours or which nobody knows; the reconciler tells of it. Killed between: done again.
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
    """What the lease on forgetting it is called."""
    return f"forget:{credential.credential_id}"


def _unfinished(credential_id: str | OuterRef) -> QuerySet[Key]:
    """Keys of it that live, or may have a copy."""
    gone = Q(state__in=DEAD_STATES, material__in=[Material.NONE, Material.DESTROYED])
    rows: QuerySet[Key] = Key.objects.filter(~gone, credential_id=credential_id)
    return rows


# --- what there is ------------------------------------------------------------------------------------------


def _accounts(merchant: Merchant) -> Iterable[Account]:
    rows: Iterable[Account] = merchant.accounts.select_related("merchant").order_by("environment")
    return rows


def _keys(account: Account) -> QuerySet[Key]:
    """A staged one is in nobody's hands, cannot become good any more, and goes with its request or rotation."""
    living = Key.objects.filter(state__in=[KeyState.ACTIVE, KeyState.SUSPENDED])
    return living.select_related("credential__account__merchant").filter(credential__account=account)


def _customer_tokens(account: Account, now: datetime) -> QuerySet[CustomerToken]:
    return CustomerToken.objects.filter(account=account, revoked_at__isnull=True, expires_at__gt=now)


def _requests(account: Account) -> QuerySet[IssuanceRequest]:
    undecided = IssuanceRequest.objects.filter(state__in=[IssuanceState.PENDING, IssuanceState.APPROVED])
    return undecided.select_related("account__merchant").filter(account=account)


def _endpoints(account: Account) -> QuerySet[WebhookEndpoint]:
    return WebhookEndpoint.objects.filter(account=account, disabled_at__isnull=True)


def _service_tokens(merchant: Merchant, now: datetime) -> QuerySet[ServiceToken]:
    alone = ServiceToken.objects.filter(merchants=[merchant.merchant_id])
    return alone.filter(revoked_at__isnull=True, expires_at__gt=now)


# --- and how it ends ----------------------------------------------------------------------------------------


def _shut(grant: Grant, merchant: Merchant, why: str) -> None:
    """From this commit on every request of the merchant is refused, and it is given nothing."""
    with transaction.atomic():
        # Whoever gives an account something holds its row: they are done before, or find that the merchant has left.
        list(Account.objects.select_for_update(no_key=True).filter(merchant=merchant).order_by("pk"))
        merchant.refresh_from_db(from_queryset=Merchant.objects.select_for_update(no_key=True))
        if merchant.status == MerchantStatus.OFFBOARDED:
            return
        event = "merchant.offboarding_began"
        with recorded(grant, P.MERCHANTS_OFFBOARD, event, merchant_id=merchant.merchant_id, why=why):
            merchant.compare_and_swap(status=MerchantStatus.OFFBOARDED)


def _end_account(grant: Grant, account: Account) -> StoredAssets:
    own = authorize(grant.principal, P.MERCHANTS_OFFBOARD, account, now=grant.at)
    return StoredAssets(
        keys=_end_each(_keys(account), lambda key: revoke_key(own, key, RevocationReason.CESSATION_OF_OPERATION)),
        customer_tokens=_revoke_customer_tokens(own, account),
        issuance_requests=_end_each(_requests(account), lambda request: end_issuance(own, request, _WHY)),
        webhook_endpoints=_end_each(_endpoints(account), lambda endpoint: _disable(own, endpoint)),
        connections=_end_each(list_connections(account), lambda connection: remove_connection(own, connection)),
    )


def _end_each(rows: QuerySet[Any], end: Callable[[Any], object]) -> int:
    """Until none is left; how many this run ended. What somebody else writes meanwhile is read again, some rounds."""
    ended = fruitless = 0
    while fruitless < _ROUNDS and (found := list(rows.order_by("pk")[:_BATCH])):
        before = ended
        for row in found:
            try:
                end(row)
            except StateConflictError:
                continue
            ended += 1
        fruitless += ended == before
    return ended


def _revoke_customer_tokens(grant: Grant, account: Account) -> int:
    """There may be many, each for minutes: one entry tells of a whole batch. Each has its own change row."""
    ended = 0
    while True:
        with transaction.atomic():
            live = _customer_tokens(account, grant.at).select_for_update(no_key=True)
            batch = list(live.order_by("pk")[:_BATCH])
            if not batch:
                return ended
            with recorded(
                grant, P.MERCHANTS_OFFBOARD, "customer_token.revoked", account=account, count=len(batch), why=_WHY
            ):
                for token in batch:
                    token.compare_and_swap(revoked_at=grant.at)
        ended += len(batch)


def _disable(grant: Grant, endpoint: WebhookEndpoint) -> None:
    """For what comes from now on: what was announced is still sent, so that the merchant reads that all has ended."""
    account = endpoint.account
    with recorded(
        grant, P.MERCHANTS_OFFBOARD, "webhook_endpoint.disabled", account=account, host=host_of(endpoint), why=_WHY
    ):
        endpoint.compare_and_swap(disabled_at=grant.at, disabled_why=_WHY)


def _revoke_token(grant: Grant, token: ServiceToken) -> None:
    with recorded(grant, P.MERCHANTS_OFFBOARD, "service_token.revoked", token_id=token.token_id, why=_WHY):
        token.compare_and_swap(revoked_at=grant.at)
