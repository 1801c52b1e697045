"""An immutable snapshot of the endpoint catalog and the operators' limit overrides."""

from collections.abc import Mapping
from dataclasses import dataclass

from keyvault.access.catalog import Catalog, Endpoint
from keyvault.access.limits import Limit
from keyvault.domain.environments import Environment


@dataclass(frozen=True, slots=True, eq=False)
class PolicySnapshot:
    """`overrides`: limit and setting id by account (None: the whole environment), environment and endpoint.

    `state` identifies the database state that was read: if it is equal, there is nothing to reload.
    """

    catalog: Catalog
    overrides: Mapping[tuple[int | None, str, str], tuple[Limit, str]]
    state: object

    def endpoint_limit(self, account_id: int, environment: Environment, endpoint: Endpoint) -> tuple[Limit | None, str]:
        """Return the account's limit, else the environment's, else the catalog's; with its setting id ("": catalog)."""
        for account in (account_id, None):
            found = self.overrides.get((account, environment, endpoint.name))
            if found is not None:
                return found
        return endpoint.limit, ""
