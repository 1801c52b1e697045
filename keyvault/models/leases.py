"""Leases on work items, stored apart from the items' own rows."""

from django.db import models
from django.db.models import Q

from keyvault.models.columns import at


class WorkLease(models.Model):
    """The lease of one work item. `token` is a fencing token: each claim replaces it.

    `queue`: the queue that dispatches the work when it is due; empty for work that its own table lists.
    `due_since`: when dispatched work became due; None: it was not dispatched since the last claim.
    `wakes`: total number of wake-ups.
    """

    subject = models.CharField(primary_key=True, max_length=80)
    token = models.CharField(max_length=32, blank=True)
    until = at()
    due_at = at()
    queue = models.CharField(max_length=40, blank=True)
    is_urgent = models.BooleanField(default=False)
    due_since = at()
    wakes = models.PositiveIntegerField(default=0)
    attempts = models.PositiveIntegerField(default=0)
    last_error = models.CharField(max_length=300, blank=True)

    class Meta:
        indexes = [
            models.Index(fields=["queue", "is_urgent", "due_at"], name="work_lease_due"),
            models.Index(
                fields=["queue", "due_since"], name="work_lease_waiting", condition=Q(due_since__isnull=False)
            ),
            models.Index(fields=["subject"], name="work_lease_failing", condition=~Q(last_error="")),
            models.Index(fields=["due_at"], name="work_lease_abandoned", condition=Q(queue="", due_at__isnull=False)),
            models.Index(fields=["until"], name="work_lease_held", condition=Q(queue="", due_at__isnull=True)),
        ]

    def __str__(self) -> str:
        return self.subject
