"""Hostile servers cause no hang beyond the deadline, no second payment, and no key elsewhere."""

import json
import logging
import socket
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import anyio
import pytest
from keyvault_client import (
    AsyncMerchantClient,
    AsyncVerifier,
    Decision,
    KeyvaultError,
    MerchantClient,
    MerchantOptions,
    Question,
    Verifier,
)

from .feed_service import TOKEN, key_string
from .scripted_server import Handler, ReceivedRequest, ScriptedServer, render, scripted_server

KEY = key_string(1)
ORDER = {"amount_minor": 1250, "currency": "EUR"}
CREATED: Mapping[str, Any] = {"status": 201, "body": {"order_token": "ord_1"}, "headers": {"X-Request-Id": "r1"}}
ALLOWED: Mapping[str, Any] = {
    "status": 200,
    "body": {
        "allowed": True,
        "status": 200,
        "headers": {},
        "key_id": KEY[11:27],
        "credential_id": "crd_1",
        "kind": "private",
        "merchant_id": "acme",
        "environment": "sandbox",
    },
}
MODES = pytest.mark.parametrize("mode", ["sync", "async"])
SHORT = 0.5
"""A deadline that passes, in seconds."""

HANGS_AFTER = 30.0
"""Far more than SHORT: a call that takes as long has no deadline."""


