"""Makes everything that the service needs before it starts; repeatable."""

from collections.abc import Mapping
from typing import Any

from django.core.management import call_command
from django.db import connection
from django.db.migrations.executor import MigrationExecutor

from keyvault.management.json_command import JsonCommand
from keyvault.models.triggers import missing_triggers
from keyvault.services.peppers.ring import ensure_peppers
from keyvault.services.revocations.log_opening import open_journal
from keyvault.services.startup.startup_checks import format_journal_loss


class Command(JsonCommand):
    help = "Migrates the database, opens the keystore, makes the first peppers and checks them. Repeatable."

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        if self._is_behind():
            call_command("migrate", interactive=False, verbosity=0)
        ensure_peppers(self.now)
        if not open_journal(self.now):
            self.stderr.write(f"Nothing will start: {format_journal_loss()}")
        return {"database": connection.vendor, "ready": True}

    def _is_behind(self) -> bool:
        """A database that needs nothing is left alone: servers may be at work on it."""
        executor = MigrationExecutor(connection)
        pending = executor.migration_plan(executor.loader.graph.leaf_nodes())
        return bool(pending) or bool(missing_triggers(connection))
