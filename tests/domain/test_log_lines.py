"""Lines of the log: a secret is masked wherever it is in a record, and a record is one line."""

import io
import json
import logging
import re
from collections.abc import Callable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from keyvault.domain.plaintext import Plaintext
from keyvault.project.logs import RedactedJSONFormatter

from .minting import mint
from .test_redaction import HANDLE, KEY, OPAQUE, SECRET, tangles


class Log:
    """Return a separate logger with the service's formatter."""

    def __init__(self) -> None:
        self.stream = io.StringIO()
        handler = logging.StreamHandler(self.stream)
        handler.setFormatter(RedactedJSONFormatter())
        self.logger = logging.Logger("tests.log_lines")
        self.logger.addHandler(handler)

    def read(self) -> dict[str, Any]:
        """Return the one line that was written."""
        text = self.stream.getvalue()
        assert text.endswith("\n")
        assert len(text.splitlines()) == 1, text
        line = json.loads(text)
        assert isinstance(line, dict)
        return line


@pytest.fixture
def log() -> Log:
    return Log()


def fail(with_text: str) -> None:
    local = with_text
    raise ValueError(f"cannot use {local}")


def log_exception(log: Log) -> None:
    try:
        fail(KEY)
    except ValueError:
        log.logger.exception("it broke")


def log_chain(log: Log) -> None:
    try:
        try:
            fail(KEY)
        except ValueError as error:
            raise RuntimeError("on the way") from error
    except RuntimeError as error:
        log.logger.error("it broke", exc_info=error)


def log_group(log: Log) -> None:
    log.logger.error("they broke", exc_info=ExceptionGroup("both", [ValueError(KEY), KeyError(KEY)]))


def log_note(log: Log) -> None:
    error = ValueError("see the note")
    error.add_note(f"sent {KEY}")
    log.logger.error("it broke", exc_info=error)


def log_stack(log: Log) -> None:
    record = log.logger.makeRecord("a", logging.INFO, __file__, 1, "here", (), None)
    record.stack_info = f"Stack (most recent call last):\n  send({KEY!r})"
    log.logger.handle(record)


WAYS: dict[str, Callable[[Log], None]] = {
    "message": lambda log: log.logger.info(f"sent {KEY}"),  # noqa: G004  the way itself is what is tried
    "argument": lambda log: log.logger.info("sent %s", KEY),
    "argument, repr": lambda log: log.logger.info("sent %r", {"X-Api-Key": KEY}),
    "argument, mapping": lambda log: log.logger.info("sent %(key)s", {"key": KEY}),
    "argument, object": lambda log: log.logger.info("sent %s", SimpleNamespace(key=KEY)),
    "argument, bytes": lambda log: log.logger.info("sent %s", KEY.encode()),
    "extra": lambda log: log.logger.info("sent", extra={"sent": KEY}),
    "extra, object": lambda log: log.logger.info("sent", extra={"sent": [{"a": (KEY,)}]}),
    "extra, name": lambda log: log.logger.info("sent", extra={KEY: "1"}),
    "extra, header's name": lambda log: log.logger.info("sent", extra={"authorization": f"Bearer {OPAQUE}"}),
    "extra, headers": lambda log: log.logger.info("sent", extra={"headers": {"HTTP_X_API_KEY": OPAQUE}}),
    "exception": log_exception,
    "exception, chained": log_chain,
    "exception, group": log_group,
    "exception, note": log_note,
    "stack": log_stack,
    "logger's name": lambda log: log.logger.handle(logging.makeLogRecord({"name": KEY, "levelno": 20})),
    "header in the message": lambda log: log.logger.info("sent Authorization: Basic %s", OPAQUE),
    "environ in the message": lambda log: log.logger.info("%s", {"HTTP_AUTHORIZATION": f"Basic {OPAQUE}"}),
    "JSON in the message": lambda log: log.logger.info(json.dumps({"x-api-key": OPAQUE})),
    "extra with a quote": lambda log: log.logger.info("sent", extra={"x_api_key": f'a"b{OPAQUE}'}),
    "wire in the message": lambda log: log.logger.info("GET /\r\nX-Api-Key: %s\r\n\r\n", OPAQUE),
    "wire with a quote in the message": lambda log: log.logger.info('GET /\r\nX-Api-Key: a"b%s\r\n\r\n', OPAQUE),
    "cut short": lambda log: log.logger.info("sent %.40s", KEY),
}


