"""List filters of the console."""

from collections.abc import Mapping
from typing import Any, ClassVar

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest


class StateFilter(admin.SimpleListFilter):
    """Filter by states that no column stores. Subclasses map each state to its condition in `states`.

    An unknown state in the query string filters nothing.
    """

    title = "state"
    parameter_name = "state"
    states: ClassVar[Mapping[str, Q]] = {}

    def conditions(self) -> Mapping[str, Q]:
        """Return the condition of each state. Override it for conditions that depend on the time."""
        return self.states

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(state, state) for state in self.conditions()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        condition = self.conditions().get(self.value() or "")
        return queryset if condition is None else queryset.filter(condition)
