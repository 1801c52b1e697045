"""Documentation states the command that starts the server, and the bounds of the server."""

import re
from pathlib import Path

from django.conf import settings

from keyvault.domain.errors import ErrorCode
from keyvault.hotpath.http1.framing import HEAD_BYTES, TARGET_BYTES
from keyvault.management.service import CONNECTIONS, HEADER_READ_MILLISECONDS, server_program
from keyvault.project.asgi_wsgi_bridge import Capacity
from keyvault.wire.problems import PROBLEM_TYPES

ROOT = Path(__file__).resolve().parent.parent.parent
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()


def test_docs_server_is_started_with_the_options_of_make_run() -> None:
    """Guarantee: the command for production has every bound that the embedded server has."""
    (documented,) = re.findall(r"^    granian (.+)$", OPERATIONS, re.MULTILINE)
    (in_deploy,) = re.findall(r"`granian ([^`]+)`", (ROOT / "deploy" / "README.md").read_text())
    assert documented == in_deploy
    run = " ".join(server_program(8000).command)
    *options, application = re.split(r" (?=--)| (?=keyvault\.)", documented)
    assert application in run
    assert [option for option in options if f"{option} " not in run] == []
    assert {"--backpressure", "--http1-header-read-timeout"} <= {option.split()[0] for option in options}


def test_docs_bounds_of_the_server_are_those_in_the_code() -> None:
    page = (ROOT / "deploy" / "README.md").read_text()
    table = page.split("## The ordinary server")[1].split("## The dedicated verifier")[0]
    capacity = Capacity()
    assert capacity.requests == CONNECTIONS
    assert re.findall(r"^\|[^|]+\| ([^|]*\d[^|]*) \|", table, re.MULTILINE) == [
        f"{CONNECTIONS}",
        f"{HEADER_READ_MILLISECONDS // 1000} s",
        f"{TARGET_BYTES // 1024} KiB",
        f"{HEAD_BYTES // 1024} KiB",
        f"{capacity.requests}",
        f"{settings.DATA_UPLOAD_MAX_MEMORY_SIZE // 1024} KiB in {capacity.body_seconds:g} s",
        f"{capacity.threads} threads, {capacity.queue} requests waiting for one",
        f"{capacity.console_threads} threads, {capacity.console_queue} requests waiting for one",
    ]
    assert f"within {capacity.body_seconds:g} seconds" in PROBLEM_TYPES[ErrorCode.REQUEST_TIMEOUT].cause
