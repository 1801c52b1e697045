"""Create an operator of the console. Operators can be created on the host only."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.permissions import Permission
from keyvault.access.roles import Role
from keyvault.domain.errors import NotFoundError
from keyvault.management.mixins import UsernameMixin, add_role_option
from keyvault.management.passwords import read_password
from keyvault.models import Operator
from keyvault.services.operators.operators import create_operator


class Command(UsernameMixin):
    help = (
        "Create an operator. The command prompts for the password, or reads it from standard input without a terminal."
    )

    def add_options(self, parser: CommandParser) -> None:
        super().add_options(parser)
        add_role_option(parser)
        parser.add_argument("--same-person-as", metavar="USERNAME", help="an existing operator of the same person")

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        person = None
        if options["same_person_as"]:
            other = Operator.objects.filter(username=options["same_person_as"]).first()
            if other is None:
                raise NotFoundError(f"There is no operator {options['same_person_as']}.")
            person = other.person
        operator = create_operator(
            self.operators_grant(Permission.OPERATORS_ENROLL),
            username=options["username"],
            roles=[Role(role) for role in options["role"]],
            password=read_password(),
            person=person,
        )
        return {"username": operator.username, "roles": sorted(options["role"]), "person": operator.person}
