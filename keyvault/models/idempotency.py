"""Stored responses of create requests, so that a retry gets the same response and has no second effect."""

from django.db import models

from keyvault.models.columns import at, created_at


class IdempotentRequest(models.Model):
    """One Idempotency-Key of one caller at one endpoint, stored for a day.

    `holder` is the credential, the service token's lineage, or the operator who sent a form. The key itself and the
    request body are stored as digests. `status` None: an attempt is in progress until `held_until`; `fence` counts
    them. `body` never has a secret: the secret is in `sealed` until `sealed_until`, and `secret_of` is the id of its
    key or token.
    """

    holder = models.CharField(max_length=64)
    endpoint = models.CharField(max_length=100)
    key_digest = models.BinaryField(max_length=32)
    body_digest = models.BinaryField(max_length=32)
    fence = models.PositiveIntegerField(default=1)
    held_until = models.DateTimeField()
    status = models.PositiveSmallIntegerField(null=True, blank=True)
    body = models.TextField(blank=True)
    sealed = models.BinaryField(null=True, blank=True)
    sealed_until = at()
    secret_of = models.CharField(max_length=16, blank=True)
    created_at = created_at()
    expires_at = models.DateTimeField()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["holder", "endpoint", "key_digest"], name="idempotent_request_once"),
        ]
        indexes = [
            models.Index(fields=["expires_at"], name="idempotent_request_expiring"),
            models.Index(
                fields=["sealed_until"], name="idempotent_request_sealed", condition=models.Q(sealed__isnull=False)
            ),
        ]

    def __str__(self) -> str:
        return f"{self.holder} {self.endpoint}"
