"""A small service for LocalVerifier: it decides, and has a change feed, as docs and OpenAPI describe them."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKEN = f"kv_svc_sbx_{'t' * 65}"
ENDPOINTS = [
    {"name": "orders.create", "method": "POST", "path": "/merchants/orders", "credentials": ["private"]},
    {"name": "client.configuration", "method": "GET", "path": "/client/configuration", "credentials": ["public"]},
]
PLAIN = {"bearer": "none", "merchant_from": None, "store_from": None, "limit": None}


def key_string(number: int, kind: str = "prv") -> str:
    return f"kv_{kind}_sbx_{number:016d}{'s' * 49}"


class FeedService:
    """Answers over HTTP. `lock` guards all members.

    Attributes:
        asked: questions that the service got, with their cost.
        receipt: set when the reader has confirmed the newest change.
        before: by path, called once before the next answer to it, without the lock.
        seconds_ahead: how far the service's clock is ahead of this machine's.
        largest_cost: a question about more tokens is refused, as with a limit that is smaller.
        sends_date: whether answers have a date.
        expires_at: of all keys.
        refused_registrations: number of registrations that are refused first.
        cut: paths whose requests are not processed. `lost`: paths of which one answer each is lost, after its effect.
    """

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.asked: list[dict[str, Any]] = []
        self.revoked: set[str] = set()
        self.changes: list[dict[str, Any]] = []
        self.sequence = 10
        self.registrations = 0
        self.refused_registrations = 0
        self.is_reader_known = False
        self.receipt = threading.Event()
        self.reports: dict[int, dict[str, Any]] = {}
        self.count = 1_000
        self.tokens: int | None = None
        self.largest_cost: int | None = None
        self.staleness = 10
        self.seconds_ahead = 0.0
        self.sends_date = True
        self.expires_at: datetime | None = None
        self.refused_reports = 0
        self.before: dict[str, Callable[[], object]] = {}
        self.cut: set[str] = set()
        self.lost: list[str] = []

    @property
    def now(self) -> datetime:
        return datetime.fromtimestamp(time.time() + self.seconds_ahead, UTC)

    def revoke(self, key: str) -> None:
        self.change("key", key[11:27], lambda: self.revoked.add(key[11:27]))

    def change(self, kind: str, identity: str, apply: Callable[[], Any] = lambda: None) -> None:
        with self.lock:
            apply()
            self.receipt.clear()
            self.sequence += 1
            self.changes.append({"sequence": self.sequence, "kind": kind, "id": identity})
            self.lock.notify_all()

    def answer(self, method: str, path: str, query: dict[str, str], body: dict[str, Any]) -> tuple[int, Any]:
        hook = self.before.pop(path, None)
        if hook is not None:
            hook()
        with self.lock:
            return getattr(self, f"_{method}{path}".replace("/", "_").replace("-", "_").lower())(query, body)  # type: ignore[no-any-return]  # a method by name

    def record(self, key_id: str) -> dict[str, Any]:
        return {
            "key_id": key_id,
            "credential_id": f"crd_{key_id}",
            "kind": "private",
            "environment": "sandbox",
            "merchant_id": "acme",
            "state": "deactivated" if key_id in self.revoked else "active",
            "retirement": "revoked" if key_id in self.revoked else None,
            "expires_at": None if self.expires_at is None else self.expires_at.isoformat(),
            "merchant_active": True,
            "account_active": True,
            "origin_header": "refuse",
            "networks": [],
            "limit": None,
        }

    def _post_v1_keys_verify(self, query: dict[str, str], body: dict[str, Any]) -> tuple[int, Any]:
        self.asked.append(body)
        key_id, cost = body["key"][11:27], body.get("cost", 1)
        problem = {"status": 401, "code": "key_revoked"}
        if self.largest_cost is not None and cost > self.largest_cost:
            return 400, {"code": "request_invalid", "errors": [{"pointer": "/cost"}]}
        if self.tokens is not None:
            if self.tokens < cost:
                problem = {"status": 429, "code": "rate_limited"}
                return 200, {"allowed": False, "headers": {"Retry-After": "1"}, "problem": problem, **problem}
            self.tokens -= cost
        if self.expires_at is not None and self.now >= self.expires_at:
            problem = {"status": 401, "code": "key_expired"}
            return 200, {"allowed": False, "headers": {}, "problem": problem, **problem}
        if key_id in self.revoked:
            return 200, {"allowed": False, "headers": {}, "problem": problem, **problem}
        record = self.record(key_id)
        names = ("key_id", "credential_id", "kind", "environment", "merchant_id")
        return 200, {"allowed": True, "status": 200, "headers": {}, **{name: record[name] for name in names}}

    def _get_v1_changes(self, query: dict[str, str], body: dict[str, Any]) -> tuple[int, Any]:
        waited = 0.0
        if "after" not in query:
            if self.refused_registrations:
                self.refused_registrations -= 1
                return 410, {"code": "cursor_expired"}
            self.registrations += 1
            self.is_reader_known, changes = True, []
        else:
            if not self.is_reader_known:
                return 410, {"code": "cursor_expired"}
            began = time.monotonic()
            after = int(query["after"])
            self.lock.wait_for(lambda: self.sequence > after or not self.is_reader_known, min(1, self.staleness / 2))
            waited = time.monotonic() - began
            if not self.is_reader_known:
                return 410, {"code": "cursor_expired"}
            changes = [change for change in self.changes if change["sequence"] > after]
        described = [
            change | {"record": self.record(change["id"]) if change["kind"] == "key" else None} for change in changes
        ]
        return 200, {
            "sequence": self.sequence,
            "waited_seconds": waited,
            "staleness_seconds": self.staleness,
            "changes": described,
        }

    def _post_v1_changes_confirmations(self, query: dict[str, str], body: dict[str, Any]) -> tuple[int, Any]:
        if body["sequence"] == self.sequence:
            self.receipt.set()
        return 200, {"sequence": body["sequence"]}

    def _post_v1_usage_reports(self, query: dict[str, str], body: dict[str, Any]) -> tuple[int, Any]:
        latest = self.now + timedelta(seconds=10)
        faults = ["/flushed_through"] if datetime.fromisoformat(body["flushed_through"]) > latest else []
        for number, use in enumerate(body["uses"]):
            if not self.now - timedelta(days=1) <= datetime.fromisoformat(use["last_at"]) <= latest:
                faults.append(f"/uses/{number}")
        if faults:
            self.refused_reports += 1
            self.lock.notify_all()
            return 400, {"code": "request_invalid", "errors": [{"pointer": pointer} for pointer in faults]}
        if body["number"] not in self.reports:
            self.reports[body["number"]] = body
        self.lock.notify_all()
        return 200, {"number": body["number"]}

    def _get_v1_snapshot(self, query: dict[str, str], body: dict[str, Any]) -> tuple[int, Any]:
        limits = {"default": {"sandbox": {"count": self.count, "seconds": 1}}, "overrides": []}
        return 200, {"endpoints": [PLAIN | endpoint for endpoint in ENDPOINTS], "limits": limits}

    def _get_v1_snapshot_keys(self, query: dict[str, str], body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"keys": [self.record(key_id) for key_id in query["key_ids"].split(",")]}


@contextmanager
def feed_service() -> Iterator[tuple[FeedService, str]]:
    """Serve on a loopback port. Yields the service and its URL."""
    service = FeedService()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self._serve("GET")

        def do_POST(self) -> None:
            self._serve("POST")

        def _serve(self, method: str) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            url = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(url.query).items()}
            if url.path in service.cut:
                self.close_connection = True
                return
            status, answer = service.answer(method, url.path, query, json.loads(body or b"{}"))
            if url.path in service.lost:
                service.lost.remove(url.path)
                self.close_connection = True
                return
            text = json.dumps(answer).encode()
            with suppress(OSError):
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

        def date_time_string(self, timestamp: float | None = None) -> str:
            return super().date_time_string(service.now.timestamp() if timestamp is None else timestamp)

        def send_header(self, keyword: str, value: str) -> None:
            if keyword != "Date" or service.sends_date:
                super().send_header(keyword, value)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the name is the base class's
            return

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        # Connections that are kept alive would keep server_close waiting.
        block_on_close = False

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield service, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
