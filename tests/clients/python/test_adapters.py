"""The adapters in their frameworks, as their documentation says to use them."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory
from fastapi import FastAPI, Request
from flask import Flask
from keyvault_client import AsyncVerifier, Decision, Identity, Question, Verifier
from keyvault_client.adapters import asgi, rest_framework
from keyvault_client.adapters.django import KeyvaultMiddleware
from keyvault_client.adapters.flask import current_identity, protect
from keyvault_client.adapters.incoming import AdapterOptions, Incoming, client_address
from rest_framework import views
from rest_framework.response import Response
from rest_framework.test import APIRequestFactory

from .feed_service import TOKEN, key_string
from .scripted_server import ScriptedServer, scripted_server
from .test_hostile_server import ALLOWED

KEY = key_string(1)
PROBLEM = {"status": 429, "code": "rate_limited", "detail": "Too many requests.", "request_id": "r1"}
LIMITED = {
    "status": 200,
    "body": {
        "allowed": False,
        "status": 429,
        "code": "rate_limited",
        "check": None,
        "headers": {"Retry-After": "3", "RateLimit": '"account";r=0;t=3'},
        "problem": PROBLEM,
        "request_id": "r1",
    },
}
REVOKED = {
    "status": 200,
    "body": {
        "allowed": False,
        "status": 401,
        "code": "key_revoked",
        "headers": {"WWW-Authenticate": 'ApiKey realm="keyvault"'},
        "problem": {"status": 401, "code": "key_revoked"},
        "request_id": "r1",
    },
}


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server(ALLOWED, LIMITED, REVOKED) as found:
        yield found


@pytest.fixture
def verifier(server: ScriptedServer) -> Iterator[Verifier]:
    with Verifier(server.url, "sandbox", TOKEN, timeout=30) as found:
        yield found


def require_refusals(limited: Any, revoked: Any) -> None:
    """The service's answers arrive unchanged. Each argument: status, headers in any case, and body."""
    status, headers, body = limited
    assert (status, headers["Retry-After"], headers["RateLimit"]) == (429, "3", '"account";r=0;t=3')
    assert headers["Content-Type"].split(";")[0] == "application/problem+json"
    assert json.loads(body) == PROBLEM
    status, headers, body = revoked
    assert (status, headers["WWW-Authenticate"]) == (401, 'ApiKey realm="keyvault"')
    assert json.loads(body)["code"] == "key_revoked"


def asked(server: ScriptedServer) -> list[dict[str, Any]]:
    return [json.loads(request.body) for request in server.received]


def test_flask_is_protected_with_one_line(server: ScriptedServer, verifier: Verifier) -> None:
    """Guarantee: no view of a protected Flask app runs for a refused request."""
    app = Flask("shop")
    protect(app, verifier)

    @app.get("/orders/<name>")
    def order(name: str) -> dict[str, str]:
        return {"merchant": current_identity().merchant_id}

    client = app.test_client()
    answers = [client.get("/orders/a?b=1", headers={"X-Api-Key": KEY}) for _ in range(3)]
    assert (answers[0].status_code, answers[0].json) == (200, {"merchant": "acme"})
    require_refusals(*[(answer.status_code, answer.headers, answer.data) for answer in answers[1:]])
    assert asked(server)[0]["key"] == KEY
    assert asked(server)[0]["path"] == "/orders/a?b=1"


@pytest.mark.anyio
async def test_fastapi_is_protected_with_one_line(server: ScriptedServer, anyio_backend: str) -> None:
    """Guarantee: no route of a protected FastAPI app runs for a refused request."""
    async with AsyncVerifier(server.url, "sandbox", TOKEN, timeout=30) as verifier:
        app = FastAPI()
        app.add_middleware(asgi.KeyvaultMiddleware, verifier=verifier)

        @app.get("/orders/{name}")
        async def order(name: str, request: Request) -> dict[str, str]:
            identity = asgi.identity_of(request.scope)
            return {"merchant": "" if identity is None else identity.merchant_id}

        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            answers = [await client.get("/orders/a?b=1", headers={"X-Api-Key": KEY}) for _ in range(3)]
    assert (answers[0].status_code, answers[0].json()) == (200, {"merchant": "acme"})
    require_refusals(*[(answer.status_code, answer.headers, answer.content) for answer in answers[1:]])
    assert asked(server)[0]["path"] == "/orders/a?b=1"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def test_django_middleware_calls_the_view_for_allowed_requests_only(
    server: ScriptedServer, verifier: Verifier, settings: Any
) -> None:
    """Guarantee: no view behind the middleware runs for a refused request."""
    settings.KEYVAULT_VERIFIER = verifier
    settings.KEYVAULT_OPTIONS = AdapterOptions(endpoint="orders.retrieve", trusted_proxies=1)
    seen: list[Identity] = []

    def view(request: HttpRequest) -> HttpResponse:
        seen.append(request.keyvault)  # type: ignore[attr-defined]  # the middleware adds it
        return HttpResponse("ok")

    middleware = KeyvaultMiddleware(view)
    headers = {"X-Api-Key": KEY, "X-Forwarded-For": "203.0.113.9, 192.0.2.7"}
    answers: list[Any] = [middleware(RequestFactory().get("/orders/a", headers=headers)) for _ in range(3)]
    assert answers[0].content == b"ok"
    assert [identity.merchant_id for identity in seen] == ["acme"]
    require_refusals(*[(answer.status_code, answer.headers, answer.content) for answer in answers[1:]])
    question = asked(server)[0]
    assert (question["endpoint"], question["client_ip"], "path" in question) == ("orders.retrieve", "192.0.2.7", False)


