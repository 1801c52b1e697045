"""Options that name a schedule by what it applies to, and what commands print of it."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.domain.environments import Environment
from keyvault.domain.errors import NotFoundError
from keyvault.management.json_command import JsonCommand
from keyvault.management.mixins import OperatorMixin, add_environment_option
from rotation.models import RotationSchedule
from rotation.services.schedules.schedules import ScheduleScope, find_schedule, find_scope


class ScopeMixin(JsonCommand):
    """`--environment`, `--merchant` and `--credential`: what a schedule applies to."""

    def add_options(self, parser: CommandParser) -> None:
        add_environment_option(parser)
        parser.add_argument("--merchant", metavar="ID", help="default: every merchant without its own schedule")
        parser.add_argument("--credential", metavar="ID", help="one credential; its schedule overrides all others")
        super().add_options(parser)

    def scope(self, options: Mapping[str, Any]) -> ScheduleScope:
        """Return the scope. Raises NotFoundError and RequestInvalidError."""
        return find_scope(Environment(options["environment"]), options["merchant"], options["credential"])

    def schedule(self, options: Mapping[str, Any]) -> RotationSchedule:
        """Return the schedule of exactly this scope. Raises NotFoundError."""
        scope = self.scope(options)
        schedule = find_schedule(scope)
        if schedule is None:
            raise NotFoundError(f"There is no schedule for {scope}.")
        return schedule


class ScheduleCommand(OperatorMixin, ScopeMixin):
    """Base class of the commands with which an operator changes a schedule."""
