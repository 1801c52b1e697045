"""Search over several models: one query finds the ids of all matching rows, each part of it by an index."""

from collections.abc import Sequence
from typing import Any

from django.db.models import IntegerField, QuerySet, TextField, Value
from django.db.models.functions import Cast

from keyvault.models.union_parts import limit_part


def find_ids(selections: Sequence[QuerySet[Any]], most: int) -> list[list[str]]:
    """Return the ids, as texts, of the first rows of each selection, by one query."""
    return find_values([(rows, "pk") for rows in selections], most)


def find_values(selections: Sequence[tuple[QuerySet[Any], str]], most: int) -> list[list[str]]:
    """Return a column, as texts, of the first rows of each selection, by one query."""
    found: list[list[str]] = [[] for _ in selections]
    parts = [_values(rows, column, number, most) for number, (rows, column) in enumerate(selections)]
    if parts:
        for number, value in parts[0].union(*parts[1:], all=True):
            found[number].append(value)
    return found


def _values(rows: QuerySet[Any], column: str, number: int, most: int) -> QuerySet[Any]:
    values = {"number": Value(number, IntegerField()), "text": Cast(column, TextField())}
    found: QuerySet[Any] = limit_part(rows, most).annotate(**values).values_list("number", "text")
    return found
