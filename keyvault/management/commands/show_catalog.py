"""Print the endpoint catalog: the requirements of each built-in or added endpoint."""

from collections.abc import Mapping
from typing import Any

from django.conf import settings

from keyvault.access.endpoint_description import describe_catalog_endpoint, format_limit
from keyvault.access.limits import Limit
from keyvault.management.json_command import JsonCommand
from keyvault.services.catalog.catalog import current_catalog

_COLUMNS = ("endpoint", "method", "path", "key", "bearer", "context", "limit", "added")


class Command(JsonCommand):
    help = "Print every endpoint with its rule and limits. Without an endpoint limit, only the account's limit applies."

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "endpoints": [describe_catalog_endpoint(endpoint) for endpoint in current_catalog().endpoints],
            "account_limits": {
                environment: {"count": count, "seconds": seconds}
                for environment, (count, seconds) in settings.ACCOUNT_LIMITS.items()
            },
        }

    def format_text(self, answer: Mapping[str, Any]) -> str:
        rows = [_COLUMNS, *map(_row, answer["endpoints"])]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        accounts = [f"{name} {_limit_text(limit)}" for name, limit in answer["account_limits"].items()]
        return "\n".join([*lines, "", f"Default limit of an account: {', '.join(accounts)}"])


def _row(described: Mapping[str, Any]) -> tuple[str, ...]:
    context = ", ".join(filter(None, (described["merchant_from"], described["store_from"])))
    return (
        described["name"],
        described["method"],
        described["path"],
        described["credential"],
        described["bearer"],
        context or "-",
        _limit_text(described["limit"]) if described["limit"] else "-",
        "" if described["built_in"] else "by an operator",
    )


def _limit_text(limit: Mapping[str, int]) -> str:
    return format_limit(Limit(limit["count"], limit["seconds"]))
