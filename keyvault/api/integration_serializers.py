"""Request bodies of the integration plane."""

from django.core.validators import RegexValidator

from keyvault.access.customers import CUSTOMER_ID
from keyvault.api.serializers import StrictInteger, StrictSerializer, StrictText
from keyvault.services.merchants.client_configuration import MAX_SECONDS
from keyvault.services.merchants.orders import CURRENCY, MAX_AMOUNT_MINOR


class OrderRequest(StrictSerializer):
    amount_minor = StrictInteger(min_value=1, max_value=MAX_AMOUNT_MINOR)
    currency = StrictText(
        min_length=3, max_length=3, validators=[RegexValidator(CURRENCY, "Three capital letters (ISO 4217).")]
    )
    customer_id = StrictText(
        required=False,
        allow_null=True,
        max_length=128,
        validators=[RegexValidator(CUSTOMER_ID, "Not a valid customer id.")],
    )


class CustomerTokenRequest(StrictSerializer):
    """The account may set a lower maximum than this field's."""

    ttl_seconds = StrictInteger(required=False, min_value=1, max_value=MAX_SECONDS)
