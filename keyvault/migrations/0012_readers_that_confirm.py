"""What a reader of the change feed has not confirmed yet, and the merchants whose keys a reporter verifies."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("keyvault", "0011_checkpoints_by_key")]

    operations = [
        migrations.AddField("feedreader", "awaited_sequence", models.PositiveBigIntegerField(db_default=0, default=0)),
        migrations.AddField("feedreader", "awaited_since", models.DateTimeField(blank=True, null=True)),
        migrations.AddField("usagereporter", "merchants", models.TextField(blank=True, db_default="", default="")),
    ]
