"""Pepper versions and their installation. The peppers themselves are in the secret backend."""

from django.db import models

from keyvault.domain.digests import PepperSet
from keyvault.models.columns import at, choice, choices_check, created_at
from keyvault.models.recording import RecordedModel


class Installation(RecordedModel):
    """The id of this database: one row, created before the first pepper. Every pepper has it as a label.

    It distinguishes the peppers of installations that use the same secret backend by mistake.
    `oldest_compatible_release`: older releases do not start on this database's schema.
    """

    id = models.PositiveSmallIntegerField(primary_key=True, default=1)
    installation_id = models.CharField(max_length=64)
    oldest_compatible_release = models.CharField(max_length=20)
    created_at = created_at()

    class Meta:
        constraints = [models.CheckConstraint(name="installation_one", condition=models.Q(id=1))]

    def __str__(self) -> str:
        return self.installation_id

    def alters(self) -> None:
        return None


class PepperVersion(RecordedModel):
    """A pepper version. At startup `check_value` shows whether the loaded pepper made the digests.

    New digests use the newest version whose `hashes_from_at` has passed. It is set when every live process has loaded
    the version; None for version 1, which is used from the beginning. A retired version verifies nothing; an operator
    destroys its material later.
    """

    pepper_set = choice(PepperSet)
    number = models.PositiveIntegerField()
    check_value = models.BinaryField(max_length=16)
    created_at = created_at()
    hashes_from_at = at()
    retired_at = at()
    destroyed_at = at()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["pepper_set", "number"], name="pepper_version_unique"),
            choices_check("pepper_set", "pepper_set", PepperSet),
        ]

    def __str__(self) -> str:
        return f"{self.pepper_set} {self.number}"

    @property
    def is_staged(self) -> bool:
        """Whether the version verifies digests but does not make new ones yet."""
        return self.number > 1 and self.hashes_from_at is None

    def alters(self) -> None:
        return None
