"""The operations that the client's logic asks for, and that a sync or an async runner performs.

The logic is a generator: it yields an effect and gets its outcome. It does no I/O, so both runners share it.
"""

import json
import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from keyvault.domain.plaintext import Plaintext
from keyvault_client.keystrings import KEY_SHAPED

HEADER_VALUE = re.compile(r"[\x20-\x7e]{0,4096}")
"""Matches a header's value that may be passed on."""


def read_request_id(value: object) -> str | None:
    """Return a valid request id, else None. An answer may contain anything, also the key of the request."""
    if not isinstance(value, str) or not value or not HEADER_VALUE.fullmatch(value) or KEY_SHAPED.search(value):
        return None
    return value


class KeySource(Protocol):
    """Where a key comes from.

    `watch_seconds`: a client reads the source again for a call that comes this long after the last reading, in seconds;
    None: only after the service has refused the key.
    """

    watch_seconds: float | None

    def read(self, timeout: float) -> Plaintext:
        """Return the key, within `timeout` seconds. May raise any exception."""


@dataclass(frozen=True, slots=True)
class SendRequest:
    """Send a request. The outcome is an HttpReply or a Failure. `deadline`: a time of `time.monotonic()`."""

    method: str
    url: str
    headers: Mapping[str, str | Plaintext]
    body: bytes = field(repr=False)
    deadline: float


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait; the outcome is None."""

    seconds: float


@dataclass(frozen=True, slots=True)
class ReadKey:
    """Read a key source. The outcome is a Plaintext, or the exception of the source."""

    source: KeySource
    timeout: float


ClientEffect = SendRequest | Pause | ReadKey


@dataclass(frozen=True, slots=True)
class HttpReply:
    """A complete reply. `headers`: names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes = field(repr=False)

    @property
    def request_id(self) -> str | None:
        """The header X-Request-Id; None without a valid one."""
        return read_request_id(self.headers.get("x-request-id"))

    def members(self) -> dict[str, Any]:
        """Return the JSON object of the body, or an empty one for any other body."""
        try:
            found = json.loads(self.body)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True)
class Failure:
    """There is no complete reply. `cause`: why, without any part of the request."""

    cause: str
    is_deadline: bool = False


Result = TypeVar("Result")
Steps = Generator[ClientEffect, Any, Result]
"""A run of the client's logic. Any: the outcome depends on the effect, see each effect."""
