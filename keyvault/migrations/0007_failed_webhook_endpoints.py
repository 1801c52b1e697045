"""An index of webhook endpoints that were disabled after failures, which the console lists among all endpoints."""

from django.db import migrations, models

from keyvault.models.migration_operations import AddIndexOnline


class Migration(migrations.Migration):
    atomic = False

    dependencies = [("keyvault", "0006_verifiers_by_their_end")]

    operations = [
        AddIndexOnline(
            model_name="webhookendpoint",
            index=models.Index(
                fields=["disabled_at"],
                name="webhook_endpoint_failed",
                condition=models.Q(("disabled_at__isnull", False), models.Q(("disabled_why", ""), _negated=True)),
            ),
        ),
    ]
