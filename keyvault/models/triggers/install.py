"""Create, drop and list the triggers of every registered app."""

from collections.abc import Iterable
from typing import Any, Protocol

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper

from keyvault.models.triggers import postgresql, sqlite
from keyvault.models.triggers.guards import GUARDS
from keyvault.models.triggers.peppers import PEPPERS
from keyvault.models.triggers.rules import AppendOnly, Kept, TriggerRule, WriteGuard
from keyvault.models.triggers.tables import APPEND_ONLY, FOUR_EYES, FROZEN, KEPT, STATES

_PREFIX = "kv_"
"""Prefix of the names of these triggers in the database."""

_rules: dict[str, tuple[TriggerRule, ...]] = {
    "keyvault": (*APPEND_ONLY, *KEPT, *FROZEN, *STATES, *FOUR_EYES, *GUARDS, *PEPPERS)
}
"""Rules by app label."""


class Renderer(Protocol):
    """One database's dialect."""

    def restore(
        self, connection: BaseDatabaseWrapper, guards: Iterable[WriteGuard], never_truncated: Iterable[str], prefix: str
    ) -> None: ...

    def drop_all(self, cursor: CursorWrapper, prefix: str) -> None: ...

    def find_enabled(self, cursor: CursorWrapper, prefix: str) -> set[str]: ...

    def truncate_names(self, never_truncated: Iterable[str]) -> set[str]: ...


_RENDERERS: dict[str, Renderer] = {"sqlite": sqlite, "postgresql": postgresql}


def register_rules(app: str, rules: Iterable[TriggerRule]) -> None:
    """Add the rules of an app to those that every database must have."""
    _rules[app] = tuple(rules)


def list_rules() -> list[TriggerRule]:
    return [rule for rules in _rules.values() for rule in rules]


def list_guards() -> list[WriteGuard]:
    return [guard for rule in list_rules() for guard in rule.guards()]


def list_never_truncated() -> list[str]:
    """Return the tables that TRUNCATE must not empty, sorted."""
    kept = {rule.table for rule in list_rules() if isinstance(rule, AppendOnly | Kept)}
    return sorted({*kept, "keyvault_auditchain"})


def restore_triggers(using: str, **_: Any) -> None:
    """Receive `post_migrate` of an app that has rules."""
    ensure_triggers(connections[using])


def ensure_triggers(connection: BaseDatabaseWrapper) -> None:
    """Create the triggers of every existing table, and drop those that no rule has any more; repeatable."""
    tables = set(connection.introspection.table_names())
    guards = [guard for guard in list_guards() if guard.table in tables and _reads_only(guard, tables)]
    never_truncated = [table for table in list_never_truncated() if table in tables]
    _RENDERERS[connection.vendor].restore(connection, guards, never_truncated, _PREFIX)


def drop_triggers(connection: BaseDatabaseWrapper) -> None:
    """Drop every trigger: before they are created again, before a migration on SQLite, and in tests."""
    with connection.cursor() as cursor:
        _RENDERERS[connection.vendor].drop_all(cursor, _PREFIX)


def list_triggers(connection: BaseDatabaseWrapper) -> set[str]:
    """Return the names of the enabled triggers, to compare with `expected_triggers`."""
    with connection.cursor() as cursor:
        names = _RENDERERS[connection.vendor].find_enabled(cursor, _PREFIX)
    return {name.removeprefix(_PREFIX) for name in names}


def expected_triggers(vendor: str = "sqlite") -> set[str]:
    """Return the names of the triggers that a database of this vendor must have. Every vendor has those of SQLite."""
    return {guard.name for guard in list_guards()} | _RENDERERS[vendor].truncate_names(list_never_truncated())


def missing_triggers(connection: BaseDatabaseWrapper) -> set[str]:
    """Return the expected triggers that this database lacks."""
    return expected_triggers(connection.vendor) - list_triggers(connection)


def _reads_only(guard: WriteGuard, tables: set[str]) -> bool:
    """Return whether every table that the condition reads exists."""
    tokens = set(guard.condition.replace("(", " ").replace(")", " ").split())
    prefixes = tuple(f"{app}_" for app in _rules)
    return all(token in tables for token in tokens if token.startswith(prefixes))
