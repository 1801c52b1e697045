"""Clients of the verifier's two frontends, with the interface of Django's test client.

WsgiClient     calls `mounted` with an environ
LoopClient     runs `AsyncioFrontend` in an event loop, and parses the bytes that its server writes
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from http.client import parse_headers
from io import BytesIO
from typing import Any, NoReturn
from urllib.parse import unquote_to_bytes
from weakref import finalize

from django.conf import settings

from keyvault.access.policy_snapshot import PolicySnapshot
from keyvault.hotpath.adapters.assembly import make_engine
from keyvault.hotpath.adapters.stores import DatabaseStore
from keyvault.hotpath.engine.engine import Engine
from keyvault.hotpath.engine.freshness import Freshness
from keyvault.hotpath.frontends.asyncio_frontend import AsyncioFrontend, AsyncStore
from keyvault.hotpath.frontends.threaded_frontend import ThreadedFrontend
from keyvault.hotpath.frontends.wsgi import RAW_PATH, mounted
from keyvault.hotpath.messages.pending_requests import Found
from keyvault.hotpath.messages.responses import HttpResponse
from keyvault.project.engine_view import serves_host
from keyvault.services.limits.budgets import LocalBudgets
from keyvault.services.limits.limiter import Limiter, failed_proofs
from keyvault.services.limits.stores import LocalStore
from keyvault.services.peppers.ring import load_peppers
from tests.hotpath.priming import outside_the_loop

HOST = "127.0.0.1:8000"


@dataclass(frozen=True)
class Response:
    """The part of Django's response that the tests read. Header names are lower case."""

    status_code: int
    headers: Mapping[str, str]
    content: bytes

    def __getitem__(self, name: str) -> str:
        return self.headers[name.lower()]

    def __contains__(self, name: str) -> bool:
        return name.lower() in self.headers

    def json(self) -> Any:
        return json.loads(self.content)


class EngineClient:
    """A client of its own engine, whose limits give nothing back.

    With `may_remember`, the engine's feed is confirmed before each request, so that it may answer from its cache.
    """

    def __init__(self, *, may_remember: bool) -> None:
        store = LocalStore(lambda: 0)
        limiter = Limiter(store, None, 100)
        self.budgets = LocalBudgets(limiter, store)
        ports = replace(make_engine(failed_proofs().note, load_peppers).ports, budgets=self.budgets)
        self.engine = Engine(ports, Freshness(settings.MAX_STALENESS_SECONDS), settings.VERIFIER_KEYS)
        self._may_remember = may_remember

    def get(self, path: str, headers: Mapping[str, str]) -> Response:
        return self.generic("GET", path, headers=headers)

    def post(self, path: str, data: str, content_type: str, headers: Mapping[str, str]) -> Response:
        return self.generic("POST", path, data.encode(), content_type, headers=headers)

    def generic(
        self, method: str, path: str, data: bytes = b"", content_type: str = "", *, headers: Mapping[str, str]
    ) -> Response:
        if self._may_remember:
            self.engine.freshness.confirm(time.monotonic(), time.time())
        named = {"Host": HOST, **headers, **({"Content-Type": content_type} if content_type else {})}
        return self.send(method, path, named, data)

    def send(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Response:
        raise NotImplementedError


class WsgiClient(EngineClient):
    def __init__(self, *, may_remember: bool) -> None:
        super().__init__(may_remember=may_remember)
        frontend = ThreadedFrontend(self.engine, DatabaseStore(), self.budgets)
        self._mounted = mounted(_reject_request, frontend, serves_host)

    def send(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Response:
        path, _, query = target.partition("?")
        environ: dict[str, Any] = {
            "REQUEST_METHOD": method,
            "SCRIPT_NAME": "",
            "PATH_INFO": unquote_to_bytes(path).decode("latin-1"),
            "QUERY_STRING": query,
            RAW_PATH: path,
            "CONTENT_LENGTH": str(len(body)),
            "wsgi.input": BytesIO(body),
            "wsgi.input_terminated": True,
        }
        for name, value in headers.items():
            key = name.upper().replace("-", "_")
            environ[key if key == "CONTENT_TYPE" else f"HTTP_{key}"] = value
        started: list[tuple[str, list[tuple[str, str]]]] = []

        def start_response(status: str, sent: list[tuple[str, str]], exc_info: object = None) -> Callable[[bytes], Any]:
            started.append((status, sent))
            return lambda _: None

        content = b"".join(self._mounted(environ, start_response))
        ((status, sent),) = started
        assert len({name.lower() for name, _ in sent}) == len(sent)
        return Response(int(status[:3]), {name.lower(): value for name, value in sent}, content)


def _reject_request(environ: object, start_response: object) -> NoReturn:
    raise AssertionError("a request for the engine reached the application behind it")


class LoopStore(AsyncStore):
    """A store that reads through the connection and the transaction of the test."""

    def __init__(self) -> None:
        self._store = DatabaseStore()

    async def find(self, kind: str, ids: frozenset[str]) -> Mapping[str, Found]:
        return outside_the_loop(lambda: self._store.find(kind, ids, None))

    async def read_rules(self, known: PolicySnapshot | None) -> PolicySnapshot:
        return outside_the_loop(lambda: self._store.read_rules(known))


class LoopClient(EngineClient):
    def __init__(self, *, may_remember: bool) -> None:
        super().__init__(may_remember=may_remember)
        self._frontend = AsyncioFrontend(self.engine, LoopStore(), self.budgets, failed_proofs().is_over)
        self._loop = asyncio.new_event_loop()
        finalize(self, self._loop.close)

    def send(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Response:
        sent = [(name.encode(), value.encode()) for name, value in headers.items()]
        return _parsed(self._loop.run_until_complete(self._ask(method.encode(), target.encode(), sent, body)))

    async def _ask(self, method: bytes, target: bytes, headers: list[tuple[bytes, bytes]], body: bytes) -> bytes:
        found = self._frontend.answer(method, target, headers, body)
        answer = found if isinstance(found, HttpResponse) else await found
        return answer.on_the_wire()


def _parsed(raw: bytes) -> Response:
    head, _, content = raw.partition(b"\r\n\r\n")
    line, _, lines = head.partition(b"\r\n")
    headers = parse_headers(BytesIO(lines + b"\r\n\r\n"))
    assert len(headers.keys()) == len(set(headers.keys()))
    return Response(int(line.split()[1]), dict(headers.items()), content)


CLIENTS: Sequence[type[EngineClient]] = (WsgiClient, LoopClient)
