"""A migration that rebuilds a table keeps every database rule in force."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.sql import emit_post_migrate_signal, emit_pre_migrate_signal
from django.db import connection, models
from django.db.migrations import Migration

from keyvault.models import Order, ServiceToken
from keyvault.models.triggers import ensure_triggers, expected_triggers, list_triggers, missing_triggers


def _change_column(old: models.Field[str, str], new: models.Field[str, str]) -> None:
    """Change the table as `migrate` does, including the signals that it sends."""
    plan = [(Migration("rebuilding", "keyvault"), False)]
    emit_pre_migrate_signal(0, False, "default", plan=plan)
    with connection.schema_editor() as editor:
        editor.alter_field(ServiceToken, old, new)
    emit_post_migrate_signal(0, False, "default", plan=plan)


@pytest.mark.database
@pytest.mark.django_db(transaction=True)
def test_rebuilt_table_keeps_its_triggers() -> None:
    """SQLite renames a table to rebuild it, and refuses while another table's trigger names it."""
    field: models.Field[str, str] = ServiceToken._meta.get_field("name")
    wider: models.Field[str, str] = models.CharField(max_length=1000)
    wider.set_attributes_from_name("name")
    wider.model = ServiceToken
    _change_column(field, wider)
    try:
        assert missing_triggers(connection) == set()
    finally:
        _change_column(wider, field)
    assert missing_triggers(connection) == set()


@pytest.mark.database
@pytest.mark.django_db(transaction=True)
def test_triggers_of_a_rebuilt_table_are_restored_by_migrate() -> None:
    """SQLite rebuilds a table when a column changes and loses its triggers; the end of `migrate` restores them."""
    before = expected_triggers(connection.vendor)
    field = Order._meta.get_field("currency")
    wider: models.Field[Any, Any] = models.CharField(max_length=9)
    wider.set_attributes_from_name("currency")
    wider.model = Order  # a table that no other table's trigger names
    try:
        with connection.schema_editor() as editor:
            editor.alter_field(Order, field, wider)
        if connection.vendor == "sqlite":
            assert not any(name.startswith("order_") for name in list_triggers(connection)), "the table was not rebuilt"
        call_command("migrate", interactive=False, verbosity=0)
        assert list_triggers(connection) == before
    finally:
        with connection.schema_editor() as editor:
            editor.alter_field(Order, wider, field)
        ensure_triggers(connection)
