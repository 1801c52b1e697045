"""Add a webhook endpoint to a merchant's account."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.permissions import Permission
from keyvault.management.mixins import AccountMixin, OperatorMixin, add_reveal_option
from keyvault.services.webhooks.endpoints import add_endpoint


class Command(AccountMixin, OperatorMixin):
    help = "Add a webhook endpoint. Its signing secret is printed once, and only with --reveal."

    def add_options(self, parser: CommandParser) -> None:
        super().add_options(parser)
        parser.add_argument("--url", required=True)
        add_reveal_option(parser, "print the signing secret once")

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        account = self.account(options)
        grant = self.operator_grant(options, Permission.WEBHOOKS_WRITE, account)
        endpoint, secret = add_endpoint(grant, account, options["url"])
        answer: dict[str, Any] = {"endpoint": endpoint.pk, "url": endpoint.url}
        if options["reveal"]:
            answer["secret"] = secret.reveal()
        return answer
