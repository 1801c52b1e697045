"""Django application: drops and restores the database triggers around `migrate`."""

from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig
from django.db import connections
from django.db.models.signals import post_migrate, pre_migrate


class KeyvaultConfig(AppConfig):
    name = "keyvault"

    def ready(self) -> None:
        from keyvault.models.triggers import restore_triggers

        pre_migrate.connect(_drop_triggers, sender=self, dispatch_uid="keyvault.triggers")
        post_migrate.connect(restore_triggers, sender=self, dispatch_uid="keyvault.triggers")


def _drop_triggers(using: str, plan: Sequence[Any] = (), **_: Any) -> None:
    """Drop every app's triggers before a migration on SQLite, which cannot rename a table that a trigger names.

    An interrupted migration leaves no triggers; `require_ready` then refuses to serve.
    """
    from keyvault.models.triggers import drop_triggers

    if plan and connections[using].vendor == "sqlite":
        drop_triggers(connections[using])
