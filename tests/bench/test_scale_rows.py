"""The rows of the large load are rows that the product could have written."""

import pytest
from django.apps import apps
from django.db import connection
from django.db.models import ForeignKey

from . import scale_rows

pytestmark = [pytest.mark.postgres, pytest.mark.django_db]

SIZE = scale_rows.PlatformSize(1_000)


def test_load_leaves_no_row_without_its_parent() -> None:
    """The copies skip foreign keys, so a wrong expression would go unnoticed and be measured."""
    scale_rows.load(SIZE)
    orphans = []
    for model in apps.get_models():
        for field in model._meta.local_concrete_fields:
            if isinstance(field, ForeignKey):
                parent = field.related_model
                missing = (
                    f"SELECT count(*) FROM {model._meta.db_table} child WHERE {field.column} IS NOT NULL AND NOT EXISTS"  # noqa: S608  names of ours
                    f" (SELECT FROM {parent._meta.db_table} parent WHERE parent.{parent._meta.pk.column} ="
                    f" child.{field.column})"
                )
                with connection.cursor() as cursor:
                    cursor.execute(missing)
                    if cursor.fetchone() != (0,):
                        orphans.append((model.__name__, field.name))
    assert orphans == []
    # A chain whose head is not its newest entry gets no checkpoint.
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM keyvault_auditchain WHERE sequence > 0 AND NOT EXISTS (SELECT FROM"
            " keyvault_auditentry entry WHERE chain_id = name AND entry.sequence = keyvault_auditchain.sequence"
            " AND hash = head_hash)"
        )
        assert cursor.fetchone() == (0,)
