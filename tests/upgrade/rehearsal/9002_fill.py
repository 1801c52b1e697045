from django.db import migrations
from django.db.models import F, Q

from keyvault.models.migration_operations import Backfill


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("keyvault", "LEAF")]

    operations = [
        Backfill("order", Q(rehearsal_amount__isnull=True), {"rehearsal_amount": F("amount_minor")}),
    ]
