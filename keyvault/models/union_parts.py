"""Parts of a union with a limit each."""

from typing import Any

from django.db import connections
from django.db.models import QuerySet


def limit_part(rows: QuerySet[Any], most: int) -> QuerySet[Any]:
    """Return the first of these rows, for a part of a union.

    SQLite allows neither a limit nor an order in a part: there they are in a subquery.
    """
    if connections[rows.db].features.supports_slicing_ordering_in_compound:
        return rows[:most]
    limited: QuerySet[Any] = rows.model._base_manager.filter(pk__in=rows.values("pk")[:most]).order_by()
    return limited
