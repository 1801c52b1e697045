"""What needs the operator's attention: rows of every model admin, found by one query for the menu and the overview."""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, zip_longest
from time import monotonic
from typing import TYPE_CHECKING, Any

from django.db.models import Model, QuerySet
from django.http import HttpRequest

from keyvault.access.permissions import Permission
from keyvault.access.rules import operation
from keyvault.admin.framework.enforcement import operator_of
from keyvault.admin.framework.row_search import Statement, compile_selections
from keyvault.admin.framework.shown_environment import environment_of
from keyvault.admin.framework.widgets import Line

if TYPE_CHECKING:
    from keyvault.admin.framework.model_admin import ConsoleModelAdmin

MAX_LINES = 5
"""Maximum lines that the overview shows per item."""

MAX_ROWS = 200
"""Maximum rows that are counted per item."""

MAX_DECIDABLE = 50
"""Maximum rows of an item that are read to check, row by row, whether the operator may decide."""

_MAX_AUTHORIZED = 12
"""Maximum rows that are checked one by one if SQL already selects nearly only rows that the operator may decide.

If there are more, all count as decidable without a check.
"""

URGENT_TONES = frozenset({"alarm", "action"})
"""Tones of items that the operator can act on. The menu counts them."""


def _all(rows: list[Any]) -> list[Any]:
    return rows


@dataclass(frozen=True, slots=True)
class Attention:
    """A selection of rows that may need attention. It reads nothing yet.

    Args:
        rows: in the order in which they are shown, limited to the operator's scope.
        query: filters the list that the item links to.
        tone: `alarm`, `action`, or `plain` for what others must do.
        decide: permission of the decision that the rows wait for; rows that the operator may not decide are left out.
        selections: what selects the rows, each by an index of its own, if `rows` would sort or read too many; `rows`
            then has all rows of the model.
        select: returns which of the given rows belong to the item, if SQL cannot express the condition.
        one: what one row is, such as `Rotation stalled`.
        button: label of the link to a row.
        entry: entry of the menu that counts the rows; empty: that of the model admin.
    """

    model_admin: "ConsoleModelAdmin"
    title: str
    rows: QuerySet[Any]
    query: str
    tone: str = "plain"
    decide: Permission | None = None
    selections: Sequence[QuerySet[Any]] = ()
    select: Callable[[list[Any]], list[Any]] = _all
    one: str = ""
    button: str = "Review"
    entry: str = ""

    def limited_selections(self, request: HttpRequest) -> list[QuerySet[Any]]:
        """Return what selects the rows that the menu counts: without those that need another person's decision."""
        return [self._limit(request, rows) for rows in self.selections or (self.rows,)]

    def first_rows(self, request: HttpRequest, ids: Sequence[str], most: int) -> QuerySet[Any]:
        """Return at least the first `most` rows of those that `select_rows` found, in their order."""
        return self._limit(request, self.rows).filter(pk__in=ids[: most * max(len(self.selections), 1)])

    def _limit(self, request: HttpRequest, rows: QuerySet[Any]) -> QuerySet[Any]:
        rows = self.model_admin.rows_shown(request, rows)
        if self.decide is not None and operation(self.decide).second_person:
            # Rows are limited: the operator's own requests must not displace those of others.
            rows = rows.exclude(requester_person=operator_of(request).person)
        return rows

    def read(self, request: HttpRequest, ids: Sequence[str]) -> "AttentionItem":
        """Return the item with its first lines. `ids`: of the rows that `select_rows` found."""
        if self.decide is None and self.select is _all:
            most, shown = MAX_ROWS, list(self.first_rows(request, ids, MAX_LINES)[:MAX_LINES])
            found = len(ids)
        elif self.select is _all:
            # Nearly all are decidable: of more than are read, the number of all is shown, as in the menu.
            most, shown = MAX_ROWS, self.read_decidable(request, ids, _MAX_AUTHORIZED)
            found = len(ids) if len(ids) > _MAX_AUTHORIZED else len(shown)
        else:
            most, shown = MAX_DECIDABLE, self.read_decidable(request, ids, MAX_DECIDABLE + 1)
            found = len(shown)
        lines = [self.model_admin.line_of(row) for row in shown[:MAX_LINES]]
        return self.item(lines, min(found, most), has_more=found > most)

    def read_decidable(self, request: HttpRequest, ids: Sequence[str], most: int) -> list[Any]:
        """Return those of the first `most` rows that belong to the item and that the operator may decide."""
        rows = self.first_rows(request, ids, most)[:most]
        return self.select([row for row in rows if self._may_decide(request, row)])

    def item(self, lines: Sequence[Line] = (), count: int = 0, *, has_more: bool = False) -> "AttentionItem":
        return AttentionItem(
            self.title,
            self.model_admin.list_url(self.query),
            count,
            lines,
            self.tone,
            has_more,
            self.one or self.title,
            self.button,
        )

    def _may_decide(self, request: HttpRequest, row: Model) -> bool:
        return self.decide is None or self.model_admin.may_on(request, self.decide, row)


