"""Refuse Django's `flush` on a command line."""

from typing import NoReturn

from django.core.management.commands.flush import Command as DjangoCommand

from keyvault.management.refused_commands import refuse


class Command(DjangoCommand):
    help = "Refused: no command empties the database."

    def run_from_argv(self, argv: list[str]) -> NoReturn:
        refuse(
            argv,
            "No command empties the database. "
            "To start over, set KEYVAULT_DATABASE_URL to an empty one. Run: manage.py setup",
        )
