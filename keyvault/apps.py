"""Django application: drops and restores the database triggers around `migrate`."""

from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig
from django.db import connections
from django.db.models.signals import post_migrate, pre_migrate


class KeyvaultConfig(AppConfig):
    name = "keyvault"

    def ready(self) -> None:
        pre_migrate.connect(_drop_triggers, dispatch_uid="keyvault.triggers")
        # No sender: rotation migrates after keyvault, and either migration may complete the tables of a trigger.
        post_migrate.connect(_ensure_triggers, dispatch_uid="keyvault.triggers")


def _drop_triggers(sender: AppConfig, using: str, plan: Sequence[Any] = (), **_: Any) -> None:
    """Drop the triggers before a migration on SQLite, which cannot rename a table that a trigger names.

    An interrupted migration leaves no triggers; `require_ready` then refuses to serve.
    """
    from keyvault.models.triggers import drop_triggers

    if sender.name == "keyvault" and plan and connections[using].vendor == "sqlite":
        drop_triggers(connections[using])


def _ensure_triggers(sender: AppConfig, using: str, **_: Any) -> None:
    from keyvault.models.triggers import ensure_triggers

    if sender.name in {"keyvault", "rotation"}:
        ensure_triggers(connections[using])
