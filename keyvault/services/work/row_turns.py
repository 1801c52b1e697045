"""Batches of due rows in turn, so that rows that always fail do not block the rows behind them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from django.db.models import Model, Q, QuerySet

BATCH = 100
"""Maximum rows in one batch."""

_RowT = TypeVar("_RowT", bound=Model)


def batch_after(rows: QuerySet[_RowT], field: str, last: _RowT | None) -> list[_RowT]:
    """Return the next BATCH rows in the order of `field` and primary key, after `last`; None: the first ones."""
    ordered = rows.order_by(field, "pk")
    if last is not None:
        at: Any = getattr(last, field)
        ordered = ordered.filter(Q(**{f"{field}__gt": at}) | Q(pk__gt=last.pk), **{f"{field}__gte": at})
    return list_batch(ordered)


def list_batch(rows: QuerySet[_RowT]) -> list[_RowT]:
    """Return the first BATCH rows."""
    # Most batches are empty, and a query of whole rows costs several times as much to build.
    return list(rows[:BATCH]) if rows.values_list("pk")[:BATCH] else []


@dataclass(slots=True)
class RowTurns(Generic[_RowT]):
    """Visit the due rows of one kind, a batch in each run. `last`: the row visited last, None: begin with the first."""

    last: _RowT | None = None

    def visit(self, list_after: Callable[[_RowT | None], list[_RowT]]) -> Iterator[_RowT]:
        """Yield a batch that begins after the last row visited and continues with the first rows.

        A caller that stops early continues with the next row in its next run.
        """
        rows = list_after(self.last)
        if self.last is not None and len(rows) < BATCH:
            known = {row.pk for row in rows}
            rows += [row for row in list_after(None) if row.pk not in known][: BATCH - len(rows)]
        for row in rows:
            self.last = row
            yield row
        if len(rows) < BATCH:
            self.last = None
