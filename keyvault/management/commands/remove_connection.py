"""Remove a provider connection from a merchant's account."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.permissions import Permission
from keyvault.management.mixins import AccountMixin, OperatorMixin
from keyvault.services.secrets.provider_connections import describe_connection, get_connection, remove_connection


class Command(AccountMixin, OperatorMixin):
    help = "Remove a provider connection. A worker erases its credentials from the secret backend."

    def add_options(self, parser: CommandParser) -> None:
        super().add_options(parser)
        parser.add_argument("--provider", required=True)

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        account = self.account(options)
        grant = self.operator_grant(options, Permission.CONNECTIONS_WRITE, account)
        connection = get_connection(account, options["provider"])
        remove_connection(grant, connection)
        return {**describe_connection(connection), "removed_at": connection.removed_at}
