"""Add a webhook endpoint to a merchant's account."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.permissions import Permission
from keyvault.domain.environments import Environment
from keyvault.management.json_command import JsonCommand
from keyvault.services.merchants.merchants import find_account
from keyvault.services.webhooks.endpoints import add_endpoint


class Command(JsonCommand):
    help = "Add a webhook endpoint. Its signing secret is printed once, and only with --reveal."

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("--merchant", required=True)
        parser.add_argument("--environment", required=True, choices=[env.value for env in Environment])
        parser.add_argument("--url", required=True)
        parser.add_argument("--by", required=True, metavar="OPERATOR")
        parser.add_argument("--reveal", action="store_true", help="print the signing secret once")

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        account = find_account(options["merchant"], options["environment"])
        grant = self.grant(self.operator(options["by"]), Permission.WEBHOOKS_WRITE, account)
        endpoint, secret = add_endpoint(grant, account, options["url"])
        answer: dict[str, Any] = {"endpoint": endpoint.pk, "url": endpoint.url}
        if options["reveal"]:
            answer["secret"] = secret.reveal()
        return answer
