"""Load the policy snapshot of a verifier: the catalog and the limit overrides of its endpoints."""

from django.db.models import Count, Max, Sum

from keyvault.access.catalog import BUILT_IN
from keyvault.access.limits import Limit
from keyvault.access.policy_snapshot import PolicySnapshot
from keyvault.models import CatalogEndpoint, LimitOverride
from keyvault.services.catalog.catalog import endpoint_of, limit_of


def read_rules(known: PolicySnapshot | None) -> PolicySnapshot:
    """Return the snapshot of the current rows: `known` itself when nothing has changed since it was read.

    Rows are never deleted and their versions only grow, so every change alters the row count or the sum of versions.
    The newest row's creation time distinguishes one database from another.
    """
    state = tuple(
        tuple(model.objects.aggregate(Count("pk"), Sum("version"), Max("created_at")).values())
        for model in (CatalogEndpoint, LimitOverride)
    )
    if known is not None and known.state == state:
        return known
    endpoints = CatalogEndpoint.objects.filter(withdrawn_at__isnull=True).order_by("name")
    overrides: dict[tuple[int | None, str, str], tuple[Limit, str]] = {}
    columns = ("pk", "version", "account_id", "environment", "endpoint", "limit_count", "limit_seconds")
    for pk, version, account_id, environment, endpoint, count, seconds in LimitOverride.objects.values_list(*columns):
        limit = limit_of(count, seconds)
        if limit is not None:
            overrides[account_id, environment, endpoint] = (limit, f"{pk}.{version}")
    return PolicySnapshot(BUILT_IN.with_added(map(endpoint_of, endpoints)), overrides, state)
