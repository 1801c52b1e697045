"""The Celery app's connection to its broker."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("scheme", ["amqp", "amqps", "pyamqp"])
def test_rabbitmq_that_does_not_reply_is_given_up(tmp_path: Path, scheme: str) -> None:
    """Guarantee: no request, worker or beat waits forever for a broker that has accepted its connection."""
    code = (
        "import json; from keyvault.project.celery import app; c = app.connection_for_write();"
        "print(json.dumps([c.transport_options, c.connect_timeout]))"
    )
    environment = os.environ | {
        "DJANGO_SETTINGS_MODULE": "keyvault.project.settings",
        "KEYVAULT_DATA_DIR": str(tmp_path),
        "KEYVAULT_BROKER_URL": f"{scheme}://keyvault:secret@127.0.0.1:5672//",
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    options, connect_seconds = json.loads(done.stdout)
    assert options == {"read_timeout": 5, "write_timeout": 5}
    assert connect_seconds <= 5
