"""Migrations of each kind that a release may contain, for tables that are in constant use.

`EXPAND` adds: a column with a default to the table of keys, a column without one to the orders, its values, an index
and a constraint. `CONTRACT` removes all of it, as the release after next would. They are no migrations of this tree:
`make upgrade-test` copies them into a copy of it.
"""

import importlib.util
from pathlib import Path

from django.db.migrations import Migration

FOLDER = Path(__file__).parent
EXPAND = ("9001_add_columns", "9002_fill", "9003_add_index")
CONTRACT = ("9004_remove_from_state", "9005_drop_columns")

_LEAF = "LEAF"


def copy_rehearsal(names: tuple[str, ...], to: Path) -> None:
    """Copy migrations into the folder of an app's migrations, where the first one follows the newest one there."""
    for name in names:
        leaf = max(path.stem for path in to.glob("[0-9]*.py"))
        (to / f"{name}.py").write_text((FOLDER / f"{name}.py").read_text().replace(_LEAF, leaf))


def read_rehearsal(names: tuple[str, ...], leaf: str) -> list[Migration]:
    """Import the migrations, where the first one follows `leaf`."""
    found = []
    for name in names:
        spec = importlib.util.spec_from_loader(name, loader=None)
        assert spec
        module = importlib.util.module_from_spec(spec)
        exec((FOLDER / f"{name}.py").read_text().replace(_LEAF, leaf), vars(module))  # noqa: S102  our own files
        found.append(module.Migration(name, "keyvault"))
        leaf = name
    return found
