"""An index by which a browser's preflight finds an account that lists its origin."""

from django.contrib.postgres.indexes import GinIndex
from django.db import migrations

from keyvault.models.migration_operations import AddIndexOnline


class Migration(migrations.Migration):
    atomic = False

    dependencies = [("keyvault", "0015_resumed_keys")]

    operations = [
        AddIndexOnline(
            model_name="account",
            index=GinIndex(fields=["allowed_origins"], name="account_origins", opclasses=["jsonb_path_ops"]),
        ),
    ]
