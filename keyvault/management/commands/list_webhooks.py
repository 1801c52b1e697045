"""List the webhook endpoints of a merchant's account."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.domain.environments import Environment
from keyvault.management.json_command import JsonCommand
from keyvault.services.merchants.merchants import find_account
from keyvault.services.webhooks.endpoints import describe_endpoint, list_endpoints


class Command(JsonCommand):
    help = "List a merchant's webhook endpoints, with counts of pending, delivered and failed messages. No secrets."

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("--merchant", required=True)
        parser.add_argument("--environment", required=True, choices=[env.value for env in Environment])

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        account = find_account(options["merchant"], options["environment"])
        return {"endpoints": [describe_endpoint(endpoint) for endpoint in list_endpoints(account)]}
