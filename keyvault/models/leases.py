"""Leases on work items, stored apart from the items' own rows."""

from django.db import models

from keyvault.models.columns import at


class WorkLease(models.Model):
    """The lease of one work item. `token` is a fencing token: each claim replaces it."""

    subject = models.CharField(primary_key=True, max_length=80)
    token = models.CharField(max_length=32, blank=True)
    until = at()
    due_at = at()
    attempts = models.PositiveIntegerField(default=0)
    last_error = models.CharField(max_length=300, blank=True)

    def __str__(self) -> str:
        return self.subject
