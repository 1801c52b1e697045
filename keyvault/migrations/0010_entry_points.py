"""The fields `door` are named `entry_point`. The columns keep their name, which version 0.2.0 reads and writes."""

from django.db import migrations, models

POINTS = ["integration", "verify", "traefik", "nginx", "envoy"]


class Migration(migrations.Migration):
    dependencies = [("keyvault", "0009_audit_entries_by_actor")]

    operations = [
        migrations.SeparateDatabaseAndState(
            state_operations=[
                migrations.AlterField("verifier", "door", models.CharField(db_column="door", max_length=16)),
                migrations.RenameField("verifier", "door", "entry_point"),
                migrations.RemoveConstraint("refusal", "refusal_door"),
                migrations.AlterField(
                    "refusal",
                    "door",
                    models.CharField(choices=[(point, point) for point in POINTS], db_column="door", max_length=32),
                ),
                migrations.RenameField("refusal", "door", "entry_point"),
                migrations.AddConstraint(
                    "refusal",
                    models.CheckConstraint(condition=models.Q(entry_point__in=POINTS), name="refusal_door"),
                ),
            ]
        )
    ]
