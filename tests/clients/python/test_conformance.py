"""The Python client and `clients/conformance.json`, which all clients run, in its sync and its async mode."""

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from keyvault_client import (
    AsyncMerchantClient,
    AsyncVerifier,
    Identity,
    KeyvaultError,
    MerchantClient,
    MerchantOptions,
    RefusedError,
    SealedError,
    Verifier,
    WebhookSecretError,
    WebhookSignatureError,
    verify_webhook,
)
from keyvault_client.adapters import asgi, wsgi

from .scripted_server import ScriptedServer, scripted_server

CASES = json.loads((Path(__file__).resolve().parents[3] / "clients/conformance.json").read_bytes())
KEYS: Mapping[str, str] = CASES["keys"]
MODES = ("sync", "async")


def cases(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [pytest.param(case, id=case["name"]) for case in CASES[name]])


def require_no_key(text: str) -> None:
    """No key's secret part is in the text."""
    assert [name for name, key in KEYS.items() if key[27:] in text] == []


# --- verdicts ---------------------------------------------------------------------------------------------------


class MiddlewareAnswer:
    """What the middleware answered, and what the protected handler saw."""

    def __init__(self) -> None:
        self.identity: Identity | None = None
        self.status = 0
        self.headers: list[tuple[str, str]] = []
        self.body = b""


def send_wsgi(verifier: Any, incoming: Mapping[str, Any]) -> MiddlewareAnswer:
    """Send to the WSGI middleware what a server of PEP 3333 would."""
    answer = MiddlewareAnswer()

    def handler(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        answer.identity = wsgi.identity_of(environ)
        start_response("207 Handled", [])
        return [b""]

    def start_response(status: str, headers: list[tuple[str, str]], *_: Any) -> None:
        answer.status, answer.headers = int(status[:3]), headers

    path, _, query = incoming["path"].partition("?")
    environ = {"REQUEST_METHOD": incoming["method"], "PATH_INFO": path, "QUERY_STRING": query}
    environ |= {"REMOTE_ADDR": "127.0.0.1", "SCRIPT_NAME": ""}
    for header, value in incoming["headers"]:
        name = f"HTTP_{header.upper().replace('-', '_')}"
        environ[name] = f"{environ[name]},{value}" if name in environ else value
    answer.body = b"".join(wsgi.KeyvaultMiddleware(handler, verifier)(environ, start_response))
    return answer


async def send_asgi(verifier: Any, incoming: Mapping[str, Any]) -> MiddlewareAnswer:
    """Send to the ASGI middleware what a server of ASGI 3 would."""
    answer = MiddlewareAnswer()

    async def handler(scope: Any, receive: Any, send: Any) -> None:
        answer.identity = asgi.identity_of(scope)
        await send({"type": "http.response.start", "status": 207})
        await send({"type": "http.response.body"})

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = [(name.decode(), value.decode()) for name, value in message["headers"]]
        else:
            answer.body += message.get("body", b"")

    path, _, query = incoming["path"].partition("?")
    scope = {
        "type": "http",
        "method": incoming["method"],
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(name.lower().encode(), value.encode()) for name, value in incoming["headers"]],
        "client": ("127.0.0.1", 50000),
    }
    await asgi.KeyvaultMiddleware(handler, verifier)(scope, receive, send)
    return answer


async def ask_async(url: str, timeout: float, incoming: Mapping[str, Any]) -> MiddlewareAnswer:
    async with AsyncVerifier(url, "sandbox", KEYS["service_token"], timeout=timeout) as verifier:
        return await send_asgi(verifier, incoming)


