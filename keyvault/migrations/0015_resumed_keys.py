"""When a key was last resumed: the silence of keys counts from then."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("keyvault", "0014_resumed_accounts")]

    operations = [migrations.AddField("key", "resumed_at", models.DateTimeField(blank=True, null=True))]
