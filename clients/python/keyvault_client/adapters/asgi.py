"""ASGI middleware, for Starlette, FastAPI and others.

app.add_middleware(KeyvaultMiddleware, verifier=AsyncVerifier("https://keyvault.internal", "sandbox", token))
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

from keyvault_client.adapters.incoming import IDENTITY, AdapterOptions, ask_about, from_scope, identity_of
from keyvault_client.adapters.wsgi import missing_headers
from keyvault_client.decisions import Decision, Question

__all__ = ["KeyvaultMiddleware", "identity_of"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class AwaitableVerifier(Protocol):
    """What the middleware needs: an AsyncVerifier or an AsyncLocalVerifier."""

    async def verify(self, question: Question) -> Decision: ...


class KeyvaultMiddleware:
    """Calls the application only for allowed requests and WebSocket handshakes. Wrap the whole application with it."""

    def __init__(self, app: Application, verifier: AwaitableVerifier, options: AdapterOptions | None = None) -> None:
        self._app = app
        self._verifier = verifier
        self._options = options or AdapterOptions()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] not in {"http", "websocket"}:
            raise ValueError(f"unknown ASGI scope {scope['type']!a}")
        scope.pop(IDENTITY, None)
        decision = await self._verifier.verify(ask_about(from_scope(scope), self._options, scope))
        if decision.identity is None:
            await _refuse(scope["type"], decision, send)
            return
        scope[IDENTITY] = decision.identity

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                own = missing_headers(decision, (name.decode("latin-1") for name, _ in headers))
                message["headers"] = [*_encode(own), *headers]
            await send(message)

        await self._app(scope, receive, send_with_headers)


async def _refuse(kind: str, decision: Decision, send: Send) -> None:
    if kind == "websocket":
        # The server answers the handshake with 403.
        await send({"type": "websocket.close", "code": 1008})
        return
    headers = _encode([*decision.headers, ("Content-Length", str(len(decision.body)))])
    await send({"type": "http.response.start", "status": decision.status, "headers": headers})
    await send({"type": "http.response.body", "body": decision.body})


def _encode(headers: list[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
