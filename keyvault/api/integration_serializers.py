"""Request and response bodies of the integration plane."""

from typing import Any

from django.core.validators import RegexValidator
from rest_framework import serializers

from keyvault.access.customers import CUSTOMER_ID
from keyvault.api.serializers import StrictInteger, StrictSerializer, StrictText
from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyState
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


class OrderBody(serializers.Serializer[Any]):
    order_token = serializers.CharField()
    amount_minor = serializers.IntegerField()
    currency = serializers.CharField()
    customer_id = serializers.CharField(allow_null=True)
    created_at = serializers.DateTimeField()


class ConfigurationBody(serializers.Serializer[Any]):
    merchant_id = serializers.CharField()
    environment = serializers.ChoiceField(choices=[environment.value for environment in Environment])
    configuration = serializers.DictField()


class CustomerTokenBody(serializers.Serializer[Any]):
    """When a replay can no longer show the token, `token` is null and `secret_available` false."""

    token_id = serializers.CharField()
    token = serializers.CharField(allow_null=True)
    customer_id = serializers.CharField()
    expires_at = serializers.DateTimeField()
    secret_available = serializers.BooleanField(required=False)


class CustomerBody(serializers.Serializer[Any]):
    customer_id = serializers.CharField()
    expires_at = serializers.DateTimeField()


class OwnEndBody(serializers.Serializer[Any]):
    key_id = serializers.CharField()
    state = serializers.ChoiceField(choices=[state.value for state in KeyState])
    sequence = serializers.IntegerField()
