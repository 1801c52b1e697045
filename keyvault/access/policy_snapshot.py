"""The catalog of the moment, and the limits that operators have set for its endpoints."""

from collections.abc import Mapping
from dataclasses import dataclass

from keyvault.access.catalog import Catalog, Endpoint
from keyvault.access.limits import Limit
from keyvault.domain.environments import Environment


@dataclass(frozen=True, slots=True, eq=False)
class PolicySnapshot:
    """`overrides` by account (None: all of the environment), environment and endpoint: the limit, and which setting it
    is. `state` tells one reading of the database from another: what is equal needs not be read again."""

    catalog: Catalog
    overrides: Mapping[tuple[int | None, str, str], tuple[Limit, str]]
    state: object

    def endpoint_limit(self, account_id: int, environment: Environment, endpoint: Endpoint) -> tuple[Limit | None, str]:
        """The pair's own, else the environment's, else the catalog's; and which setting it is, "" for the catalog's."""
        for account in (account_id, None):
            found = self.overrides.get((account, environment, endpoint.name))
            if found is not None:
                return found
        return endpoint.limit, ""
