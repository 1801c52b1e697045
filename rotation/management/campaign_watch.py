"""A campaign's progress in a terminal: bars on standard error until it has ended or a person is needed."""

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

LOOK_AGAIN_SECONDS = 2.0

STOPPED = frozenset({*CLOSED, CampaignState.HALTED})
"""Nothing more will happen by itself."""


class WatchingCommand(JsonCommand):
    """A command that may watch a campaign. Exit 1, after the answer, when it was watched to anything but its end."""

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--watch", action="store_true", help="shows its progress until it has ended or halted")

    def handle(self, *args: Any, **options: Any) -> None:
        self.stopped: str | None = None
        super().handle(*args, **options)
        if self.stopped is not None:
            raise CommandError(redact(self.stopped))

    def told(self, campaign: Campaign, options: Mapping[str, Any]) -> dict[str, Any]:
        """What the command answers: at once, or after having watched."""
        if not options["watch"]:
            return describe_campaign(campaign, datetime.now(UTC))
        told = watch_campaign(campaign.campaign_id, Console(stderr=True))
        self.stopped = exit_words(told)
        return told


def _pause() -> None:
    """Until the next look; which may be after a restart of the database."""
    time.sleep(LOOK_AGAIN_SECONDS)
    close_old_connections()


def watch_campaign(campaign_id: str, console: Console, pause: Callable[[], None] = _pause) -> dict[str, Any]:
    """Returns what the campaign has come to; earlier when the user interrupts, which changes nothing about it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TaskProgressColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=console) as bars:
        proved, ended = bars.add_task("replacement proved", note=""), bars.add_task("ended", note="")
        while True:
            told: dict[str, Any] = describe_campaign(get_campaign(campaign_id), datetime.now(UTC))
            count = told["progress"]
            done = count["completed"] + count["failed"] + count["stalled"] + count["skipped"]
            bars.update(proved, total=count["members"], completed=count["proved"], note=told["state"])
            bars.update(ended, total=count["members"], completed=done, note=_trouble(count))
            if told["state"] in STOPPED:
                return told
            try:
                pause()
            except KeyboardInterrupt:
                return told


def exit_words(told: dict[str, Any]) -> str | None:
    """What a script is to be stopped with: of a campaign that ended otherwise than completed. None: nothing."""
    if told["state"] not in STOPPED or told["state"] == CampaignState.COMPLETED:
        return None
    return f"the campaign is {told['state']}{': ' + told['why'] if told['why'] else ''}"


def _trouble(count: dict[str, int]) -> str:
    found = [f"{count[name]} {name}" for name in ("stalled", "failed", "skipped") if count[name]]
    return ", ".join(found)
