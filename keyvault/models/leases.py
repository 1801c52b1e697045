"""Leases on work items, stored apart from the items' own rows."""

from django.db import models
from django.db.models import Q

from keyvault.models.columns import at


class WorkLease(models.Model):
    """The lease of one work item. `token` is a fencing token: each claim replaces it."""

    subject = models.CharField(primary_key=True, max_length=80)
    token = models.CharField(max_length=32, blank=True)
    until = at()
    due_at = at()
    attempts = models.PositiveIntegerField(default=0)
    last_error = models.CharField(max_length=300, blank=True)

    class Meta:
        indexes = [
            models.Index(fields=["due_at"], name="work_lease_due", condition=Q(due_at__isnull=False)),
            models.Index(fields=["until"], name="work_lease_held", condition=Q(due_at__isnull=True)),
        ]

    def __str__(self) -> str:
        return self.subject
