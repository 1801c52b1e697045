"""The W3C `traceparent` of the request or task in progress: logged, and passed on unchanged.

The service makes no spans of its own, so it passes the header on as a proxy does.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

TRACEPARENT: Final = "traceparent"

_LENGTH: Final = 55
_FORM: Final = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")

_current: ContextVar[str] = ContextVar(TRACEPARENT, default="")


def read_traceparent(value: object) -> str:
    """Return a valid header of version 00; "" for everything else, which is ignored."""
    if not isinstance(value, str) or len(value) != _LENGTH or _FORM.fullmatch(value) is None:
        return ""
    return value


def current_traceparent() -> str:
    """Return the header of the request or task in progress; "" if it has none."""
    return _current.get()


def current_trace_id() -> str:
    return _current.get()[3:35]


@contextmanager
def traced(value: object) -> Iterator[None]:
    """Make a received header the current one for this block, if it is valid."""
    token = _current.set(read_traceparent(value))
    try:
        yield
    finally:
        _current.reset(token)
