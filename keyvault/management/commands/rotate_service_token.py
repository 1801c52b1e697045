"""Create the successor of a service token; the old one expires after an overlap."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.permissions import Permission
from keyvault.domain.errors import NotFoundError
from keyvault.management.mixins import HostOperatorMixin, add_reveal_option
from keyvault.services.tokens.service_tokens import MAX_OVERLAP_HOURS, get_service_token, rotate_service_token


class Command(HostOperatorMixin):
    help = "Rotate a service token. The new one has the same rights; it is printed once, and only with --reveal."

    def add_options(self, parser: CommandParser) -> None:
        super().add_options(parser)
        parser.add_argument("token_id")
        parser.add_argument(
            "--overlap-hours",
            type=int,
            required=True,
            help=f"hours for which both tokens are valid (0 to {MAX_OVERLAP_HOURS})",
        )
        add_reveal_option(parser, "print the token once")

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        token = get_service_token(options["token_id"])
        if token is None:
            raise NotFoundError("There is no such service token.")
        grant = self.operator_grant(options, Permission.TOKENS_WRITE, within=token.access_scope)
        successor, text = rotate_service_token(grant, token, options["overlap_hours"])
        answer: dict[str, Any] = {
            "key_id": successor.token_id,
            "expires_at": successor.expires_at,
            "predecessor_key_id": token.token_id,
            "predecessor_expires_at": token.expires_at,
        }
        if options["reveal"]:
            answer["token"] = text.reveal()
        else:
            self.warn_unrevealed()
        return answer
