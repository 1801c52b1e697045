"""Choices of rows for a combobox: a guarded view, and the text field that offers its rows.

The field is a text input for an id, so it also works without scripts, and no form lists all rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from django import forms
from django.contrib.admin import AdminSite
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import reverse

from keyvault.access.permissions import Permission
from keyvault.access.scopes import AccessScope
from keyvault.admin.framework.enforcement import operator_of
from keyvault.admin.framework.menu import ConsolePage

MAX_CHOICES = 20
"""Maximum rows that a combobox offers."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A row: `value` is what the field sends, usually its id; `detail` tells equal labels apart."""

    value: str
    label: str
    detail: str = ""


FindChoices = Callable[[AccessScope, str, int], Sequence[Choice]]
"""Return up to that many rows of the scope that match the typed text, by indexes. An empty text: the first rows."""


def choices_page(name: str, permissions: tuple[Permission, ...], find: FindChoices) -> ConsolePage:
    """Return the page of choices for `site.add_page`. Its address is `choices/NAME/`, and `q` is the typed text.

    Args:
        name: unique among the choices, such as `merchants`.
        permissions: any one of them opens the view.
    """

    def view(site: AdminSite, request: HttpRequest) -> HttpResponse:
        words = request.GET.get("q", "").strip()[:200]
        found = [] if "\0" in words else list(find(operator_of(request).scope, words, MAX_CHOICES + 1))
        choices = [{"value": each.value, "label": each.label, "detail": each.detail} for each in found[:MAX_CHOICES]]
        response = JsonResponse({"choices": choices, "has_more": len(found) > MAX_CHOICES})
        response["Cache-Control"] = "no-store"
        return response

    return ConsolePage(f"choices_{name}", f"choices/{name}/", "", "", permissions, view)


class ComboboxInput(forms.TextInput):
    """Text input that offers the rows of a page of choices. `name`: as of `choices_page`."""

    def __init__(self, name: str, attrs: dict[str, Any] | None = None) -> None:
        super().__init__(attrs)
        self.choices_name = name

    def get_context(self, name: str, value: Any, attrs: dict[str, Any] | None) -> dict[str, Any]:
        url = reverse(f"admin:choices_{self.choices_name}")
        return super().get_context(name, value, {**(attrs or {}), "data-combobox": url, "spellcheck": "false"})
