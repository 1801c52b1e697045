"""Refuse Django's `changepassword` on a command line."""

from typing import NoReturn

from django.contrib.auth.management.commands.changepassword import Command as DjangoCommand

from keyvault.management.refused_commands import refuse


class Command(DjangoCommand):
    help = "Refused: use reset_operator_password."

    def run_from_argv(self, argv: list[str]) -> NoReturn:
        refuse(argv, "Run: manage.py reset_operator_password NAME")
