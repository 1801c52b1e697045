"""Pages of the service plane's lists: the newest rows first, each page by a cursor.

A page costs a few short index scans, however many rows the table has. The indexes of `page_indexes` begin with the
account or with its environment: there is one scan for each account, or each environment, of the query.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Generic, TypeVar

from django.db.models import F, Model, QuerySet
from django.db.models.fields.tuple_lookups import Tuple, TupleLessThan

from keyvault.api.enforcement import ServiceView
from keyvault.domain.environments import Environment
from keyvault.models import Account

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)

_ListedT = TypeVar("_ListedT", bound=Model)
_Position = tuple[datetime, str]
"""A row's `created_at` and primary key."""


@dataclass(frozen=True, slots=True)
class Page(Generic[_ListedT]):
    """`next_cursor` None: there are no more rows."""

    rows: list[_ListedT]
    next_cursor: str | None


def read_page(
    view: ServiceView, rows: QuerySet[_ListedT], query: Mapping[str, Any], filters: list[dict[str, Any]]
) -> Page[_ListedT]:
    """Read the page of the rows that the view's token may see.

    Args:
        rows: all rows of a model with `account`, `account_environment` and `created_at`.
        query: the validated `PageQuery`.
        filters: mutually exclusive conditions. For each one there is an index by account and one by environment.

    Raises DeniedError for a merchant or an environment outside the token.
    """
    limit: int = query["limit"]
    after = None if "cursor" not in query else _read_cursor(query["cursor"])
    found: list[_Position] = []
    for place in _places(view, query):
        for condition in filters:
            found += _list_positions(rows.filter(**place, **condition), after, limit + 1)
    # The database orders rows with the same time, because it may compare ids differently from Python.
    newest_first = sorted(found, key=lambda position: position[0], reverse=True)
    oldest = newest_first[: limit + 1][-1:]
    ids = [pk for at, pk in newest_first if at >= oldest[0][0]]
    read = list(rows.filter(pk__in=ids).order_by("-created_at", "-pk")[: limit + 1]) if ids else []
    page = read[:limit]
    return Page(page, _write_cursor(page[-1]) if len(read) > limit else None)


def _list_positions(rows: QuerySet[_ListedT], after: _Position | None, limit: int) -> QuerySet[Any, _Position]:
    if after is not None:
        rows = rows.filter(TupleLessThan(Tuple(F("created_at"), F("pk")), after))
    return rows.order_by("-created_at", "-pk").values_list("created_at", "pk")[:limit]


def _places(view: ServiceView, query: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the accounts of the query, or its environments if neither it nor the token names a merchant."""
    environment = Environment(query["environment"]) if "environment" in query else None
    merchant_id: str | None = query.get("merchant")
    view.require_scope(environment, merchant_id)
    scope = view.service.scope
    environments = scope.environments if environment is None else frozenset({environment})
    merchants = scope.merchants if merchant_id is None else frozenset({merchant_id})
    if merchants is None:
        yield from ({"account_environment": environment} for environment in sorted(environments))
    else:
        accounts = Account.objects.filter(merchant__in=merchants, environment__in=environments)
        yield from ({"account": pk} for pk in accounts.values_list("pk", flat=True))


def _write_cursor(row: Any) -> str:
    return f"{(row.created_at - _EPOCH) // _MICROSECOND}.{row.pk}"


def _read_cursor(text: str) -> _Position:
    microseconds, _, pk = text.partition(".")
    return _EPOCH + int(microseconds) * _MICROSECOND, pk
