"""When an account was last resumed: the silence of keys counts from then."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("keyvault", "0013_resumed_merchants")]

    operations = [migrations.AddField("account", "resumed_at", models.DateTimeField(blank=True, null=True))]
