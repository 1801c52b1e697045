"""Show a campaign's progress in a terminal: bars on standard error until it has ended or needs a person."""

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db import close_old_connections
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn

from keyvault.domain.redaction import redact
from keyvault.management.json_command import JsonCommand
from rotation.models import Campaign, CampaignState
from rotation.services.campaigns.campaigns import CLOSED, get_campaign
from rotation.services.campaigns.reports import describe_campaign

POLL_INTERVAL_SECONDS = 2.0

STOPPED = frozenset({*CLOSED, CampaignState.HALTED})
"""States in which the campaign makes no automatic progress."""


class WatchingCommand(JsonCommand):
    """A command with `--watch`. It exits 1, after its output, when the watched campaign was not completed."""

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--watch", action="store_true", help="show its progress until it has ended or halted")

    def handle(self, *args: Any, **options: Any) -> None:
        self.stopped: str | None = None
        super().handle(*args, **options)
        if self.stopped is not None:
            raise CommandError(redact(self.stopped))

    def report(self, campaign: Campaign, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the command's output, with `--watch` after the campaign has stopped."""
        if not options["watch"]:
            return describe_campaign(campaign, datetime.now(UTC))
        described = watch_campaign(campaign.campaign_id, Console(stderr=True))
        self.stopped = format_exit(described)
        return described


def _pause() -> None:
    """Sleep until the next poll and drop stale connections, since the database may have restarted."""
    time.sleep(POLL_INTERVAL_SECONDS)
    close_old_connections()


def watch_campaign(campaign_id: str, console: Console, pause: Callable[[], None] = _pause) -> dict[str, Any]:
    """Return the campaign's description once it has stopped, or when the user interrupts; the campaign continues."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TaskProgressColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=console) as bars:
        proved, ended = bars.add_task("replacement proved", note=""), bars.add_task("ended", note="")
        while True:
            described: dict[str, Any] = describe_campaign(get_campaign(campaign_id), datetime.now(UTC))
            count = described["progress"]
            done = count["completed"] + count["failed"] + count["stalled"] + count["skipped"]
            bars.update(proved, total=count["members"], completed=count["proved"], note=described["state"])
            bars.update(ended, total=count["members"], completed=done, note=_format_failures(count))
            if described["state"] in STOPPED:
                return described
            try:
                pause()
            except KeyboardInterrupt:
                return described


def format_exit(described: dict[str, Any]) -> str | None:
    """Return the error for a campaign that stopped without being completed; None for any other."""
    if described["state"] not in STOPPED or described["state"] == CampaignState.COMPLETED:
        return None
    return f"the campaign is {described['state']}{': ' + described['why'] if described['why'] else ''}"


def _format_failures(count: dict[str, int]) -> str:
    found = [f"{count[name]} {name}" for name in ("stalled", "failed", "skipped") if count[name]]
    return ", ".join(found)
