"""Rotations with their approvals."""

from datetime import datetime
from typing import Any

from django.conf import settings
from django.db import models
from django.db.models import F, Q

from keyvault.domain.errors import RequestInvalidError
from keyvault.domain.issuance import Delivery
from keyvault.domain.keys import KeyState
from keyvault.models.columns import (
    ApprovalColumns,
    RequestColumns,
    account_environment,
    at,
    choice,
    choices_check,
    page_indexes,
)
from keyvault.models.keys import Credential, Key
from keyvault.models.merchants import Account
from keyvault.models.tokens import ServiceToken
from rotation.domain.events import RotationState
from rotation.domain.plan_fields import Proof
from rotation.domain.policy import PLAN_UNREADABLE, Plan, UnreadablePlanError
from rotation.domain.states import CLOSED
from rotation.models.campaigns import Campaign
from rotation.models.schedules import RotationSchedule, ScheduledCredential
from rotation.models.standing_approvals import StandingApproval

AWAITS_CONFIRMATION = Q(state=RotationState.AWAITING_PROOF.value, confirmed_at__isnull=True) & (
    Q(plan__proof=Proof.CONFIRMATION.value) | Q(plan__is_dormant=True)
)
"""Rotations that only an operator can confirm: of public keys and of unused credentials."""


def explain_unreadable(error: Exception) -> str:
    """Explain in one line why this release cannot read stored JSON."""
    if isinstance(error, RequestInvalidError):
        return "; ".join(f"{fault.pointer} must be {fault.detail}" for fault in error.faults) or error.detail
    return f"{type(error).__name__}: {error}"[:200]


