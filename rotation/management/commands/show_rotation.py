"""Show a rotation's state, what it waits for, and its evidence."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from django.core.management.base import CommandParser

from keyvault.management.json_command import JsonCommand
from rotation.services.rotations.reports import describe, get_rotation


class Command(JsonCommand):
    help = "Show a rotation: its state, what it waits for, its evidence, and who still uses the old key."

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("rotation_id")

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return describe(get_rotation(options["rotation_id"]), datetime.now(UTC))
