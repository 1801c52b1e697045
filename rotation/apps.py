"""Django application: registers its tables' rules, restores triggers after `migrate`, and subscribes to events."""

from django.apps import AppConfig
from django.db.models.signals import post_migrate


class RotationConfig(AppConfig):
    name = "rotation"

    def ready(self) -> None:
        from keyvault.models.triggers import register_rules, restore_triggers
        from keyvault.services.keys import lifecycle
        from rotation.models.triggers import RULES
        from rotation.services.rotations import reports, turns
        from rotation.services.schedules import date_marks

        register_rules(self.label, RULES)
        lifecycle.find_undelivered = reports.list_undelivered
        turns.connect_signals()
        date_marks.connect_signals()
        post_migrate.connect(restore_triggers, sender=self, dispatch_uid="rotation.triggers")
