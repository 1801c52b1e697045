"""Request and response shapes; unknown fields are refused, so that a misspelt one is never silently ignored."""

import ipaddress
from collections.abc import Mapping
from typing import Any

from rest_framework import serializers

from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind
from keyvault.domain.revocation import RevocationReason
from keyvault.models import Credential
from keyvault.services.keys import describe_key


class StrictSerializer(serializers.Serializer[Any]):
    def to_internal_value(self, data: Any) -> Any:
        if isinstance(data, Mapping):
            unknown = sorted(set(map(str, data)) - set(self.fields))
            if unknown:
                raise serializers.ValidationError({name: ["There is no such field."] for name in unknown})
        return super().to_internal_value(data)


class RawText(serializers.Field[Any, Any, Any, Any]):
    """Text exactly as it came, of whatever characters: what is wrong with it is for the verdict to say."""

    def to_internal_value(self, data: Any) -> str:
        if not isinstance(data, str):
            raise serializers.ValidationError("Not a string.")
        return data

    def to_representation(self, value: Any) -> Any:
        raise NotImplementedError("raw text is never sent back")


class StrictInteger(serializers.IntegerField):
    """A JSON integer: neither a string of digits, nor a boolean, nor 1.0."""

    def to_internal_value(self, data: Any) -> int:
        if not isinstance(data, int) or isinstance(data, bool):
            raise serializers.ValidationError("Not an integer.")
        return super().to_internal_value(data)


class StrictBoolean(serializers.BooleanField):
    def to_internal_value(self, data: Any) -> bool:
        if not isinstance(data, bool):
            raise serializers.ValidationError("Not a boolean.")
        return data


class ClientAddress(serializers.CharField):
    """An IPv4 or IPv6 address, in its canonical form; an IPv4-mapped one as IPv4."""

    def to_internal_value(self, data: Any) -> str:
        text = super().to_internal_value(data)
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            raise serializers.ValidationError("Not an IP address.") from None
        mapped = getattr(address, "ipv4_mapped", None)
        return str(mapped or address)


class VerifyRequest(StrictSerializer):
    key = RawText(allow_null=True)
    environment = serializers.ChoiceField(choices=[env.value for env in Environment])
    endpoint = serializers.CharField(required=False, max_length=100)
    method = serializers.RegexField(r"^[A-Z]{1,16}$", required=False)
    path = serializers.CharField(required=False, max_length=8192, trim_whitespace=False)
    merchant = serializers.CharField(required=False, allow_null=True, max_length=64, trim_whitespace=False)
    customer_token = RawText(required=False, allow_null=True)
    client_ip = ClientAddress(required=False, allow_null=True, max_length=64)
    origin = serializers.CharField(required=False, allow_null=True, max_length=500, trim_whitespace=False)
    user_agent = serializers.CharField(required=False, allow_null=True, max_length=1000, allow_blank=True)
    cost = StrictInteger(required=False, min_value=1, max_value=1_000_000)
    dry_run = StrictBoolean(required=False)

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        by_name, by_line = "endpoint" in attrs, {"method", "path"} & set(attrs)
        if by_name == bool(by_line) or (by_line and len(by_line) != 2):
            raise serializers.ValidationError("Give `endpoint`, or both `method` and `path`.")
        return attrs


class RevokeRequest(StrictSerializer):
    reason = serializers.ChoiceField(choices=[reason.value for reason in RevocationReason])


class CredentialQuery(StrictSerializer):
    merchant = serializers.CharField(required=False, max_length=64)
    environment = serializers.ChoiceField(choices=[env.value for env in Environment], required=False)
    kind = serializers.ChoiceField(choices=[kind.value for kind in KeyKind], required=False)
    cursor = serializers.RegexField(r"^crd_[0-9A-Za-z]{20}$", required=False)
    limit = serializers.IntegerField(required=False, min_value=1, max_value=200, default=50)


def credential_as_json(credential: Credential) -> dict[str, Any]:
    return {
        "credential_id": credential.credential_id,
        "merchant_id": credential.account.merchant_id,
        "environment": credential.account.environment,
        "kind": credential.kind,
        "label": credential.label,
        "delivery": credential.delivery,
        "created_at": credential.created_at,
        "keys": [describe_key(key) for key in sorted(credential.keys.all(), key=lambda key: key.created_at)],
    }
