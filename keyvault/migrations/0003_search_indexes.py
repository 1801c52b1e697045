"""Indexes of the console's search: the beginning of a merchant's name, and the last characters of a key id."""

from django.db import migrations, models
from django.db.models.functions import Substr

from keyvault.models.migration_operations import AddIndexOnline


class Migration(migrations.Migration):
    atomic = False

    dependencies = [("keyvault", "0002_usage_total")]

    operations = [
        AddIndexOnline(
            model_name="merchant",
            index=models.Index(fields=["name"], name="merchant_name", opclasses=["varchar_pattern_ops"]),
        ),
        AddIndexOnline(model_name="key", index=models.Index(Substr("key_id", 11), name="key_tail")),
    ]
