"""Who works on what, until when: bookkeeping beside the rows that matter, which stay the truth."""

from django.db import models

from keyvault.models.columns import at


class WorkLease(models.Model):
    """One row for each piece of work that has been tried. `token` fences: a new holder voids the old one's."""

    subject = models.CharField(primary_key=True, max_length=80)
    token = models.CharField(max_length=32, blank=True)
    until = at()
    due_at = at()
    attempts = models.PositiveIntegerField(default=0)
    last_error = models.CharField(max_length=300, blank=True)

    def __str__(self) -> str:
        return self.subject
