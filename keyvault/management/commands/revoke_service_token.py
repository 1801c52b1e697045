"""Revoke a service token, immediately and permanently."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.permissions import Permission
from keyvault.access.principals import HOST
from keyvault.domain.errors import NotFoundError
from keyvault.management.json_command import JsonCommand
from keyvault.services.recording.authorization import authorize
from keyvault.services.tokens.service_tokens import get_service_token, revoke_service_token


class Command(JsonCommand):
    help = "Revoke a service token, immediately and permanently."

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("token_id")
        parser.add_argument("--by", metavar="OPERATOR", help="acting operator (default: the host's owner)")

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        if options["by"]:
            grant = self.grant(self.operator(options["by"]), Permission.TOKENS_WRITE)
        else:
            grant = authorize(HOST, Permission.TOKENS_WRITE, now=self.now)
        token = get_service_token(options["token_id"])
        if token is None:
            raise NotFoundError("There is no such service token.")
        revoke_service_token(grant, token)
        return {"key_id": token.token_id, "state": "revoked", "revoked_at": token.revoked_at}
