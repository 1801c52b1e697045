"""An index of an account's newest denied requests, which the page of its merchant lists. It replaces a narrower one."""

from django.db import migrations, models

from keyvault.models.migration_operations import AddIndexOnline, RemoveIndexOnline


class Migration(migrations.Migration):
    atomic = False

    dependencies = [("keyvault", "0007_failed_webhook_endpoints")]

    operations = [
        AddIndexOnline(
            model_name="refusal",
            index=models.Index(
                fields=["merchant_id", "environment", "-at", "-request_id"],
                name="refusal_of_account",
                condition=models.Q(("merchant_id", ""), _negated=True),
            ),
        ),
        RemoveIndexOnline(model_name="refusal", name="refusal_by_merchant"),
    ]
