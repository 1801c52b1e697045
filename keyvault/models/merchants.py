"""Merchants and their accounts: an account is a merchant in one environment, with that environment's settings."""

from django.contrib.postgres.indexes import GinIndex
from django.db import models
from django.db.models import Q

from keyvault.domain.environments import ConnectionMode, Environment
from keyvault.domain.ids import Subject
from keyvault.models.columns import LimitColumns, at, choice, choices_check, created_at, limit_check, prefix_index
from keyvault.models.recording import RecordedModel


class MerchantStatus(models.TextChoices):
    """`offboarded` is final: the merchant's accounts get no more keys."""

    ACTIVE = "active"
    SUSPENDED = "suspended"
    OFFBOARDED = "offboarded"


class Merchant(RecordedModel):
    """`resumed_at`: when its last suspension ended, if it had one."""

    merchant_id = models.CharField(primary_key=True, max_length=64)
    name = models.CharField(max_length=200)
    status = choice(MerchantStatus, default=MerchantStatus.ACTIVE)
    resumed_at = at()
    created_at = created_at()

    class Meta:
        constraints = [choices_check("merchant_status", "status", MerchantStatus)]
        indexes = [
            models.Index(
                fields=["merchant_id"], name="merchant_offboarded", condition=Q(status=MerchantStatus.OFFBOARDED)
            ),
            prefix_index("merchant_name", "name"),
        ]

    def __str__(self) -> str:
        return self.merchant_id

    def alters(self) -> Subject:
        return "merchant", self.merchant_id

    def has_ended(self) -> bool:
        return str(self.status) == MerchantStatus.OFFBOARDED


class Account(LimitColumns):
    """A merchant in one environment. `limit_…` None: the default (25 per second in sandbox, 100 in production).

    `allowed_origins`: browser origins of its public keys. `customer_token_seconds`: maximum lifetime of a customer
    access token. `resumed_at`: when the account's last suspension ended, if it had one.
    """

    merchant = models.ForeignKey(Merchant, models.PROTECT, related_name="accounts")
    environment = choice(Environment)
    status = choice(MerchantStatus, default=MerchantStatus.ACTIVE)
    resumed_at = at()
    client_configuration = models.JSONField(default=dict, blank=True)
    allowed_origins = models.JSONField(default=list, blank=True)
    customer_token_seconds = models.PositiveIntegerField(default=3600)
    created_at = created_at()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["merchant", "environment"], name="account_unique"),
            choices_check("account_environment", "environment", Environment),
            choices_check("account_status", "status", MerchantStatus),
            limit_check("account_limit_whole"),
            models.CheckConstraint(
                name="account_customer_token_seconds", condition=Q(customer_token_seconds__range=(60, 86_400))
            ),
        ]
        indexes = [GinIndex(fields=["allowed_origins"], name="account_origins", opclasses=["jsonb_path_ops"])]

    def __str__(self) -> str:
        return f"{self.merchant_id}/{self.environment}"

    def alters(self) -> Subject:
        return "account", str(self)


class ProviderConnection(RecordedModel):
    """A connection to a payment provider: test mode in sandbox, live mode in production. Its secret is in the backend.

    `stored_at`, `stored_by`: when and by whom its credentials were last written, as `backend_version`. From
    `settle_due_at` on, a worker compares the backend with this row and destroys older versions; None: not due. A
    worker erases a removed connection's path (`forgotten_at`). A trigger compares the mode with the environment.
    """

    account = models.ForeignKey(Account, models.PROTECT, related_name="connections")
    provider = models.SlugField(max_length=64)
    mode = choice(ConnectionMode)
    backend_path = models.CharField(max_length=255, blank=True)
    backend_version = models.PositiveIntegerField(null=True, blank=True)
    created_at = created_at()
    stored_at = at()
    stored_by = models.CharField(max_length=200, blank=True)
    settle_due_at = at()
    removed_at = at()
    forgotten_at = at()

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["account", "provider"], name="connection_unique", condition=Q(removed_at__isnull=True)
            ),
            choices_check("connection_mode", "mode", ConnectionMode),
        ]
        indexes = [
            models.Index(
                fields=["settle_due_at", "id"],
                name="connection_to_settle",
                condition=Q(removed_at__isnull=True, settle_due_at__isnull=False),
            ),
            models.Index(
                fields=["removed_at", "id"],
                name="connection_to_forget",
                condition=Q(removed_at__isnull=False, forgotten_at__isnull=True),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.provider} ({self.mode})"

    def alters(self) -> None:
        return None


class WebhookEndpoint(RecordedModel):
    """A webhook endpoint for events of one environment; never shared with the other environment.

    `secret` signs each message (Standard Webhooks); it is sealed with `domain.sealing`. After a rotation of the secret
    `previous_secret` signs, too, until `previous_until`.
    """

    account = models.ForeignKey(Account, models.PROTECT, related_name="webhook_endpoints")
    url = models.URLField(max_length=500)
    secret = models.BinaryField(default=bytes)
    previous_secret = models.BinaryField(null=True, blank=True)
    previous_until = at()
    created_at = created_at()
    disabled_at = at()
    disabled_why = models.CharField(max_length=300, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["account", "url"], name="webhook_endpoint_unique"),
        ]
        indexes = [
            models.Index(
                fields=["disabled_at"],
                name="webhook_endpoint_failed",
                condition=models.Q(disabled_at__isnull=False) & ~models.Q(disabled_why=""),
            )
        ]

    def __str__(self) -> str:
        return self.url

    def alters(self) -> None:
        return None
