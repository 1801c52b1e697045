"""Create a service token for a backend service or a gateway."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.permissions import SERVICE_PERMISSIONS, Permission
from keyvault.domain.keystring import string_scope
from keyvault.management.mixins import HostOperatorMixin, add_reveal_option, add_scope_options, read_scope
from keyvault.models.tokens import MAX_READERS, MAX_STALENESS_SECONDS
from keyvault.services.tokens.service_tokens import DEFAULT_DAYS, create_service_token


class Command(HostOperatorMixin):
    help = "Create a service token. The token itself is printed once, and only with --reveal."

    def add_options(self, parser: CommandParser) -> None:
        super().add_options(parser)
        parser.add_argument("name")
        add_scope_options(parser)
        parser.add_argument(
            "--permission", action="append", required=True, choices=sorted(p.value for p in SERVICE_PERMISSIONS)
        )
        parser.add_argument("--days", type=int, default=DEFAULT_DAYS, help=f"lifetime in days (default {DEFAULT_DAYS})")
        parser.add_argument(
            "--probe", action="store_true", help="for test calls: its verifications do not count as uses of a key"
        )
        parser.add_argument(
            "--max-readers",
            type=int,
            default=MAX_READERS,
            help=f"processes that may read the change feed with it (default {MAX_READERS})",
        )
        parser.add_argument(
            "--max-staleness",
            type=int,
            default=MAX_STALENESS_SECONDS,
            help="seconds for which such a process may answer from memory after a response "
            f"(default {MAX_STALENESS_SECONDS})",
        )
        add_reveal_option(parser, "print the token once")

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        scope = read_scope(options)
        grant = self.operator_grant(options, Permission.TOKENS_WRITE, within=scope)
        token, text = create_service_token(
            grant,
            name=options["name"],
            scope=string_scope(scope.environments),
            permissions=[Permission(permission) for permission in options["permission"]],
            merchants=scope.merchants,
            lifetime_days=options["days"],
            is_probe=options["probe"],
            max_readers=options["max_readers"],
            max_staleness_seconds=options["max_staleness"],
        )
        answer: dict[str, Any] = {"key_id": token.token_id, "expires_at": token.expires_at, "is_probe": token.is_probe}
        if options["reveal"]:
            answer["token"] = text.reveal()
        else:
            self.warn_unrevealed()
        return answer
