"""What the service plane answers about a rotation, as shapes for the OpenAPI page."""

from typing import Any

from rest_framework import serializers

from keyvault.domain.environments import Environment
from rotation.models import EvidenceKind
from rotation.policy import Proof
from rotation.states import RotationState


class PlanBody(serializers.Serializer[Any]):
    """Everything that is approved."""

    credential_id = serializers.CharField()
    predecessor_key_id = serializers.CharField()
    reason = serializers.CharField()
    not_before = serializers.DateTimeField()
    deadline = serializers.DateTimeField()
    proof = serializers.ChoiceField(choices=[proof.value for proof in Proof])
    proof_count = serializers.IntegerField()
    proof_sources = serializers.IntegerField()
    soak_seconds = serializers.IntegerField()
    quiet_seconds = serializers.IntegerField()
    quarantine_seconds = serializers.IntegerField()
    expires_in_days = serializers.IntegerField(allow_null=True)
    predecessor_may_expire = serializers.BooleanField()


class EvidenceBody(serializers.Serializer[Any]):
    evidence_id = serializers.CharField()
    kind = serializers.ChoiceField(choices=[kind.value for kind in EvidenceKind])
    seen = serializers.DictField()
    created_at = serializers.DateTimeField()


class UserBody(serializers.Serializer[Any]):
    """Who used a key, from where and for what."""

    source = serializers.CharField()  # type: ignore[assignment]  # DRF takes fields off the class
    user_agent = serializers.CharField()
    endpoint = serializers.CharField()
    count = serializers.IntegerField()
    last_at = serializers.DateTimeField()


class RotationBody(serializers.Serializer[Any]):
    rotation_id = serializers.CharField()
    state = serializers.ChoiceField(choices=[state.value for state in RotationState])
    waiting_for = serializers.CharField(allow_null=True)
    why = serializers.CharField()
    credential_id = serializers.CharField()
    merchant_id = serializers.CharField()
    environment = serializers.ChoiceField(choices=[environment.value for environment in Environment])
    predecessor_key_id = serializers.CharField()
    replacement_key_id = serializers.CharField(allow_null=True)
    plan = PlanBody()
    plan_digest = serializers.CharField()
    approvals = serializers.ListField(child=serializers.CharField())
    approvals_needed = serializers.IntegerField()
    created_at = serializers.DateTimeField()
    accepted_at = serializers.DateTimeField(allow_null=True)
    delivered_at = serializers.DateTimeField(allow_null=True)
    acknowledged_at = serializers.DateTimeField(allow_null=True)
    used_at = serializers.DateTimeField(allow_null=True)
    silent_at = serializers.DateTimeField(allow_null=True)
    closed_at = serializers.DateTimeField(allow_null=True)
    evidence = EvidenceBody(many=True)
    predecessor_users = UserBody(many=True)
