"""Request bodies and queries. Unknown fields are refused, so that a misspelled one is never silently ignored."""

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

from django.http import QueryDict
from rest_framework import serializers

from keyvault.domain.environments import Environment
from keyvault.domain.issuance import MAX_EXPIRES_IN_DAYS, Delivery, IssuanceState
from keyvault.domain.keys import KeyKind
from keyvault.domain.recipients import KEY_CHARACTERS
from keyvault.domain.redaction import redact
from keyvault.domain.revocation import RevocationReason
from keyvault.models import Credential
from keyvault.services.keys.lifecycle import describe_key


class StrictSerializer(serializers.Serializer[Any]):
    def to_internal_value(self, data: Any) -> Any:
        if isinstance(data, Mapping):
            unknown = sorted(set(map(str, data)) - set(self.fields))
            if unknown:
                raise serializers.ValidationError({name: ["There is no such field."] for name in unknown})
        return super().to_internal_value(data)


class OneOf(serializers.ChoiceField):
    """One value of an enum; the error of any other value lists the accepted ones."""

    def __init__(self, members: Iterable[StrEnum], **options: Any) -> None:
        choices = [member.value for member in members]
        refusal = f'"{{input}}" is none of {", ".join(choices)}.'
        super().__init__(choices, error_messages={"invalid_choice": refusal}, **options)

    def to_internal_value(self, data: Any) -> str:
        """Report a wrong value as `hotpath.messages.requests` does: redacted, since it may be a key."""
        if not isinstance(data, str):
            raise serializers.ValidationError("Not a string.")
        if data not in self.choices:
            self.fail("invalid_choice", input=redact(data.encode(errors="backslashreplace").decode())[:64])
        return data


class StrictInteger(serializers.IntegerField):
    """A JSON integer; strings of digits, booleans and 1.0 are refused."""

    def to_internal_value(self, data: Any) -> int:
        if not isinstance(data, int) or isinstance(data, bool):
            raise serializers.ValidationError("Not an integer.")
        return super().to_internal_value(data)


class StrictBoolean(serializers.BooleanField):
    def to_internal_value(self, data: Any) -> bool:
        if not isinstance(data, bool):
            raise serializers.ValidationError("Not a boolean.")
        return data


class StrictText(serializers.CharField):
    """A JSON string, not trimmed, without NUL, which PostgreSQL cannot store; numbers are refused.

    `pattern` is a regular expression for the whole string.
    """

    def __init__(self, *, pattern: str | None = None, **options: Any) -> None:
        if not options.get("allow_blank"):
            options.setdefault("min_length", 1)
        super().__init__(trim_whitespace=False, **options)
        self.pattern = pattern

    def to_internal_value(self, data: Any) -> str:
        if not isinstance(data, str):
            raise serializers.ValidationError("Not a string.")
        if self.pattern is not None and re.fullmatch(self.pattern, data) is None:
            raise serializers.ValidationError("Does not have the required form.")
        return super().to_internal_value(data)


class RevokeRequest(StrictSerializer):
    reason = OneOf(RevocationReason)


class QuerySerializer(StrictSerializer):
    """Query parameters; a repeated one is refused."""

    def to_internal_value(self, data: QueryDict) -> Any:
        repeated = sorted(name for name, values in data.lists() if len(values) > 1)
        if repeated:
            raise serializers.ValidationError({name: ["The parameter is repeated. Send it once."] for name in repeated})
        return super().to_internal_value(data.dict())


class QueryInteger(serializers.IntegerField):
    """Up to 9 ASCII digits; other forms that Python parses as a number are refused."""

    def to_internal_value(self, data: Any) -> int:
        if re.fullmatch("[0-9]{1,9}", data) is None:
            raise serializers.ValidationError("Not a whole number of at most 9 digits.")
        return super().to_internal_value(data)


class PageQuery(QuerySerializer):
    """One page of a list. `cursor`: the `next_cursor` of the page before; `api.pages` reads it."""

    merchant = StrictText(required=False, max_length=64, help_text="Rows of this merchant only.")
    environment = OneOf(Environment, required=False, help_text="Rows of this environment only.")
    cursor = StrictText(
        required=False,
        pattern=r"[0-9]{1,16}\.[a-z]{3}_[0-9A-Za-z]{20}",
        help_text="`next_cursor` of the page before.",
    )
    limit = QueryInteger(
        required=False, min_value=1, max_value=200, default=50, help_text="Maximum number of rows of the page."
    )


class CredentialQuery(PageQuery):
    kind = OneOf(KeyKind, required=False, help_text="Credentials of this kind only.")


class IssuanceQuery(PageQuery):
    state = OneOf(IssuanceState, required=False, help_text="Requests in this state only.")


class CredentialRequest(StrictSerializer):
    """The service validates `label` and the requirements of `delivery`."""

    merchant = StrictText(max_length=64)
    environment = OneOf(Environment)
    kind = OneOf(KeyKind)
    label = StrictText(required=False, max_length=100)  # type: ignore[assignment]  # DRF takes fields off the class
    delivery = OneOf(Delivery, required=False)
    expires_in_days = StrictInteger(required=False, min_value=1, max_value=MAX_EXPIRES_IN_DAYS)
    recipient_public_key = StrictText(required=False, max_length=KEY_CHARACTERS)


class CollectRequest(StrictSerializer):
    """An empty object: the path names the issuance request."""


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
