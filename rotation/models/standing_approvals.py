"""Standing approvals, under which a production schedule's rotations need no approval of their own."""

from django.conf import settings
from django.db import models
from django.db.models import Q

from keyvault.models.columns import ApprovalColumns, RequestColumns, at, choice, choices_check
from rotation.models.schedules import RotationSchedule


class StandingApprovalState(models.TextChoices):
    AWAITING_APPROVAL = "awaiting_approval"
    APPROVED = "approved"
    REJECTED = "rejected"
    WITHDRAWN = "withdrawn"
    VOID = "void"


LIVE = (StandingApprovalState.AWAITING_APPROVAL, StandingApprovalState.APPROVED)


class StandingApproval(RequestColumns):
    """The approval of all rotations that a schedule requests until `expires_at`.

    `terms`: the schedule's plan and selection as requested; the digest covers them and `expires_at`. The requester is
    the schedule's author, who also requests its rotations. Each change of the schedule or its calendar voids it.
    `notice_at`: when a worker next announces that an approved row expires, or has expired; None: it has done so.
    """

    approval_id = models.CharField(primary_key=True, max_length=32)
    schedule = models.ForeignKey(RotationSchedule, models.PROTECT, related_name="standing_approvals")
    state = choice(StandingApprovalState)
    why = models.CharField(max_length=300, blank=True)
    terms = models.JSONField()
    requester = models.ForeignKey(settings.AUTH_USER_MODEL, models.PROTECT, related_name="+")
    approval_expires_at = models.DateTimeField()
    expires_at = models.DateTimeField()
    notice_at = at()
    closed_at = at()

    class Meta:
        constraints = [
            choices_check("standing_approval_state", "state", StandingApprovalState),
            models.UniqueConstraint(
                fields=["schedule", "state"], name="standing_approval_one", condition=Q(state__in=LIVE)
            ),
        ]
        indexes = [
            models.Index(
                fields=["notice_at"],
                name="standing_approval_expiring",
                condition=Q(state=StandingApprovalState.APPROVED, notice_at__isnull=False),
            )
        ]

    def __str__(self) -> str:
        return self.approval_id

    def alters(self) -> None:
        return None


class ScheduleApproval(ApprovalColumns):
    """One person's approval of one standing approval's digest."""

    standing = models.ForeignKey(StandingApproval, models.PROTECT, related_name="approvals")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["standing", "person"], name="schedule_approval_once")]

    def __str__(self) -> str:
        return f"{self.approver_id} on {self.standing_id}"

    def alters(self) -> None:
        return None
