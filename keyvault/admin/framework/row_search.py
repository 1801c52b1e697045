"""Search over several models: one query finds the ids of all matching rows, each part of it by an index."""

from collections.abc import Sequence
from typing import Any

from django.core.exceptions import EmptyResultSet
from django.db import connection
from django.db.models import QuerySet


def find_ids(selections: Sequence[QuerySet[Any]], most: int) -> list[list[str]]:
    """Return the ids, as texts, of the first rows of each selection, by one query."""
    return find_values([(rows, "pk") for rows in selections], most)


def find_values(selections: Sequence[tuple[QuerySet[Any], str]], most: int) -> list[list[str]]:
    """Return a column, as texts, of the first rows of each selection, by one query.

    It joins the statements that Django compiles: `QuerySet.union` would resolve and compile each selection twice, and
    the menu makes this query on most pages.
    """
    found: list[list[str]] = [[] for _ in selections]
    parts, parameters = list[str](), list[Any]()
    for number, (rows, column) in enumerate(selections):
        compiler = rows.values(column)[:most].query.get_compiler(connection=connection)
        try:
            # SQLite allows a limit only in a subquery of a union's part.
            sql, values = compiler.as_sql()
        except EmptyResultSet:
            continue
        name = connection.ops.quote_name(column)
        parts.append(f"SELECT {number}, CAST(part.{name} AS text) FROM ({sql}) AS part")  # noqa: S608  Django quotes it
        parameters += values
    if parts:
        with connection.cursor() as cursor:
            cursor.execute(" UNION ALL ".join(parts), parameters)
            for number, value in cursor.fetchall():
                found[number].append(value)
    return found
