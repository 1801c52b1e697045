"""Parts of the overview that other apps add, and numbers as people read them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from django.db.models import QuerySet
from django.http import HttpRequest

from keyvault.admin.framework.components import Tile


@dataclass(frozen=True, slots=True)
class OverviewPart:
    """What an app adds to the overview.

    Args:
        tiles: numbers, after those of keyvault.
        notes: texts that are added to the notes of keyvault's tiles, by the tile's label.
        section: a `FactTable`, `Table` or `Card`, after those of keyvault; None: none.
    """

    tiles: Sequence[Tile] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)
    section: Any = None


@dataclass(frozen=True, slots=True)
class PartFinder:
    """How an app finds its part, limited to the chosen environments.

    Args:
        select: returns rows with the column that is read of each, in the same query as those that need attention.
        find: called with the values of each selection, as texts. None: the operator may not see the part.
    """

    select: Callable[[HttpRequest], Sequence[tuple[QuerySet[Any], str]]]
    find: Callable[[HttpRequest, Sequence[Sequence[str]]], OverviewPart | None]


def format_number(value: float) -> str:
    """Format a number for a tile, such as `18,204` or `3.61 M`."""
    if value >= 1_000_000:
        return f"{value / 1_000_000:,.2f} M"
    return f"{value:,.0f}"


def format_bounded(count: int, most: int) -> str:
    """Format a number that was counted up to a maximum."""
    return f"{most:,}+" if count > most else f"{count:,}"


def format_share(part: float, whole: float) -> str:
    """Format a share in percent, such as `2.9 %`."""
    return "0 %" if not whole or not part else f"{100 * part / whole:.1f} %" if part * 1000 >= whole else "< 0.1 %"
