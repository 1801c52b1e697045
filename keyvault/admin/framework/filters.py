"""List filters of the console."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest

Conditions = Mapping[str, Q]
"""Condition of each value that the query string accepts."""


class StateFilter(admin.SimpleListFilter):
    """Filter by states that no column stores; `state_filter` makes one for a list.

    An unknown state in the query string filters nothing.
    """

    title = "state"
    parameter_name = "state"
    labels: ClassVar[Mapping[str, str]] = {}

    @staticmethod
    def read_conditions() -> Conditions:
        return {}

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(state, self.labels.get(state, state)) for state in self.read_conditions()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        condition = self.read_conditions().get(self.value() or "")
        return queryset if condition is None else queryset.filter(condition)


def state_filter(
    conditions: Conditions | Callable[[], Conditions],
    *,
    name: str = "state",
    title: str = "state",
    labels: Mapping[str, str] | None = None,
) -> type[StateFilter]:
    """Return a filter for a list.

    Args:
        conditions: by state; a function for conditions that depend on the time.
        name: parameter in the query string.
        labels: by state; a state without a label is its own.
    """
    read = conditions if callable(conditions) else lambda: conditions
    members = {
        "title": title,
        "parameter_name": name,
        "read_conditions": staticmethod(read),
        "labels": labels or {},
        "__module__": __name__,
    }
    return type("StateFilter", (StateFilter,), members)