@dataclass(frozen=True, slots=True)
class AttentionItem:
    """Rows that need the operator's attention.

    `lines` shows the first few. `count`: all of them, or the maximum that is counted, and then `has_more`.
    """

    title: str
    url: str
    count: int
    lines: Sequence[Line] = field(default_factory=tuple)
    tone: str = "plain"
    has_more: bool = False
    one: str = ""
    button: str = "Review"


FoundAttention = Sequence[tuple[Attention, list[str]]]
"""Items with the ids of their first rows."""

_MAX_SHOWN = 8
"""Maximum lines of the overview."""

_MAX_SHOWN_PER_ITEM = 3
"""Maximum lines of one item."""

_MAX_SHOWN_ITEMS = 3
"""Maximum items whose rows the overview reads, by one query each."""


MENU_SECONDS = 10.0
"""How long the counts of the menu are kept, in seconds."""

_MAX_KEPT = 1_000
"""Maximum sessions whose counts are kept."""

_MAX_KEPT_QUERIES = 100
"""Maximum queries that are kept, each of some 300 kB."""


@dataclass(frozen=True, slots=True)
class AttentionQuery:
    """Items and other selections, with the query that finds the first rows of all.

    Args:
        selections: number of selections of each item.
        others: number of selections of each group of other selections.
    """

    items: Sequence[Attention]
    selections: Sequence[int]
    others: Sequence[int]
    statement: Statement

    def find(self) -> tuple[FoundAttention, list[list[list[str]]]]:
        """Return each item with the ids of its first rows, and the values of each group, by one query."""
        values = iter(self.statement.find())
        ids = [_merge(list(islice(values, count))) for count in self.selections]
        return list(zip(self.items, ids, strict=True)), [list(islice(values, count)) for count in self.others]


def select_rows(
    request: HttpRequest, items: Sequence[Attention], others: Sequence[Sequence[tuple[QuerySet[Any], str]]] = ()
) -> AttentionQuery:
    """Select at most MAX_ROWS + 1 rows of each selection of these items.

    Args:
        others: groups of further selections, each with the column that is returned of it.
    """
    selections = [item.limited_selections(request) for item in items]
    parts = [*((rows, "pk") for each in selections for rows in each), *(each for group in others for each in group)]
    statement = compile_selections(parts, MAX_ROWS + 1)
    return AttentionQuery(items, list(map(len, selections)), list(map(len, others)), statement)


class KeptQueries:
    """Queries by operator and chosen environment: Django takes longer to compile one than the database to run it.

    A query has no row and no time, only conditions, which follow from the operator's person, roles and scope. So it
    never becomes outdated. For an operator of named merchants it is compiled each time, with the ids of their accounts.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[Hashable, ...], AttentionQuery] = {}

    def find(self, name: str, request: HttpRequest, select: Callable[[], AttentionQuery]) -> AttentionQuery:
        """Return the operator's query of this name. `select` makes it."""
        operator = operator_of(request)
        if operator.scope.merchants is not None:
            return select()
        key = (name, operator, environment_of(request))
        query = self._kept.get(key)
        if query is None:
            if len(self._kept) >= _MAX_KEPT_QUERIES:
                self._kept.clear()
            self._kept[key] = query = select()
        return query