class AllRecords(logging.Handler):
    """Keeps the text of every log record, with its traceback."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


@contextmanager
def no_key_leaks() -> Iterator[list[str]]:
    """Assert that no log record of the block, at any level, and no text that it adds contains a key or the token."""
    root, records = logging.getLogger(), AllRecords()
    level = root.level
    root.addHandler(records)
    root.setLevel(logging.DEBUG)
    try:
        yield records.texts
    finally:
        root.removeHandler(records)
        root.setLevel(level)
    assert [text for text in records.texts if KEY[27:] in text or TOKEN[27:] in text] == []


def whole(reply: Mapping[str, Any]) -> bytes:
    return b"".join(render(reply, {}))


def create_order(url: str, mode: str, **options: Any) -> Any:
    """Create an order without waits between attempts. Returns the response or the error; no text of it has a key."""
    settings = MerchantOptions(**({"deadline": 60.0} | options))

    async def run() -> Any:
        async with AsyncMerchantClient(f"{url}/sandbox", "sandbox", KEY, settings) as client:
            client._runner.sleep = no_wait
            return await client.request("POST", "/merchants/orders", json=ORDER)

    with no_key_leaks() as texts:
        try:
            if mode == "async":
                return anyio.run(run)
            with MerchantClient(f"{url}/sandbox", "sandbox", KEY, settings) as client:
                client._runner.sleep = lambda seconds: None
                return client.request("POST", "/merchants/orders", json=ORDER)
        except KeyvaultError as error:
            texts += [repr(error), *traceback.format_exception(error)]
            return error


async def no_wait(seconds: float) -> None:
    return None


def verify(url: str, mode: str, timeout: float) -> Decision:
    question = Question(key=KEY, endpoint="orders.create")

    async def run() -> Decision:
        async with AsyncVerifier(url, "sandbox", TOKEN, timeout=timeout) as verifier:
            return await verifier.verify(question)

    with no_key_leaks() as texts:
        if mode == "async":
            decision = anyio.run(run)
        else:
            with Verifier(url, "sandbox", TOKEN, timeout=timeout) as verifier:
                decision = verifier.verify(question)
        texts.append(repr(decision))
    return decision


def send_and_cut(text: bytes) -> Handler:
    def answer(connection: socket.socket, request: ReceivedRequest) -> None:
        connection.sendall(text)

    return answer


class Payments:
    """Creates an order once for an Idempotency-Key, as the service does, and cuts the connection in its answer."""

    def __init__(self) -> None:
        self.created: dict[str, bytes] = {}

    def answer(self, cut_at: int | None, connection: socket.socket, request: ReceivedRequest) -> None:
        known = self.created.setdefault(request.headers["idempotency-key"], request.body)
        assert known == request.body
        connection.sendall(whole(CREATED)[:cut_at])


@MODES
def test_hostile_connection_cut_at_every_byte_makes_no_second_payment(mode: str) -> None:
    """Guarantee: wherever the answer ends, the call is repeated under its Idempotency-Key, and there is one order."""
    size = len(whole(CREATED))
    with scripted_server() as server:
        for cut_at in range(size):
            payments = Payments()
            server.begin(partial(payments.answer, cut_at), partial(payments.answer, None))
            response = create_order(server.url, mode)
            assert response.json == {"order_token": "ord_1"}, cut_at
            assert len(payments.created) == 1
            assert len({request.body for request in server.received}) == 1


@MODES
def test_hostile_decision_cut_at_every_byte_is_a_refusal(mode: str) -> None:
    """Guarantee: a part of an authorization authorizes nothing."""
    text = whole(ALLOWED)
    with scripted_server() as server:
        for cut_at in range(len(text)):
            server.begin(send_and_cut(text[:cut_at]))
            decision = verify(server.url, mode, 30)
            assert (decision.allowed, decision.status) == (False, 503), cut_at
        server.begin(send_and_cut(text))
        assert verify(server.url, mode, 30).allowed


def drip(server: ScriptedServer, text: bytes) -> Handler:
    """Send a byte from time to time, without end."""

    def answer(connection: socket.socket, request: ReceivedRequest) -> None:
        while not server.stopped.wait(0.02):
            connection.sendall(text)

    return answer


DRIPS: dict[str, bytes] = {
    "headers": b"X-Drip: 1\r\n",
    "interim": b"HTTP/1.1 103 Early Hints\r\n\r\n",
    "nothing": b"",
    "status": b"H",
}


@MODES
@pytest.mark.parametrize("name", [*DRIPS, "body", "chunks"])
def test_hostile_slow_answer_ends_at_the_deadline(mode: str, name: str) -> None:
    """Guarantee: the client stops reading an endless answer at the deadline, and it authorizes nothing."""
    starts = {
        "headers": b"HTTP/1.1 200 OK\r\n",
        "body": b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n",
        "chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
    }
    piece = {"body": b" ", "chunks": b"1\r\n \r\n"}.get(name, DRIPS.get(name, b""))
    with scripted_server() as server:

        def answer(connection: socket.socket, request: ReceivedRequest) -> None:
            connection.sendall(starts.get(name, b""))
            drip(server, piece)(connection, request)

        server.begin(answer)
        began = time.monotonic()
        assert not verify(server.url, mode, SHORT).allowed
        assert time.monotonic() - began < HANGS_AFTER
        server.begin(answer)
        result = create_order(server.url, mode, deadline=SHORT, max_attempts=1)
        assert isinstance(result, KeyvaultError)
        assert time.monotonic() - began < HANGS_AFTER


@MODES
def test_hostile_server_that_does_not_accept_ends_at_the_deadline(mode: str) -> None:
    """Guarantee: a connection that is never served ends at the deadline."""
    with socket.create_server(("127.0.0.1", 0), backlog=1) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert not verify(url, mode, SHORT).allowed


@MODES
def test_hostile_storm_of_429_ends_with_the_budget(mode: str) -> None:
    """Guarantee: many calls that are refused make no more retries than the budget allows."""
    refused = {"status": 429, "body": {"code": "rate_limited"}, "headers": {"Retry-After": "0"}}
    calls, budget = 20, 5

    async def run(url: str) -> None:
        options = MerchantOptions(retry_budget=budget)
        async with AsyncMerchantClient(f"{url}/sandbox", "sandbox", KEY, options) as client:
            client._runner.sleep = no_wait
            for _ in range(calls):
                with pytest.raises(KeyvaultError):
                    await client.create_order(1, "EUR")

    with no_key_leaks(), scripted_server(*[refused] * 200) as server:
        if mode == "async":
            anyio.run(run, server.url)
        else:
            with MerchantClient(
                f"{server.url}/sandbox", "sandbox", KEY, MerchantOptions(retry_budget=budget)
            ) as client:
                client._runner.sleep = lambda seconds: None
                for _ in range(calls):
                    with pytest.raises(KeyvaultError):
                        client.create_order(1, "EUR")
        assert len(server.received) == calls + budget


@MODES
def test_call_with_the_defaults_outlives_a_restart_of_the_service(mode: str) -> None:
    """Guarantee: a call is given up at its deadline, not after a few attempts, and pays once."""
    away: list[Any] = [{"fault": "cut"}] * 5 + [{"status": 502, "text": ""}] * 5 + [{"status": 503, "text": ""}] * 5
    with scripted_server(*away, {"status": 201, "body": {"order_token": "ord_1"}}) as server:
        assert create_order(server.url, mode).status == 201
        assert len({request.headers["idempotency-key"] for request in server.received}) == 1


@MODES
def test_silent_address_leaves_time_for_the_next_one(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Guarantee: of a host with several addresses, one that drops every packet does not use up the deadline."""
    resolve = socket.getaddrinfo

    def resolve_both(host: Any, *arguments: Any, **named: Any) -> Any:
        names = ("127.0.0.2", "127.0.0.1") if host == "localhost" else (host,)
        return [found for name in names for found in resolve(name, *arguments, **named)]

    with scripted_server(ALLOWED, host="localhost") as server, ExitStack() as stack:
        silent = ("127.0.0.2", int(server.url.rpartition(":")[2]))
        listener = stack.enter_context(socket.socket())
        listener.bind(silent)
        listener.listen(0)
        # A full backlog drops what follows.
        stack.enter_context(socket.create_connection(silent))
        monkeypatch.setattr(socket, "getaddrinfo", resolve_both)
        assert verify(server.url, mode, 10).allowed


