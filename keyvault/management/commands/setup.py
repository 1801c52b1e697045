"""Makes everything that the service needs before it starts; repeatable."""

from collections.abc import Mapping
from typing import Any

from django.core.management import call_command
from django.db import connection

from keyvault.management.answers import AnsweringCommand
from keyvault.services.peppers import ensure_peppers


class Command(AnsweringCommand):
    help = "Migrates the database, opens the keystore, makes the first peppers and checks them. Repeatable."

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        call_command("migrate", interactive=False, verbosity=0)
        ensure_peppers(self.now)
        return {"database": connection.vendor, "ready": True}
