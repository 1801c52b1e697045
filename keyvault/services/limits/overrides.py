"""Limit overrides by operators: for an account, for an endpoint in an environment, or for both together.

An override applies to the next request; a changed limit starts full.
"""

from dataclasses import dataclass
from enum import StrEnum

from django.db import IntegrityError

from keyvault.access.catalog import Endpoint
from keyvault.access.decision import Grant
from keyvault.access.limits import Limit
from keyvault.access.permissions import Permission
from keyvault.access.scopes import AccessScope
from keyvault.domain.canonical import JsonValue
from keyvault.domain.environments import Environment
from keyvault.domain.errors import Fault, RequestInvalidError, StateConflictError
from keyvault.models import Account, LimitOverride
from keyvault.services.catalog.catalog import endpoint_limit, find_endpoint, limit_of
from keyvault.services.limits.defaults import default_limit
from keyvault.services.recording.transaction import recorded

NO_ACCOUNT = 0
"""An account id that no row has; selects the limits of accounts without their own."""


class LimitSource(StrEnum):
    """Origin of a limit: the account, the endpoint in the environment, the account and endpoint, or the default."""

    ACCOUNT = "account"
    ENDPOINT = "endpoint"
    PAIR = "pair"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class LimitInForce:
    """The limit that applies and its source. `limit` None: unlimited, as endpoints are by default."""

    limit: Limit | None
    source: LimitSource


def set_account_limit(grant: Grant, account: Account, limit: Limit | None) -> None:
    """Set an account's limit. None clears it, and the environment's default applies again."""
    before = limit_of(account.limit_count, account.limit_seconds)
    if limit is None and before is None:
        return
    with recorded(
        grant, Permission.LIMITS_WRITE, _event(limit), account=account, old=_as_json(before), new=_as_json(limit)
    ):
        account.compare_and_swap(**_columns(limit))


def set_endpoint_limit(
    grant: Grant, environment: Environment, endpoint_name: str, limit: Limit | None, account: Account | None = None
) -> LimitOverride | None:
    """Set an endpoint's limit for this account, or for every account of the environment; return its row.

    Args:
        limit: None clears the limit. Returns None when there was no row to clear.
        account: None: every account of the environment, with a grant for all of them. Otherwise the grant is for
            this account.

    Raises RequestInvalidError for an endpoint that is not in the catalog or is not rate limited.
    """
    row: LimitOverride | None = LimitOverride.objects.filter(
        account=account, environment=environment, endpoint=endpoint_name
    ).first()
    if limit is not None or row is None:
        _require_limitable(endpoint_name)
    before = None if row is None else limit_of(row.limit_count, row.limit_seconds)
    if limit is None and before is None:
        return row
    details: dict[str, JsonValue] = {"environment": environment, "endpoint": endpoint_name}
    details |= {"old": _as_json(before), "new": _as_json(limit)}
    try:
        within = AccessScope(environments=frozenset({environment}))
        with recorded(grant, Permission.LIMITS_WRITE, _event(limit), account=account or within, **details):
            if row is not None:
                return row.compare_and_swap(**_columns(limit))
            row = LimitOverride(
                account=account, environment=environment, endpoint=endpoint_name, created_at=grant.at, **_columns(limit)
            )
            row.save()
    except IntegrityError as error:
        raise StateConflictError("Another request set this limit at the same time. Check it and try again.") from error
    return row


def account_limit_in_force(account: Account) -> LimitInForce:
    own = limit_of(account.limit_count, account.limit_seconds)
    if own is not None:
        return LimitInForce(own, LimitSource.ACCOUNT)
    return LimitInForce(default_limit(Environment(account.environment)), LimitSource.DEFAULT)


def endpoint_limit_in_force(
    environment: Environment, endpoint_name: str, account: Account | None = None
) -> LimitInForce:
    """Return the endpoint's limit for an account; `account` None: for accounts without their own.

    Raises RequestInvalidError for an endpoint that is not in the catalog or is not rate limited.
    """
    endpoint = _require_limitable(endpoint_name)
    limit, row = endpoint_limit(NO_ACCOUNT if account is None else account.pk, environment, endpoint)
    if row is None:
        return LimitInForce(limit, LimitSource.DEFAULT)
    return LimitInForce(limit, LimitSource.ENDPOINT if row.account_id is None else LimitSource.PAIR)


def _require_limitable(endpoint_name: str) -> Endpoint:
    endpoint = find_endpoint(endpoint_name)
    if not isinstance(endpoint, Endpoint):
        fault = "there is no such endpoint in the catalog"
    elif not endpoint.spends:
        fault = "requests for it are not rate limited"
    else:
        return endpoint
    raise RequestInvalidError("This endpoint cannot have a limit.", [Fault("/endpoint", fault)])


def _event(limit: Limit | None) -> str:
    return "limit.cleared" if limit is None else "limit.set"


def _columns(limit: Limit | None) -> dict[str, int | None]:
    if limit is None:
        return {"limit_count": None, "limit_seconds": None}
    return {"limit_count": limit.count, "limit_seconds": limit.seconds}


def _as_json(limit: Limit | None) -> JsonValue:
    return None if limit is None else {"count": limit.count, "seconds": limit.seconds}
