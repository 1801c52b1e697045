"""kill -9 at every point of a rotation, a rollback and a reissue, on the database of this run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.database
@pytest.mark.django_db(transaction=True)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("share", [1, 2, 3])
def test_rotation_killed_at_every_point_completes_without_an_outage(share: int, tmp_path: Path) -> None:
    """Another worker finishes the rotation after any kill around a commit or backend call.

    At no moment is the key that the merchant reads refused, and at most two keys verify.
    """
    # A keystore of its own: the shared one holds pending copies of earlier tests, whose rows were rolled back.
    environment = {
        "DJANGO_SETTINGS_MODULE": "keyvault.project.settings",
        "KEYVAULT_DATA_DIR": str(tmp_path),
        "KEYVAULT_LOG_LEVEL": "ERROR",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.crash_matrix", f"{share}/3"],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["violations"] == []
    assert report["audit_intact"]
    # Far fewer would mean that the kill points are not where the work is.
    assert report["crash_points"] >= 40
    assert {f"publishing:{when}-put" for when in ("before", "after")} <= set(report["names"])
    assert {"before-soft_delete", "after-soft_delete"} <= {name.rpartition(":")[2] for name in report["names"]}
    if share == 3:
        assert {f"staged:{when}-put" for when in ("before", "after")} <= set(report["awaited"])
        assert {f"publishing:{when}-forget" for when in ("before", "after")} <= set(report["awaited"])
        assert {f"rolling_back:{when}-put" for when in ("before", "after")} <= set(report["back"])
        assert {f"publishing:{when}-put" for when in ("before", "after")} <= set(report["reissue"])
