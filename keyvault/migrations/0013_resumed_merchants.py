"""When a merchant was last resumed: the silence of keys counts from then."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("keyvault", "0012_readers_that_confirm")]

    operations = [migrations.AddField("merchant", "resumed_at", models.DateTimeField(blank=True, null=True))]
