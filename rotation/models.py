"""Rotations with their approvals, ledger and evidence; schedules and campaigns that begin them.

Triggers are in `keyvault.models.triggers`.
"""

from django.conf import settings
from django.db import models
from django.db.models import F, Q

from keyvault.domain.environments import Environment
from keyvault.domain.errors import RequestInvalidError
from keyvault.models.columns import at, choice, choices_check, created_at
from keyvault.models.keys import Credential, Key
from keyvault.models.merchants import Account
from keyvault.models.recording import RecordedModel
from keyvault.models.tokens import ServiceToken
from rotation.domain.events import RotationState
from rotation.domain.policy import PLAN_UNREADABLE, Plan, UnreadablePlanError
from rotation.domain.states import CLOSED


def explain_unreadable(error: Exception) -> str:
    """Explain in one line why this release cannot read stored JSON."""
    if isinstance(error, RequestInvalidError):
        return "; ".join(f"{fault.pointer} must be {fault.detail}" for fault in error.faults) or error.detail
    return f"{type(error).__name__}: {error}"[:200]


class BlackoutCalendar(RecordedModel):
    """A named calendar of periods in which no rotation begins.

    `periods`: [{"begins_at", "ends_at", "why"}], times in ISO 8601 with an offset.
    """

    name = models.CharField(primary_key=True, max_length=64)
    periods = models.JSONField(default=list)
    created_at = created_at()

    def __str__(self) -> str:
        return self.name

    def alters(self) -> None:
        return None


class RotationSchedule(RecordedModel):
    """How often keys are rotated in an environment, an account or one credential; the narrowest schedule applies.

    `window`: as `windows.Window.as_json` writes it, without blackouts, which come from the `calendar`; None: any time.
    A key falls due `cryptoperiod_days` after its activation, less up to `jitter_days` derived from the credential's
    id. The rotation is requested `lead_days` before, so that it can be approved in time. `wish`: plan overrides of the
    environment's defaults. `author`: the requester of its rotations.
    """

    environment = choice(Environment)
    account = models.ForeignKey(Account, models.PROTECT, null=True, blank=True, related_name="rotation_schedules")
    credential = models.ForeignKey(Credential, models.PROTECT, null=True, blank=True, related_name="rotation_schedules")
    cryptoperiod_days = models.PositiveIntegerField()
    jitter_days = models.PositiveIntegerField(default=0)
    lead_days = models.PositiveIntegerField(default=0)
    window = models.JSONField(null=True, blank=True)
    calendar = models.ForeignKey(BlackoutCalendar, models.PROTECT, null=True, blank=True, related_name="schedules")
    wish = models.JSONField(default=dict, blank=True)
    is_enabled = models.BooleanField(default=True)
    author = models.ForeignKey(settings.AUTH_USER_MODEL, models.PROTECT, related_name="rotation_schedules")
    author_person = models.CharField(max_length=32)
    created_at = created_at()

    class Meta:
        constraints = [
            choices_check("schedule_environment", "environment", Environment),
            models.CheckConstraint(name="schedule_cryptoperiod", condition=Q(cryptoperiod_days__range=(1, 3650))),
            models.CheckConstraint(name="schedule_jitter", condition=Q(jitter_days__lt=F("cryptoperiod_days"))),
            models.CheckConstraint(
                name="schedule_scope", condition=Q(account__isnull=True) | Q(credential__isnull=True)
            ),
            models.UniqueConstraint(
                fields=["environment"],
                name="schedule_one_of_environment",
                condition=Q(account__isnull=True, credential__isnull=True),
            ),
            models.UniqueConstraint(
                fields=["account"], name="schedule_one_of_account", condition=Q(account__isnull=False)
            ),
            models.UniqueConstraint(
                fields=["credential"], name="schedule_one_of_credential", condition=Q(credential__isnull=False)
            ),
        ]

    def __str__(self) -> str:
        return f"every {self.cryptoperiod_days} days in {self.credential_id or self.account or self.environment}"

    def alters(self) -> None:
        return None


class CampaignState(models.TextChoices):
    AWAITING_APPROVAL = "awaiting_approval"
    RUNNING = "running"
    PAUSED = "paused"
    HALTED = "halted"
    COMPLETED = "completed"
    REJECTED = "rejected"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


class Campaign(RecordedModel):
    """A selection of credentials that is rotated under one approval of selection, plan and pace.

    `selection`: {"environment", "merchants" (list or null), "older_than_days" (or null)}, and `left_out`, the number
    of excluded credentials by reason. `wish`: the overrides of each plan. `pace`: {"per_minute", "concurrency",
    "halt_on_stall" (bool), "halt_at_failed_percent"}. The digest covers all three and the selected credentials, which
    are `members` from the start. `began_at`: when the approval was complete. `resumed_at`: when it was last resumed
    after a halt; only later outcomes count towards the next halt.
    """

    campaign_id = models.CharField(primary_key=True, max_length=32)
    environment = choice(Environment)
    state = choice(CampaignState)
    why = models.CharField(max_length=300, blank=True)
    reason = models.CharField(max_length=300)
    selection = models.JSONField()
    wish = models.JSONField()
    pace = models.JSONField()
    plan_digest = models.CharField(max_length=64)
    approvals_needed = models.PositiveSmallIntegerField()
    requester = models.ForeignKey(settings.AUTH_USER_MODEL, models.PROTECT, related_name="campaigns")
    requester_person = models.CharField(max_length=32)
    created_at = created_at()
    approval_expires_at = models.DateTimeField()
    began_at = at()
    resumed_at = at()
    closed_at = at()

    class Meta:
        constraints = [
            choices_check("campaign_environment", "environment", Environment),
            choices_check("campaign_state", "state", CampaignState),
        ]

    def __str__(self) -> str:
        return self.campaign_id

    def alters(self) -> None:
        return None


