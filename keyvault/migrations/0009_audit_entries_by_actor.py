"""Indexes of the audit entries of an actor, of all scopes and of one, by which the console filters them."""

from django.db import migrations, models

from keyvault.models.migration_operations import AddIndexOnline


class Migration(migrations.Migration):
    atomic = False

    dependencies = [("keyvault", "0008_denials_of_an_account")]

    operations = [
        AddIndexOnline(
            model_name="auditentry", index=models.Index(fields=["actor", "-at"], name="audit_by_actor")
        ),
        AddIndexOnline(
            model_name="auditentry",
            index=models.Index(fields=["scope", "actor", "-at"], name="audit_by_scope_actor"),
        ),
    ]
