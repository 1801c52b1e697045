"""Orders of the integration plane, with the minimum of fields."""

from django.db import models
from django.db.models import Q

from keyvault.models.columns import created_at
from keyvault.models.merchants import Account
from keyvault.models.recording import RecordedModel


class Order(RecordedModel):
    """An order. `amount_minor` is in the currency's minor unit; `customer_id` is the merchant's and not verified."""

    order_token = models.CharField(primary_key=True, max_length=32)
    account = models.ForeignKey(Account, models.PROTECT, related_name="orders")
    amount_minor = models.PositiveBigIntegerField()
    currency = models.CharField(max_length=3)
    customer_id = models.CharField(max_length=128, null=True, blank=True)
    created_at = created_at()

    class Meta:
        constraints = [
            models.CheckConstraint(name="order_amount", condition=Q(amount_minor__gte=1)),
            models.CheckConstraint(name="order_currency", condition=Q(currency__regex=r"^[A-Z]{3}$")),
        ]

    def __str__(self) -> str:
        return self.order_token

    def alters(self) -> None:
        return None
