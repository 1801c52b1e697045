"""Rotations that an earlier version left open: its deadline stood in the plan only, its quarantine in the state only."""

from datetime import datetime

from django.db import migrations

_CLOSED = ["cancelled", "completed", "expired", "rejected"]


def fill_in(apps, schema_editor):
    rotations = apps.get_model("rotation", "Rotation").objects.exclude(state__in=_CLOSED)
    for rotation in rotations.filter(deadline_at=None).iterator():
        deadline = rotation.plan.get("deadline")
        changes = {"deadline_at": datetime.fromisoformat(deadline)} if deadline else {}
        if rotation.state == "quarantine" and rotation.quarantined_at is None:
            changes["quarantined_at"] = rotation.entered_at
        rotations.filter(pk=rotation.pk).update(**changes)


class Migration(migrations.Migration):
    dependencies = [("rotation", "0002_whole_engine")]
    operations = [migrations.RunPython(fill_in, migrations.RunPython.noop)]
