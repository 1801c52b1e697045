"""Template tags of the console, for values that a template has and no view rendered."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from django import template
from django.utils.safestring import SafeString

from keyvault.admin.framework import widgets

register = template.Library()


@register.simple_tag
def badge(state: str) -> SafeString:
    """`{% badge row.state %}`: see `widgets.badge`."""
    return widgets.badge(state)


@register.simple_tag
def moment(at: datetime | None, missing: str = widgets.NOTHING) -> SafeString:
    """`{% moment row.created_at %}`: see `widgets.moment`."""
    return widgets.moment(at, missing=missing)


@register.simple_tag
def identifier(text: object) -> SafeString:
    """`{% identifier row.pk %}`: see `widgets.identifier`."""
    return widgets.identifier(text)


@register.simple_tag
def selected_choice(choices: Iterable[Mapping[str, Any]]) -> str:
    """Return the label of the chosen value of a list filter; empty: the filter selects all rows."""
    listed = list(choices)
    return next((str(choice["display"]) for choice in listed[1:] if choice["selected"]), "")
