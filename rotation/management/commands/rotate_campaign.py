"""Request a campaign, and approve it where required if an approver is named; workers do the rest."""

from argparse import BooleanOptionalAction
from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.permissions import Permission
from keyvault.domain.environments import Environment
from keyvault.domain.errors import KeyvaultError
from keyvault.management.mixins import ApprovalMixin, add_environment_option
from rotation.domain.pacing import Pace
from rotation.domain.plan_fields import SHARED_FIELDS
from rotation.management.campaign_watch import WatchingCommand
from rotation.management.plan_options import add_plan_options, read_overrides
from rotation.models import Campaign, CampaignState
from rotation.services.campaigns.campaigns import approve_campaign, cancel_campaign, request_campaign, scope_of

_DEFAULT_PACE = Pace()
_SHOWN = ("campaign_id", "state", "environment", "progress", "selection", "pace", "approvals", "all_begun_at")


class Command(ApprovalMixin, WatchingCommand):
    help = "Rotate many credentials of an environment under one approval, at a given pace."

    approver_help = "default: approve it in the console"

    def add_options(self, parser: CommandParser) -> None:
        super().add_options(parser)
        add_environment_option(parser)
        parser.add_argument("--merchant", action="append", metavar="ID", help="repeatable; default: all")
        parser.add_argument("--older-than-days", type=int, metavar="N")
        parser.add_argument("--per-minute", type=int, metavar="N", default=_DEFAULT_PACE.per_minute)
        parser.add_argument("--concurrency", type=int, metavar="N", default=_DEFAULT_PACE.concurrency)
        parser.add_argument("--halt-on-stall", action=BooleanOptionalAction, default=_DEFAULT_PACE.halt_on_stall)
        parser.add_argument(
            "--halt-at-failed-percent", type=int, metavar="N", default=_DEFAULT_PACE.halt_at_failed_percent
        )
        add_plan_options(parser, SHARED_FIELDS)
        parser.add_argument("--reason", default="requested on the command line")

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        requester = self.requester(options)
        campaign = request_campaign(
            self.grant(requester, Permission.ROTATIONS_WRITE, within=requester.scope),
            environment=Environment(options["environment"]),
            merchants=options["merchant"],
            older_than_days=options["older_than_days"],
            overrides=read_overrides(options, SHARED_FIELDS),
            pace=Pace(
                per_minute=options["per_minute"],
                concurrency=options["concurrency"],
                halt_on_stall=options["halt_on_stall"],
                halt_at_failed_percent=options["halt_at_failed_percent"],
            ),
            reason=options["reason"],
        )
        if campaign.state == CampaignState.AWAITING_APPROVAL and options["approved_by"]:
            self._approve(campaign, options)
        return self.report(campaign, options)

    def format_text(self, answer: Mapping[str, Any]) -> str:
        return super().format_text({name: answer[name] for name in _SHOWN})

    def _approve(self, campaign: Campaign, options: Mapping[str, Any]) -> None:
        """Approve the campaign; cancel it if the approval is refused, since both were requested together."""
        try:
            approver = self.approver(options)
            person, within = campaign.requester_person, scope_of(campaign)
            grant = self.grant(approver, Permission.ROTATIONS_APPROVE, requester_person=person, within=within)
            approve_campaign(grant, campaign, campaign.plan_digest)
        except KeyvaultError:
            requester = self.requester(options)
            grant = self.grant(requester, Permission.ROTATIONS_WRITE, within=requester.scope)
            cancel_campaign(grant, campaign, "the approval on the command line was refused")
            raise
