"""Offboard a merchant: revoke everything that belongs to it, permanently."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandError, CommandParser

from keyvault.access.permissions import Permission
from keyvault.domain.errors import NotFoundError, StateConflictError
from keyvault.management.mixins import OperatorMixin
from keyvault.models import Merchant
from keyvault.services.merchants.merchants import scope_of_merchant
from keyvault.services.offboarding import count_assets, offboard_merchant


class Command(OperatorMixin):
    help = (
        "Revoke every key, customer token, request and webhook endpoint of a merchant, in both environments, "
        "permanently. Needs neither the secret backend nor the broker. After an interruption, run it again."
    )

    def add_options(self, parser: CommandParser) -> None:
        super().add_options(parser)
        parser.add_argument("merchant_id", metavar="MERCHANT")
        parser.add_argument("--why", required=True, help="reason for the audit log")
        parser.add_argument("--yes", action="store_true", help="offboard; without it, only print what would be revoked")

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        merchant: Merchant | None = Merchant.objects.filter(merchant_id=options["merchant_id"]).first()
        if merchant is None:
            raise NotFoundError(f"There is no merchant {options['merchant_id']}.")
        grant = self.operator_grant(options, Permission.MERCHANTS_OFFBOARD, within=scope_of_merchant(merchant))
        if not options["yes"]:
            assets = count_assets(merchant, self.now)
            raise StateConflictError(
                f"This would revoke {assets.format_counts()}. This is irreversible. Run it again with --yes."
            )
        done = offboard_merchant(grant, merchant, options["why"])
        self.left = done.left.format_counts() if done.left else ""
        return {
            "merchant_id": merchant.merchant_id,
            "status": merchant.status,
            "ended": done.ended.as_json(),
            "left": done.left.as_json(),
            "is_complete": not done.left,
        }

    def handle(self, *args: Any, **options: Any) -> None:
        self.left = ""
        super().handle(*args, **options)
        if self.left:
            raise CommandError(f"not complete, run it again; remaining: {self.left}")
