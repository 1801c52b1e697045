from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("keyvault", "LEAF")]

    operations = [
        migrations.AddField("key", "rehearsal_weight", models.IntegerField(db_default=1)),
        migrations.AddField("order", "rehearsal_amount", models.BigIntegerField(null=True)),
    ]
