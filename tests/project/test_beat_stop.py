"""Beat stops when its supervisor says so, also while it sends a message."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from redis import Redis

from tests.environment import ROOT
from tests.servers.throwaway import free_port
from tests.template_database import make_migrated_data_folder

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]

WITHIN_SECONDS = 90
HELD_MS = 600_000


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_beat_that_waits_for_redis_to_take_a_message_stops(redis_url: str, tmp_path: Path, number: int) -> None:
    """Guarantee: no beat runs on after the end of its container, and a stop needs no SIGKILL."""
    make_migrated_data_folder(tmp_path / "data")
    environ = {name: text for name, text in os.environ.items() if not name.startswith("KEYVAULT_")}
    environ |= {
        "KEYVAULT_DATA_DIR": str(tmp_path / "data"),
        "KEYVAULT_BROKER_URL": redis_url,
        "KEYVAULT_METRICS": f"127.0.0.1:{free_port()}",
    }
    subprocess.run([sys.executable, "manage.py", "setup"], cwd=ROOT, env=environ, check=True, capture_output=True)
    log = tmp_path / "log"
    with Redis.from_url(redis_url) as client, log.open("wb") as output:
        client.client_pause(HELD_MS, all=False)
        command = [sys.executable, "-m", "celery", "-A", "keyvault.project", "beat", "--pidfile", ""]
        beat = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=output, stderr=output)
        try:
            deadline = time.monotonic() + WITHIN_SECONDS
            while not any("b" in each["flags"] for each in client.client_list()):
                assert beat.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            beat.send_signal(number)
            assert beat.wait(WITHIN_SECONDS) == 0
        finally:
            client.client_unpause()
            beat.kill()
            beat.wait()
    assert "Traceback" not in log.read_text()
