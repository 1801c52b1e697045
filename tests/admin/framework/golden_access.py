"""The golden table: the status of every page of the console, by who opens it.

    KEYVAULT_TEST_REWRITE=console KEYVAULT_TEST_DATABASE=sqlite python -m pytest -p no:xdist \
        tests/admin/framework/test_enforcement.py tests/admin/framework/test_scope.py

rewrites console_access.txt. Review the diff.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from keyvault.access.roles import Role

GOLDEN = Path(__file__).with_name("console_access.txt")

COLUMNS = ("no_session", "password", *Role, "globex", "globex/sandbox", "acme/sandbox", "sandbox", "nowhere")
"""Who opens the page: without a session, with the password only, with one role and no scope limit, or with every role
in a scope.
"""

HEADING = """\
# The status of every page of the console by GET and by POST, or by GET alone. The pages of single rows are those of the
# merchant acme, most of them in production. Columns: without a session; with a password and no second factor; one role
# for the whole installation; every role within a scope. golden_access.py says how to generate this file. Review a
# change of it as a diff.
#
"""


def require_column(column: str, found: Mapping[str, str]) -> None:
    """Require the statuses of all pages in one column of the table; or write them, on request."""
    table = _read()
    if os.environ.get("KEYVAULT_TEST_REWRITE") == "console":
        _write({page: {**table.get(page, {}), column: status} for page, status in found.items()})
        return
    golden = {page: cells[column] for page, cells in table.items()}
    wrong = [
        f"{page}: {found.get(page)}, not {golden.get(page)}"
        for page in sorted({*found, *golden})
        if found.get(page) != golden.get(page)
    ]
    assert not wrong, f"column {column}: {'; '.join(wrong)}"


def golden_status(column: str, page: str) -> int:
    """Return the status by GET."""
    return int(_read()[page][column].partition("/")[0])


def _read() -> dict[str, dict[str, str]]:
    if not GOLDEN.exists():
        return {}
    lines = [
        re.split("  +", line) for line in GOLDEN.read_text().splitlines() if not line.startswith("# ") and line != "#"
    ]
    columns = lines[0][1:]
    return {page: dict(zip(columns, cells, strict=True)) for page, *cells in lines[1:]}


def _write(table: Mapping[str, Mapping[str, str]]) -> None:
    rows = [["page", *COLUMNS]]
    rows += [[page, *(cells.get(column, "?") for column in COLUMNS)] for page, cells in table.items()]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    GOLDEN.write_text(HEADING + "\n".join(lines) + "\n")
