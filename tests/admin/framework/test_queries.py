"""Queries of every page of the console, by GET."""

import re
from typing import Any
from urllib.parse import urlencode

import pytest
from django import forms
from django.contrib import admin
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from keyvault.access.roles import Role
from keyvault.admin.framework import attention
from keyvault.admin.framework.model_admin import ConsoleModelAdmin
from tests.admin.desk import Desk, address, browser, text_of
from tests.factories import make_operator
from tests.rotation.admin.test_rotation_actions import emergency

from .test_enforcement import OPEN, every_address

MAX_QUERIES = 12

KINDS_OF_APPROVALS = 7
"""Models whose rows wait for approval."""


def find_waiting(client: Client) -> list[str]:
    """Return what the operator can choose on the list of approvals."""
    return re.findall(r'name="item" value="([^"]+)"', text_of(client.get(address("approvals"))))


@pytest.mark.usefixtures("menu_counts")
def test_queries_of_every_page_are_few(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: no page of the console makes more than MAX_QUERIES queries, those of the menu's counts included."""
    monkeypatch.setattr(attention, "MENU_SECONDS", 1e9)
    emergency(desk)  # has its own group on the list of approvals
    paths = [(name, path) for name, path in every_address(desk) if name not in OPEN]
    client, found = browser(make_operator("somebody", *Role)), dict[str, int]()
    client.get("/admin/")
    waiting = find_waiting(client)
    assert len({label for label, _, _ in (choice.partition(":") for choice in waiting)}) == KINDS_OF_APPROVALS
    paths.append(
        ("approvals_review of all", f"{address('approvals_review')}?{urlencode([('item', each) for each in waiting])}")
    )
    for name, path in paths:
        attention.menu_counts.forget_all()
        with CaptureQueriesContext(connection) as made:
            client.get(path)
        statements = [each["sql"] for each in made.captured_queries if "SAVEPOINT" not in each["sql"]]
        found[name] = len(statements)
    assert {name: count for name, count in found.items() if count > MAX_QUERIES} == {}


@pytest.mark.parametrize("model_admin", admin.site._registry.values(), ids=lambda each: each.opts.model_name)
def test_queries_no_column_is_hidden_by_a_relation(model_admin: ConsoleModelAdmin) -> None:
    """Guarantee: no list reads a row for each of its rows: Django prefers a model's field to a column's method."""
    relations = {field.name for field in model_admin.opts.get_fields() if field.is_relation}
    columns = [name for name in model_admin.list_display if isinstance(name, str) and hasattr(type(model_admin), name)]
    assert relations.isdisjoint(columns)


@pytest.mark.parametrize("model_admin", admin.site._registry.values(), ids=lambda each: each.opts.model_name)
def test_queries_no_form_lists_rows(model_admin: ConsoleModelAdmin) -> None:
    """Guarantee: no form has a choice for each row of a table."""
    actions: list[Any] = [*model_admin.row_actions, *model_admin.create_actions]
    forms_of = [action.form for action in actions]
    listing = [
        (form.__name__, name)
        for form in forms_of
        for name, field in form.base_fields.items()
        if isinstance(field, forms.ModelChoiceField) and isinstance(field.widget, forms.Select)
    ]
    assert listing == []
