"""The central service, as a regional verifier calls it: JSON over HTTP, with a bounded number of open connections.

`http.client` suffices: a region calls one server. A lost connection is opened again, once for each call that may be
repeated. Every call of the feed may be: reads, confirmations and numbered reports.
"""

import json
import socket
import ssl
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

from keyvault.domain.errors import DependencyUnavailableError
from keyvault.domain.plaintext import Plaintext

CALL_SECONDS: Final = 3.0
"""Maximum wait for the connection and for each read of a reply, in seconds. Below every staleness bound: an older reply
must not decide a request."""

MAX_IDLE: Final = 8
"""Maximum number of idle connections."""

_MAX_REPLY_BYTES: Final = 32 * 1024 * 1024


class CentralUnavailableError(DependencyUnavailableError):
    """The service sent no reply, or one that is not readable."""


class CentralRefusedError(Exception):
    """The service answered with an error. `code` is its error code. `pointers` name what it refused, if it says so."""

    def __init__(self, status: int, code: str, pointers: Sequence[str] = ()) -> None:
        super().__init__(f"the central service answered {status} {code}")
        self.status = status
        self.code = code
        self.pointers = pointers


class CentralService:
    """The service at `url`, which the service token authenticates to. Safe for use by several threads."""

    def __init__(self, url: str, token: Plaintext, ca_file: str | None = None) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port
        self._prefix = parts.path.rstrip("/")
        self._context = ssl.create_default_context(cafile=ca_file) if parts.scheme == "https" else None
        self._token = token
        self._idle: list[HTTPConnection] = []
        self._lock = threading.Lock()

    def get(self, path: str, query: Mapping[str, object] | None = None, *, seconds: float = CALL_SECONDS) -> Any:
        """Return the parsed body. Raises CentralUnavailableError, CentralRefusedError."""
        return self._call("GET", f"{path}?{urlencode(query)}" if query else path, None, seconds)

    def post(self, path: str, body: Mapping[str, object], *, seconds: float = CALL_SECONDS) -> Any:
        """Send JSON and return the parsed body. Raises CentralUnavailableError, CentralRefusedError."""
        return self._call("POST", path, json.dumps(body).encode(), seconds)

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _call(self, method: str, target: str, body: bytes | None, seconds: float) -> Any:
        kept = self._take_idle()
        if kept is not None:
            # The server may have closed it meanwhile.
            with suppress(OSError, HTTPException):
                return self._send(kept, method, target, body, seconds)
            kept.close()
        connection = self._open(seconds)
        try:
            return self._send(connection, method, target, body, seconds)
        except (OSError, HTTPException) as error:
            connection.close()
            raise CentralUnavailableError("The central service does not answer.", internal=repr(error)) from error

    def _send(self, connection: HTTPConnection, method: str, target: str, body: bytes | None, seconds: float) -> Any:
        if connection.sock is not None:
            connection.sock.settimeout(seconds)
        headers = {"Authorization": f"Bearer {self._token.reveal()}"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        connection.request(method, self._prefix + target, body, headers)
        response = connection.getresponse()
        raw = response.read(_MAX_REPLY_BYTES + 1)
        if len(raw) > _MAX_REPLY_BYTES:
            raise HTTPException("the reply is too large")
        if response.will_close:
            connection.close()
        else:
            self._give_back(connection)
        return _parse(response.status, raw)

    def _open(self, seconds: float) -> HTTPConnection:
        if self._context is not None:
            connection: HTTPConnection = HTTPSConnection(self._host, self._port, timeout=seconds, context=self._context)
        else:
            connection = HTTPConnection(self._host, self._port, timeout=seconds)
        try:
            connection.connect()
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            connection.close()
            raise CentralUnavailableError("The central service cannot be reached.", internal=repr(error)) from error
        return connection

    def _take_idle(self) -> HTTPConnection | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _give_back(self, connection: HTTPConnection) -> None:
        with self._lock:
            if len(self._idle) < MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()


def _parse(status: int, raw: bytes) -> Any:
    try:
        body = json.loads(raw)
    except ValueError:
        body = None
    if status != 200:
        code = body.get("code", "") if isinstance(body, dict) else ""
        if status >= 500 or not code:
            why = f"it answered {status} {code}"
            raise CentralUnavailableError("The central service is unavailable.", internal=why)
        raise CentralRefusedError(status, str(code), _pointers(body.get("errors")))
    if not isinstance(body, dict):
        raise CentralUnavailableError("The central service gave no answer.", internal="the reply is no JSON object")
    return body


def _pointers(errors: Any) -> list[str]:
    faults = errors if isinstance(errors, list) else []
    return [str(fault.get("pointer")) for fault in faults if isinstance(fault, dict)]
