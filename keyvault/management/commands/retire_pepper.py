"""Retire a pepper version that no active credential uses; a month later, destroy its material."""

from collections.abc import Mapping
from itertools import islice
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.decision import Grant
from keyvault.domain.digests import PepperSet
from keyvault.management.mixins import PepperSetMixin
from keyvault.models import PepperVersion
from keyvault.services.pepper_rotation.rotation import (
    KEPT_AFTER_RETIREMENT,
    PepperInUseError,
    destroy_pepper,
    destroyable_from,
    retire_pepper,
)
from keyvault.services.pepper_rotation.status import list_dormant_keys

_MAX_LISTED = 100


class Command(PepperSetMixin):
    help = (
        "Retire an old pepper version; refused while a usable key or token depends on it. Its revoked keys are then "
        "answered credential_invalid instead of key_revoked. Its material stays in the secret backend for restored "
        f"backups. {KEPT_AFTER_RETIREMENT.days} days after the retirement --destroy erases it permanently, which makes "
        "older backups useless. It is never destroyed automatically."
    )

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        """Let the pepper's `--version` replace Django's option."""
        return super().create_parser(prog_name, subcommand, conflict_handler="resolve", **kwargs)

    def add_options(self, parser: CommandParser) -> None:
        super().add_options(parser)
        parser.add_argument("--version", dest="number", type=int, required=True)
        parser.add_argument(
            "--destroy",
            action="store_true",
            help=f"permanently erase the material of a version retired {KEPT_AFTER_RETIREMENT.days} days ago",
        )

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        pepper_set, number = PepperSet(options["pepper_set"]), options["number"]
        grant = self.peppers_grant()
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

    def format_text(self, answer: Mapping[str, Any]) -> str:
        version = f"{answer['set']} pepper {answer['version']}"
        if answer["destroyed_at"]:
            return f"{version} is retired and destroyed."
        return (
            f"{version} is retired. Its material can be destroyed from {answer['destroyable_from']:%Y-%m-%d} on "
            "(--destroy), when older backups are no longer needed."
        )

    def _retire(self, grant: Grant, pepper_set: PepperSet, number: int) -> PepperVersion:
        try:
            return retire_pepper(grant, pepper_set, number)
        except PepperInUseError as error:
            raise PepperInUseError(error.detail + self._listed(pepper_set, number)) from error

    def _listed(self, pepper_set: PepperSet, number: int) -> str:
        """List the keys that prevent the retirement, at most _MAX_LISTED."""
        keys = islice(list_dormant_keys(pepper_set, number, self.now, dormant_days=0), _MAX_LISTED)
        return "".join(f"\n  {key.format_line()}" for key in keys)
