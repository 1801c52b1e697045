"""List filters of the console."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest

from keyvault.admin.framework.choices import ComboboxInput


class TextFilter(admin.SimpleListFilter):
    """Filter by what the operator types, with the choices of a combobox: no list has all its values.

    Subclasses define `choices_name`, the name of a page of choices, and `queryset`.
    """

    template = "console/text_filter.html"
    choices_name = ""

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return []

    def has_output(self) -> bool:
        return True

    @property
    def text(self) -> str:
        """The typed text; empty: the filter selects all rows."""
        return (self.value() or "").strip()[:_MAX_TEXT]

    def choices(  # type: ignore[override]  # its template reads other members
        self, changelist: Any
    ) -> Iterator[dict[str, Any]]:
        """Yield what the template shows: the field, the other parameters of the list, and the list without it."""
        name = str(self.parameter_name)
        kept = {each: value for each, value in changelist.params.items() if each != name}
        field = ComboboxInput(self.choices_name).render(name, self.text, {"id": f"filter-{name}"})
        yield {"text": self.text, "field": field, "kept": kept, "without": changelist.get_query_string(remove=[name])}


_MAX_TEXT = 200

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
