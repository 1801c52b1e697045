"""Which pepper versions exist. The peppers themselves are in the secret backend."""

from django.db import models

from keyvault.domain.digests import PepperSet
from keyvault.models.columns import choice, choices_check, created_at
from keyvault.models.recording import RecordedModel


class PepperVersion(RecordedModel):
    """`check_value` tells at start that the loaded pepper is the one the digests were made with."""

    pepper_set = choice(PepperSet)
    number = models.PositiveIntegerField()
    check_value = models.BinaryField(max_length=16)
    created_at = created_at()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["pepper_set", "number"], name="pepper_version_unique"),
            choices_check("pepper_set", "pepper_set", PepperSet),
        ]

    def __str__(self) -> str:
        return f"{self.pepper_set} {self.number}"

    def alters(self) -> None:
        return None
