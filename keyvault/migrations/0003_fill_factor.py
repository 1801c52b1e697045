"""Counts are updated every second in rows of thousands of keys, so their pages keep free space.

PostgreSQL writes a changed row anew and leaves the indexes alone while the page has room for it. In a full page each
update adds an entry to every index of the table.
"""

from django.db import migrations

COUNTED = ("keyvault_keyuse", "keyvault_keysource", "keyvault_usebucket")
FILL_FACTOR = 45
"""Percentage of a page that new rows may fill."""


def set_fill_factor(apps, schema_editor):
    if schema_editor.connection.vendor == "postgresql":
        for table in COUNTED:
            schema_editor.execute(f"ALTER TABLE {table} SET (fillfactor = {FILL_FACTOR})")


class Migration(migrations.Migration):
    dependencies = [("keyvault", "0002_roles")]
    operations = [migrations.RunPython(set_fill_factor, migrations.RunPython.noop)]