ODD: dict[str, bytes] = {
    "huge header": b"HTTP/1.1 200 OK\r\nX-Huge: " + b"x" * 2_000_000 + b"\r\n\r\n",
    "many headers": b"HTTP/1.1 200 OK\r\n" + b"X-Many: 1\r\n" * 100_000 + b"\r\n",
    "huge body": b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n" + b" " * 6_000_000,
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "not HTTP": b"SSH-2.0-OpenSSH_9.6\r\n",
    "deep JSON": b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n" + b"[" * 200_000,
    "compressed": b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\n\r\n{}",
    "null": b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\nnull",
    "old date": b"HTTP/1.1 503 No\r\nDate: Thu, 01 Jan 1970 00:00:00 GMT\r\n"
    b"Retry-After: Fri, 31 Dec 9999 23:59:59 GMT\r\n\r\n",
    "bad retry": b"HTTP/1.1 429 No\r\nRetry-After: -1e999\r\n\r\n",
    "late date": b"HTTP/1.1 503 No\r\nRetry-After: Fri, 31 Dec 99999 23:59:59 GMT\r\n\r\n",
}
PROBLEMS: tuple[Any, ...] = (
    None,
    [],
    "text",
    {},
    {"code": 7, "request_id": [], "check": "x"},
    {"code": "x" * 100_000, "request_id": "\r\nX-Injected: 1", "check": True},
    {"code": None, "check": 10**400},
    {"code": "\ud800", "errors": {"a": 1}},
    {"code": KEY, "request_id": KEY, "detail": KEY},
)


@MODES
@pytest.mark.parametrize("name", ODD)
def test_hostile_answer_is_an_error_of_the_package(mode: str, name: str) -> None:
    """Guarantee: an invalid answer causes a refusal, or an exception of the package."""
    with scripted_server(send_and_cut(ODD[name]), send_and_cut(ODD[name])) as server:
        decision = verify(server.url, mode, 30)
        assert (decision.allowed, decision.status) == (False, 503)
        assert isinstance(create_order(server.url, mode, max_attempts=1), KeyvaultError) or name == "null"


@MODES
@pytest.mark.parametrize("problem", PROBLEMS)
def test_hostile_problem_document_is_an_error_of_the_package(mode: str, problem: Any) -> None:
    """Guarantee: of an invalid problem document, only what is valid is read, and no text of it breaks a log line."""
    text = json.dumps(problem)
    reply = {"status": 422, "text": text, "headers": {"Content-Type": "application/problem+json"}}
    with scripted_server(reply, reply) as server:
        result = create_order(server.url, mode)
        assert isinstance(result, KeyvaultError)
        assert (result.status, result.check) == (422, None)
        assert "\n" not in str(result)
        assert len(str(result)) < 300
        assert not verify(server.url, mode, 30).allowed


@MODES
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_hostile_redirect_takes_no_credential_elsewhere(mode: str, status: int) -> None:
    """Guarantee: no redirect is followed, so no credential and no payment goes to another host."""
    with scripted_server(host="localhost") as other:
        redirect = {"status": status, "headers": {"Location": f"{other.url}/v1/keys/verify"}}
        with scripted_server(redirect, redirect) as server:
            assert not verify(server.url, mode, 30).allowed
            assert isinstance(create_order(server.url, mode), KeyvaultError)
            assert len(server.received) == 2
        assert other.connections == 0


def test_hostile_environment_gives_neither_proxy_nor_password(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Guarantee: neither proxy variables nor a .netrc change where credentials go, and which."""
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login a password b\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    with scripted_server() as proxy, scripted_server(CREATED) as server:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        assert create_order(server.url, "sync").status == 201
        assert "authorization" not in server.received[0].headers
        assert proxy.connections == 0


def test_hostile_unix_socket_is_asked_without_tcp(tmp_path: Any) -> None:
    """Guarantee: with a Unix socket the question goes there, with the token."""
    path = tmp_path / "verifier.sock"
    seen: list[bytes] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    seen.append(connection.recv(65536))
                    connection.sendall(whole(ALLOWED))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        assert verify(f"unix://{path}", "sync", 30).allowed
        assert verify(f"unix://{path}", "async", 30).allowed
        thread.join()
    assert all(TOKEN.encode() in text for text in seen)
