"""Keyvault starts and works without rotation."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.long
def test_keyvault_without_rotation_starts_and_judges_a_key(tmp_path: Path) -> None:
    """No module of keyvault imports rotation, and no check at startup counts on its tables, triggers or tasks."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KEYVAULT_")}
    environment |= {
        "KEYVAULT_DATA_DIR": str(tmp_path / "data"),
        "DJANGO_SETTINGS_MODULE": "tests.project.keyvault_alone.settings",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.project.keyvault_alone"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["modules"] > 0
    assert found["unknown_tasks"] == []
    assert found["status"] == 200