class Rotation(RequestColumns):
    """One rotation of a credential's key.

    `accepted_at`, `delivered_at`, `used_at`, `silent_at`: the four facts; none implies another. `deadline_at`: the
    plan's deadline, or the extended one. `retire_at`: for a public key, the approved date. `quarantined_at`: when the
    rotation suspended the key that is being retired. `held_at`: since when an operator holds it suspended. `waived_at`:
    when the predecessor went into quarantine on an approved date, its silence unproved. `bypassed_at`: when the
    approval was bypassed; the break-glass action stays listed until reviewed. `handover`: the replacement's string,
    sealed to the recipient key.
    `awaits_requester`: the replacement is shown once, to the operator who requested it, and was not collected yet.
    `standing_approval`: the schedule's approval that covers this rotation.
    `reminded_percent`, `alarmed_at`: the last reminder to the merchant and the last alarm to the operators.
    """

    rotation_id = models.CharField(primary_key=True, max_length=32)
    credential = models.ForeignKey(Credential, models.PROTECT, related_name="rotations")
    # A copy of the credential's account. The index of the account's pages serves the foreign key.
    account = models.ForeignKey(Account, models.PROTECT, related_name="rotations", db_index=False)
    account_environment = account_environment()
    predecessor = models.ForeignKey(Key, models.PROTECT, related_name="retiring_rotations")
    replacement = models.ForeignKey(Key, models.PROTECT, null=True, blank=True, related_name="introducing_rotations")
    state = choice(RotationState)
    stalled_from = choice(RotationState, null=True, blank=True)
    why = models.CharField(max_length=300, blank=True)
    plan = models.JSONField()
    requester = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.PROTECT, null=True, blank=True, related_name="rotations"
    )
    requested_via = models.ForeignKey(ServiceToken, models.PROTECT, null=True, blank=True)
    approval_expires_at = models.DateTimeField()
    entered_at = models.DateTimeField()
    accepted_at = at()
    delivered_at = at()
    acknowledged_at = at()
    used_at = at()
    silent_at = at()
    awaits_requester = models.BooleanField(default=False)
    collected_at = at()
    closed_at = at()
    deadline_at = at()
    retire_at = at()
    confirmed_at = at()
    notified_at = at()
    quarantined_at = at()
    held_at = at()
    reinstated_at = at()
    waived_at = at()
    written_back_at = at()
    bypassed_at = at()
    alarmed_at = at()
    reminded_percent = models.PositiveSmallIntegerField(default=0)
    handover = models.JSONField(null=True, blank=True)
    schedule = models.ForeignKey(RotationSchedule, models.PROTECT, null=True, blank=True, related_name="rotations")
    standing_approval = models.ForeignKey(
        StandingApproval, models.PROTECT, null=True, blank=True, related_name="rotations"
    )
    campaign = models.ForeignKey(
        Campaign, models.PROTECT, null=True, blank=True, related_name="rotations", db_index=False
    )

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
            models.Index(fields=["state", "created_at"], name="rotation_by_state"),
            models.Index(fields=["-created_at", "-rotation_id"], name="rotation_newest"),
            models.Index(
                fields=["account_environment", "created_at"], name="rotation_to_confirm", condition=AWAITS_CONFIRMATION
            ),
            models.Index(fields=["account"], name="rotation_account_to_confirm", condition=AWAITS_CONFIRMATION),
            models.Index(
                fields=["requester_person", "created_at"],
                name="rotation_to_collect",
                condition=Q(awaits_requester=True),
            ),
            models.Index(
                fields=["created_at"],
                name="rotation_to_hand_over",
                condition=Q(awaits_requester=True) & (Q(schedule__isnull=False) | Q(campaign__isnull=False)),
            ),
            models.Index(
                fields=["campaign", "state"], name="rotation_of_campaign", condition=Q(campaign__isnull=False)
            ),
            models.Index(
                fields=["-created_at", "-rotation_id"],
                name="rotation_bypassed",
                condition=Q(bypassed_at__isnull=False),
            ),
            *page_indexes("rotation", "rotation_id"),
            *page_indexes("rotation", "rotation_id", "state"),
        ]

    def __str__(self) -> str:
        return self.rotation_id

    def alters(self) -> None:
        return None

    def save(self, *args: Any, **kwargs: Any) -> None:
        super().save(*args, **kwargs)
        if self.schedule_id is None:  # A worker that begins a scheduled rotation writes its date itself.
            self.expire_date(self.created_at)

    def expire_date(self, now: datetime) -> None:
        """Mark the credential's next date for recomputation, because no rotation is requested beside an open one.

        Call it when the rotation closes, after the write to its lease: a change of a key locks the two in that order.
        """
        rows = ScheduledCredential.objects.filter(credential=self.credential_id)
        rows.update(ask_at=now, refusals=0, revision=F("revision") + 1)

    @property
    def is_held(self) -> bool:
        """Whether an operator holds the key in quarantine suspended: the rotation neither resumes nor revokes it."""
        key = self.replacement if self.stage is RotationState.ROLLING_BACK else self.predecessor
        return self.held_at is not None and key is not None and key.state == KeyState.SUSPENDED

    @property
    def sealed_replacement(self) -> dict[str, str] | None:
        """The handover, unless it is of an earlier replacement."""
        handover: dict[str, str] | None = self.handover
        return handover if handover is not None and handover["key_id"] == self.replacement_id else None

    @property
    def delivery(self) -> Delivery:
        """How the merchant gets the replacement: sealed where there is a handover of it, else as its credential."""
        return Delivery.SEALED if self.sealed_replacement is not None else Delivery(self.credential.delivery)

    @property
    def current_state(self) -> RotationState:
        return RotationState(self.state)

    @property
    def stage(self) -> RotationState:
        """The state; of a stalled rotation, the state that it stalled in."""
        is_stalled = self.state == RotationState.STALLED and self.stalled_from is not None
        return RotationState(self.stalled_from if is_stalled else self.state)

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


class RotationApproval(ApprovalColumns):
    """One person's approval of one plan digest."""

    rotation = models.ForeignKey(Rotation, models.PROTECT, related_name="approvals")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["rotation", "person"], name="rotation_approval_once")]

    def __str__(self) -> str:
        return f"{self.approver_id} on {self.rotation_id}"

    def alters(self) -> None:
        return None
