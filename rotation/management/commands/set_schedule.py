"""Create or change the rotation schedule of an environment, an account or a credential, and enable it."""

import json
from argparse import ArgumentTypeError
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from django.core.management.base import CommandError, CommandParser

from keyvault.access.permissions import Permission
from keyvault.domain.errors import RequestInvalidError
from rotation.domain.plan_fields import FIELDS, SHARED_FIELDS
from rotation.domain.windows import Window
from rotation.management.plan_options import add_plan_options, read_overrides
from rotation.management.schedule_scope import ScheduleCommand
from rotation.models import RotationSchedule
from rotation.services.schedules.reports import describe_schedule
from rotation.services.schedules.schedules import ScheduleDraft, draft_of, find_schedule, get_calendar, save_schedule

_PLAN_FIELDS = (*SHARED_FIELDS, FIELDS["reason"])
_DAYS = ("cryptoperiod_days", "jitter_days", "lead_days")


class Command(ScheduleCommand):
    help = (
        "Create or change a rotation schedule, and enable it. An omitted option keeps its saved value. The operator "
        "becomes the requester of its rotations."
    )

    def add_options(self, parser: CommandParser) -> None:
        super().add_options(parser)
        parser.add_argument("--cryptoperiod-days", type=int, metavar="N", help="maximum time that a key is in use")
        parser.add_argument("--jitter-days", type=int, metavar="N", help="rotate each key up to this many days earlier")
        parser.add_argument(
            "--lead-days", type=int, metavar="N", help="request each rotation this many days before it is due"
        )
        window, calendar = parser.add_mutually_exclusive_group(), parser.add_mutually_exclusive_group()
        window.add_argument("--window", type=_window, metavar="JSON", help="as in a plan of the REST API")
        window.add_argument("--no-window", action="store_true", help="rotations may start at any time")
        calendar.add_argument("--calendar", metavar="NAME", help="blackout calendar")
        calendar.add_argument("--no-calendar", action="store_true")
        add_plan_options(parser, _PLAN_FIELDS)

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        scope = self.scope(options)
        grant = self.operator_grant(options, Permission.SCHEDULES_WRITE, scope.place, scope.within)
        known = find_schedule(scope)
        schedule = save_schedule(grant, scope, _draft(options, known), known=known)
        return describe_schedule(schedule, self.now)


def _draft(options: Mapping[str, Any], known: RotationSchedule | None) -> ScheduleDraft:
    """Return the saved draft with the given options. Raises UnreadableScheduleError, NotFoundError."""
    if known is None and options["cryptoperiod_days"] is None:
        raise CommandError("a new schedule needs --cryptoperiod-days", returncode=2)
    saved = ScheduleDraft(options["cryptoperiod_days"]) if known is None else draft_of(known)
    chosen = read_overrides(options, _PLAN_FIELDS)
    given = {each.name: getattr(chosen, each.name) for each in fields(chosen)}
    changed = {name: value for name, value in given.items() if value is not None and value is not False and value != ""}
    overrides = replace(saved.overrides, **changed)
    changes: dict[str, Any] = {name: options[name] for name in _DAYS if options[name] is not None}
    if options["window"] is not None or options["no_window"]:
        changes["window"] = options["window"]
    if options["calendar"] is not None:
        changes["calendar"] = get_calendar(options["calendar"])
    elif options["no_calendar"]:
        changes["calendar"] = None
    return replace(saved, overrides=overrides, **changes)


def _window(text: str) -> Window:
    try:
        return Window.from_json(json.loads(text))
    except ValueError as error:
        raise ArgumentTypeError("not JSON") from error
    except RequestInvalidError as error:
        raise ArgumentTypeError("; ".join(f"{fault.pointer}: {fault.detail}" for fault in error.faults)) from error
