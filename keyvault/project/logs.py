"""Log lines: one JSON object each, redacted as the last step."""

import json
import logging
from datetime import UTC, datetime

from keyvault.domain.redaction import redact
from keyvault.domain.timestamps import format_timestamp
from keyvault.project.log_events import find_event
from keyvault.wire.trace_context import current_trace_id

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class RedactedJSONFormatter(logging.Formatter):
    """Formats message, arguments, extra fields and traceback as one line; control characters stay escaped.

    Redaction is the last step, so that nothing reaches a log line without it.
    """

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "at": format_timestamp(datetime.fromtimestamp(record.created, UTC), "milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            **({"event": event} if (event := find_event(record.msg)) else {}),
            "message": _message(record),
            **({"trace_id": trace_id} if (trace_id := current_trace_id()) else {}),
            **{name: _text(value) for name, value in vars(record).items() if name not in _STANDARD},
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        # Redact before the JSON escapes too: a quote inside a header would read differently afterwards.
        return redact(json.dumps({name: redact(text) for name, text in line.items()}))


def _text(value: object) -> str:
    return format_timestamp(value) if isinstance(value, datetime) else str(value)


def _message(record: logging.LogRecord) -> str:
    """Return the message. If formatting fails, logging itself would print the arguments unredacted."""
    try:
        return record.getMessage()
    except (TypeError, ValueError, KeyError) as error:
        return f"{record.msg!r} with {record.args!r} cannot be formatted: {error}"
