"""The application's place in Django: what happens after `migrate`, and what a process checks before it serves."""

from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig
from django.db import connections
from django.db.models.signals import post_migrate, pre_migrate


class KeyvaultConfig(AppConfig):
    name = "keyvault"

    def ready(self) -> None:
        pre_migrate.connect(_take_rules_away, dispatch_uid="keyvault.triggers")
        # Without a sender: rotation's tables come after ours, and each app's turn may complete a rule.
        post_migrate.connect(_put_rules_in_place, dispatch_uid="keyvault.triggers")


def _take_rules_away(sender: AppConfig, using: str, plan: Sequence[Any] = (), **_: Any) -> None:
    """SQLite rebuilds a table by renaming it, and refuses to while a trigger of another table names it.

    A migration that stops half-way leaves none: `require_ready` then refuses to serve.
    """
    from keyvault.models.triggers import drop_triggers

    if sender.name == "keyvault" and plan and connections[using].vendor == "sqlite":
        drop_triggers(connections[using])


def _put_rules_in_place(sender: AppConfig, using: str, **_: Any) -> None:
    from keyvault.models.triggers import ensure_triggers

    if sender.name in {"keyvault", "rotation"}:
        ensure_triggers(connections[using])
