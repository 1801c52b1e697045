"""The groups of the console, one for each role of `keyvault.access.roles`; what each may do stands there."""

from django.db import migrations

ROLES = ("key_administrator", "technical_account_manager", "approver", "auditor", "incident_responder")


def create_groups(apps, schema_editor):
    group = apps.get_model("auth", "Group")
    for role in ROLES:
        group.objects.get_or_create(name=role)


class Migration(migrations.Migration):
    dependencies = [("keyvault", "0001_initial"), ("auth", "0012_alter_user_first_name_max_length")]
    operations = [migrations.RunPython(create_groups, migrations.RunPython.noop)]
