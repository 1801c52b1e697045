"""Show a campaign's progress and obstacles."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from rotation.management.campaign_watch import WatchingCommand
from rotation.services.campaigns.campaigns import get_campaign


class Command(WatchingCommand):
    help = "Show a campaign: its approval, its pace, its progress, and what halted it."

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("campaign_id")

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return self.report(get_campaign(options["campaign_id"]), options)
