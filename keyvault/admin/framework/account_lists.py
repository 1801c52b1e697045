"""Short lists of an account's rows, for the page of a merchant: several model admins' rows by one query."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db.models import CharField, IntegerField, QuerySet, TextField, Value
from django.db.models.functions import Cast

from keyvault.admin.framework.widgets import Table, link
from keyvault.models import Account
from keyvault.models.union_parts import limit_part

MAX_ROWS = 5
"""Maximum rows of an account in a list, the newest."""


@dataclass(frozen=True, slots=True)
class ListedRow:
    """The values of a row that its list shows. `account`: that of the list."""

    account: Account
    pk: str
    label: str
    state: str
    detail: str
    at: datetime | None


@dataclass(frozen=True, slots=True)
class AccountList:
    """What the page of a merchant lists of each account.

    Args:
        select: the rows of an account, newest first, by an index.
        label, state, detail: expressions for texts of a row; `at`: the column with its time.
        cells: the cells of a row under the `columns`.
        list_url: the page with all rows of an account.
    """

    title: str
    columns: Sequence[str]
    select: Callable[[Account], QuerySet[Any]]
    label: Any
    state: Any
    detail: Any
    at: str
    cells: Callable[[ListedRow], Sequence[Any]]
    list_url: Callable[[Account], str]
    empty: str

    def table(self, account: Account, rows: Sequence[ListedRow]) -> Table:
        """Return the table of an account. `rows`: in any order, and one more than are shown if there are more."""
        newest = sorted(rows, key=lambda row: (row.at is not None, row.at), reverse=True)[:MAX_ROWS]
        title = f"{self.title} in {account.environment}"
        return Table(
            f"{title}: the newest {MAX_ROWS}" if len(rows) > MAX_ROWS else title,
            self.columns,
            [self.cells(row) for row in newest],
            empty=self.empty,
            aside=link(self.list_url(account), "Show all"),
        )


def read_account_lists(lists: Sequence[AccountList], accounts: Sequence[Account]) -> Mapping[int, list[Table]]:
    """Return the tables of each account, by its id, in the order of the lists. One query."""
    parts = [
        limit_part(each.select(account), MAX_ROWS + 1).values_list(
            Value(number, IntegerField()),
            Value(place, IntegerField()),
            *(Cast(text, TextField()) for text in ("pk", each.label, each.state, each.detail)),
            each.at,
        )
        for number, each in enumerate(lists)
        for place, account in enumerate(accounts)
    ]
    found: dict[tuple[int, int], list[ListedRow]] = {}
    for number, place, *values in parts[0].union(*parts[1:], all=True) if parts else ():
        found.setdefault((number, place), []).append(ListedRow(accounts[place], *values))
    return {
        account.pk: [each.table(account, found.get((number, place), [])) for number, each in enumerate(lists)]
        for place, account in enumerate(accounts)
    }


def text(value: str) -> Value:
    """Return a constant text as an expression."""
    return Value(value, CharField())
