"""Rules that a CHECK constraint cannot express, as triggers: append-only tables, four eyes, final states.

Each rule is a condition under which the database refuses a write. `rules` has the kinds of rules, `tables`, `guards`
and `peppers` have keyvault's own, and `sqlite` and `postgresql` render them. Another app registers its rules when it
starts. The triggers are created after every `migrate`: SQLite rebuilds a table, and drops its triggers, when a column
changes.
"""

from keyvault.models.triggers.install import (
    drop_triggers,
    ensure_triggers,
    expected_triggers,
    list_guards,
    list_never_truncated,
    list_rules,
    list_triggers,
    missing_triggers,
    register_rules,
    restore_triggers,
)

__all__ = [
    "drop_triggers",
    "ensure_triggers",
    "expected_triggers",
    "list_guards",
    "list_never_truncated",
    "list_rules",
    "list_triggers",
    "missing_triggers",
    "register_rules",
    "restore_triggers",
]
