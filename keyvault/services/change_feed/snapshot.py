"""Snapshots for readers of the change feed: the key records, endpoint rules and limits that they decide with.

A record has a digest only if the token may replicate digests. Such a reader has peppers of its own.
"""

import base64
from collections.abc import Collection, Sequence
from typing import Any

from keyvault.access.endpoint_description import describe_catalog_endpoint
from keyvault.access.limits import Limit
from keyvault.access.permissions import Permission
from keyvault.access.principals import Service
from keyvault.domain.digests import PEPPER_SET, PepperSet
from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyRecord
from keyvault.domain.timestamps import format_timestamp
from keyvault.models import LimitOverride, PepperVersion
from keyvault.models.keys import OriginHeader
from keyvault.services.catalog.catalog import current_catalog, limit_of
from keyvault.services.keys.records import find_customers, find_keys, find_tokens
from keyvault.services.limits.defaults import default_limit

MAX_KEYS = 100
"""Maximum keys of one response."""


def describe_records(service: Service, key_ids: Collection[str], *, has_digests: bool = False) -> list[dict[str, Any]]:
    """Describe the keys within the token's scope; others are absent."""
    found = find_keys(key_ids).values()
    visible = [record for record in found if service.scope.has(record.merchant_id, record.environment)]
    return [describe_record(record, has_digest=has_digests) for record in visible]


def describe_record(record: KeyRecord, *, has_digest: bool = False) -> dict[str, Any]:
    limit = limit_of(record.limit_count, record.limit_seconds)
    described: dict[str, Any] = {
        "key_id": record.key_id,
        "credential_id": record.credential_id,
        "kind": record.kind,
        "environment": record.environment,
        "merchant_id": record.merchant_id,
        "state": record.state,
        "retirement": record.retirement,
        "expires_at": format_timestamp(record.expires_at),
        "merchant_active": record.merchant_active,
        "account_active": record.account_active,
        "origin_header": OriginHeader.REPORT if record.reports_origin else OriginHeader.REFUSE,
        "networks": [*map(str, record.networks)],
        "limit": describe_limit(limit),
    }
    if has_digest:
        described |= {
            "digest": _encode(record.digest),
            "pepper_version": record.pepper_version,
            "account_id": record.account_id,
            "account_version": record.account_version,
        }
    return described


def describe_rules(service: Service) -> dict[str, Any]:
    """Describe the catalog, the accounts' default limits, and the overrides of endpoints' limits in the scope."""
    return {
        "endpoints": [*map(describe_catalog_endpoint, current_catalog().endpoints)],
        "limits": {
            "default": {
                environment.value: describe_limit(default_limit(environment))
                for environment in Environment
                if environment in service.scope.environments
            },
            "overrides": _overrides(service),
        },
    }


def describe_limit(limit: Limit | None) -> dict[str, int] | None:
    return None if limit is None else {"count": limit.count, "seconds": limit.seconds}


def _overrides(service: Service) -> Sequence[dict[str, Any]]:
    rows = LimitOverride.objects.filter(environment__in=service.scope.environments).select_related("account")
    if service.scope.merchants is not None:
        rows = rows.exclude(account__isnull=False) | rows.filter(account__merchant_id__in=service.scope.merchants)
    return [
        {
            "merchant_id": None if row.account is None else row.account.merchant_id,
            "environment": row.environment,
            "endpoint": row.endpoint,
            "limit": describe_limit(limit),
            "setting": f"{row.pk}.{row.version}",
            "account_id": row.account_id,
        }
        for row in rows
        if (limit := limit_of(row.limit_count, row.limit_seconds)) is not None
    ]


def describe_tokens(service: Service, token_ids: Collection[str]) -> list[dict[str, Any]]:
    """Describe the service tokens that may verify within the region's scope, with their digests."""
    found = find_tokens(token_ids).values()
    visible = [record for record in found if service.scope.covers(record.service.scope)]
    return [
        {
            "token_id": record.service.token_id,
            "name": record.service.name,
            "person": record.service.person,
            "permissions": sorted(record.service.permissions & {Permission.KEYS_VERIFY}),
            "scope": record.service.scope.as_json(),
            "lineage": record.service.lineage,
            "is_probe": record.service.is_probe,
            "digest": _encode(record.digest),
            "pepper_version": record.pepper_version,
            "expires_at": format_timestamp(record.expires_at),
            "revoked_at": format_timestamp(record.revoked_at),
        }
        for record in visible
    ]


def describe_customers(service: Service, token_ids: Collection[str]) -> list[dict[str, Any]]:
    """Describe the customer access tokens within the scope, with their digests."""
    found = find_customers(token_ids).values()
    visible = [record for record in found if service.scope.has(record.merchant_id, record.environment)]
    return [
        {
            "token_id": record.token_id,
            "environment": record.environment,
            "merchant_id": record.merchant_id,
            "customer_id": record.customer_id,
            "digest": _encode(record.digest),
            "pepper_version": record.pepper_version,
            "expires_at": format_timestamp(record.expires_at),
            "revoked_at": format_timestamp(record.revoked_at),
        }
        for record in visible
    ]


def describe_pepper_versions(service: Service) -> list[dict[str, Any]]:
    """Describe the versions of the peppers of the scope's environments, without the peppers themselves."""
    sets = {PepperSet.SERVICE, *(PEPPER_SET[environment] for environment in service.scope.environments)}
    return [
        {
            "pepper_set": row.pepper_set,
            "number": row.number,
            "check_value": _encode(row.check_value),
            "created_at": format_timestamp(row.created_at),
            "hashes_from_at": format_timestamp(row.hashes_from_at),
            "retired_at": format_timestamp(row.retired_at),
        }
        for row in PepperVersion.objects.filter(pepper_set__in=sets).order_by("pepper_set", "number")
    ]


def _encode(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
