"""An index of verifiers by the time when they deregistered: a receipt reads those that run, and the latest others."""

from django.db import migrations, models

from keyvault.models.migration_operations import AddIndexOnline


class Migration(migrations.Migration):
    atomic = False

    dependencies = [("keyvault", "0005_notice_kinds")]

    operations = [
        AddIndexOnline(model_name="verifier", index=models.Index(fields=["stopped_at"], name="verifier_stopped")),
    ]
