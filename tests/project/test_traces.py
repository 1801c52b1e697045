"""`traceparent` of a request: in its log lines, in the messages to workers, and in the tasks that they run."""

import json
import logging
from queue import Queue
from typing import Any

import pytest
from celery.signals import before_task_publish
from django.test import Client

from keyvault.project.celery import TracedTask, app
from keyvault.project.logs import RedactedJSONFormatter
from keyvault.wire.trace_context import TRACEPARENT, current_trace_id, current_traceparent, traced
from rotation.services.rotations.turns import Turn, TurnDispatcher
from rotation.tasks import advance_rotation

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
VALID = f"00-{TRACE}-00f067aa0ba902b7-01"


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(RedactedJSONFormatter())
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(json.loads(self.format(record)))


@pytest.fixture
def lines() -> Any:
    handler, logger = Lines(), logging.getLogger("keyvault.requests")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler.lines
    logger.setLevel(before)
    logger.removeHandler(handler)


@pytest.mark.django_db
@pytest.mark.parametrize("path", ["/v1/keys/unknown", "/v1/keys/verify"])
def test_trace_of_a_request_is_in_its_log_lines_and_no_others(
    client: Client, lines: list[dict[str, Any]], path: str
) -> None:
    """On the ordinary path, and on the slow path of the engine."""
    client.post(path, headers={TRACEPARENT: VALID})
    client.post(path, headers={TRACEPARENT: "00-nonsense"})
    assert [line.get("trace_id") for line in lines] == [TRACE, None]
    assert {line["event"] for line in lines} == {"request.refused"}
    assert "nonsense" not in json.dumps(lines)
    assert current_traceparent() == ""


def test_trace_is_passed_on_in_the_headers_of_a_message() -> None:
    headers: dict[str, Any] = {}
    without: dict[str, Any] = {}
    with traced(VALID):
        before_task_publish.send(sender="task", headers=headers)
    before_task_publish.send(sender="task", headers=without)
    assert (headers, without) == ({TRACEPARENT: VALID}, {})


def test_task_runs_in_the_trace_of_its_message() -> None:
    seen = []

    @app.task(name="tests.traced", shared=False)
    def look() -> None:
        seen.append(current_trace_id())

    try:
        assert isinstance(look, TracedTask)
        look.apply(headers={TRACEPARENT: VALID})
        look.push_request(**{TRACEPARENT: VALID})
        look()
        look.pop_request()
        look()
    finally:
        app.tasks.unregister("tests.traced")
    assert seen[1:] == [TRACE, ""]
    assert isinstance(advance_rotation, TracedTask)


def test_trace_of_a_request_reaches_the_thread_that_sends_its_messages() -> None:
    sent: Queue[Turn] = Queue()
    dispatcher = TurnDispatcher(sent.put)
    try:
        with traced(VALID):
            dispatcher.put([Turn("rot_1", "sandbox", is_urgent=False)])
        assert sent.get(timeout=60).traceparent == VALID
    finally:
        dispatcher.stop()
