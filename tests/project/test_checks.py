"""Django's checks, and the processes that skip them because they load the console."""

import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from django.core.management import call_command

from tests.environment import ROOT

LIST_PAGES = """
import sys
from celery.fixups.django import DjangoWorkerFixup
from django.core.management import execute_from_command_line
from keyvault.project.celery import app
try:
    execute_from_command_line(["manage.py", "list_operators", "--json"])
except SystemExit:
    pass  # there is no database
app.loader.import_default_modules()
DjangoWorkerFixup(app).validate_models()
print(*(name for name in sys.modules if name.startswith("keyvault.admin.")))
"""


@pytest.mark.django_db
def test_checks_of_django_find_nothing() -> None:
    """Guarantee: no page of the console, model, setting or route is faulty in a way that Django notices."""
    call_command("check", "--database", "default", fail_level="WARNING", stdout=StringIO())


def test_commands_and_workers_load_no_page_of_the_console(tmp_path: Path) -> None:
    """Guarantee: the console, which takes longest to load, is loaded only by processes that serve it."""
    done = subprocess.run(
        [sys.executable, "-c", LIST_PAGES],
        cwd=ROOT,
        env={
            **os.environ,
            "KEYVAULT_DATA_DIR": str(tmp_path / "data"),
            "KEYVAULT_DATABASE_URL": f"sqlite:///{tmp_path}/absent.sqlite3",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
