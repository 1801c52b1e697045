"""Create an operator of the console, and print the one-time link at which it sets up its sign-in."""

import os
from collections.abc import Mapping
from typing import Any

from django.conf import settings
from django.core.management.base import CommandError, CommandParser

from keyvault.access.permissions import Permission
from keyvault.access.roles import Role
from keyvault.access.scopes import EVERYWHERE
from keyvault.domain.origins import to_domain
from keyvault.management.mixins import (
    UsernameMixin,
    add_operator_scope_options,
    add_reveal_option,
    add_role_option,
    has_operator_scope,
    read_operator_scope,
)
from keyvault.management.service import find_running_origin
from keyvault.models import Operator
from keyvault.services.operator_changes import enroll_operator
from keyvault.services.operators.operators import get_operator
from keyvault.services.sessions.invitations import enrolment_url, invite, prepare_sign_in


class Command(UsernameMixin):
    help = (
        "Create an operator and print a link, valid for 72 hours and once, at which it sets a password and a second "
        "factor. The link begins with KEYVAULT_CONSOLE_ORIGIN, or else KEYVAULT_ORIGIN. Without both it begins "
        "with the origin of `run` on this data folder. For an existing operator without a second factor, print a new "
        "link. Without a scope option the scope is the whole installation. With a Vault, once two persons can approve, "
        "the roles approver and key_administrator are added under four eyes afterwards (set_operator_roles)."
    )

    def add_options(self, parser: CommandParser) -> None:
        super().add_options(parser)
        add_role_option(parser, required=False)
        add_operator_scope_options(parser)
        parser.add_argument("--same-person-as", metavar="USERNAME", help="an existing operator of the same person")
        add_reveal_option(parser, "also set a random password and an authenticator app, and print both once")

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        grant = self.operators_grant(Permission.OPERATORS_ENROLL)
        operator = self._operator(options)
        url = enrolment_url(invite(grant, operator), self._origin())
        answer: dict[str, Any] = {"username": operator.username, "enrolment_url": url.reveal()}
        if options["reveal"]:
            prepared = prepare_sign_in(grant, operator)
            answer |= {"password": prepared.password.reveal(), "totp_secret": prepared.totp_seed.reveal()}
        return answer

    def _origin(self) -> str:
        """Return the origin of the console."""
        if not any(os.environ.get(name) for name in ("KEYVAULT_CONSOLE_ORIGIN", "KEYVAULT_ORIGIN")):
            if (running := find_running_origin()) is not None:
                return to_domain(running)
            self.stderr.write(
                f"KEYVAULT_ORIGIN is not set, so the link is for {settings.CONSOLE_ORIGIN}. "
                "If the console is elsewhere, set it and run this again without --role."
            )
        origin: str = settings.CONSOLE_ORIGIN
        return origin

    def _operator(self, options: Mapping[str, Any]) -> Operator:
        """Return the new operator, or the existing one if no role is named."""
        same = options["same_person_as"]
        if not options["role"]:
            if same or has_operator_scope(options):
                raise CommandError(
                    "--merchant, --environment, --all and --same-person-as are for a new operator: add --role, or omit "
                    "them",
                    returncode=2,
                )
            return get_operator(options["username"])
        return enroll_operator(
            self.operators_grant(Permission.OPERATORS_ENROLL),
            username=options["username"],
            roles=[Role(role) for role in options["role"]],
            scope=read_operator_scope(options) if has_operator_scope(options) else EVERYWHERE,
            same_person_as=get_operator(same) if same else None,
        )
