"""Rotations, their approvals, their ledger and their evidence. Triggers stand in `keyvault.models.triggers`."""

from django.conf import settings
from django.db import models
from django.db.models import F, Q

from keyvault.models.columns import at, choice, choices_check, created_at
from keyvault.models.keys import Credential, Key
from keyvault.models.recording import RecordedModel
from keyvault.models.tokens import ServiceToken
from rotation.policy import Plan
from rotation.states import CLOSED, RotationState


class Rotation(RecordedModel):
    """`accepted_at`, `delivered_at`, `used_at`, `silent_at` are the four facts; none stands for another."""

    rotation_id = models.CharField(primary_key=True, max_length=32)
    credential = models.ForeignKey(Credential, models.PROTECT, related_name="rotations")
    predecessor = models.ForeignKey(Key, models.PROTECT, related_name="retiring_rotations")
    replacement = models.ForeignKey(Key, models.PROTECT, null=True, blank=True, related_name="introducing_rotations")
    state = choice(RotationState)
    stalled_from = choice(RotationState, null=True, blank=True)
    why = models.CharField(max_length=300, blank=True)
    plan = models.JSONField()
    plan_digest = models.CharField(max_length=64)
    approvals_needed = models.PositiveSmallIntegerField()
    requester = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.PROTECT, null=True, blank=True, related_name="rotations"
    )
    requested_via = models.ForeignKey(ServiceToken, models.PROTECT, null=True, blank=True)
    requester_person = models.CharField(max_length=32)
    created_at = created_at()
    approval_expires_at = models.DateTimeField()
    entered_at = models.DateTimeField()
    accepted_at = at()
    delivered_at = at()
    acknowledged_at = at()
    used_at = at()
    silent_at = at()
    collected_at = at()
    closed_at = at()

    class Meta:
        constraints = [
            choices_check("rotation_state", "state", RotationState),
            models.UniqueConstraint(
                fields=["credential"],
                name="rotation_one_open",
                condition=~Q(state__in=sorted(state.value for state in CLOSED)),
            ),
            models.CheckConstraint(
                name="rotation_two_keys", condition=Q(replacement__isnull=True) | ~Q(replacement=F("predecessor"))
            ),
            models.CheckConstraint(
                name="rotation_proved",
                condition=~Q(state__in=["overlap", "quarantine", "revoking"])
                | Q(accepted_at__isnull=False, delivered_at__isnull=False, used_at__isnull=False),
            ),
            models.CheckConstraint(
                name="rotation_silent",
                condition=~Q(state__in=["quarantine", "revoking"]) | Q(silent_at__isnull=False),
            ),
        ]
        indexes = [models.Index(fields=["state"], name="rotation_by_state")]

    def __str__(self) -> str:
        return self.rotation_id

    def alters(self) -> None:
        return None

    @property
    def current_state(self) -> RotationState:
        return RotationState(self.state)

    @property
    def approved_plan(self) -> Plan:
        return Plan.from_json(self.plan)


class RotationApproval(RecordedModel):
    """One person's yes to one plan digest."""

    rotation = models.ForeignKey(Rotation, models.PROTECT, related_name="approvals")
    approver = models.ForeignKey(settings.AUTH_USER_MODEL, models.PROTECT, related_name="rotation_approvals")
    person = models.CharField(max_length=32)
    plan_digest = models.CharField(max_length=64)
    created_at = created_at()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["rotation", "person"], name="rotation_approval_once")]

    def __str__(self) -> str:
        return f"{self.approver_id} on {self.rotation_id}"

    def alters(self) -> None:
        return None


class LedgerState(models.TextChoices):
    STARTED = "started"
    DONE = "done"
    FAILED = "failed"


class LedgerEntry(models.Model):
    """One try of one side effect, written before it: what a worker that died was about to do."""

    rotation = models.ForeignKey(Rotation, models.PROTECT, related_name="ledger")
    step = choice(RotationState)
    key = models.ForeignKey(Key, models.PROTECT, null=True, blank=True, related_name="ledger")
    state = choice(LedgerState, default=LedgerState.STARTED)
    started_at = models.DateTimeField()
    finished_at = at()
    detail = models.CharField(max_length=300, blank=True)

    class Meta:
        constraints = [choices_check("ledger_state", "state", LedgerState)]
        indexes = [models.Index(fields=["rotation", "started_at"], name="ledger_by_rotation")]

    def __str__(self) -> str:
        return f"{self.rotation_id} {self.step} {self.state}"


class EvidenceKind(models.TextChoices):
    ACCEPTED = "accepted"
    DELIVERED = "delivered"
    USED = "used"
    SILENT = "silent"
    UNTRIED = "untried"


class Evidence(RecordedModel):
    """What was seen when a fact was taken for proved; the revoking transaction cites these rows."""

    evidence_id = models.CharField(primary_key=True, max_length=32)
    rotation = models.ForeignKey(Rotation, models.PROTECT, related_name="evidence")
    kind = choice(EvidenceKind)
    seen = models.JSONField()
    created_at = created_at()

    class Meta:
        constraints = [choices_check("evidence_kind", "kind", EvidenceKind)]

    def __str__(self) -> str:
        return f"{self.kind} ({self.evidence_id})"

    def alters(self) -> None:
        return None