class CampaignApproval(RecordedModel):
    """One person's approval of one campaign's digest."""

    campaign = models.ForeignKey(Campaign, models.PROTECT, related_name="approvals")
    approver = models.ForeignKey(settings.AUTH_USER_MODEL, models.PROTECT, related_name="campaign_approvals")
    person = models.CharField(max_length=32)
    plan_digest = models.CharField(max_length=64)
    created_at = created_at()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["campaign", "person"], name="campaign_approval_once")]

    def __str__(self) -> str:
        return f"{self.approver_id} on {self.campaign_id}"

    def alters(self) -> None:
        return None


class Rotation(RecordedModel):
    """One rotation of a credential's key.

    `accepted_at`, `delivered_at`, `used_at`, `silent_at`: the four facts; none implies another. `deadline_at`: the
    plan's deadline, or the extended one. `retire_at`: for a public key, the approved date. `quarantined_at`: when the
    rotation suspended the key that is being retired. `waived_at`: when the predecessor went into quarantine on an
    approved date, its silence unproved. `bypassed_at`: when the approval was bypassed; the break-glass act stays listed
    until reviewed. `handover`: for a sealed credential, the replacement's string sealed to the recipient's key.
    `reminded_percent`, `alarmed_at`: the last reminder to the merchant and the last alarm to the operators.
    """

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
    deadline_at = at()
    retire_at = at()
    confirmed_at = at()
    told_at = at()
    quarantined_at = at()
    reinstated_at = at()
    waived_at = at()
    written_back_at = at()
    bypassed_at = at()
    alarmed_at = at()
    reminded_percent = models.PositiveSmallIntegerField(default=0)
    handover = models.JSONField(null=True, blank=True)
    schedule = models.ForeignKey(RotationSchedule, models.PROTECT, null=True, blank=True, related_name="rotations")
    campaign = models.ForeignKey(Campaign, models.PROTECT, null=True, blank=True, related_name="rotations")

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
                condition=~Q(state__in=["quarantine", "revoking"])
                | Q(silent_at__isnull=False)
                | Q(waived_at__isnull=False),
            ),
        ]
        indexes = [
            models.Index(fields=["state"], name="rotation_by_state"),
            models.Index(
                fields=["rotation_id"],
                name="rotation_open",
                condition=~Q(state__in=sorted(state.value for state in CLOSED)),
            ),
        ]

    def __str__(self) -> str:
        return self.rotation_id

    def alters(self) -> None:
        return None

    @property
    def current_state(self) -> RotationState:
        return RotationState(self.state)

    @property
    def approved_plan(self) -> Plan:
        """The plan. Raises UnreadablePlanError."""
        try:
            return Plan.from_json(self.plan)
        except Exception as error:
            # Content of a newer release or a damaged row can fail to parse in any way.
            raise UnreadablePlanError(f"{PLAN_UNREADABLE}: {explain_unreadable(error)}.") from error

    @property
    def readable_plan(self) -> Plan | None:
        """The plan, or None where this release cannot read it; for display."""
        try:
            return self.approved_plan
        except UnreadablePlanError:
            return None


class RotationApproval(RecordedModel):
    """One person's approval of one plan digest."""

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


class Retirement(RecordedModel):
    """The date on which a rotation's public predecessor is taken out of service.

    One person requests it; another approves it where the environment requires that.
    """

    rotation = models.ForeignKey(Rotation, models.PROTECT, related_name="retirements")
    retire_at = models.DateTimeField()
    requester = models.ForeignKey(settings.AUTH_USER_MODEL, models.PROTECT, related_name="+")
    requester_person = models.CharField(max_length=32)
    approver = models.ForeignKey(settings.AUTH_USER_MODEL, models.PROTECT, null=True, blank=True, related_name="+")
    approver_person = models.CharField(max_length=32, blank=True)
    created_at = created_at()
    approved_at = at()

    class Meta:
        constraints = [
            models.CheckConstraint(
                name="retirement_second_person", condition=~Q(approver_person=F("requester_person"))
            ),
        ]

    def __str__(self) -> str:
        return f"{self.rotation_id} on {self.retire_at:%Y-%m-%d}"

    def alters(self) -> None:
        return None


class CampaignMember(models.Model):
    """A credential of a campaign and its rotation, whose state is the member's outcome.

    `outcome`: `skipped` for a credential that no longer qualified at its turn, with `why`; else empty.
    """

    campaign = models.ForeignKey(Campaign, models.PROTECT, related_name="members")
    credential = models.ForeignKey(Credential, models.PROTECT, related_name="+")
    rotation = models.OneToOneField(Rotation, models.PROTECT, null=True, blank=True, related_name="membership")
    outcome = models.CharField(max_length=32, blank=True)
    why = models.CharField(max_length=300, blank=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["campaign", "credential"], name="campaign_member_once")]
        indexes = [models.Index(fields=["campaign", "outcome"], name="campaign_member_by_outcome")]

    def __str__(self) -> str:
        return f"{self.credential_id} in {self.campaign_id}"


class LedgerState(models.TextChoices):
    STARTED = "started"
    DONE = "done"
    FAILED = "failed"


class LedgerEntry(models.Model):
    """One attempt of one side effect, written before it, so that a dead worker's intent is known."""

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
    TRIED = "tried"
    CONFIRMED = "confirmed"
    WAIVED = "waived"
    WRITTEN_BACK = "written_back"


class Evidence(RecordedModel):
    """The observations that proved a fact; the revoking transaction cites these rows."""

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
