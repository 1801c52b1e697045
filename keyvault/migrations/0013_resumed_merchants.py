"""When a merchant, an account or a key was last resumed: the silence of keys counts from then."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("keyvault", "0012_readers_that_confirm")]

    operations = [
        migrations.AddField("merchant", "resumed_at", models.DateTimeField(blank=True, null=True)),
        migrations.AddField("account", "resumed_at", models.DateTimeField(blank=True, null=True)),
        migrations.AddField("key", "resumed_at", models.DateTimeField(blank=True, null=True)),
    ]
