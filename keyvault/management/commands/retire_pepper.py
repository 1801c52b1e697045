"""Ends a pepper version that nothing living is hashed with; and, a month later, destroys its material."""

from collections.abc import Mapping
from itertools import islice
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.access.principals import HOST
from keyvault.domain.digests import PepperSet
from keyvault.management.json_command import JsonCommand
from keyvault.models import PepperVersion
from keyvault.services.pepper_rotation.rotation import (
    KEPT_AFTER_RETIREMENT,
    PepperInUseError,
    destroy_pepper,
    destroyable_from,
    retire_pepper,
)
from keyvault.services.pepper_rotation.status import list_dormant_keys
from keyvault.services.recording.authorization import authorize

_MOST_LISTED = 100


class Command(JsonCommand):
    help = (
        "Retires an old pepper version; refused while anything that may still be good leans on it. Its dead keys are "
        "answered credential_invalid instead of key_revoked from then on. Its material stays in the secret backend, "
        f"for a database restored from a backup of before: {KEPT_AFTER_RETIREMENT.days} days after the retirement "
        "--destroy erases it, for ever, and such backups are useless then. Nothing destroys it by itself."
    )

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        """Here `--version` is a pepper's, not Django's."""
        return super().create_parser(prog_name, subcommand, conflict_handler="resolve", **kwargs)

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("--set", dest="pepper_set", choices=[each.value for each in PepperSet], required=True)
        parser.add_argument("--version", dest="number", type=int, required=True)
        parser.add_argument(
            "--destroy",
            action="store_true",
            help=f"erase the material of a version retired {KEPT_AFTER_RETIREMENT.days} days ago, for ever",
        )

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        pepper_set, number = PepperSet(options["pepper_set"]), options["number"]
        grant = authorize(HOST, Permission.PEPPERS_WRITE, now=self.now)
        if options["destroy"]:
            row = destroy_pepper(grant, pepper_set, number)
        else:
            row = self._retire(grant, pepper_set, number)
        return {
            "set": row.pepper_set,
            "version": row.number,
            "retired_at": row.retired_at,
            "destroyable_from": destroyable_from(row),
            "destroyed_at": row.destroyed_at,
        }

    def words(self, answer: Mapping[str, Any]) -> str:
        version = f"{answer['set']} pepper {answer['version']}"
        if answer["destroyed_at"]:
            return f"{version} is retired and destroyed."
        return (
            f"{version} is retired. Its material may be destroyed from {answer['destroyable_from']:%Y-%m-%d} on "
            "(--destroy), when no backup of before is needed any more."
        )

    def _retire(self, grant: Grant, pepper_set: PepperSet, number: int) -> PepperVersion:
        try:
            return retire_pepper(grant, pepper_set, number)
        except PepperInUseError as error:
            raise PepperInUseError(error.detail + self._listed(pepper_set, number)) from error

    def _listed(self, pepper_set: PepperSet, number: int) -> str:
        """The keys in the way, the first hundred."""
        keys = islice(list_dormant_keys(pepper_set, number, self.now, dormant_days=0), _MOST_LISTED)
        return "".join(f"\n  {key.format_line()}" for key in keys)
