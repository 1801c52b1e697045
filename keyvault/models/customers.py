"""Customer access tokens: short-lived, hashed like keys, bound to one account and one customer of the merchant."""

from django.db import models
from django.db.models import F, Q

from keyvault.domain.digests import DIGEST_BYTES
from keyvault.domain.ids import Subject
from keyvault.models.columns import TokenColumns
from keyvault.models.keys import Key
from keyvault.models.merchants import Account


class CustomerToken(TokenColumns):
    """`issued_with` is the private key that requested it. Triggers prevent un-revocation, see `models.triggers`."""

    account = models.ForeignKey(Account, models.PROTECT, related_name="customer_tokens")
    issued_with = models.ForeignKey(Key, models.PROTECT, related_name="customer_tokens")
    customer_id = models.CharField(max_length=128)

    class Meta:
        constraints = [
            models.CheckConstraint(name="customer_token_digest_bytes", condition=Q(digest__length=DIGEST_BYTES)),
            models.CheckConstraint(name="customer_token_pepper_version", condition=Q(pepper_version__gte=1)),
            models.CheckConstraint(name="customer_token_expires_later", condition=Q(expires_at__gt=F("created_at"))),
        ]

        indexes = [models.Index(fields=["expires_at"], name="customer_token_expiring")]

    def __str__(self) -> str:
        return self.token_id

    def __repr__(self) -> str:
        return f"CustomerToken({self.token_id})"

    def alters(self) -> Subject:
        return "customer_token", self.token_id
