"""Beat and workers stop when their supervisor says so, also while they wait for Redis."""

import signal
import time
from pathlib import Path

import pytest
from redis import Redis

from tests.project.test_metrics import running, set_up
from tests.servers.throwaway import free_port

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]

WITHIN_SECONDS = 90
HELD_MS = 600_000


@pytest.mark.parametrize(
    ("what", "number"), [("beat", signal.SIGTERM), ("beat", signal.SIGINT), ("worker", signal.SIGTERM)]
)
def test_process_that_waits_for_redis_stops(redis_url: str, tmp_path: Path, what: str, number: int) -> None:
    """Guarantee: no process runs on after the end of its container, and a stop needs no SIGKILL."""
    folder, log = tmp_path / "data", tmp_path / f"{what}.log"
    set_up(folder)
    settings = {"KEYVAULT_BROKER_URL": redis_url, "KEYVAULT_METRICS": f"127.0.0.1:{free_port()}"}
    with Redis.from_url(redis_url) as client:
        try:
            if what == "beat":
                client.client_pause(HELD_MS, all=False)
            with running(what, folder, **settings) as process:
                deadline = time.monotonic() + WITHIN_SECONDS
                # Beat waits to send a message; a worker waits for one, which Redis then holds as well.
                while not any("b" in each["flags"] for each in client.client_list()):
                    assert process.poll() is None, log.read_text()
                    assert time.monotonic() < deadline, log.read_text()
                    time.sleep(0.1)
                client.client_pause(HELD_MS, all=False)
                process.send_signal(number)
                assert process.wait(WITHIN_SECONDS) == 0
        finally:
            client.client_unpause()
    assert "Traceback" not in log.read_text()
