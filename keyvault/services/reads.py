"""What a verifier reads: records by many ids at once, and the rules; each in one query, from the primary database."""

from collections.abc import Collection, Iterable
from functools import lru_cache
from typing import Any

from django.db.models import Count, Max, Sum
from msgspec.json import decode

from keyvault.access.catalog import BUILT_IN
from keyvault.access.customers import CustomerRecord
from keyvault.access.limits import Limit
from keyvault.access.rule_book import RuleBook
from keyvault.access.verification import TokenRecord
from keyvault.domain.keys import KeyRecord
from keyvault.domain.networks import IPNetwork, parse_network
from keyvault.models import CatalogEndpoint, CustomerToken, LimitOverride, ServiceToken
from keyvault.services.catalog import endpoint_of, limit_of
from keyvault.services.lookup import KEY_ID, customer_record, key_record, key_rows, token_record


def find_keys(key_ids: Collection[str]) -> dict[str, KeyRecord]:
    """Those that there are, by id."""
    return {row[KEY_ID]: key_record(row) for row in key_rows(key_ids)}


def keys_of_raw(rows: Iterable[Any]) -> dict[str, KeyRecord]:
    """The same of rows that were read already, whose JSON is as PostgreSQL sends it."""
    return {row[KEY_ID]: key_record(row, _raw_networks) for row in rows}


@lru_cache(maxsize=1024)
def _raw_networks(raw: bytes) -> tuple[IPNetwork, ...]:
    """Most lists are empty, and many of the others are the same."""
    return tuple(map(parse_network, decode(raw[1:]) or ()))  # behind the version of the format


def find_customers(token_ids: Collection[str]) -> dict[str, CustomerRecord]:
    rows = CustomerToken.objects.select_related("account").filter(token_id__in=token_ids)
    return {row.token_id: customer_record(row) for row in rows}


def find_tokens(token_ids: Collection[str]) -> dict[str, TokenRecord]:
    return {row.token_id: token_record(row) for row in ServiceToken.objects.filter(token_id__in=token_ids)}


def read_rules(known: RuleBook | None) -> RuleBook:
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
    return RuleBook(BUILT_IN.with_added(map(endpoint_of, endpoints)), overrides, state)
