"""List the provider connections of a merchant's account."""

from collections.abc import Mapping
from typing import Any

from keyvault.management.mixins import AccountMixin
from keyvault.services.secrets.provider_connections import describe_connection, list_connections


class Command(AccountMixin):
    help = "List a merchant's provider connections and, with a Vault, where its backend reads them. No secrets."

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        account = self.account(options)
        return {"connections": [describe_connection(connection) for connection in list_connections(account)]}
