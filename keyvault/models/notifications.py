"""The outbox: notices about credentials, written in the transaction of the change and delivered afterwards."""

from django.conf import settings
from django.db import models
from django.db.models import Case, F, Q, Value, When

from keyvault.domain.notifications import WITHOUT_ACCOUNT, NoticeKind
from keyvault.models.columns import account_environment, at, choice, choices_check, created_at
from keyvault.models.merchants import Account, WebhookEndpoint
from keyvault.models.recording import RecordedModel

UNSEEN_NOTICE = Q(is_alarm=True, seen_at__isnull=True)
"""Alarms that no operator has marked as seen."""

IS_UNSEEN = Case(When(UNSEEN_NOTICE, then=Value(True)), default=Value(False), output_field=models.BooleanField())
"""Sort key of the inbox; the index `notice_inbox` has the same expression."""

SETTLED_NOTICE = Q(is_alarm=False) | Q(seen_at__isnull=False)
"""Notices that need no operator's attention any more."""


class Notice(RecordedModel):
    """One event in a credential's lifecycle; `payload` has ids and times, never material.

    `account`: None for a notice about the installation, which only operators see.
    `is_alarm`: it needs attention and stays in the console's inbox until `seen_at`.
    """

    notice_id = models.CharField(primary_key=True, max_length=32)
    account = models.ForeignKey(Account, models.PROTECT, null=True, blank=True, related_name="notices")
    account_environment = account_environment(null=True, blank=True)
    kind = choice(NoticeKind)
    subject = models.CharField(max_length=64)
    payload = models.JSONField()
    is_alarm = models.BooleanField(default=False)
    created_at = created_at()
    seen_at = at()
    seen_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.PROTECT, null=True, blank=True, related_name="+")

    class Meta:
        constraints = [
            choices_check("notice_kind", "kind", NoticeKind),
            models.CheckConstraint(
                name="notice_of_an_account",
                condition=Q(account__isnull=False) | Q(kind__in=sorted(kind.value for kind in WITHOUT_ACCOUNT)),
            ),
        ]
        indexes = [
            models.Index(fields=["account", "-created_at"], name="notice_by_account"),
            models.Index(fields=["subject", "kind"], name="notice_by_subject"),
            models.Index(fields=["created_at"], name="notice_unseen", condition=UNSEEN_NOTICE),
            models.Index(IS_UNSEEN.desc(), F("created_at").desc(), F("notice_id").desc(), name="notice_inbox"),
            models.Index(
                F("account_environment"),
                IS_UNSEEN.desc(),
                F("created_at").desc(),
                F("notice_id").desc(),
                name="notice_inbox_env",
            ),
            models.Index(fields=["created_at"], name="notice_settled", condition=SETTLED_NOTICE),
        ]

    def __str__(self) -> str:
        return f"{self.kind} ({self.notice_id})"

    def alters(self) -> None:
        return None


class DeliveryState(models.TextChoices):
    DUE = "due"
    DELIVERED = "delivered"
    GIVEN_UP = "given_up"


class WebhookDelivery(models.Model):
    """The delivery of a notice to one endpoint, retried with growing pauses until `give_up_at`.

    `is_urgent`: it is sent before the others. `give_up_at`: an attempt that fails after this time is the last one.
    """

    notice = models.ForeignKey(Notice, models.PROTECT, related_name="deliveries")
    # The index `webhook_delivery_newest` begins with the endpoint.
    endpoint = models.ForeignKey(WebhookEndpoint, models.PROTECT, related_name="deliveries", db_index=False)
    state = choice(DeliveryState, default=DeliveryState.DUE)
    is_urgent = models.BooleanField(default=False)
    attempts = models.PositiveSmallIntegerField(default=0)
    due_at = models.DateTimeField()
    give_up_at = models.DateTimeField()
    delivered_at = at()
    last_status = models.PositiveSmallIntegerField(null=True, blank=True)
    last_error = models.CharField(max_length=300, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["notice", "endpoint"], name="webhook_delivery_once"),
            choices_check("webhook_delivery_state", "state", DeliveryState),
        ]
        indexes = [
            models.Index(fields=["endpoint", "-id"], name="webhook_delivery_newest"),
            models.Index(
                fields=["is_urgent", "endpoint", "due_at", "id"],
                name="webhook_delivery_due",
                condition=Q(state="due"),
            ),
            models.Index(fields=["is_urgent", "due_at"], name="webhook_delivery_due_at", condition=Q(state="due")),
            models.Index(fields=["due_at"], name="webhook_delivery_settled", condition=~Q(state="due")),
        ]

    def __str__(self) -> str:
        return f"{self.notice_id} to {self.endpoint_id}: {self.state}"


class AlarmChannel(models.TextChoices):
    """How operators receive alarms outside of the console."""

    EMAIL = "email"
    WEBHOOK = "webhook"


class AlarmDelivery(models.Model):
    """An alarm that operators have not received over a channel. The row is deleted with its delivery.

    `due_at`: when the next attempt is made; an attempt under way moves it.
    """

    notice = models.ForeignKey(Notice, models.PROTECT, related_name="alarm_deliveries")
    channel = choice(AlarmChannel)
    attempts = models.PositiveSmallIntegerField(default=0)
    created_at = models.DateTimeField()
    due_at = models.DateTimeField()
    last_error = models.CharField(max_length=300, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["notice", "channel"], name="alarm_delivery_once"),
            choices_check("alarm_delivery_channel", "channel", AlarmChannel),
        ]
        indexes = [
            models.Index(fields=["channel", "due_at", "id"], name="alarm_delivery_due"),
            models.Index(fields=["created_at"], name="alarm_delivery_old"),
        ]

    def __str__(self) -> str:
        return f"{self.notice_id} by {self.channel}"


class WebhookBreaker(models.Model):
    """The circuit breaker of an endpoint whose last attempt got no reply; deleted with the next reply.

    `failures`: consecutive attempts without a reply. `open_until`: no attempt is made before; None: closed.
    """

    endpoint = models.OneToOneField(WebhookEndpoint, models.PROTECT, primary_key=True, related_name="breaker")
    failures = models.PositiveIntegerField()
    open_until = at()

    def __str__(self) -> str:
        return f"{self.endpoint_id}: {self.failures} attempts without a reply"
