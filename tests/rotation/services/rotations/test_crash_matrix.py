"""kill -9 at every point of the way forward, the way back and a reissue, on whichever database this run is about."""

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
def test_rotation_killed_at_every_point_completes_and_never_takes_the_merchant_down() -> None:
    """Whatever commit or backend call a worker is killed around, another one finishes the rotation.

    At no moment is the key that the merchant reads from the backend refused, and never do more than two
    verify (invariants 1, 3 and 6 of ROTATION.md).
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.crash_matrix"],
        cwd=ROOT,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "keyvault.project.settings", "KEYVAULT_LOG_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["violations"] == []
    assert report["audit_intact"]
    # Far fewer would mean that the bombs were not planted where the work is.
    assert report["crash_points"] >= 40
    assert {f"publishing:{when}-put" for when in ("before", "after")} <= set(report["names"])
    assert {"before-soft_delete", "after-soft_delete"} <= {name.rpartition(":")[2] for name in report["names"]}
    assert {f"rolling_back:{when}-put" for when in ("before", "after")} <= set(report["back"])
    assert {f"publishing:{when}-put" for when in ("before", "after")} <= set(report["reissue"])
