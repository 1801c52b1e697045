"""Enable a rotation schedule."""

from collections.abc import Mapping
from typing import Any

from keyvault.access.permissions import Permission
from rotation.management.schedule_scope import ScheduleCommand
from rotation.services.schedules.reports import describe_schedule
from rotation.services.schedules.schedules import enable_schedule, scope_of


class Command(ScheduleCommand):
    help = "Enable a rotation schedule unchanged. The operator becomes the requester of its rotations."

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        schedule = self.schedule(options)
        scope = scope_of(schedule)
        grant = self.operator_grant(options, Permission.SCHEDULES_WRITE, scope.place, scope.within)
        enable_schedule(grant, schedule)
        return describe_schedule(schedule, self.now)
