"""What stands between the service and a Vault in these tests: it counts the requests, and strikes at one of them.

Nothing in the product knows of it. It opens a new connection for each request that it passes on, so that it needs no
telling when the server is killed and started again.
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
class Strike:
    """What happens to a request. `before`, `after`: done around its passing on. `is_lost`: its answer is.

    `late_seconds` before it is passed on, `slow_seconds` before it is answered.
    """

    before: Callable[[], object] = _nothing
    after: Callable[[], object] = _nothing
    is_lost: bool = False
    late_seconds: float = 0.0
    slow_seconds: float = 0.0


UNDISTURBED = Strike()


class Proxy:
    """`calls`: the requests by name, in order. `struck`: the one it was told of has come, and may be under way.

    `failures`: of the strikes themselves, which then did not happen.
    """

    def __init__(self, upstream: str) -> None:
        self._upstream = urlsplit(upstream).netloc
        self._lock = threading.Lock()
        self._busy = 0
        self._idle = threading.Condition(self._lock)
        self._at, self._strike, self.every = 0, UNDISTURBED, UNDISTURBED
        self.calls: list[str] = []
        self.failures: list[Exception] = []
        self.struck = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def strike_at(self, number: int, strike: Strike) -> None:
        """At that request from now on, counting from 1; 0: at none. Every other one is as `every` says."""
        with self._lock:
            self._at, self._strike, self.every, self.calls = number, strike, UNDISTURBED, []
            self.struck.clear()

    def wait_until_idle(self) -> None:
        """Until nothing is on its way to the server any more, be its sender still there or not."""
        with self._idle:
            assert self._idle.wait_for(lambda: self._busy == 0, timeout=30)

    @contextmanager
    def running(self) -> Iterator["Proxy"]:
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()

    # --- one request ----------------------------------------------------------------------------------------

    def _draw(self, method: str, path: str) -> Strike:
        with self._lock:
            self._busy += 1
            self.calls.append(name_call(method, path))
            if len(self.calls) != self._at:
                return self.every
            self.struck.set()
            return self._strike

    def _end(self) -> None:
        with self._idle:
            self._busy -= 1
            self._idle.notify_all()

    def _pass_on(
        self, strike: Strike, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes] | None:
        """The server's answer; None: nobody is told one."""
        time.sleep(strike.late_seconds)
        strike.before()
        upstream = http.client.HTTPConnection(self._upstream, timeout=30)
        try:
            upstream.request(method, path, body, headers)
            reply = upstream.getresponse()
            told = reply.status, reply.getheaders(), reply.read()
        except (OSError, http.client.HTTPException):
            told = None
        finally:
            upstream.close()
        strike.after()
        time.sleep(strike.slow_seconds)
        return None if strike.is_lost else told

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_BY_HOP}
                strike = proxy._draw(self.command, self.path)
                self.close_connection = True
                try:
                    told = proxy._pass_on(strike, self.command, self.path, headers, body)
                except Exception as error:  # noqa: BLE001  told to the test, whose thread is another
                    proxy.failures.append(error)
                    return
                finally:
                    proxy._end()
                if told is None:
                    return
                status, replied, text = told
                self.send_response_only(status)
                for name, value in replied:
                    if name.lower() not in _HOP_BY_HOP:
                        self.send_header(name, value)
                self.send_header("Content-Length", str(len(text)))
                self.send_header("Connection", "close")
                # Who asked may have given up.
                with suppress(OSError):
                    self.end_headers()
                    self.wfile.write(text)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's own name
                return None

        for method in _METHODS:
            setattr(Handler, f"do_{method}", Handler.answer)
        return Handler


def name_call(method: str, path: str) -> str:
    """Without ids and prefixes: `PUT keys-sandbox/data`, `POST auth/approle/login`."""
    place = path.partition("?")[0]
    found = _ENGINE.match(place)
    return f"{method} {found[1] if found else place.removeprefix('/v1/')}"