@pytest.mark.parametrize("has_handler", [True, False])
def test_rest_framework_authenticates_and_permits(
    server: ScriptedServer, verifier: Verifier, settings: Any, has_handler: bool
) -> None:
    """Guarantee: a view runs for verified requests only, and refusals arrive with status and headers."""
    settings.KEYVAULT_VERIFIER = verifier
    settings.KEYVAULT_OPTIONS = None

    class View(views.APIView):
        authentication_classes = [rest_framework.KeyvaultAuthentication]
        permission_classes = [rest_framework.IsVerified]
        keyvault_endpoint = "orders.create"

        def get_exception_handler(self) -> Any:
            return rest_framework.exception_handler if has_handler else views.exception_handler

        def post(self, request: Any) -> Response:
            return Response({"merchant": request.auth.merchant_id, "user": str(request.user)})

    view = View.as_view()
    answers: list[Any] = [view(APIRequestFactory().post("/o", headers={"X-Api-Key": KEY})) for _ in range(3)]
    assert answers[0].data == {"merchant": "acme", "user": KEY[11:27]}
    assert asked(server)[0]["endpoint"] == "orders.create"
    assert [answer.status_code for answer in answers] == [200, 429, 401]
    if has_handler:
        require_refusals(*[(answer.status_code, answer.headers, answer.content) for answer in answers[1:]])
    else:
        assert (answers[1]["Retry-After"], answers[1].data) == ("3", PROBLEM)
        assert answers[2]["WWW-Authenticate"] == 'ApiKey realm="keyvault"'


def test_rest_framework_refusal_has_what_support_asks_for() -> None:
    """Guarantee: a handler reads `request_id`, `code` and `check` of a refusal as of the client's exceptions."""
    decision = Decision(status=401, body=b"{}", code="key_revoked", check=4, request_id="r1")
    refused = rest_framework.RefusedRequest(decision)
    assert (refused.request_id, refused.code, refused.check) == ("r1", "key_revoked", 4)


@pytest.mark.anyio
async def test_websocket_of_a_refused_request_is_closed(anyio_backend: str) -> None:
    """Guarantee: a WebSocket is verified like a request."""
    sent: list[Any] = []

    class Refusing:
        async def verify(self, question: Question) -> Decision:
            return Decision()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("the application was called")

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope: Any = {"type": "websocket", "path": "/ws", "headers": [], "query_string": b"", "client": None}
    await asgi.KeyvaultMiddleware(app, Refusing())(scope, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


@pytest.mark.parametrize(
    ("peer", "forwarded", "proxies", "expected"),
    [
        ("192.0.2.1", None, 0, "192.0.2.1"),
        ("192.0.2.1", "198.51.100.1", 0, "192.0.2.1"),
        ("192.0.2.1", "203.0.113.5, 198.51.100.1", 1, "198.51.100.1"),
        ("192.0.2.1", "203.0.113.5, 198.51.100.1", 2, "203.0.113.5"),
        ("192.0.2.1", "203.0.113.5", 2, None),
        ("192.0.2.1", None, 1, None),
        ("192.0.2.1", "198.51.100.1:4711", 1, "198.51.100.1"),
        ("192.0.2.1", "[2001:db8::1]:4711", 1, "2001:db8::1"),
        ("::ffff:192.0.2.1", None, 0, "192.0.2.1"),
        ("fe80::1%eth0", None, 0, None),
        ("", None, 0, None),
        ("unix:", None, 0, None),
    ],
)
def test_client_address_is_that_of_the_last_untrusted_hop(
    peer: str, forwarded: str | None, proxies: int, expected: str | None
) -> None:
    """Guarantee: a client cannot choose its address with a header of its own."""
    headers = {} if forwarded is None else {"x-forwarded-for": forwarded}
    assert client_address(Incoming("GET", "/", headers, peer), proxies) == expected
