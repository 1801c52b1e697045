"""The application's place in Django: what happens after `migrate`, and what a process checks before it serves."""

from typing import Any

from django.apps import AppConfig
from django.db import connections
from django.db.models.signals import post_migrate


class KeyvaultConfig(AppConfig):
    name = "keyvault"

    def ready(self) -> None:
        # Without a sender: rotation's tables come after ours, and each app's turn may complete a rule.
        post_migrate.connect(_put_rules_in_place, dispatch_uid="keyvault.triggers")


def _put_rules_in_place(sender: AppConfig, using: str, **_: Any) -> None:
    from keyvault.models.triggers import ensure_triggers

    if sender.name in {"keyvault", "rotation"}:
        ensure_triggers(connections[using])
