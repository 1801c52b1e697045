"""Create an operator of the console. Operators can be created on the host only."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.permissions import Permission
from keyvault.access.principals import HOST
from keyvault.access.roles import Role
from keyvault.domain.errors import NotFoundError
from keyvault.management.json_command import JsonCommand
from keyvault.management.passwords import read_password
from keyvault.models import Operator
from keyvault.services.merchants.operators import create_operator
from keyvault.services.recording.authorization import authorize


class Command(JsonCommand):
    help = (
        "Create an operator. The command prompts for the password, or reads it from standard input without a terminal."
    )

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("username")
        parser.add_argument("--role", action="append", required=True, choices=[role.value for role in Role])
        parser.add_argument("--same-person-as", metavar="USERNAME", help="an existing operator of the same person")

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        person = None
        if options["same_person_as"]:
            other = Operator.objects.filter(username=options["same_person_as"]).first()
            if other is None:
                raise NotFoundError(f"There is no operator {options['same_person_as']}.")
            person = other.person
        operator = create_operator(
            authorize(HOST, Permission.OPERATORS_WRITE, now=self.now),
            username=options["username"],
            roles=[Role(role) for role in options["role"]],
            password=read_password(),
            person=person,
        )
        return {"username": operator.username, "roles": sorted(options["role"]), "person": operator.person}
