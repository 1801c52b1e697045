"""Show the next dates of scheduled rotations and what prevents any of them, as a dry run."""

import io
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from django.core.management.base import CommandParser
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from keyvault.access.scopes import EVERYWHERE
from keyvault.domain.environments import Environment
from keyvault.domain.errors import NotFoundError
from keyvault.domain.redaction import redact
from keyvault.management.json_command import JsonCommand
from keyvault.management.mixins import add_environment_option
from keyvault.models import Merchant
from rotation.services.schedules.calendar import DateState, list_next
from rotation.services.schedules.candidates import MAX_LISTED

_STYLES = {
    DateState.AWAITING_APPROVAL: "yellow",
    DateState.OPEN: "cyan",
    DateState.OVERDUE: "bold red",
    DateState.NOT_SCHEDULABLE: "red",
}


_MORE = f"Lists {MAX_LISTED} with a date and {MAX_LISTED} without. Choose an environment or a merchant to see others."


class Command(JsonCommand):
    help = "Show when scheduled keys are rotated next, without writing anything. Times are UTC."

    def add_options(self, parser: CommandParser) -> None:
        add_environment_option(parser, required=False)
        parser.add_argument("--merchant", metavar="ID")
        parser.add_argument("--days", type=_days, default=90, metavar="N", help="number of days ahead, 1 to 732 (90)")

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        if options["merchant"] and not Merchant.objects.filter(pk=options["merchant"]).exists():
            raise NotFoundError(f"There is no merchant {options['merchant']}.")
        now = datetime.now(UTC)
        until = now + timedelta(days=options["days"])
        environment = Environment(options["environment"]) if options["environment"] else None
        listed = list_next(now, until, EVERYWHERE.narrowed_to(options["merchant"], environment))
        has_more = listed.after is not None or listed.has_more_undated
        return {"now": now, "until": until, "dates": [date.as_json() for date in listed.dates], "has_more": has_more}

    def format_text(self, answer: Mapping[str, Any]) -> str:
        if not answer["dates"]:
            return f"No scheduled key is rotated until {answer['until']:%Y-%m-%d}."
        table = Table(box=box.SIMPLE_HEAD)
        for column in ("begins (UTC)", "account", "credential", "label", "state", "why"):
            table.add_column(column, no_wrap=column != "why", overflow="fold")
        for date in answer["dates"]:
            table.add_row(
                _short(date["begins_at"]),
                f"{date['merchant_id']}/{date['environment']}",
                date["credential_id"],
                Text(redact(date["label"])),
                Text(date["state"].replace("_", " "), style=_STYLES.get(DateState(date["state"]), "")),
                Text(redact(date["why"])),
            )
        output, on_terminal = io.StringIO(), self.stdout.isatty()
        # Without a terminal lines are not wrapped, so that the output can be searched.
        width = None if on_terminal else 400
        Console(file=output, force_terminal=on_terminal, highlight=False, width=width).print(table)
        lines = [line.rstrip() for line in output.getvalue().splitlines()]
        return "\n".join([*lines, _MORE] if answer["has_more"] else lines)


def _short(text: str | None) -> str:
    return "-" if text is None else f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M}"


def _days(text: str) -> int:
    days = int(text)
    if not 1 <= days <= 732:
        raise ValueError("1 to 732")
    return days
