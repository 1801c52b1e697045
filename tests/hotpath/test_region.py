"""A regional verifier over a bad line, in real processes; `python -m tests.faults region` does the same for longer."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environment import ROOT

SHORT_MINUTES = 0.9
"""Below a minute: the short form of the experiment."""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_region_never_says_yes_after_a_receipt_or_later_than_its_bound(tmp_path: Path) -> None:
    """Guarantee: delays, cuts and partitions of the line never let a revoked key pass after its receipt."""
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "tests.faults.experiment_process", "region", "1", str(SHORT_MINUTES), str(result)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(result.read_text())
    assert found["violations"] == []
    assert found["n"] > 0
    assert found["counts"]["refused inside partitions"] > 0
