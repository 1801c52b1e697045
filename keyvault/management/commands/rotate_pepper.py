"""Create a new pepper version; every key moves to it when it is next used."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.permissions import Permission
from keyvault.access.principals import HOST
from keyvault.domain.digests import PepperSet
from keyvault.management.json_command import JsonCommand
from keyvault.services.pepper_rotation.propagation import PROPAGATION
from keyvault.services.pepper_rotation.rotation import rotate_pepper
from keyvault.services.recording.authorization import authorize


class Command(JsonCommand):
    help = "Create a new pepper in the secret backend. After an interruption, run it again. Needs the keeper's login."

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("--set", dest="pepper_set", choices=[each.value for each in PepperSet], required=True)

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        grant = authorize(HOST, Permission.PEPPERS_WRITE, now=self.now)
        row = rotate_pepper(grant, PepperSet(options["pepper_set"]))
        return {"set": row.pepper_set, "version": row.number, "hashes_from_at": row.hashes_from_at}

    def format_text(self, answer: Mapping[str, Any]) -> str:
        return (
            f"{answer['set']} pepper {answer['version']} is created. Every process loads it automatically. When all "
            f"have, after {PROPAGATION.seconds} seconds at the earliest, new digests use it, and a key moves to it "
            "when it is used. See pepper_status."
        )
