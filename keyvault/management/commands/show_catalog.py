"""Prints the endpoint catalog: what each endpoint asks of a caller, built in or added by an operator."""

from collections.abc import Mapping
from typing import Any

from django.conf import settings

from keyvault.access.catalog import Endpoint
from keyvault.access.endpoint_description import format_limit
from keyvault.access.limits import Limit
from keyvault.management.json_command import JsonCommand
from keyvault.services.catalog.catalog import current_catalog

_COLUMNS = ("endpoint", "method", "path", "key", "bearer", "context", "limit", "added")


class Command(JsonCommand):
    help = "Prints every endpoint with its rule and limits. Where no limit stands, the account's alone holds."

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "endpoints": [_told(endpoint) for endpoint in current_catalog().endpoints],
            "account_limits": {
                environment: {"count": count, "seconds": seconds}
                for environment, (count, seconds) in settings.ACCOUNT_LIMITS.items()
            },
        }

    def words(self, answer: Mapping[str, Any]) -> str:
        rows = [_COLUMNS, *map(_row, answer["endpoints"])]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        accounts = [f"{name} {_limit_text(limit)}" for name, limit in answer["account_limits"].items()]
        return "\n".join([*lines, "", f"An account's limit unless it has its own: {', '.join(accounts)}"])


def _told(endpoint: Endpoint) -> dict[str, Any]:
    return {
        "name": endpoint.name,
        "method": endpoint.method,
        "path": endpoint.path,
        "credential": endpoint.kinds,
        "credentials": sorted(endpoint.credentials),
        "bearer": endpoint.bearer,
        "merchant_from": str(endpoint.merchant_from or "") or None,
        "store_from": str(endpoint.store_from or "") or None,
        "idempotency_key": endpoint.idempotent_by_key,
        "limit": None if endpoint.limit is None else {"count": endpoint.limit.count, "seconds": endpoint.limit.seconds},
        "on_limiter_loss": endpoint.on_limiter_loss,
        "built_in": endpoint.is_built_in,
        "summary": endpoint.summary,
    }


def _row(told: Mapping[str, Any]) -> tuple[str, ...]:
    context = ", ".join(filter(None, (told["merchant_from"], told["store_from"])))
    return (
        told["name"],
        told["method"],
        told["path"],
        told["credential"],
        told["bearer"],
        context or "-",
        _limit_text(told["limit"]) if told["limit"] else "-",
        "" if told["built_in"] else "by an operator",
    )


def _limit_text(limit: Mapping[str, int]) -> str:
    return format_limit(Limit(limit["count"], limit["seconds"]))