@pytest.mark.parametrize("mode", MODES)
@cases("verdicts")
def test_conformance_verdicts(case: Mapping[str, Any], mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """Guarantee: only a complete, consistent authorization allows a request; clients get the service's answer."""
    caplog.set_level(logging.DEBUG)
    with scripted_server(host="localhost") as other, scripted_server(case["reply"], other=other.url) as server:
        if case["reply"].get("fault") == "refuse":
            server.refuse_connections()
        timeout = case.get("deadline_seconds", 10)
        if mode == "sync":
            with Verifier(server.url, "sandbox", KEYS["service_token"], timeout=timeout) as verifier:
                answer = send_wsgi(verifier, case["incoming"])
                require_no_key(f"{verifier!r} {vars(verifier)!r} {vars(verifier._logic._address)!r}")
        else:
            answer = anyio.run(ask_async, server.url, timeout, case["incoming"])
        require_asked(server, case)
        assert other.received == []
    require_answer(answer, case["expect"])
    require_no_key(caplog.text)
    assert ("no decision" in caplog.text) or "fault" not in case["reply"]


def require_asked(server: ScriptedServer, case: Mapping[str, Any]) -> None:
    if case["reply"].get("fault") == "refuse":
        return
    (question,) = server.received
    assert (question.method, question.path) == ("POST", "/v1/keys/verify")
    assert question.headers["authorization"] == f"Bearer {KEYS['service_token']}"
    assert json.loads(question.body) == case["asked"]


def require_answer(answer: MiddlewareAnswer, expect: Mapping[str, Any]) -> None:
    assert (answer.identity is not None, answer.status == 207) == (expect["allowed"], expect["allowed"])
    for name, value in expect.get("headers", {}).items():
        assert [own for header, own in answer.headers if header.lower() == name.lower()] == [value]
    for name in expect.get("absent_headers", ()):
        assert name.lower() not in {header.lower() for header, _ in answer.headers}
    if expect["allowed"]:
        assert answer.identity == Identity(**expect["identity"])
        return
    assert answer.status == expect["status"]
    problem = json.loads(answer.body)
    assert {name: problem.get(name) for name in expect["problem"]} == expect["problem"]


# --- requests ---------------------------------------------------------------------------------------------------


class CaseClient:
    """A client of a case, with its waits replaced."""

    def __init__(self, server: ScriptedServer, case: Mapping[str, Any], mode: str) -> None:
        options = case["client"]
        names = iter(options["keys"])
        last = options["keys"][-1]
        arguments: Any = (
            server.url + options["base_path"],
            options["environment"],
            lambda: KEYS[next(names, last)],
            MerchantOptions(
                deadline=options["deadline_seconds"],
                max_attempts=options["max_attempts"],
                retry_budget=options["retry_budget"],
                # A case counts the requests of its own calls.
                acknowledge=False,
            ),
        )
        self.mode = mode
        self.client: Any = (MerchantClient if mode == "sync" else AsyncMerchantClient)(*arguments)
        wait: Any = self._wait if mode == "sync" else self._wait_async
        self.client._runner.sleep = wait
        self.waits: list[float] = []

    async def request(self, call: Mapping[str, Any]) -> Any:
        start = partial(
            self.client.request,
            call["method"],
            call["path"],
            body=(call["body"] or "").encode(),
            idempotency_key=call.get("idempotency_key"),
            customer_token=KEYS.get(call.get("customer_token", "")),
        )
        try:
            return start() if self.mode == "sync" else await start()
        except KeyvaultError as error:
            return error

    async def close(self) -> None:
        if self.mode == "sync":
            self.client.close()
        else:
            await self.client.close()

    def _wait(self, seconds: float) -> None:
        self.waits.append(seconds)

    async def _wait_async(self, seconds: float) -> None:
        self.waits.append(seconds)


@pytest.mark.parametrize("mode", MODES)
@cases("requests")
def test_conformance_requests(case: Mapping[str, Any], mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """Guarantee: a call is repeated as documented, with the same bytes and Idempotency-Key, and never elsewhere."""
    caplog.set_level(logging.DEBUG)
    with scripted_server(host="localhost") as other, scripted_server(other=other.url) as server:
        anyio.run(run_calls, server, case, mode)
        assert other.received == []
    require_no_key(caplog.text)


async def run_calls(server: ScriptedServer, case: Mapping[str, Any], mode: str) -> None:
    merchant = CaseClient(server, case, mode)
    seen: set[str] = set()
    for call in case["calls"]:
        merchant.waits.clear()
        server.begin(*call["replies"])
        result = await merchant.request(call)
        require_result(result, call["expect"])
        require_no_key(f"{vars(merchant.client)!r} {vars(merchant.client._logic)!r} {result!r} {result}")
        require_attempts(server, case, call, seen)
        expected = call["expect"]["waits"]
        assert len(merchant.waits) == len(expected)
        for wait, limits in zip(merchant.waits, expected, strict=True):
            assert limits["at_least"] <= wait <= limits["at_most"]
    await merchant.close()


def require_result(result: Any, expect: Mapping[str, Any]) -> None:
    if "error" not in expect:
        assert not isinstance(result, KeyvaultError), result
        assert (result.status, result.json) == (expect["status"], expect.get("json"))
        return
    assert isinstance(result, KeyvaultError)
    assert str(result).isascii() and str(result).isprintable(), ascii(str(result))  # noqa: PT018  one property: printable ASCII
    for name, value in expect["error"].items():
        # The file writes 0 for the status of no answer.
        assert (getattr(result, name) or None) == (value or None), name


def require_attempts(server: ScriptedServer, case: Mapping[str, Any], call: Mapping[str, Any], seen: set[str]) -> None:
    attempts, client = server.received, case["client"]
    assert len(attempts) == call["expect"]["attempts"]
    own_keys = {attempt.headers.get("idempotency-key") for attempt in attempts}
    (own_key,) = own_keys
    assert (own_key is not None) == (call["method"] == "POST")
    assert call.get("idempotency_key") in {None, own_key}
    if own_key is not None:
        assert own_key not in seen
        seen.add(own_key)
    bearer = call["expect"].get("authorization", "").replace("{customer_token}", KEYS["customer_token"])
    for number, attempt in enumerate(attempts):
        assert (attempt.method, attempt.path) == (call["method"], client["base_path"] + call["path"])
        assert attempt.body == (call["body"] or "").encode()
        assert attempt.headers["x-api-key"] == KEYS[client["keys"][min(number, len(client["keys"]) - 1)]]
        assert attempt.headers.get("authorization", "") == bearer


# --- refusals, webhooks, sealed ---------------------------------------------------------------------------------


@cases("refusals")
def test_conformance_refusals(case: Mapping[str, Any]) -> None:
    """Guarantee: what would disclose a credential is refused before a connection is opened."""
    key = case.get("key_text") or KEYS[case["key"]]
    start = Verifier if case["client"] == "verifier" else partial(call_refused, case)
    with pytest.raises(RefusedError) as refused:
        start(case["base_url"], case["environment"], key)
    assert refused.value.refusal == case["refusal"]
    require_no_key(f"{refused.value!r}")


def call_refused(case: Mapping[str, Any], base_url: str, environment: str, key: str) -> None:
    client: Any = MerchantClient(base_url, environment, key)
    client._runner.send = None  # Nothing may be sent.
    client.request(
        case["method"],
        case["path"],
        body=b"{}",
        idempotency_key=case.get("idempotency_key"),
        customer_token=KEYS.get(case.get("customer_token", "")),
    )


@cases("webhooks")
def test_conformance_webhooks(case: Mapping[str, Any]) -> None:
    """Guarantee: only a message with a valid signature and a recent timestamp is verified."""
    now = datetime.fromtimestamp(case["now"], UTC)
    errors = {"signature": WebhookSignatureError, "secret": WebhookSecretError}
    if "error" in case["expect"]:
        with pytest.raises(errors[case["expect"]["error"]]):
            verify_webhook(case["headers"], case["body"].encode(), case["secrets"], now=now)
        return
    assert verify_webhook(case["headers"], case["body"].encode(), case["secrets"], now=now) == case["expect"]["id"]


@cases("sealed")
def test_conformance_sealed(case: Mapping[str, Any]) -> None:
    """Guarantee: a sealed key opens with the recipient's private key only, and unchanged."""
    sealed = pytest.importorskip("keyvault_client.sealed")
    if "error" in case["expect"]:
        with pytest.raises(SealedError):
            sealed.open_sealed(case["private_key"], case["sealed"])
        return
    assert sealed.open_sealed(case["private_key"], case["sealed"]).reveal() == case["expect"]["text"]
