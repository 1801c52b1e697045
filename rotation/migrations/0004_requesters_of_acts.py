"""Acts under break-glass of an earlier version name who asked for the rotation or the campaign that they are about."""

from django.db import migrations

_FILL_IN = """
UPDATE keyvault_breakglass SET requester_person = coalesce(
    CASE WHEN event = 'rotation.retirement_approved' THEN (
        SELECT t.requester_person FROM rotation_retirement t WHERE t.rotation_id = subject
        ORDER BY t.created_at DESC LIMIT 1) END,
    (SELECT r.requester_person FROM rotation_rotation r WHERE r.rotation_id = subject),
    (SELECT c.requester_person FROM rotation_campaign c WHERE c.campaign_id = subject),
    '')
WHERE requester_person = '' AND reviewed_at IS NULL
"""


class Migration(migrations.Migration):
    dependencies = [("keyvault", "0011_break_glass_requester"), ("rotation", "0003_rotations_under_way")]
    operations = [migrations.RunSQL(_FILL_IN, migrations.RunSQL.noop)]
