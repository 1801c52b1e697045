"""Pages of a list by the sort keys of the last row, so that a page costs the same wherever it is in the list."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from django.core.exceptions import ValidationError
from django.core.signing import BadSignature, Signer
from django.db import connection
from django.db.models import F, Model, Q, QuerySet
from django.db.models.expressions import OrderBy
from django.db.models.fields.tuple_lookups import Tuple, TupleGreaterThan, TupleLessThan


class Keyset:
    """The order of a query set's rows, whose last sort key is unique. Cursors are signed: no client chooses values."""

    def __init__(self, rows: QuerySet[Any]) -> None:
        self._rows = rows
        ordering = [_as_order(each) for each in rows.query.order_by]
        self._keys = {f"sort_key_{number}": each.expression for number, each in enumerate(ordering)}
        self._are_descending = [bool(each.descending) for each in ordering]
        self._are_nullable = [_is_nullable(rows.model, each.expression) for each in ordering]
        self._signer = Signer(salt=f"{rows.model._meta.label} by {ordering}")

    def rows_after(self, cursor: str) -> QuerySet[Any]:
        """Return the rows after the one of the cursor; all of them if the cursor is empty or of another list."""
        values = self._read_cursor(cursor)
        if values is None:
            return self._rows
        if not any(self._are_nullable) and len(set(self._are_descending)) == 1:
            # A comparison of rows, which an index of these columns serves.
            follows = TupleLessThan if self._are_descending[0] else TupleGreaterThan
            rows: QuerySet[Any] = self._rows.filter(follows(Tuple(*self._keys.values()), tuple(values)))
            return rows
        return self._rows.alias(**self._keys).filter(self._follows(values))  # type: ignore[no-any-return]  # of the stubs

    def cursor_of(self, row: Model) -> str:
        """Return the cursor of a row; empty if the row no longer exists."""
        found = self._values_of(row)
        return "" if found is None else self._signer.sign_object([*map(_as_json, found)])

    def _values_of(self, row: Model) -> Sequence[Any] | None:
        """Return the sort keys of a row. Those that are not its own columns are read."""
        columns = [each for each in self._keys.values() if isinstance(each, F)]
        names = [each.name for each in columns]  # type: ignore[attr-defined]  # the stubs lack it
        if len(columns) < len(self._keys) or any("__" in name for name in names):
            return self._with_keys().filter(pk=row.pk).values_list(*self._keys).first()
        return [row.serializable_value(name) for name in names]

    def _with_keys(self) -> QuerySet[Any]:
        annotated: QuerySet[Any] = self._rows.model._base_manager.annotate(**self._keys)
        return annotated

    def _read_cursor(self, cursor: str) -> Sequence[Any] | None:
        try:
            values = self._signer.unsign_object(cursor)
            fields = [each.output_field for each in self._with_keys().query.annotations.values()]
            return [field.to_python(value) for field, value in zip(fields, values, strict=True)]
        except (BadSignature, ValidationError, ValueError):
            return None

    def _follows(self, values: Iterable[Any]) -> Q:
        """Return the condition for the rows after these values, by any directions and with NULL."""
        found, equal = Q(pk__in=[]), Q()
        keys = zip(self._keys, self._are_descending, self._are_nullable, values, strict=True)
        for name, is_descending, is_nullable, value in keys:
            found |= equal & _is_after(name, value, is_descending=is_descending, is_nullable=is_nullable)
            equal &= Q(**{f"{name}__isnull": True}) if value is None else Q(**{name: value})
        return found


def _as_order(order: Any) -> OrderBy:
    if isinstance(order, str):
        return OrderBy(F(order.removeprefix("-")), descending=order.startswith("-"))
    return order if isinstance(order, OrderBy) else OrderBy(order)


def _is_nullable(model: type[Model], expression: Any) -> bool:
    """Whether a column may be NULL, or a relation on the way to it. Other expressions must not be."""
    if not isinstance(expression, F):
        return False
    field: Any = None
    for name in expression.name.split("__"):  # type: ignore[attr-defined]  # the stubs lack it
        of = model if field is None else field.related_model
        field = of._meta.pk if name == "pk" else of._meta.get_field(name)
        if field.null:
            return True
    return False


def _is_after(name: str, value: Any, *, is_descending: bool, is_nullable: bool) -> Q:
    are_nulls_first = is_descending == connection.features.nulls_order_largest
    if value is None:
        return Q(**{f"{name}__isnull": False}) if are_nulls_first else Q(pk__in=[])
    after = Q(**{f"{name}__{'lt' if is_descending else 'gt'}": value})
    return after | Q(**{f"{name}__isnull": True}) if is_nullable and not are_nulls_first else after


def _as_json(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else value
