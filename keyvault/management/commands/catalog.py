"""Prints the endpoint catalog: what each endpoint of the integration plane asks of a caller."""

from collections.abc import Mapping
from typing import Any

from keyvault.access.catalog import ENDPOINTS
from keyvault.management.answers import AnsweringCommand


class Command(AnsweringCommand):
    help = "Prints every endpoint with its rule."

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "endpoints": [
                {
                    "name": endpoint.name,
                    "method": endpoint.method,
                    "path": endpoint.path,
                    "credential": endpoint.credential.value,
                    "bearer": endpoint.bearer.value,
                    "idempotency_key": endpoint.idempotent_by_key,
                    "summary": endpoint.summary,
                }
                for endpoint in ENDPOINTS
            ]
        }

    def words(self, answer: Mapping[str, Any]) -> str:
        rows = [("endpoint", "method", "path", "key", "bearer")] + [
            (row["name"], row["method"], row["path"], row["credential"], row["bearer"]) for row in answer["endpoints"]
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)
