"""Which pepper versions exist, and whose they are. The peppers themselves are in the secret backend."""

from django.db import models

from keyvault.domain.digests import PepperSet
from keyvault.models.columns import at, choice, choices_check, created_at
from keyvault.models.recording import RecordedModel


class Installation(RecordedModel):
    """This database's own name, one row, made before its first pepper: it stands in the labels of every pepper.

    So peppers of another installation are told from ours where both were pointed at one secret backend.
    """

    id = models.PositiveSmallIntegerField(primary_key=True, default=1)
    installation_id = models.CharField(max_length=64)
    created_at = created_at()

    class Meta:
        constraints = [models.CheckConstraint(name="installation_one", condition=models.Q(id=1))]

    def __str__(self) -> str:
        return self.installation_id

    def alters(self) -> None:
        return None


class PepperVersion(RecordedModel):
    """`check_value` tells at start that the loaded pepper is the one the digests were made with.

    New digests are made with the newest one whose `hashes_from_at` has passed: it is set once every live process has
    loaded the version (of number 1 it is None: from the beginning). A retired one verifies nothing any more; its
    material is destroyed by hand, long afterwards.
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
        """Whether it only proves as yet."""
        return self.number > 1 and self.hashes_from_at is None

    def alters(self) -> None:
        return None
