from django.db import migrations

from keyvault.models.migration_operations import RemoveIndexOnline


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("keyvault", "LEAF")]

    operations = [
        RemoveIndexOnline("order", "rehearsal_order_amount"),
        RemoveIndexOnline("key", "rehearsal_key_weight"),
        migrations.SeparateDatabaseAndState(
            state_operations=[
                migrations.RemoveConstraint("order", "rehearsal_amount_positive"),
                migrations.RemoveField("order", "rehearsal_amount"),
                migrations.RemoveField("key", "rehearsal_weight"),
            ],
        ),
    ]
