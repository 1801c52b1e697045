"""Counts go up each second in rows of thousands of keys.

PostgreSQL writes a changed row anew, and leaves the indexes alone as long as the new one finds room in the old one's
page. Full pages have none: then each count going up is an entry in every index of the table.
"""

import django.db.models.deletion
from django.db import migrations, models
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.state import StateApps

COUNTED = ("keyvault_keyuse", "keyvault_usebucket")
FILLED = 45
"""Percent of a page that new rows may fill: each of them fits in once more."""


def leave_room(apps: StateApps, schema_editor: BaseDatabaseSchemaEditor) -> None:
    if schema_editor.connection.vendor == "postgresql":
        for table in COUNTED:
            schema_editor.execute(f"ALTER TABLE {table} SET (fillfactor = {FILLED})")


def leave_none(apps: StateApps, schema_editor: BaseDatabaseSchemaEditor) -> None:
    if schema_editor.connection.vendor == "postgresql":
        for table in COUNTED:
            schema_editor.execute(f"ALTER TABLE {table} RESET (fillfactor)")


class Migration(migrations.Migration):
    dependencies = [("keyvault", "0007_verifier")]

    operations = [
        migrations.AlterField(
            model_name="usebucket",
            name="key",
            # The unique constraint's index begins with it.
            field=models.ForeignKey(
                db_index=False,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="use_buckets",
                to="keyvault.key",
            ),
        ),
        migrations.RunPython(leave_room, leave_none),
    ]
