"""Changes of operators that a second person approves. Triggers enforce four eyes, see `models.triggers`."""

from django.conf import settings
from django.db import models
from django.db.models import F, Q

from keyvault.models.columns import ApprovalColumns, RequestColumns, at, choice, choices_check


class OperatorChangeKind(models.TextChoices):
    ROLES = "roles"
    SCOPE = "scope"
    SECOND_FACTORS_RESET = "second_factors_reset"


class OperatorChangeState(models.TextChoices):
    AWAITING_APPROVAL = "awaiting_approval"
    APPLIED = "applied"
    REJECTED = "rejected"
    WITHDRAWN = "withdrawn"


class OperatorChange(RequestColumns):
    """A requested change of an operator. Neither the requester nor the person of the operator approves it.

    `roles`, `roles_before`: names of roles, separated by spaces. `scope`, `scope_before`: see `AccessScope.as_json`.
    `why`: the requester's reason. `closed_why`: the reason of a rejection.
    """

    change_id = models.CharField(primary_key=True, max_length=32)
    # The index `operator_change_newest_of` begins with the operator.
    operator = models.ForeignKey(settings.AUTH_USER_MODEL, models.PROTECT, related_name="changes", db_index=False)
    operator_person = models.CharField(max_length=32)
    kind = choice(OperatorChangeKind)
    roles_before = models.CharField(max_length=200, blank=True)
    roles = models.CharField(max_length=200, blank=True)
    scope_before = models.JSONField()
    scope = models.JSONField()
    why = models.CharField(max_length=300)
    state = choice(OperatorChangeState)
    requester = models.ForeignKey(settings.AUTH_USER_MODEL, models.PROTECT, related_name="+")
    approval_expires_at = models.DateTimeField()
    closed_at = at()
    closed_why = models.CharField(max_length=300, blank=True)

    class Meta:
        constraints = [
            choices_check("operator_change_kind", "kind", OperatorChangeKind),
            choices_check("operator_change_state", "state", OperatorChangeState),
            models.CheckConstraint(
                name="operator_change_of_another", condition=~Q(requester_person=F("operator_person"))
            ),
            models.CheckConstraint(
                name="operator_change_expires_later", condition=Q(approval_expires_at__gt=F("created_at"))
            ),
            models.CheckConstraint(
                name="operator_change_closed",
                condition=Q(state="awaiting_approval", closed_at__isnull=True)
                | (~Q(state="awaiting_approval") & Q(closed_at__isnull=False)),
            ),
        ]
        indexes = [
            models.Index(fields=["operator", "-created_at"], name="operator_change_newest_of"),
            models.Index(fields=["state", "created_at"], name="operator_change_by_state"),
            models.Index(fields=["-created_at"], name="operator_change_newest"),
        ]

    def __str__(self) -> str:
        return self.change_id

    def alters(self) -> None:
        return None


class OperatorChangeApproval(ApprovalColumns):
    """One person's approval of one change."""

    change = models.ForeignKey(OperatorChange, models.PROTECT, related_name="approvals")

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["change", "person"], name="operator_change_approval_once"),
        ]

    def __str__(self) -> str:
        return f"{self.approver_id} on {self.change_id}"

    def alters(self) -> None:
        return None
