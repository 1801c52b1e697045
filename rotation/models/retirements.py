"""Dates on which public keys are taken out of service."""

from django.conf import settings
from django.db import models
from django.db.models import F, Q

from keyvault.models.columns import at, created_at
from keyvault.models.recording import RecordedModel
from rotation.models.rotations import Rotation


class Retirement(RecordedModel):
    """The date on which a rotation's public predecessor is taken out of service.

    One person requests it; another approves it where the environment requires that. `is_requester_claimed`: it was
    requested on a command line, which proves no identity.
    """

    rotation = models.ForeignKey(Rotation, models.PROTECT, related_name="retirements")
    retire_at = models.DateTimeField()
    requester = models.ForeignKey(settings.AUTH_USER_MODEL, models.PROTECT, related_name="+")
    requester_person = models.CharField(max_length=32)
    is_requester_claimed = models.BooleanField()
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
