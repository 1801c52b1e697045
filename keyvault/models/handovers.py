"""Keys handed over inside a wrapping token of the secrets manager."""

from django.db import models
from django.db.models import F, Q

from keyvault.models.columns import at, created_at
from keyvault.models.keys import Key
from keyvault.models.recording import RecordedModel


class WrappedHandover(RecordedModel):
    """One wrapping token, by its accessor, which opens nothing. `subject`: the request or rotation it is for.

    It ends in one way: `confirmed_at` (whoever should have opened it says so), `revoked_at` (taken back unopened), or
    `suspected_at` (used or expired, and nobody who should have it has the key). `used_at`: its key was in use before
    anybody had said a word, which a thief does too, and so ends nothing.
    """

    subject = models.CharField(max_length=32)
    key = models.ForeignKey(Key, models.PROTECT, related_name="handovers")
    accessor = models.CharField(max_length=128, unique=True)
    creation_path = models.CharField(max_length=300)
    created_at = created_at()
    expires_at = models.DateTimeField()
    used_at = at()
    confirmed_at = at()
    revoked_at = at()
    suspected_at = at()

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["subject"],
                name="handover_one_open",
                condition=Q(confirmed_at__isnull=True, revoked_at__isnull=True, suspected_at__isnull=True),
            ),
            models.CheckConstraint(name="handover_expires_later", condition=Q(expires_at__gt=F("created_at"))),
            models.CheckConstraint(
                name="handover_ends_once",
                condition=Q(confirmed_at__isnull=True, revoked_at__isnull=True)
                | Q(confirmed_at__isnull=True, suspected_at__isnull=True)
                | Q(revoked_at__isnull=True, suspected_at__isnull=True),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.subject} until {self.expires_at:%H:%M:%S}"

    def alters(self) -> None:
        return None
