"""Fold a table of many combinations: rows that no further column distinguishes become one line."""

from collections.abc import Mapping, Sequence

Row = tuple[str, ...]


def folded(found: Mapping[Row, str]) -> str:
    """Return one line for each set of rows with one outcome: `*` any, `a|b` one of these, `!a|b` any but these."""
    columns = [list(dict.fromkeys(values)) for values in zip(*found, strict=True)]
    width = max(map(len, found.values()))
    return "".join(f"{outcome:<{width}}  {'  '.join(row)}\n" for *row, outcome in _lines(found, columns, ()))


def _lines(found: Mapping[Row, str], columns: Sequence[Sequence[str]], known: Row) -> list[Row]:
    """Return the lines below `known`, without it."""
    if len(known) == len(columns):
        return [(found[known],)]
    values = columns[len(known)]
    branches: dict[tuple[Row, ...], list[str]] = {}
    for value in values:
        branches.setdefault(tuple(_lines(found, columns, (*known, value))), []).append(value)
    return [(_words(alike, values), *rest) for branch, alike in branches.items() for rest in branch]


def _words(alike: Sequence[str], values: Sequence[str]) -> str:
    others = [value for value in values if value not in alike]
    if not others:
        return "*"
    return "!" + "|".join(others) if len(others) < len(alike) and len(values) > 3 else "|".join(alike)
