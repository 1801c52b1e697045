"""A proxy between the service and a Vault that counts requests and injects a fault into one of them.

The product does not know about it. It opens a new upstream connection for each request, so a server restart needs no
handling.
"""

import http.client
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

_HOP_BY_HOP = frozenset({"connection", "host", "keep-alive", "transfer-encoding", "content-length"})
_METHODS = ("GET", "HEAD", "LIST", "POST", "PUT", "PATCH", "DELETE")
_ENGINE = re.compile(r"/v1/[^/]+-((?:keys|peppers|anchor)-[a-z]+/[a-z]+)")


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Injection:
    """What happens to one request.

    `before` and `after` run around forwarding it. `is_lost`: its reply is dropped. `late_seconds`: delay before it is
    forwarded. `slow_seconds`: delay before it is answered.
    """

    before: Callable[[], object] = _nothing
    after: Callable[[], object] = _nothing
    is_lost: bool = False
    late_seconds: float = 0.0
    slow_seconds: float = 0.0


NO_FAULT = Injection()

IDLE_SECONDS = 120
"""Maximum wait for the requests on their way, in seconds; longer than an injection with a slow administrator takes."""


class VaultProxy:
    """Counts requests and injects one `Injection`.

    `calls`: the names of the requests, in order. `injected`: set once the selected request has arrived; it may still be
    in progress. `failures`: errors of the injection itself, which then did not happen.
    """

    def __init__(self, upstream: str) -> None:
        self._upstream = urlsplit(upstream).netloc
        self._lock = threading.Lock()
        self._busy = 0
        self._idle = threading.Condition(self._lock)
        self._at, self._injection, self.every = 0, NO_FAULT, NO_FAULT
        self.calls: list[str] = []
        self.failures: list[Exception] = []
        self.injected = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def inject_at(self, number: int, injection: Injection) -> None:
        """Inject at request number `number`, counting from 1; 0 injects nowhere. All other requests use `every`."""
        with self._lock:
            self._at, self._injection, self.every, self.calls = number, injection, NO_FAULT, []
            self.failures = []
            self.injected.clear()

    def wait_until_idle(self) -> None:
        """Wait until no request is on its way to the server, even if its sender has disconnected."""
        with self._idle:
            assert self._idle.wait_for(lambda: self._busy == 0, timeout=IDLE_SECONDS)

    @contextmanager
    def running(self) -> Iterator["VaultProxy"]:
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()

    # --- one request ----------------------------------------------------------------------------------------

    def _draw(self, method: str, path: str) -> Injection:
        with self._lock:
            self._busy += 1
            self.calls.append(name_call(method, path))
            if len(self.calls) != self._at:
                return self.every
            self.injected.set()
            return self._injection

    def _end(self) -> None:
        with self._idle:
            self._busy -= 1
            self._idle.notify_all()

    def _pass_on(
        self, injection: Injection, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes] | None:
        """Return the server's reply; None: the client gets no reply."""
        time.sleep(injection.late_seconds)
        injection.before()
        upstream = http.client.HTTPConnection(self._upstream, timeout=30)
        try:
            upstream.request(method, path, body, headers)
            reply = upstream.getresponse()
            forwarded = reply.status, reply.getheaders(), reply.read()
        except (OSError, http.client.HTTPException):
            forwarded = None
        finally:
            upstream.close()
        injection.after()
        time.sleep(injection.slow_seconds)
        return None if injection.is_lost else forwarded

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_BY_HOP}
                injection = proxy._draw(self.command, self.path)
                self.close_connection = True
                try:
                    forwarded = proxy._pass_on(injection, self.command, self.path, headers, body)
                except Exception as error:  # noqa: BLE001  reported to the test, which runs in another thread
                    proxy.failures.append(error)
                    return
                finally:
                    proxy._end()
                if forwarded is None:
                    return
                status, replied, text = forwarded
                self.send_response_only(status)
                for name, value in replied:
                    if name.lower() not in _HOP_BY_HOP:
                        self.send_header(name, value)
                self.send_header("Content-Length", str(len(text)))
                self.send_header("Connection", "close")
                # The sender may have given up.
                with suppress(OSError):
                    self.end_headers()
                    self.wfile.write(text)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's own name
                return None

        for method in _METHODS:
            setattr(Handler, f"do_{method}", Handler.answer)
        return Handler


def name_call(method: str, path: str) -> str:
    """Name a request without ids and prefixes: `PUT keys-sandbox/data`, `POST auth/approle/login`."""
    place = path.partition("?")[0]
    found = _ENGINE.match(place)
    return f"{method} {found[1] if found else place.removeprefix('/v1/')}"
