"""List the webhook endpoints of a merchant's account."""

from collections.abc import Mapping
from typing import Any

from keyvault.management.mixins import AccountMixin
from keyvault.services.webhooks.endpoints import describe_endpoint, list_endpoints


class Command(AccountMixin):
    help = "List a merchant's webhook endpoints, with counts of pending, delivered and failed messages. No secrets."

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        account = self.account(options)
        return {"endpoints": [describe_endpoint(endpoint) for endpoint in list_endpoints(account)]}
