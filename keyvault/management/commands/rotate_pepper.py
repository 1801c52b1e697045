"""Create a new pepper version; every key moves to it when it is next used."""

from collections.abc import Mapping
from typing import Any

from keyvault.domain.digests import PepperSet
from keyvault.management.mixins import PepperSetMixin
from keyvault.services.pepper_rotation.propagation import PROPAGATION
from keyvault.services.pepper_rotation.rotation import rotate_pepper


class Command(PepperSetMixin):
    help = (
        "Create a new pepper in the secret backend. After an interruption, run it again. A Vault requires the login "
        "`keeper`."
    )

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        row = rotate_pepper(self.peppers_grant(), PepperSet(options["pepper_set"]))
        return {"set": row.pepper_set, "version": row.number, "hashes_from_at": row.hashes_from_at}

    def format_text(self, answer: Mapping[str, Any]) -> str:
        return (
            f"{answer['set']} pepper {answer['version']} is created. Every process loads it automatically. When all "
            f"have, after {PROPAGATION.seconds} seconds at the earliest, new digests use it, and a key moves to it "
            "when it is used. See show_peppers."
        )
