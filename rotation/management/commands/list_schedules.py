"""List the rotation schedules with their standing approvals."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.domain.environments import Environment
from keyvault.management.json_command import JsonCommand
from keyvault.management.mixins import add_environment_option
from rotation.services.schedules.reports import list_schedules


class Command(JsonCommand):
    help = "List the rotation schedules: what each applies to, its terms, its state and its standing approvals."

    def add_options(self, parser: CommandParser) -> None:
        add_environment_option(parser, required=False)

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        environments = [options["environment"]] if options["environment"] else [each.value for each in Environment]
        return {"schedules": list_schedules(environments, self.now)}
