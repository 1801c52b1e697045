"""Service tokens made before there was a lineage are each the first of their own."""

from django.db import migrations
from django.db.models import F


def begin_lineages(apps, schema_editor):
    apps.get_model("keyvault", "ServiceToken").objects.filter(lineage="").update(lineage=F("token_id"))


class Migration(migrations.Migration):
    dependencies = [("keyvault", "0003_integration_plane")]
    operations = [migrations.RunPython(begin_lineages, migrations.RunPython.noop)]
