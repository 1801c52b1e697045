"""Campaigns, which begin a rotation for each of their members under one approval."""

from django.conf import settings
from django.db import models
from django.db.models import Q

from keyvault.domain.environments import Environment
from keyvault.models.columns import ApprovalColumns, RequestColumns, at, choice, choices_check
from keyvault.models.keys import Credential


class CampaignState(models.TextChoices):
    AWAITING_APPROVAL = "awaiting_approval"
    RUNNING = "running"
    PAUSED = "paused"
    HALTED = "halted"
    COMPLETED = "completed"
    REJECTED = "rejected"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


UNDER_WAY = (CampaignState.AWAITING_APPROVAL, CampaignState.RUNNING, CampaignState.PAUSED, CampaignState.HALTED)
"""States of a campaign that is not closed, in which workers advance it."""


class Campaign(RequestColumns):
    """A selection of credentials that is rotated under one approval of selection, plan and pace.

    `selection`: {"environment", "merchants" (list or null), "older_than_days" (or null)}, `left_out`, the number of
    matching credentials that were excluded, by reason, and `count`, that of the selected ones. `overrides`: those of
    each plan. `pace`: {"per_minute", "concurrency", "halt_on_stall" (bool), "halt_at_failed_percent"}. The digest
    covers all three and the selected credentials, which are `members` from the start. `began_at`: when the approval was
    complete. `resumed_at`: when it was last resumed after a halt; only later outcomes count towards the next halt.
    """

    campaign_id = models.CharField(primary_key=True, max_length=32)
    environment = choice(Environment)
    state = choice(CampaignState)
    why = models.CharField(max_length=300, blank=True)
    reason = models.CharField(max_length=300)
    selection = models.JSONField()
    overrides = models.JSONField()
    pace = models.JSONField()
    requester = models.ForeignKey(settings.AUTH_USER_MODEL, models.PROTECT, related_name="campaigns")
    approval_expires_at = models.DateTimeField()
    began_at = at()
    resumed_at = at()
    closed_at = at()

    class Meta:
        constraints = [
            choices_check("campaign_environment", "environment", Environment),
            choices_check("campaign_state", "state", CampaignState),
        ]
        indexes = [
            models.Index(
                fields=["environment", "created_at"],
                name="campaign_under_way",
                condition=Q(state__in=[state.value for state in UNDER_WAY]),
            ),
        ]

    def __str__(self) -> str:
        return self.campaign_id

    def alters(self) -> None:
        return None


class CampaignApproval(ApprovalColumns):
    """One person's approval of one campaign's digest."""

    campaign = models.ForeignKey(Campaign, models.PROTECT, related_name="approvals")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["campaign", "person"], name="campaign_approval_once")]

    def __str__(self) -> str:
        return f"{self.approver_id} on {self.campaign_id}"

    def alters(self) -> None:
        return None


class CampaignMember(models.Model):
    """A credential of a campaign and its rotation, whose state is the member's outcome.

    `outcome`: `skipped` for a credential that no longer qualified at its turn, with `why`; else empty.
    """

    campaign = models.ForeignKey(Campaign, models.PROTECT, related_name="members")
    credential = models.ForeignKey(Credential, models.PROTECT, related_name="+")
    rotation = models.OneToOneField(
        "rotation.Rotation", models.PROTECT, null=True, blank=True, related_name="membership"
    )
    outcome = models.CharField(max_length=32, blank=True)
    why = models.CharField(max_length=300, blank=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["campaign", "credential"], name="campaign_member_once")]
        indexes = [models.Index(fields=["campaign", "outcome"], name="campaign_member_by_outcome")]

    def __str__(self) -> str:
        return f"{self.credential_id} in {self.campaign_id}"
