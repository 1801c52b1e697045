"""Metrics of workers and beat: each serves its own at the address of KEYVAULT_METRICS."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.environment import ROOT
from tests.servers.throwaway import free_port
from tests.template_database import make_migrated_data_folder

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

WITHIN_SECONDS = 180
PROGRAMS = {
    "worker": ["worker", "--pool", "threads", "--concurrency", "2", "--without-gossip", "--without-mingle"],
    "beat": ["beat", "--pidfile", ""],
}


@contextmanager
def running(what: str, folder: Path, **settings: str) -> Iterator["subprocess.Popen[bytes]"]:
    environ = {name: text for name, text in os.environ.items() if not name.startswith("KEYVAULT_")}
    environ |= {"KEYVAULT_DATA_DIR": str(folder), "C_FORCE_ROOT": "1", **settings}
    with (folder.parent / f"{what}.log").open("wb") as log:
        command = [sys.executable, "-m", "celery", "-A", "keyvault.project", *PROGRAMS[what]]
        process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def set_up(folder: Path) -> None:
    make_migrated_data_folder(folder)
    environ = {name: text for name, text in os.environ.items() if not name.startswith("KEYVAULT_")}
    environ["KEYVAULT_DATA_DIR"] = str(folder)
    subprocess.run([sys.executable, "manage.py", "setup"], cwd=ROOT, env=environ, check=True, capture_output=True)


@pytest.fixture(scope="module")
def set_up_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Set up one data folder; each test gets a copy."""
    folder = tmp_path_factory.mktemp("installation") / "data"
    set_up(folder)
    return folder


@pytest.fixture
def folder(set_up_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(set_up_folder, tmp_path / "data"))


@pytest.mark.parametrize(
    ("what", "series"),
    [
        (
            "worker",
            {
                'keyvault_task_duration_seconds_count{outcome="done",task="keyvault.tasks.run_maintenance"}',
                'keyvault_process_seen_timestamp_seconds{kind="worker"}',
                'keyvault_process_seen_timestamp_seconds{kind="beat"}',
            },
        ),
        ("beat", {'keyvault_process_seen_timestamp_seconds{kind="beat"}'}),
    ],
    ids=["worker", "beat"],
)
def test_celery_process_serves_its_metrics(folder: Path, what: str, series: set[str]) -> None:
    """Guarantee: what workers and beat count is visible, although they answer no requests."""
    port = free_port()
    with running(what, folder, KEYVAULT_METRICS=f"127.0.0.1:{port}") as process:
        deadline, missing = time.monotonic() + WITHIN_SECONDS, series
        while missing:
            log = (folder.parent / f"{what}.log").read_text()[-2000:]
            assert process.poll() is None, log
            assert time.monotonic() < deadline, f"{missing}\n{log}"
            try:
                with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                    found = {line.rpartition(" ")[0] for line in answer.read().decode().splitlines()}
            except OSError:
                found = set()
            missing = series - found
            time.sleep(0.2)


@pytest.mark.parametrize("what", PROGRAMS)
def test_celery_process_whose_address_cannot_be_used_does_not_start(folder: Path, what: str) -> None:
    # 192.0.2.1 is for documentation (RFC 5737): no host has it.
    with running(what, folder, KEYVAULT_METRICS="192.0.2.1:9100") as process:
        assert process.wait(WITHIN_SECONDS) != 0
    assert (
        f"the {what} does not start: KEYVAULT_METRICS: 192.0.2.1:9100 cannot be used"
        in (folder.parent / f"{what}.log").read_text()
    )
