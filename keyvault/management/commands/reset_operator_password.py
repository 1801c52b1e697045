"""Reset an operator's password."""

import secrets
from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.permissions import Permission
from keyvault.domain.plaintext import Plaintext
from keyvault.management.mixins import UsernameMixin, add_reveal_option
from keyvault.management.passwords import read_password
from keyvault.services.operators.operators import get_operator, reset_password


class Command(UsernameMixin):
    help = (
        "Reset an operator's password, end their sessions, forget their devices and unlock their name. The command "
        "prompts for the password, or reads it from standard input without a terminal."
    )

    def add_options(self, parser: CommandParser) -> None:
        super().add_options(parser)
        add_reveal_option(parser, "create a random password and print it once")

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        operator = get_operator(options["username"])
        password = Plaintext(secrets.token_urlsafe(18)) if options["reveal"] else read_password()
        reset_password(self.operators_grant(Permission.OPERATORS_ENROLL), operator, password)
        answer = {"username": operator.username}
        return {**answer, "password": password.reveal()} if options["reveal"] else answer
