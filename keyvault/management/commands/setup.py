"""Create everything that the service needs before it starts; repeatable."""

from collections.abc import Mapping
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError
from django.db import connection

from keyvault.management.json_command import JsonCommand
from keyvault.services.peppers.installation import record_compatibility
from keyvault.services.peppers.ring import ensure_peppers
from keyvault.services.revocations.log_opening import open_revocation_log, recover_revocation_log
from keyvault.services.startup.migrating import ensure_migrated
from keyvault.services.startup.startup_checks import format_log_loss


class Command(JsonCommand):
    help = "Migrate the database, open the keystore, create the first peppers and check them. Repeatable."

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        try:
            ensure_migrated()
        except ImproperlyConfigured as error:
            raise CommandError(f"nothing was set up: {error}") from None
        # Recorded before the secret backend is needed: otherwise a process of an old release could start first.
        record_compatibility(self.now)
        ensure_peppers(self.now)
        unread = recover_revocation_log(self.now).unread
        if not open_revocation_log(self.now):
            raise CommandError(f"The database is set up, but the service will not start: {format_log_loss(unread)}")
        return {"database": connection.vendor, "ready": True}
