"""What the engine has worked out already: of who asks, of what is asked, of the key, and of the three together."""

from typing import Any, Final

from msgspec import Struct, UnsetType

from keyvault.access.catalog import Endpoint
from keyvault.access.judgement import Judgement
from keyvault.access.limits import LARGEST_COUNT, Bucket, Limit
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

MOST_WAYS: Final = 4_096
_MOST_ADDRESSES: Final = 256


class Caller:
    """A proved service token, as the fast way needs it."""

    __slots__ = ("environments", "merchants", "outcome", "source")

    def __init__(self, service: Service, served: frozenset[Environment], outcome: str) -> None:
        """`served`: the environments of this process. `outcome`: what a use counts as that it asks about."""
        may_verify = Permission.KEYS_VERIFY in service.permissions
        environments = service.environments & served if may_verify else frozenset[Environment]()
        self.environments = frozenset(environment.value for environment in environments)
        self.merchants = service.merchants
        self.source = f"token:{service.token_id}"
        self.outcome = outcome


class GrantTemplate:
    """A grant as every plain key gets it that asks the same: what of it does not depend on whose key it is."""

    __slots__ = ("_judgement", "_templates", "endpoint", "name", "rules")

    def __init__(self, judgement: Judgement, endpoint: Endpoint, rules: PolicySnapshot) -> None:
        self.endpoint = endpoint
        self.name = endpoint.name
        self.rules = rules
        self._judgement = judgement
        self._templates: dict[tuple[Limit, ...], Template] = {}

    def template(self, buckets: tuple[Bucket, ...]) -> Template:
        """The answer under these limits."""
        limits = tuple(bucket.limit for bucket in buckets)
        found = self._templates.get(limits)
        if found is None:
            if len(self._templates) >= MOST_WAYS:
                self._templates.clear()
            found = self._templates[limits] = Template(self._judgement, buckets)
        return found


class SpendPlan:
    """What a plain key of one account spends from on one way, and the answer for it. `most` that a request may cost."""

    __slots__ = ("is_single", "most", "name", "pay", "rules", "template", "text")

    def __init__(self, way: GrantTemplate, buckets: tuple[Bucket, ...], budgets: EngineBudgets) -> None:
        self.pay = budgets.payer(buckets) if buckets else _pay_nothing
        self.is_single = len(buckets) == 1
        self.most = min((bucket.limit.count for bucket in buckets), default=LARGEST_COUNT)
        self.name = way.name
        self.rules = way.rules
        self.template = way.template(buckets)
        self.text = self.template.text


def _pay_nothing(cost: int) -> tuple[int, ...]:
    return ()


class SpendPlans:
    """Of the keys of one kind of one account: by what is asked, and by the endpoint's name where nothing else is; and
    how it is told whose key it is."""

    __slots__ = ("__weakref__", "by_name", "by_way", "identity")

    def __init__(self, record: KeyRecord) -> None:
        self.identity = identity_template(record)
        self.by_way: dict[GrantTemplate, SpendPlan] = {}
        self.by_name: dict[str | UnsetType, SpendPlan] = {}


class EligibleKey(Struct, gc=False, eq=False):
    """What the fast way has worked out of a plain key: one that is good, and of an active account."""

    environment: str
    identity: bytes
    kind: KeyKind
    merchant: str
    networks: tuple[IPNetwork, ...]
    purses: SpendPlans
    within: dict[str, bool] | None
    """Of a key that is good from certain networks: which addresses were found to be in them."""

    def is_from_network(self, address: str | UnsetType | None) -> bool:
        if not address or self.within is None:
            return False
        found = self.within.get(address)
        if found is None:
            if len(self.within) >= _MOST_ADDRESSES:
                self.within.clear()
            found = self.within[address] = is_within(address, self.networks)
        return found


class CacheMiss(Struct, gc=False, eq=False):
    """A question whose key is not in memory; `changes` is the engine's count when it was asked."""

    asked: VerifyRequest
    caller: Caller
    keystring: KeyString
    request_id: bytes
    changes: int
    is_plain: bool


Use = tuple[str, str, str, str, str, str]
"""A key's id, an endpoint's name, source, user agent, the page's origin, and what it counts as."""

Tally = list[Any]
"""Of one use, as it is written: the use, how often, and when the first and the last time, in seconds of the epoch."""
TIMES, LAST = 6, 8


class CachedGrant:
    """A question that was granted, for when the same caller asks it again in the very same bytes.

    Worth what its token, its key and its rules are: once one of them was forgotten it grants nothing any more.
    """

    __slots__ = ("cost", "identity", "known", "period", "purse", "tally", "token", "use")

    def __init__(
        self, token: CacheEntry[TokenRecord], known: CacheEntry[KeyRecord], purse: SpendPlan, cost: int, use: Use
    ) -> None:
        self.token = token
        self.known = known
        self.purse = purse
        self.cost = cost
        self.use = use
        self.identity: bytes = known.about.identity
        self.period = 0
        self.tally: Tally = []
        """Of its use in the period between two reports that is told by `period`."""


class CachedDenial:
    """A question that was denied because its key has ended, for when the same caller asks it again in the very same
    bytes: whoever still has a revoked key asks as often as he did before. Worth what its token, key and rules are."""

    __slots__ = ("known", "rules", "text", "token", "verdict")

    def __init__(
        self,
        token: CacheEntry[TokenRecord],
        known: CacheEntry[KeyRecord],
        rules: PolicySnapshot,
        verdict: EngineVerdict,
    ) -> None:
        self.token = token
        self.known = known
        self.rules = rules
        self.verdict = verdict
        self.text = denial_template(verdict.judgement)
