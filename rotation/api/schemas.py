"""Response bodies of rotations on the service plane, for the OpenAPI document."""

from typing import Any

from rest_framework import serializers

from keyvault.domain.environments import Environment
from keyvault.services.usage.reports import TRACES
from rotation.domain.events import RotationState
from rotation.domain.policy import AtDeadline, DeliveryChannel, Proof, Reinstatement
from rotation.models import EvidenceKind


class PlanBody(serializers.Serializer[Any]):
    """The approved plan."""

    credential_id = serializers.CharField()
    predecessor_key_id = serializers.CharField()
    reason = serializers.CharField()
    not_before = serializers.DateTimeField()
    deadline = serializers.DateTimeField(allow_null=True)
    proof = serializers.ChoiceField(choices=[proof.value for proof in Proof])
    proof_count = serializers.IntegerField()
    proof_sources = serializers.IntegerField()
    soak_seconds = serializers.IntegerField()
    quiet_seconds = serializers.IntegerField()
    quarantine_seconds = serializers.IntegerField()
    expires_in_days = serializers.IntegerField(allow_null=True)
    predecessor_may_expire = serializers.BooleanField()
    is_dormant = serializers.BooleanField()
    at_deadline = serializers.ChoiceField(choices=[each.value for each in AtDeadline])
    reinstatement = serializers.ChoiceField(choices=[each.value for each in Reinstatement])
    channels = serializers.ListField(child=serializers.ChoiceField(choices=[each.value for each in DeliveryChannel]))
    window = serializers.DictField(allow_null=True)
    retire_at = serializers.DateTimeField(allow_null=True)


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


class RotationBody(serializers.Serializer[Any]):
    rotation_id = serializers.CharField()
    state = serializers.ChoiceField(choices=[state.value for state in RotationState])
    waiting_for = serializers.CharField(allow_null=True)
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
