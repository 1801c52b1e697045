"""Selection of a campaign's credentials: those that can be rotated now, and why the others are left out.

An index finds the active keys that match the criteria. A request reads at most MAX_READ of them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from django.db.models import Count, Exists, Max, OuterRef, Q, QuerySet

from keyvault.access.scopes import AccessScope
from keyvault.domain.canonical import JsonValue
from keyvault.domain.environments import Environment
from keyvault.domain.errors import Fault, RequestInvalidError
from keyvault.domain.keys import KeyKind, KeyState
from keyvault.models import Account, Credential, Key, KeyUse, MerchantStatus, WebhookEndpoint
from keyvault.models.usage import HAS_TRAFFIC
from rotation.domain.pacing import MAX_MEMBERS
from rotation.domain.plan_fields import PlanOverrides
from rotation.domain.states import CLOSED
from rotation.models import Rotation
from rotation.services.rotations.planning import KeyOutline, find_outline_faults

MAX_READ = 2 * MAX_MEMBERS
"""Maximum number of active keys that a request reads, those of public credentials included."""

_BATCH = 500


class Obstacle(StrEnum):
    """Why a credential is left out or skipped. The values are stored with the campaign, so they never change."""

    MERCHANT_INACTIVE = "merchant_inactive"
    NO_USABLE_KEY = "no_usable_key"
    TWO_USABLE_KEYS = "two_usable_keys"
    OPEN_ROTATION = "open_rotation"
    TOO_YOUNG = "too_young"
    PLAN_CANNOT_BE_MET = "plan_cannot_be_met"


OBSTACLE_LABELS = {
    Obstacle.MERCHANT_INACTIVE: "its merchant or account is not active",
    Obstacle.NO_USABLE_KEY: "it has no usable key",
    Obstacle.TWO_USABLE_KEYS: "two of its keys verify already",
    Obstacle.OPEN_ROTATION: "it has an open rotation",
    Obstacle.TOO_YOUNG: "its key is younger than selected",
    Obstacle.PLAN_CANNOT_BE_MET: "the plan cannot be met for it",
}


@dataclass(frozen=True, slots=True)
class Selection:
    """The criteria. `merchants` None: all of the environment. `older_than_days` None: keys of any age."""

    environment: Environment
    merchants: tuple[str, ...] | None = None
    older_than_days: int | None = None

    def as_json(self) -> dict[str, JsonValue]:
        return {
            "environment": self.environment.value,
            "merchants": None if self.merchants is None else sorted(self.merchants),
            "older_than_days": self.older_than_days,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Selection":
        """Read what a campaign stores, ignoring its further members."""
        merchants = values["merchants"]
        return cls(
            Environment(values["environment"]),
            None if merchants is None else tuple(merchants),
            values["older_than_days"],
        )

    @property
    def scope(self) -> AccessScope:
        merchants = None if self.merchants is None else frozenset(self.merchants)
        return AccessScope(merchants, frozenset({self.environment}))

    def active_before(self, now: datetime) -> datetime:
        """Return the time after which an activated key is too young."""
        return now - timedelta(days=self.older_than_days or 0)


_SELECT_FEWER = Fault("/merchants", "select fewer: some merchants, or older keys")


@dataclass(frozen=True, slots=True)
class Selected:
    credentials: Sequence[Credential]
    left_out: dict[str, int]


def select_credentials(selection: Selection, overrides: PlanOverrides, now: datetime) -> Selected:
    """Select the credentials whose plan can be met as far as is known now, those with the oldest keys first.

    `left_out` counts the other credentials with an active key of the selected age. The sources of the keys are not
    read: they may make a default deadline later, and the runner plans each rotation again when it begins.

    Raises RequestInvalidError when there are more than a campaign may have or a request may read, or when no plan can
    be met, listing the faults of one of them.
    """
    before = selection.active_before(now)
    left_out: Counter[str] = Counter()
    fit = []
    for credential in _list_matching(selection, before):
        obstacle = _obstacle(credential, before)
        if obstacle is None:
            fit.append(credential)
        else:
            left_out[obstacle.value] += 1
    if len(fit) > MAX_MEMBERS:
        raise RequestInvalidError(
            f"{len(fit)} credentials are selected, and a campaign has at most {MAX_MEMBERS}.", [_SELECT_FEWER]
        )
    planned, faults, known = [], None, {}
    reachable = _find_reachable(fit)
    for credential in sorted(fit, key=lambda each: (each.active_at, each.pk)):
        has_endpoint = credential.account_id in reachable
        alike = (credential.active_until, credential.is_used, has_endpoint)
        if alike not in known:
            key = KeyOutline("any", credential.active_until, credential.is_used)
            known[alike] = find_outline_faults(credential, key, overrides, now, has_endpoint=has_endpoint)
        if known[alike]:
            left_out[Obstacle.PLAN_CANNOT_BE_MET.value] += 1
            faults = faults or known[alike]
        else:
            planned.append(credential)
    if faults and not planned:
        raise RequestInvalidError("The plan cannot be met for any selected credential.", faults)
    return Selected(planned, dict(sorted(left_out.items())))


def _find_reachable(credentials: Iterable[Any]) -> set[int]:
    """Return the accounts of these credentials that have an enabled webhook endpoint."""
    accounts = sorted({credential.account_id for credential in credentials})
    found: set[int] = set()
    for start in range(0, len(accounts), _BATCH):
        enabled = WebhookEndpoint.objects.filter(account__in=accounts[start : start + _BATCH], disabled_at__isnull=True)
        found.update(enabled.values_list("account_id", flat=True))
    return found


def find_obstacle(credential_id: str, before: datetime) -> Obstacle | None:
    """Return why the credential can no longer be rotated with its campaign; None: it can."""
    return _obstacle(_with_facts(Credential.objects.filter(pk=credential_id)).get(), before)


def _list_matching(selection: Selection, before: datetime) -> Iterator[Any]:
    """Yield the private credentials with an active key of the selected age."""
    ids = _find_matching(selection, before)
    for start in range(0, len(ids), _BATCH):
        batch = Credential.objects.filter(pk__in=ids[start : start + _BATCH], kind=KeyKind.PRIVATE)
        yield from _with_facts(batch)


def _find_matching(selection: Selection, before: datetime) -> list[str]:
    """Return the ids of the credentials with an active key of the selected age. Raises RequestInvalidError."""
    keys = Key.objects.filter(
        state=KeyState.ACTIVE, account_environment=selection.environment, activated_at__lte=before
    )
    if selection.merchants is not None:
        accounts = Account.objects.filter(environment=selection.environment, merchant__in=selection.merchants)
        keys = keys.filter(credential__account__in=list(accounts.values_list("pk", flat=True)))
    found = list(keys.order_by().values_list("credential_id", flat=True)[: MAX_READ + 1])
    if len(found) > MAX_READ:
        raise RequestInvalidError(
            f"More than {MAX_READ} active keys match, which is more than a request reads.", [_SELECT_FEWER]
        )
    return sorted(set(found))


def _with_facts(rows: "QuerySet[Any]") -> "QuerySet[Any]":
    active = Q(keys__state=KeyState.ACTIVE)
    open_rotation = Rotation.objects.filter(credential=OuterRef("pk")).exclude(state__in=CLOSED)
    annotated: QuerySet[Any] = rows.select_related("account__merchant").annotate(
        active_keys=Count("keys", filter=active),
        active_at=Max("keys__activated_at", filter=active),
        active_until=Max("keys__expires_at", filter=active),
        is_used=Exists(KeyUse.objects.filter(HAS_TRAFFIC, key__credential=OuterRef("pk"), key__state=KeyState.ACTIVE)),
        is_rotating=Exists(open_rotation),
    )
    return annotated


def _obstacle(credential: Any, before: datetime) -> Obstacle | None:
    account = credential.account
    if {account.status, account.merchant.status} != {MerchantStatus.ACTIVE}:
        return Obstacle.MERCHANT_INACTIVE
    if credential.is_rotating:
        return Obstacle.OPEN_ROTATION
    if credential.active_keys != 1:
        return Obstacle.TWO_USABLE_KEYS if credential.active_keys else Obstacle.NO_USABLE_KEY
    return Obstacle.TOO_YOUNG if credential.active_at > before else None
