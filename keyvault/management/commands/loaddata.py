"""Refuse Django's `loaddata` on a command line."""

from typing import NoReturn

from django.core.management.commands.loaddata import Command as DjangoCommand

from keyvault.management.refused_commands import refuse


class Command(DjangoCommand):
    help = "Refused: restore a backup, then use replay_revocations."

    def run_from_argv(self, argv: list[str]) -> NoReturn:
        refuse(argv, "Restore a backup of the database, then run: manage.py replay_revocations")
