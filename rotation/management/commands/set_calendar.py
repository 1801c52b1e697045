"""Create or change a blackout calendar."""

import json
from argparse import ArgumentTypeError
from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.permissions import Permission
from keyvault.management.mixins import OperatorMixin
from rotation.services.schedules.schedules import find_calendar, save_calendar


class Command(OperatorMixin):
    help = (
        "Create a blackout calendar, or change its periods, in which no scheduled rotation begins. A change voids the "
        "standing approvals of the schedules that use it."
    )

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("name")
        parser.add_argument(
            "--periods",
            type=_json,
            required=True,
            metavar="JSON",
            help='all of them: [{"begins_at": "2026-12-20T00:00:00Z", "ends_at": "2027-01-02T00:00:00Z", "why": "-"}]',
        )
        super().add_options(parser)

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        grant = self.operator_grant(options, Permission.SCHEDULES_WRITE)
        known = find_calendar(options["name"])
        calendar = save_calendar(grant, options["name"], options["periods"], known=known)
        return {"name": calendar.name, "periods": calendar.periods}


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ArgumentTypeError("not JSON") from error
