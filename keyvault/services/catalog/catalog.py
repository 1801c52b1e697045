"""The current catalog: the built-in endpoints and those that operators have added."""

from django.db.models import Count, Max, Q, Sum

from keyvault.access.catalog import (
    BUILT_IN,
    Bearer,
    Catalog,
    Endpoint,
    LimiterFailurePolicy,
    NoMatchingEndpoint,
    parse_context,
)
from keyvault.access.limits import Limit
from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind
from keyvault.models import CatalogEndpoint, LimitOverride

_known: tuple[tuple[object, ...], Catalog] = ((0, None, None), BUILT_IN)


def current_catalog() -> Catalog:
    """Return the catalog of the current rows, rebuilt when they have changed.

    Rows are never deleted and their versions only grow, so every change alters the row count or the sum of versions.
    The newest row's creation time distinguishes one database from another.
    """
    global _known
    counted = CatalogEndpoint.objects.aggregate(rows=Count("pk"), versions=Sum("version"), newest=Max("created_at"))
    state = (counted["rows"], counted["versions"], counted["newest"])
    seen, catalog = _known
    if seen != state:
        rows = CatalogEndpoint.objects.filter(withdrawn_at__isnull=True).order_by("name")
        catalog = BUILT_IN.with_added(map(endpoint_of, rows))
        _known = (state, catalog)
    return catalog


def find_endpoint(name: str) -> Endpoint | NoMatchingEndpoint:
    built_in = BUILT_IN.find(name)
    return built_in if isinstance(built_in, Endpoint) else current_catalog().find(name)


def match_endpoint(method: str, path: str, base_path: str = "") -> Endpoint | NoMatchingEndpoint:
    built_in = BUILT_IN.match(method, path, base_path)
    return built_in if isinstance(built_in, Endpoint) else current_catalog().match(method, path, base_path)


def endpoint_of(row: CatalogEndpoint) -> Endpoint:
    """Return the catalog entry of a row."""
    return Endpoint(
        name=row.name,
        method=row.method,
        path=row.path,
        credentials=frozenset(map(KeyKind, row.credentials)),
        bearer=Bearer(row.bearer),
        idempotent_by_key=row.idempotent_by_key,
        summary=row.summary,
        merchant_from=parse_context(row.merchant_from),
        store_from=parse_context(row.store_from),
        limit=limit_of(row.limit_count, row.limit_seconds),
        on_limiter_loss=LimiterFailurePolicy(row.on_limiter_loss),
        is_built_in=False,
    )


def endpoint_limit(
    account_id: int, environment: Environment, endpoint: Endpoint
) -> tuple[Limit | None, LimitOverride | None]:
    """Return the endpoint's limit for this account, and the row that sets it (None: the catalog sets it).

    An override for the account takes precedence over one for the environment, and that over the catalog's limit.
    """
    rows = LimitOverride.objects.filter(
        Q(account_id=account_id) | Q(account__isnull=True, environment=environment), endpoint=endpoint.name
    )
    by_account = {row.account_id: row for row in rows}
    for row in (by_account.get(account_id), by_account.get(None)):
        limit = None if row is None else limit_of(row.limit_count, row.limit_seconds)
        if row is not None and limit is not None:
            return limit, row
    return endpoint.limit, None


def limit_of(count: int | None, seconds: int | None) -> Limit | None:
    return None if count is None or seconds is None else Limit(count, seconds)
