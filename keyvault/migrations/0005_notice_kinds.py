"""The constraint on the kinds of notices, with the kind of recipient keys."""

from django.db import migrations, models

from keyvault.models.migration_operations import AddConstraintOnline


class Migration(migrations.Migration):
    atomic = False

    dependencies = [("keyvault", "0004_recipient_keys_and_feed_readers")]

    operations = [
        AddConstraintOnline(
            model_name="notice",
            constraint=models.CheckConstraint(condition=models.Q(('kind__in', ['key.issued', 'key.revoked', 'key.compromised', 'rotation.planned', 'rotation.replacement_available', 'rotation.predecessor_available', 'rotation.replacement_awaited', 'rotation.predecessor_retiring', 'rotation.used_in_quarantine', 'rotation.stalled', 'rotation.bypassed', 'rotation.blocked', 'rotation.ended', 'schedule.stalled', 'standing_approval.expiring', 'standing_approval.expired', 'campaign.halted', 'credential.without_key', 'credential.recipient_key_set', 'webhook.failed', 'webhook.test', 'backend.unattributed', 'backend.denied', 'journal.failed', 'operator.locked', 'address.locked', 'journal.loss_accepted', 'audit.rollback_accepted', 'anchor.late', 'clock.differs', 'process.lost', 'queue.late', 'approval.disowned', 'operator.unfamiliar_sign_in', 'operator.invited'])), name='notice_kind'),
        ),
    ]
