"""Request bodies of the integration plane."""

from typing import Any

from django.core.validators import RegexValidator
from drf_spectacular.utils import extend_schema_field
from rest_framework.serializers import ValidationError

from keyvault.access.customers import CUSTOMER_ID, CUSTOMER_ID_RULE
from keyvault.api.serializers import StrictInteger, StrictSerializer, StrictText
from keyvault.domain.currencies import CURRENCIES
from keyvault.domain.recipient_keys import KEY_CHARACTERS
from keyvault.services.merchants.client_configuration import MAX_SECONDS
from keyvault.services.merchants.orders import CURRENCY_RULE, MAX_AMOUNT_MINOR


@extend_schema_field({"type": "string", "enum": sorted(CURRENCIES)})
class CurrencyField(StrictText):
    def to_internal_value(self, data: Any) -> str:
        currency = super().to_internal_value(data)
        if currency not in CURRENCIES:
            raise ValidationError(f"Not {CURRENCY_RULE}.")
        return currency


class OrderRequest(StrictSerializer):
    amount_minor = StrictInteger(min_value=1, max_value=MAX_AMOUNT_MINOR)
    currency = CurrencyField()
    customer_id = StrictText(
        required=False,
        allow_null=True,
        max_length=128,
        validators=[RegexValidator(CUSTOMER_ID, CUSTOMER_ID_RULE)],
    )


class CustomerTokenRequest(StrictSerializer):
    """The account may set a lower maximum than this field's."""

    ttl_seconds = StrictInteger(required=False, min_value=1, max_value=MAX_SECONDS)


class RecipientKeyRequest(StrictSerializer):
    recipient_public_key = StrictText(max_length=KEY_CHARACTERS)
