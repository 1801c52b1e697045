"""An index of the checkpoints that a version of a key signed, by which an earlier one of a later version is found."""

from django.db import migrations, models

from keyvault.models.migration_operations import AddIndexOnline


class Migration(migrations.Migration):
    atomic = False

    dependencies = [("keyvault", "0010_entry_points")]

    operations = [
        AddIndexOnline(
            model_name="auditcheckpoint",
            index=models.Index(fields=["scope", "signer", "key_version", "number"], name="audit_checkpoint_by_key"),
        ),
    ]
