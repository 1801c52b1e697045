"""Columns of lists: a badge or a time of each row."""

from collections.abc import Callable
from datetime import datetime
from operator import attrgetter
from typing import Any, TypeVar

from django.contrib import admin
from django.utils.safestring import SafeString

from keyvault.admin.framework.widgets import NOTHING, badge, moment

T = TypeVar("T")

Column = Callable[[Any, Any], SafeString]
"""Method of a model admin that renders the cell of a row."""


def badge_column(heading: str, read: str | Callable[[Any], str], *, ordering: str | None = None) -> Column:
    """Return a column of badges.

    Args:
        read: lookup of a field, such as `account__environment`, which also sorts the list; or a function of the row.
        ordering: lookup that sorts the list by a function's column; None: the column does not sort.
    """
    value, ordering = _reader(read, ordering)

    @admin.display(description=heading, ordering=ordering)
    def column(model_admin: Any, row: Any) -> SafeString:
        return badge(value(row))

    return column


def moment_column(heading: str, read: str | Callable[[Any], datetime | None], *, missing: str = NOTHING) -> Column:
    """Return a column of times. `missing`: text of a row without one. `read`: see `badge_column`."""
    value, ordering = _reader(read, None)

    @admin.display(description=heading, ordering=ordering)
    def column(model_admin: Any, row: Any) -> SafeString:
        return moment(value(row), missing=missing)

    return column


def _reader(read: str | Callable[[Any], T], ordering: str | None) -> tuple[Callable[[Any], T], str | None]:
    return (attrgetter(read.replace("__", ".")), read) if isinstance(read, str) else (read, ordering)
