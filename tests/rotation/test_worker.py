"""Rotations advanced by a real Celery worker and beat, killed with SIGKILL at each step of the forward path."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
from django.conf import settings
from django.db import connection

from keyvault.models import Key
from keyvault.project.celery import app
from keyvault.services.usage.recorder import UsageLog
from rotation.domain.events import RotationState as S
from rotation.models import Rotation
from rotation.services.rotations.reports import get_rotation

from . import scene

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parent.parent.parent
POINTS = [
    "rotation.staged:after-commit",
    "rotation.publishing:before-commit",
    "publishing:after-ledger",
    "publishing:after-put",
    "rotation.awaiting_proof:after-commit",
    "rotation.overlap:before-commit",
    "rotation.quarantine:after-commit",
    "rotation.revoking:after-commit",
    "revoking:after-destroy",
]
"""See `tests.faults.crashing`; `make faults` covers all points."""


@pytest.fixture
def broker(request: pytest.FixtureRequest) -> str:
    """Return the file broker on SQLite, and Redis, as in a deployment, on PostgreSQL."""
    if connection.vendor == "postgresql":
        url: str = request.getfixturevalue("redis_url")
        return url
    return "filesystem://localhost"


@contextmanager
def worker(point: str, broker: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a worker with a beat: on the file broker in a thread, else in a child process."""
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "keyvault.project.settings",
        "KEYVAULT_BROKER_URL": broker,
        "C_FORCE_ROOT": "1",
    }
    with log.open("ab") as output:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.faults.worker",
                point,
                *([] if broker == "filesystem://localhost" else ["--beat"]),
            ],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        # A beat that is a child process outlives a killed worker.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def until(holds: Callable[[], bool], seconds: float, what: str) -> None:
    """Poll the condition: the event happens in another process and is visible only in the database."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds} s: {what}")
        time.sleep(0.1)


def acknowledge_delivered() -> None:
    """Acknowledge delivered replacements as the merchants."""
    for rotation in Rotation.objects.filter(state=S.AWAITING_PROOF, acknowledged_at=None):
        scene.acknowledge_replacement(rotation.rotation_id, datetime.now(UTC))


@pytest.mark.database
@pytest.mark.django_db(transaction=True)
@pytest.mark.timeout(240)
def test_worker_killed_at_each_step_leaves_a_rotation_that_completes(broker: str, tmp_path: Path) -> None:
    """kill -9 of the worker at any step loses nothing: the next worker finishes the rotation."""
    scene.account()  # before the verifier, whose thread writes a row: `start_with` would find it changed
    verifier = UsageLog()
    verifier.start()
    log = tmp_path / "worker.log"
    rotations = []
    try:
        for point in POINTS:
            now = datetime.now(UTC)
            key, _ = scene.issue(scene.account(), now)
            rotation = scene.rotate(key.credential, now, quiet_seconds=1, quarantine_seconds=1)
            rotations.append(rotation.rotation_id)
            with worker(point, broker, log) as process:

                def has_died(process: subprocess.Popen[bytes] = process) -> bool:
                    acknowledge_delivered()
                    return process.poll() is not None

                until(has_died, 60, f"the worker to be killed at {point}")
                assert process.returncode == -signal.SIGKILL, log.read_text()[-3000:]
        with worker("nowhere", broker, log):

            def all_completed() -> bool:
                acknowledge_delivered()
                return not Rotation.objects.exclude(state=S.COMPLETED).exists()

            until(all_completed, 90, "every rotation to complete")
    finally:
        verifier.stop()
    for rotation_id in rotations:
        finished = get_rotation(rotation_id)
        assert finished.replacement is not None
        states = set(Key.objects.filter(credential=finished.credential).values_list("key_id", "state"))
        assert (finished.replacement_id, "active") in states
        assert sum(state == "active" for _, state in states) == 1
    assert [line[-3000:] for line in log.read_text().splitlines() if "Traceback" in line] == []
    if broker.startswith("filesystem:"):
        # Killed workers leave neither mailboxes nor incomplete files.
        folder = settings.BROKER_DIR
        assert [path.name for path in (folder / "control").iterdir()] == ["keyvault.exchange"]
        assert len(list((folder / "messages").iterdir())) < 2 * len(app.conf.beat_schedule)
