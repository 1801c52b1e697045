from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("keyvault", "LEAF")]

    # PostgreSQL drops the constraint of the column, too.
    operations = [
        migrations.RunSQL("ALTER TABLE keyvault_order DROP COLUMN rehearsal_amount"),
        migrations.RunSQL("ALTER TABLE keyvault_key DROP COLUMN rehearsal_weight"),
    ]
