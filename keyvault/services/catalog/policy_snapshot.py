"""The catalog and the limits of its endpoints, read together for a verifier."""

from django.db.models import Count, Max, Sum

from keyvault.access.catalog import BUILT_IN
from keyvault.access.limits import Limit
from keyvault.access.policy_snapshot import PolicySnapshot
from keyvault.models import CatalogEndpoint, LimitOverride
from keyvault.services.catalog.catalog import endpoint_of, limit_of


def read_rules(known: PolicySnapshot | None) -> PolicySnapshot:
    """The rules as the rows have them now: `known` itself when nothing was changed since it was read.

    Rows are never deleted and count their versions up, so that their number and the sum of their versions change with
    every change; the newest one's time tells one database from another.
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
