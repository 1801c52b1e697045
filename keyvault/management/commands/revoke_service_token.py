"""Revoke a service token, immediately and permanently."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.permissions import Permission
from keyvault.domain.errors import NotFoundError
from keyvault.management.mixins import HostOperatorMixin
from keyvault.services.tokens.service_tokens import get_service_token, revoke_service_token


class Command(HostOperatorMixin):
    help = "Revoke a service token, immediately and permanently."

    def add_options(self, parser: CommandParser) -> None:
        super().add_options(parser)
        parser.add_argument("token_id")

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        token = get_service_token(options["token_id"])
        if token is None:
            raise NotFoundError("There is no such service token.")
        grant = self.operator_grant(options, Permission.TOKENS_WRITE, within=token.access_scope)
        revoke_service_token(grant, token)
        return {"key_id": token.token_id, "state": "revoked", "revoked_at": token.revoked_at}
