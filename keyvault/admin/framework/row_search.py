"""Search over several models: one query finds the ids of all matching rows, each part of it by an index."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.core.exceptions import EmptyResultSet
from django.db import connection
from django.db.models import QuerySet


@dataclass(frozen=True, slots=True)
class Statement:
    """A compiled query that returns a column, as texts, of the first rows of each of several selections."""

    size: int
    sql: str
    parameters: Sequence[Any]

    def find(self) -> list[list[str]]:
        """Run the query. Return the values of each selection."""
        found: list[list[str]] = [[] for _ in range(self.size)]
        if self.sql:
            with connection.cursor() as cursor:
                cursor.execute(self.sql, self.parameters)
                for number, value in cursor.fetchall():
                    found[number].append(value)
        return found


def find_ids(selections: Sequence[QuerySet[Any]], most: int) -> list[list[str]]:
    """Return the ids, as texts, of the first rows of each selection, by one query."""
    return find_values([(rows, "pk") for rows in selections], most)


def find_values(selections: Sequence[tuple[QuerySet[Any], str]], most: int) -> list[list[str]]:
    """Return a column, as texts, of the first rows of each selection, by one query."""
    return compile_selections(selections, most).find()


def compile_selections(selections: Sequence[tuple[QuerySet[Any], str]], most: int) -> Statement:
    """Compile the query for a column of the first rows of each selection.

    It joins the statements that Django compiles: `QuerySet.union` would resolve and compile each selection twice, and
    the menu makes this query on most pages.
    """
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
    return Statement(len(selections), " UNION ALL ".join(parts), tuple(parameters))
