"""The merchants and environments that a principal may act on."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from keyvault.domain.canonical import JsonValue
from keyvault.domain.environments import Environment


@dataclass(frozen=True, slots=True)
class AccessScope:
    """Merchants in environments. `merchants` None: all merchants, including future ones."""

    merchants: frozenset[str] | None = None
    environments: frozenset[Environment] = frozenset(Environment)

    def covers(self, other: "AccessScope") -> bool:
        """Return whether everything in the other scope is in this one."""
        has_merchants = self.merchants is None or (other.merchants is not None and other.merchants <= self.merchants)
        return has_merchants and other.environments <= self.environments

    def has(self, merchant_id: str, environment: str) -> bool:
        """Return whether the account of the merchant in the environment is in the scope."""
        return (self.merchants is None or merchant_id in self.merchants) and environment in self.environments

    def narrowed_to(self, merchant_id: str | None, environment: Environment | None) -> "AccessScope":
        """Return the part of the scope that belongs to the merchant and the environment. None: any of them."""
        merchants, environments = self.merchants, self.environments
        if merchant_id is not None:
            merchants = frozenset({merchant_id} if merchants is None else merchants & {merchant_id})
        if environment is not None:
            environments &= {environment}
        return AccessScope(merchants, environments)

    def __str__(self) -> str:
        if self.merchants == frozenset():
            return "no merchant"
        merchants = "all merchants" if self.merchants is None else ", ".join(sorted(self.merchants))
        return f"{merchants} in {' and '.join(sorted(self.environments))}"

    def as_json(self) -> dict[str, JsonValue]:
        """Return the scope for output and audit entries. `merchants` None: all merchants."""
        merchants: list[JsonValue] | None = None if self.merchants is None else [*sorted(self.merchants)]
        return {"merchants": merchants, "environments": [*sorted(self.environments)]}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """Return the scope that `as_json` serialized."""
        merchants = None if stored["merchants"] is None else frozenset(stored["merchants"])
        return cls(merchants, frozenset(map(Environment, stored["environments"])))


EVERYWHERE = AccessScope()
"""The whole installation."""

NOWHERE = AccessScope(frozenset())
"""No merchant: the initial scope of an operator whom single sign-on creates."""
