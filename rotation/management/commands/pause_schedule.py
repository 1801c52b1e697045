"""Disable a rotation schedule."""

from collections.abc import Mapping
from typing import Any

from keyvault.access.permissions import Permission
from rotation.management.schedule_scope import ScheduleCommand
from rotation.services.schedules.reports import describe_schedule
from rotation.services.schedules.schedules import disable_schedule, scope_of


class Command(ScheduleCommand):
    help = "Disable a rotation schedule: the next broader one applies. Rotations in progress continue."

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        schedule = self.schedule(options)
        scope = scope_of(schedule)
        grant = self.operator_grant(options, Permission.SCHEDULES_WRITE, scope.place, scope.within)
        disable_schedule(grant, schedule)
        return describe_schedule(schedule, self.now)
