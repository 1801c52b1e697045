"""List the provider connections of a merchant's account."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.domain.environments import Environment
from keyvault.management.json_command import JsonCommand
from keyvault.services.merchants.merchants import find_account
from keyvault.services.secrets.provider_connections import describe_connection, list_connections


class Command(JsonCommand):
    help = "List a merchant's provider connections and, with a Vault, where its backend reads them. No secrets."

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("--merchant", required=True)
        parser.add_argument("--environment", required=True, choices=[env.value for env in Environment])

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        account = find_account(options["merchant"], options["environment"])
        return {"connections": [describe_connection(connection) for connection in list_connections(account)]}
