"""Deletion of expired rows in bounded batches."""

from typing import Any

from django.db.models import QuerySet

MAX_DELETED = 5_000
"""Maximum rows of one table deleted in one run."""


def delete_batch(rows: QuerySet[Any]) -> int:
    """Delete the first MAX_DELETED rows, in the order of the query. Return how many.

    Also deletes recorded rows, which no other code may delete; the triggers decide which of them have expired.
    """
    expired = list(rows.values_list("pk", flat=True)[:MAX_DELETED])
    if not expired:
        return 0
    # With the conditions again: a row that was renewed since it was read stays.
    _, by_table = QuerySet(rows.model, query=rows.query.chain()).order_by().filter(pk__in=expired).delete()
    return by_table.get(rows.model._meta.label, 0)
