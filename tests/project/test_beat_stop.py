"""Beat stops when its supervisor says so, also while it sends a message."""

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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_beat_that_waits_for_redis_to_take_a_message_stops(redis_url: str, tmp_path: Path, number: int) -> None:
    """Guarantee: no beat runs on after the end of its container, and a stop needs no SIGKILL."""
    folder, log = tmp_path / "data", tmp_path / "beat.log"
    set_up(folder)
    settings = {"KEYVAULT_BROKER_URL": redis_url, "KEYVAULT_METRICS": f"127.0.0.1:{free_port()}"}
    with Redis.from_url(redis_url) as client:
        client.client_pause(HELD_MS, all=False)
        try:
            with running("beat", folder, **settings) as beat:
                deadline = time.monotonic() + WITHIN_SECONDS
                while not any("b" in each["flags"] for each in client.client_list()):
                    assert beat.poll() is None, log.read_text()
                    assert time.monotonic() < deadline, log.read_text()
                    time.sleep(0.1)
                beat.send_signal(number)
                assert beat.wait(WITHIN_SECONDS) == 0
        finally:
            client.client_unpause()
    assert "Traceback" not in log.read_text()
