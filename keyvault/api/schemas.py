"""Response bodies of the service plane for the OpenAPI page; a test checks a live server against them."""

from typing import Any

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from keyvault.api.serializers import OneOf
from keyvault.domain.environments import Environment
from keyvault.domain.errors import ErrorCode
from keyvault.domain.issuance import Delivery, IssuanceState
from keyvault.domain.keys import KeyKind, KeyState, RetirementReason
from keyvault.domain.revocation import RevocationReason
from keyvault.services.change_feed.receipts import VerifierProgress


class HealthBody(serializers.Serializer[Any]):
    status = serializers.ChoiceField(choices=["ok"])


class ReadinessBody(serializers.Serializer[Any]):
    """`checks` maps each dependency of a verdict to `ok` or `failing`."""

    status = serializers.ChoiceField(choices=["ready", "not_ready"])
    checks = serializers.DictField(child=serializers.ChoiceField(choices=["ok", "failing"]))


class KeyBody(serializers.Serializer[Any]):
    """A key's state, never its material."""

    key_id = serializers.CharField()
    state = OneOf(KeyState)
    kind = OneOf(KeyKind)
    credential_id = serializers.CharField()
    merchant_id = serializers.CharField()
    environment = OneOf(Environment)
    created_at = serializers.DateTimeField()
    activated_at = serializers.DateTimeField(allow_null=True)
    expires_at = serializers.DateTimeField(allow_null=True)
    first_used_at = serializers.DateTimeField(allow_null=True)
    last_used_at = serializers.DateTimeField(allow_null=True)
    retirement = OneOf(RetirementReason, allow_null=True)
    reason = OneOf(RevocationReason, allow_null=True)


class CredentialBody(serializers.Serializer[Any]):
    credential_id = serializers.CharField()
    merchant_id = serializers.CharField()
    environment = OneOf(Environment)
    kind = OneOf(KeyKind)
    label = serializers.CharField()  # type: ignore[assignment]  # DRF takes fields off the class
    delivery = OneOf(Delivery)
    created_at = serializers.DateTimeField()
    keys = KeyBody(many=True)


class CredentialsBody(serializers.Serializer[Any]):
    credentials = CredentialBody(many=True)
    next_cursor = serializers.CharField(allow_null=True)


class VerifierBody(serializers.Serializer[Any]):
    """A verifier's progress; times are by the database's clock.

    `expired`: it has not reported within its maximum staleness. It no longer answers from memory, and receipts do not
    wait for it.
    """

    verifier_id = serializers.CharField()
    door = serializers.CharField()
    state = OneOf(VerifierProgress)
    confirmed_at = serializers.DateTimeField(allow_null=True)
    seen_at = serializers.DateTimeField()


class ReceiptBody(serializers.Serializer[Any]):
    """Which verifiers have applied a change. `complete`: none is pending."""

    sequence = serializers.IntegerField()
    complete = serializers.BooleanField()
    changed_at = serializers.DateTimeField(allow_null=True)
    verifiers = VerifierBody(many=True)


class RevokedBody(serializers.Serializer[Any]):
    """`receipt` is present when the request has `Prefer: wait`."""

    key_id = serializers.CharField()
    state = OneOf(KeyState)
    sequence = serializers.IntegerField()
    receipt = ReceiptBody(required=False)


@extend_schema_field({"$ref": "#/components/schemas/Problem"})
class ProblemField(serializers.DictField):
    """A problem document, see `api.openapi.PROBLEM`."""


class LimitBody(serializers.Serializer[Any]):
    policy = serializers.ChoiceField(choices=["account", "endpoint"])
    remaining = serializers.IntegerField(min_value=0)
    reset_seconds = serializers.IntegerField(min_value=0)


class CheckBody(serializers.Serializer[Any]):
    rule = serializers.CharField()
    passed = serializers.BooleanField()


class DecisionBody(serializers.Serializer[Any]):
    """The response to send to the client.

    Fields that identify the key are present only when its possession is proved, `trace` only in a dry run.
    """

    allowed = serializers.BooleanField()
    status = serializers.IntegerField()
    code = OneOf(ErrorCode, allow_null=True)
    check = serializers.IntegerField(allow_null=True)
    headers = serializers.DictField(child=serializers.CharField())
    problem = ProblemField(required=False)
    request_id = serializers.CharField()
    key_id = serializers.CharField(required=False)
    credential_id = serializers.CharField(required=False)
    kind = OneOf(KeyKind, required=False)
    merchant_id = serializers.CharField(required=False)
    environment = OneOf(Environment, required=False)
    customer_id = serializers.CharField(required=False, allow_null=True)
    limit = LimitBody(required=False)
    trace = CheckBody(many=True, required=False)


class DecisionsBody(serializers.Serializer[Any]):
    decisions = DecisionBody(many=True)


class IssuanceRequestBody(serializers.Serializer[Any]):
    issuance_request_id = serializers.CharField()
    state = OneOf(IssuanceState)
    merchant_id = serializers.CharField()
    environment = OneOf(Environment)
    kind = OneOf(KeyKind)
    label = serializers.CharField()  # type: ignore[assignment]  # DRF takes fields off the class
    delivery = OneOf(Delivery)
    recipient_public_key = serializers.CharField(required=False)
    created_at = serializers.DateTimeField()
    expires_at = serializers.DateTimeField()
    approvals_needed = serializers.IntegerField()
    credential_id = serializers.CharField(allow_null=True)
    key_id = serializers.CharField(allow_null=True)


class SealedBody(serializers.Serializer[Any]):
    """HPKE (RFC 9180) in base mode, base64url."""

    suite = serializers.CharField()
    enc = serializers.CharField()
    ciphertext = serializers.CharField()


class CollectedBody(serializers.Serializer[Any]):
    """The key, once: in plain text, or sealed to the recipient's public key.

    When a replay can no longer show it, `key` is null and `secret_available` false.
    """

    issuance_request_id = serializers.CharField()
    credential_id = serializers.CharField()
    key_id = serializers.CharField()
    key = serializers.CharField(required=False, allow_null=True)
    sealed = SealedBody(required=False)
    secret_available = serializers.BooleanField(required=False)