@pytest.mark.parametrize("way", WAYS)
def test_log_line_shows_no_secret_whichever_way_it_came(way: str, log: Log) -> None:
    """Redaction is the last step before the line is written, so no part of a record bypasses it."""
    WAYS[way](log)
    text = log.stream.getvalue()
    assert SECRET[:5] not in text
    assert OPAQUE[:7] not in text
    assert log.read()


def test_log_line_keeps_the_handle_of_the_key(log: Log) -> None:
    log.logger.info("sent %s", KEY, extra={"header": f"X-Api-Key: {KEY}"})
    line = log.read()
    assert line["message"] == f"sent {HANDLE}***"
    assert line["header"] == f"X-Api-Key: {HANDLE}***"


def test_log_line_of_a_plaintext_is_its_mask(log: Log) -> None:
    """A secret without a recognizable format is masked because of its type."""
    log.logger.info("sent %s and %r", Plaintext("hunter2"), [Plaintext("hunter2")], extra={"it": Plaintext("hunter2")})
    line = log.read()
    assert "hunter2" not in str(line)
    assert line["it"] == "***"


UNTIL = datetime(2026, 11, 21, 12, tzinfo=UTC)


def test_log_line_has_time_level_logger_message_and_extras(log: Log) -> None:
    log.logger.warning(
        "moved to %s", "staged", extra={"rotation_id": "rot_1", "count": 3, "until": UNTIL, "nothing": None}
    )
    line = log.read()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("at"))
    assert line == {
        "level": "WARNING",
        "logger": "tests.log_lines",
        "message": "moved to staged",
        "rotation_id": "rot_1",
        "count": "3",
        "until": "2026-11-21T12:00:00Z",
        "nothing": "None",
    }


def test_log_line_of_an_exception_has_its_traceback(log: Log) -> None:
    """A masked log line still identifies the fault."""
    log_exception(log)
    line = log.read()
    assert line["message"] == "it broke"
    assert line["traceback"].startswith("Traceback (most recent call last):\n")
    assert line["traceback"].endswith(f"ValueError: cannot use {HANDLE}***")


FORGERIES = [
    'x\n{"at": "2026-11-21", "level": "INFO", "message": "forged"}',
    'x\r\n{"level": "INFO"}',
    "x\rforged",
    "x\x1b[2K\x1b[1Aforged",
    "x\u2028forged",
    "x\u2029forged",
    "x\x85forged",
    "x\x0bforged\x0cforged\x1cforged",
    "x\x00forged",
    'x", "level": "INFO',
    'x"}\n{"',
    "x\ud800",
]


@pytest.mark.parametrize("text", FORGERIES, ids=ascii)
def test_log_line_cannot_be_forged(text: str, log: Log) -> None:
    """Control characters of a client start no second line and overwrite none on a terminal."""
    log.logger.info("client said %s", text, extra={"user_agent": text})
    written = log.stream.getvalue().rstrip("\n")
    assert written.isascii()
    assert written.isprintable()
    line = log.read()
    assert line["message"] == f"client said {text}"
    assert line["user_agent"] == text
    assert line["level"] == "INFO"


@given(tangles | st.text(max_size=40), tangles | st.text(max_size=40), st.sampled_from(["header", "authorization"]))
@example("", '["Authorization', "header")
@example("", "['x-api-key', ", "header")
@example("x-api-key: [", "'authorization': '", "authorization")
def test_log_line_of_any_text_is_one_json_object(message: str, extra: str, name: str) -> None:
    """Whatever a client sends, every line is valid JSON with all fields and without secrets."""
    log = Log()
    log.logger.info("%s", message, extra={name: extra, "after": "the end"})
    line = log.read()
    assert set(line) == {"at", "level", "logger", "message", name, "after"}
    assert line["after"] == "the end"
    assert SECRET not in log.stream.getvalue()


def test_log_line_of_every_kind_of_key_is_masked(log: Log) -> None:
    log.logger.info("sent %s", [mint(seed=seed) for seed in range(20)])
    assert log.read()["message"].count("***") == 20


def test_log_line_that_cannot_be_made_shows_no_secret_either(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong format string does not bypass the redactor."""
    log.logger.info("sent %d", KEY)
    assert SECRET not in log.stream.getvalue() + "".join(capsys.readouterr())
