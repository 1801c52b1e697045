"""Remove a provider connection from a merchant's account."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.permissions import Permission
from keyvault.domain.environments import Environment
from keyvault.management.json_command import JsonCommand
from keyvault.services.merchants.merchants import find_account
from keyvault.services.secrets.provider_connections import describe_connection, get_connection, remove_connection


class Command(JsonCommand):
    help = "Remove a provider connection. A worker erases its credentials from the secret backend."

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("--merchant", required=True)
        parser.add_argument("--environment", required=True, choices=[env.value for env in Environment])
        parser.add_argument("--provider", required=True)
        parser.add_argument("--by", required=True, metavar="OPERATOR")

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        account = find_account(options["merchant"], options["environment"])
        grant = self.grant(self.operator(options["by"]), Permission.CONNECTIONS_WRITE, account)
        connection = get_connection(account, options["provider"])
        remove_connection(grant, connection)
        return {**describe_connection(connection), "removed_at": connection.removed_at}
