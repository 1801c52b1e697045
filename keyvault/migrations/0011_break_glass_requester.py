"""An act under break-glass names who asked for what it is about: that person does not review it.

Those that were reviewed already stay as they are. What is about a rotation or a campaign is filled in by `rotation`.
"""

from django.db import migrations, models

_FILL_IN = """
UPDATE keyvault_breakglass SET requester_person = coalesce(
    (SELECT r.requester_person FROM keyvault_issuancerequest r WHERE r.request_id = subject), '')
WHERE reviewed_at IS NULL
"""


class Migration(migrations.Migration):
    dependencies = [("keyvault", "0010_journal_loss_accepted")]

    operations = [
        migrations.AddField(
            model_name="breakglass",
            name="requester_person",
            field=models.CharField(default="", max_length=32),
            preserve_default=False,
        ),
        migrations.AddConstraint(
            model_name="breakglass",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    ("reviewer_person__isnull", True),
                    models.Q(("reviewer_person", models.F("requester_person")), _negated=True),
                    _connector="OR",
                ),
                name="break_glass_not_requester",
            ),
        ),
        migrations.RunSQL(_FILL_IN, migrations.RunSQL.noop),
    ]