def _merge(lists: Sequence[Sequence[str]]) -> list[str]:
    """Return the ids of several selections, the first of each first, without repetitions."""
    if len(lists) == 1:
        return list(lists[0])
    return list(dict.fromkeys(pk for ids in zip_longest(*lists) for pk in ids if pk is not None))


def count_by_entry(found: FoundAttention) -> dict[str, str]:
    """Return the number of urgent rows by the menu's entry, for those that have any."""
    counts: Counter[str] = Counter()
    for item, ids in found:
        if item.tone in URGENT_TONES:
            counts[item.entry or item.model_admin.menu] += len(ids)
    return {entry: f"{MAX_ROWS}+" if count > MAX_ROWS else str(count) for entry, count in counts.items() if count}


def attention_context(request: HttpRequest, found: FoundAttention) -> dict[str, Any]:
    """Return what the overview shows: alarms first, then what the operator can decide, then what others must do.

    Only the first items have lines. An item that turns out to have no row for the operator is empty.
    """
    order = ("alarm", "action", "plain")
    ranked = sorted((each for each in found if each[1]), key=lambda each: order.index(each[0].tone))
    items: list[AttentionItem] = []
    for item, ids in ranked:
        is_shown = sum(bool(each.lines) for each in items) < _MAX_SHOWN_ITEMS
        if is_shown:
            items.append(item.read(request, ids))
        else:
            items.append(item.item(count=min(len(ids), MAX_ROWS), has_more=len(ids) > MAX_ROWS))
    urgent = [item for item in items if item.tone in URGENT_TONES]
    own = {line.url for item in urgent for line in item.lines[:_MAX_SHOWN_PER_ITEM]}
    return {
        "attention_items": [item for item in items if item.count],
        "attention_lines": [(item, line) for item in urgent for line in _join_alike(item, own)[:_MAX_SHOWN_PER_ITEM]][
            :_MAX_SHOWN
        ],
        "waiting_items": [item for item in items if item.tone not in URGENT_TONES and item.lines],
        "attention_count": sum(item.count for item in urgent),
        "attention_has_more": any(item.has_more for item in urgent),
    }


def _join_alike(item: AttentionItem, own: Collection[str]) -> list[Line]:
    """Return the lines of an item. Lines with the same label often have one cause: they are one line, to the list.

    Args:
        own: the pages that the overview links by a line of their own. Notices about them are left out.
    """
    alike: dict[str, list[Line]] = {}
    for line in item.lines:
        if line.about not in own:
            alike.setdefault(line.label, []).append(line)
    return [
        replace(lines[0], url=item.url, detail="; ".join(line.detail for line in lines)) if lines[1:] else lines[0]
        for lines in alike.values()
    ]


class MenuCounts:
    """Counts of the menu by session and environment, which are kept for some seconds: each costs a large query."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], tuple[float, dict[str, str]]] = {}

    def find(self, request: HttpRequest) -> dict[str, str] | None:
        """Return the counts that this session saw last, unless they are old or the operator has changed something."""
        ends_at, counts = self._kept.get(self._key(request), (0.0, {}))
        return counts if monotonic() < ends_at else None

    def store(self, request: HttpRequest, counts: dict[str, str]) -> None:
        if len(self._kept) >= _MAX_KEPT:
            self.forget_all()
        self._kept[self._key(request)] = (monotonic() + MENU_SECONDS, counts)

    def forget(self, request: HttpRequest) -> None:
        """Forget the counts of the session, because the operator may have changed something."""
        self._kept.pop(self._key(request), None)

    def forget_all(self) -> None:
        self._kept.clear()

    @staticmethod
    def _key(request: HttpRequest) -> tuple[str, str]:
        return str(request.session.session_key), environment_of(request) or ""


menu_counts = MenuCounts()
