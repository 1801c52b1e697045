from django.db import migrations, models
from django.db.models import Q

from keyvault.models.migration_operations import AddConstraintOnline, AddIndexOnline


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("keyvault", "LEAF")]

    operations = [
        AddIndexOnline("order", models.Index(fields=["rehearsal_amount"], name="rehearsal_order_amount")),
        AddIndexOnline("key", models.Index(fields=["rehearsal_weight"], name="rehearsal_key_weight")),
        AddConstraintOnline(
            "order",
            models.CheckConstraint(
                name="rehearsal_amount_positive",
                condition=Q(rehearsal_amount__isnull=True) | Q(rehearsal_amount__gte=1),
            ),
        ),
    ]
