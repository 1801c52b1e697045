"""Refuse Django's `createsuperuser` on a command line."""

from typing import NoReturn

from django.contrib.auth.management.commands.createsuperuser import Command as DjangoCommand

from keyvault.management.refused_commands import refuse


class Command(DjangoCommand):
    help = "Refused: use invite_operator; there are no superusers."

    def run_from_argv(self, argv: list[str]) -> NoReturn:
        refuse(argv, "There are no superusers. Run: manage.py invite_operator NAME --role ROLE")
