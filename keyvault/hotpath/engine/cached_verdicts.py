"""Cached results of the engine: per caller, per endpoint and account, per key, and per repeated request."""

from typing import Any, Final

from msgspec import Struct, UnsetType

from keyvault.access.catalog import Endpoint
from keyvault.access.judgement import Judgement
from keyvault.access.limits import MAX_COUNT, Bucket, Limit
from keyvault.access.permissions import Permission
from keyvault.access.policy_snapshot import PolicySnapshot
from keyvault.access.principals import Service
from keyvault.access.verification import TokenRecord
from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind, KeyRecord
from keyvault.domain.keystring import KeyString
from keyvault.domain.networks import IPNetwork, is_within
from keyvault.hotpath.engine.memory import CacheEntry
from keyvault.hotpath.engine.ports import EngineBudgets, EngineVerdict
from keyvault.hotpath.messages.rendering import Template, denial_template, identity_template
from keyvault.hotpath.messages.requests import VerifyRequest

MAX_TEMPLATES: Final = 4_096
_MAX_ADDRESSES: Final = 256


class Caller:
    """A proved service token, reduced to what the fast path needs."""

    __slots__ = ("environments", "merchants", "outcome", "source")

    def __init__(self, service: Service, served: frozenset[Environment], outcome: str) -> None:
        """Derive the data. `served`: environments of this process. `outcome`: how uses by this caller are counted."""
        may_verify = Permission.KEYS_VERIFY in service.permissions
        environments = service.scope.environments & served if may_verify else frozenset[Environment]()
        self.environments = frozenset(environment.value for environment in environments)
        self.merchants = service.scope.merchants
        self.source = f"token:{service.token_id}"
        self.outcome = outcome


class GrantTemplate:
    """A grant, rendered once for all plain keys that send the same request. It holds nothing specific to one key."""

    __slots__ = ("_judgement", "_templates", "endpoint", "name", "rules")

    def __init__(self, judgement: Judgement, endpoint: Endpoint, rules: PolicySnapshot) -> None:
        self.endpoint = endpoint
        self.name = endpoint.name
        self.rules = rules
        self._judgement = judgement
        self._templates: dict[tuple[Limit, ...], Template] = {}

    def template(self, buckets: tuple[Bucket, ...]) -> Template:
        """Return the response template for these limits."""
        limits = tuple(bucket.limit for bucket in buckets)
        found = self._templates.get(limits)
        if found is None:
            if len(self._templates) >= MAX_TEMPLATES:
                self._templates.clear()
            found = self._templates[limits] = Template(self._judgement, buckets)
        return found


class SpendPlan:
    """Limits that a plain key of one account spends for one `GrantTemplate`, with the response.

    `max_cost`: maximum cost of one request.
    """

    __slots__ = ("is_single", "max_cost", "name", "rules", "spend", "template", "text")

    def __init__(self, grant_template: GrantTemplate, buckets: tuple[Bucket, ...], budgets: EngineBudgets) -> None:
        self.spend = budgets.spender(buckets) if buckets else _spend_nothing
        self.is_single = len(buckets) == 1
        self.max_cost = min((bucket.limit.count for bucket in buckets), default=MAX_COUNT)
        self.name = grant_template.name
        self.rules = grant_template.rules
        self.template = grant_template.template(buckets)
        self.text = self.template.text


def _spend_nothing(cost: int) -> tuple[int, ...]:
    return ()


class SpendPlans:
    """Spend plans of one account and key kind, by grant template and by endpoint name alone. `identity` is the identity
    part of the response, see `identity_template`."""

    __slots__ = ("__weakref__", "by_name", "by_template", "identity")

    def __init__(self, record: KeyRecord) -> None:
        self.identity = identity_template(record)
        self.by_template: dict[GrantTemplate, SpendPlan] = {}
        self.by_name: dict[str | UnsetType, SpendPlan] = {}


class EligibleKey(Struct, gc=False, eq=False):
    """Fast-path data of a plain key: an active key of an active account."""

    environment: str
    identity: bytes
    kind: KeyKind
    merchant: str
    networks: tuple[IPNetwork, ...]
    spend_plans: SpendPlans
    within: dict[str, bool] | None
    """Whether each address is inside the key's networks. None for a key without networks."""

    def is_from_network(self, address: str | UnsetType | None) -> bool:
        if not address or self.within is None:
            return False
        found = self.within.get(address)
        if found is None:
            if len(self.within) >= _MAX_ADDRESSES:
                self.within.clear()
            found = self.within[address] = is_within(address, self.networks)
        return found


class CacheMiss(Struct, gc=False, eq=False):
    """A request whose key is not in memory. `changes` is the engine's change count when the request arrived."""

    request: VerifyRequest
    caller: Caller
    keystring: KeyString
    request_id: bytes
    changes: int
    is_plain: bool


CountedUse = tuple[str, str, str, str, str, str]
"""Key id, endpoint name, source, user agent, page origin, outcome."""

Tally = list[Any]
"""One use as it is recorded: a `CountedUse`, the count, and the first and last time in epoch seconds."""
TIMES, LAST = 6, 8


class CachedGrant:
    """A granted request, kept for a byte-identical repetition by the same caller.

    Valid only while its token, key and rules are cached.
    """

    __slots__ = ("cost", "entry", "identity", "period", "spend_plan", "tally", "token", "use")

    def __init__(
        self,
        token: CacheEntry[TokenRecord],
        entry: CacheEntry[KeyRecord],
        spend_plan: SpendPlan,
        cost: int,
        use: CountedUse,
    ) -> None:
        self.token = token
        self.entry = entry
        self.spend_plan = spend_plan
        self.cost = cost
        self.use = use
        self.identity: bytes = entry.derived.identity
        self.period = 0
        self.tally: Tally = []
        """Counter of this use in the reporting period numbered `period`."""


class CachedDenial:
    """A denied request of a terminated key, kept for a byte-identical repetition by the same caller.

    Clients that still hold a revoked key keep sending it at the same rate. Valid only while its token, key and rules
    are cached.
    """

    __slots__ = ("entry", "rules", "text", "token", "verdict")

    def __init__(
        self,
        token: CacheEntry[TokenRecord],
        entry: CacheEntry[KeyRecord],
        rules: PolicySnapshot,
        verdict: EngineVerdict,
    ) -> None:
        self.token = token
        self.entry = entry
        self.rules = rules
        self.verdict = verdict
        self.text = denial_template(verdict.judgement)
