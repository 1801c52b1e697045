"""Response bodies of rotations on the service plane, for the OpenAPI document."""

from typing import Any, get_args, get_type_hints

from rest_framework import serializers

from keyvault.domain.environments import Environment
from keyvault.services.usage.reports import TRACES
from rotation.domain.events import RotationState
from rotation.domain.plan_fields import FIELDS, NUMBERS, FieldType, PlanField
from rotation.domain.policy import Plan
from rotation.models import EvidenceKind


class PlanBody(serializers.Serializer[Any]):
    """The approved plan."""

    credential_id = serializers.CharField()
    predecessor_key_id = serializers.CharField()
    is_dormant = serializers.BooleanField()
    late_sources = serializers.DictField(
        child=serializers.DateTimeField(allow_null=True),
        allow_null=True,
        help_text="The sources that cannot be silent by the deadline, each with a deadline that would fit; null: seen "
        "once, so it must use the replacement or be waived.",
    )

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        return {**super().get_fields(), **{field.name: _plan_field(field) for field in FIELDS.values()}}


def _plan_field(field: PlanField) -> serializers.Field[Any, Any, Any, Any]:
    options: dict[str, Any] = {"help_text": field.help}
    if type(None) in get_args(_PLAN_TYPES[field.name]):
        options["allow_null"] = True
    if field.type in NUMBERS:
        return serializers.IntegerField(**options)
    if field.type is FieldType.FLAG:
        return serializers.BooleanField(**options)
    if field.type is FieldType.INSTANT:
        return serializers.DateTimeField(**options)
    if field.type is FieldType.WINDOW:
        return serializers.DictField(**options)
    choices = [choice.value for choice in field.choices]
    if field.type is FieldType.CHOICE:
        return serializers.ChoiceField(choices=choices, **options)
    if field.type is FieldType.CHANNELS:
        return serializers.ListField(child=serializers.ChoiceField(choices=choices), **options)
    return serializers.CharField(**options)


_PLAN_TYPES = get_type_hints(Plan)


class EvidenceBody(serializers.Serializer[Any]):
    evidence_id = serializers.CharField()
    kind = serializers.ChoiceField(choices=[kind.value for kind in EvidenceKind])
    seen = serializers.DictField()
    created_at = serializers.DateTimeField()


class UserBody(serializers.Serializer[Any]):
    """One client of a key: source, endpoint and counts. `is_probe`: a test call of ours, which proves nothing."""

    source = serializers.CharField()  # type: ignore[assignment]  # DRF takes fields off the class
    network = serializers.CharField()
    user_agent = serializers.CharField()
    endpoint = serializers.CharField()
    origin = serializers.CharField()
    outcome = serializers.ChoiceField(choices=[outcome.value for outcome in TRACES])
    is_probe = serializers.BooleanField()
    count = serializers.IntegerField()
    first_at = serializers.DateTimeField()
    last_at = serializers.DateTimeField()


class HandoverBody(serializers.Serializer[Any]):
    """The sealed replacement; only the holder of the recipient's private key can open it (HPKE, RFC 9180)."""

    key_id = serializers.CharField()
    enc = serializers.CharField()
    ciphertext = serializers.CharField()


class AwaitedSourceBody(serializers.Serializer[Any]):
    """A source that the rotation waits for. `until` null: it was seen once, and must use the other key or be waived."""

    source = serializers.CharField()  # type: ignore[assignment]  # DRF takes fields off the class
    last_used_at = serializers.DateTimeField()
    until = serializers.DateTimeField(allow_null=True)


class RotationBody(serializers.Serializer[Any]):
    rotation_id = serializers.CharField()
    state = serializers.ChoiceField(choices=[state.value for state in RotationState])
    waiting_for = serializers.CharField(allow_null=True)
    waiting_sources = AwaitedSourceBody(many=True)
    why = serializers.CharField()
    stalled_from = serializers.ChoiceField(choices=[state.value for state in RotationState], allow_null=True)
    credential_id = serializers.CharField()
    merchant_id = serializers.CharField()
    environment = serializers.ChoiceField(choices=[environment.value for environment in Environment])
    predecessor_key_id = serializers.CharField()
    replacement_key_id = serializers.CharField(allow_null=True)
    plan = PlanBody()
    plan_digest = serializers.CharField()
    approvals = serializers.ListField(child=serializers.CharField())
    approvals_needed = serializers.IntegerField()
    is_bypass = serializers.BooleanField()
    campaign_id = serializers.CharField(allow_null=True)
    created_at = serializers.DateTimeField()
    deadline = serializers.DateTimeField(allow_null=True)
    retire_at = serializers.DateTimeField(allow_null=True)
    accepted_at = serializers.DateTimeField(allow_null=True)
    delivered_at = serializers.DateTimeField(allow_null=True)
    acknowledged_at = serializers.DateTimeField(allow_null=True)
    confirmed_at = serializers.DateTimeField(allow_null=True)
    used_at = serializers.DateTimeField(allow_null=True)
    silent_at = serializers.DateTimeField(allow_null=True)
    quarantined_at = serializers.DateTimeField(allow_null=True)
    reinstated_at = serializers.DateTimeField(allow_null=True)
    closed_at = serializers.DateTimeField(allow_null=True)
    handover = HandoverBody(allow_null=True)
    evidence = EvidenceBody(many=True)
    predecessor_users = UserBody(many=True)
