"""Recipient keys that merchants set, readers of the change feed, and the kind of a notice about the former.

The next migration adds the constraint on the kinds of notices again.
"""

import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("keyvault", "0003_search_indexes")]

    operations = [
        migrations.CreateModel(
            name="FeedReader",
            fields=[
                ("reader_id", models.CharField(max_length=64, primary_key=True, serialize=False)),
                ("lineage", models.CharField(max_length=16)),
                ("offered_sequence", models.PositiveBigIntegerField(default=0)),
                ("created_at", models.DateTimeField()),
            ],
            options={
                "indexes": [
                    models.Index(fields=["lineage"], name="feed_reader_lineage"),
                    models.Index(fields=["created_at"], name="feed_reader_created"),
                ],
            },
        ),
        migrations.CreateModel(
            name="RecipientKey",
            fields=[
                ("version", models.PositiveIntegerField(default=1, editable=False)),
                ("recipient_key_id", models.CharField(max_length=32, primary_key=True, serialize=False)),
                (
                    "account_environment",
                    models.CharField(
                        choices=[("sandbox", "sandbox"), ("production", "production")],
                        max_length=32,
                        verbose_name="environment",
                    ),
                ),
                ("public_key", models.CharField(max_length=43)),
                ("approvals_needed", models.PositiveSmallIntegerField()),
                ("created_at", models.DateTimeField()),
                ("applies_at", models.DateTimeField()),
                ("withdrawn_at", models.DateTimeField(blank=True, null=True)),
                (
                    "account",
                    models.ForeignKey(
                        db_index=False,
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="recipient_keys",
                        to="keyvault.account",
                    ),
                ),
                (
                    "credential",
                    models.ForeignKey(
                        db_index=False,
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="recipient_keys",
                        to="keyvault.credential",
                    ),
                ),
                (
                    "key",
                    models.ForeignKey(
                        db_index=False,
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="+",
                        to="keyvault.key",
                    ),
                ),
            ],
            options={
                "indexes": [
                    models.Index(fields=["credential", "-created_at"], name="recipient_by_credential"),
                    models.Index(fields=["-created_at", "-recipient_key_id"], name="recipient_newest"),
                    models.Index(fields=["account", "-created_at"], name="recipient_account"),
                    models.Index(fields=["account_environment", "-created_at"], name="recipient_env"),
                    models.Index(
                        condition=models.Q(("withdrawn_at__isnull", True)),
                        fields=["applies_at"],
                        name="recipient_pending",
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="RecipientKeyApproval",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("version", models.PositiveIntegerField(default=1, editable=False)),
                ("person", models.CharField(max_length=32)),
                ("plan_digest", models.CharField(max_length=64)),
                ("created_at", models.DateTimeField()),
                (
                    "approver",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT, related_name="+", to=settings.AUTH_USER_MODEL
                    ),
                ),
                (
                    "recipient_key",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="approvals",
                        to="keyvault.recipientkey",
                    ),
                ),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(fields=("recipient_key", "person"), name="recipient_approval_once")
                ],
            },
        ),
        migrations.AddField(
            model_name="servicetoken",
            name="max_readers",
            field=models.PositiveSmallIntegerField(db_default=64, default=64),
        ),
        migrations.AddField(
            model_name="servicetoken",
            name="max_staleness_seconds",
            field=models.PositiveSmallIntegerField(db_default=10, default=10),
        ),
        migrations.RemoveConstraint(model_name="notice", name="notice_kind"),
        migrations.AlterField(
            model_name="notice",
            name="kind",
            field=models.CharField(choices=[('key.issued', 'key.issued'), ('key.revoked', 'key.revoked'), ('key.compromised', 'key.compromised'), ('rotation.planned', 'rotation.planned'), ('rotation.replacement_available', 'rotation.replacement available'), ('rotation.predecessor_available', 'rotation.predecessor available'), ('rotation.replacement_awaited', 'rotation.replacement awaited'), ('rotation.predecessor_retiring', 'rotation.predecessor retiring'), ('rotation.used_in_quarantine', 'rotation.used in quarantine'), ('rotation.stalled', 'rotation.stalled'), ('rotation.bypassed', 'rotation.bypassed'), ('rotation.blocked', 'rotation.blocked'), ('rotation.ended', 'rotation.ended'), ('schedule.stalled', 'schedule.stalled'), ('standing_approval.expiring', 'standing approval.expiring'), ('standing_approval.expired', 'standing approval.expired'), ('campaign.halted', 'campaign.halted'), ('credential.without_key', 'credential.without key'), ('credential.recipient_key_set', 'credential.recipient key set'), ('webhook.failed', 'webhook.failed'), ('webhook.test', 'webhook.test'), ('backend.unattributed', 'backend.unattributed'), ('backend.denied', 'backend.denied'), ('journal.failed', 'journal.failed'), ('operator.locked', 'operator.locked'), ('address.locked', 'address.locked'), ('journal.loss_accepted', 'journal.loss accepted'), ('audit.rollback_accepted', 'audit.rollback accepted'), ('anchor.late', 'anchor.late'), ('clock.differs', 'clock.differs'), ('process.lost', 'process.lost'), ('queue.late', 'queue.late'), ('approval.disowned', 'approval.disowned'), ('operator.unfamiliar_sign_in', 'operator.unfamiliar sign in'), ('operator.invited', 'operator.invited')], max_length=32),
        ),
    ]
