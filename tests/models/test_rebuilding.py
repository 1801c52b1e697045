"""A migration that rebuilds a table keeps every database rule in force."""

from __future__ import annotations

import pytest
from django.core.management.sql import emit_post_migrate_signal, emit_pre_migrate_signal
from django.db import connection, models
from django.db.migrations import Migration

from keyvault.models import ServiceToken
from keyvault.models.triggers import missing_triggers


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
