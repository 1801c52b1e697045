"""How an adapter describes an incoming request to the verifier, and where it keeps the identity."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from keyvault_client.decisions import MAX_USER_AGENT, Identity, Question, canonical_address

IDENTITY = "keyvault.identity"
"""Name of the identity in a WSGI environ and an ASGI scope."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """What adapters know about a request.

    Attributes:
        method, path: as received; the path with the query.
        headers: names in lower case; repeated headers are joined with a comma, which no credential may hold.
        peer: the address of the connection's other end.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    peer: str


Describe = Callable[[Any, Question], None]
"""Adds to a question what a request names, for example the merchant. The first argument is the environ or the scope."""


@dataclass(frozen=True, slots=True)
class AdapterOptions:
    """Options of all adapters.

    Attributes:
        endpoint: name of the endpoint in the catalog, instead of the request's method and path. The service then
            does not see the URL, and cannot refuse a key in it.
        trusted_proxies: number of your own proxies that append to X-Forwarded-For; 0 uses the peer's address.
        describe: may add to the question.
    """

    endpoint: str | None = None
    trusted_proxies: int = 0
    describe: Describe | None = None


def ask_about(incoming: Incoming, options: AdapterOptions, request: Any) -> Question:
    headers = incoming.headers
    question = Question(
        key=headers.get("x-api-key"),
        customer_token=_bearer(headers.get("authorization")),
        client_ip=client_address(incoming, options.trusted_proxies),
        origin=headers.get("origin"),
        user_agent=headers.get("user-agent", "")[:MAX_USER_AGENT] or None,
    )
    if options.endpoint is None:
        question.method, question.path = incoming.method, incoming.path
    else:
        question.endpoint = options.endpoint
    if options.describe is not None:
        options.describe(request, question)
    return question


def from_environ(environ: Mapping[str, Any]) -> Incoming:
    """Describe a request of WSGI (PEP 3333)."""
    headers = {
        name[5:].replace("_", "-").lower(): value
        for name, value in environ.items()
        if name.startswith("HTTP_") and isinstance(value, str)
    }
    raw = environ.get("RAW_URI") or environ.get("REQUEST_URI") or ""
    if not raw.startswith("/"):
        path = quote(f"{environ.get('SCRIPT_NAME', '')}{environ.get('PATH_INFO', '')}".encode("latin-1", "replace"))
        query = environ.get("QUERY_STRING", "")
        raw = f"{path}?{query}" if query else path
    return Incoming(environ.get("REQUEST_METHOD", ""), raw, headers, environ.get("REMOTE_ADDR") or "")


def from_scope(scope: Mapping[str, Any]) -> Incoming:
    """Describe a request of ASGI 3."""
    headers: dict[str, str] = {}
    for raw_name, raw_value in scope["headers"]:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]},{value}" if name in headers else value
    path = (scope.get("raw_path") or quote(scope["path"]).encode()).decode("latin-1")
    query = scope.get("query_string", b"").decode("latin-1")
    if query and "?" not in path:
        path = f"{path}?{query}"
    return Incoming(scope.get("method", "GET"), path, headers, (scope.get("client") or ("",))[0] or "")


def identity_of(request: Mapping[str, Any]) -> Identity | None:
    """Return the identity of an allowed request. `request`: its WSGI environ, or its ASGI scope."""
    found = request.get(IDENTITY)
    return found if isinstance(found, Identity) else None


def client_address(incoming: Incoming, trusted_proxies: int) -> str | None:
    """Return the peer's address, or behind n trusted proxies the n-th last entry of X-Forwarded-For.

    None if that is no address.
    """
    text = incoming.peer
    if trusted_proxies > 0:
        entries = incoming.headers.get("x-forwarded-for", "").split(",")
        if len(entries) < trusted_proxies:
            return None
        text = entries[-trusted_proxies].strip(" \t")
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    return canonical_address(text)


def _bearer(authorization: str | None) -> str | None:
    if authorization is None:
        return None
    scheme, _, token = authorization.partition(" ")
    # The service refuses an empty token, so no scheme but Bearer is accepted.
    return token.strip(" ") if scheme.lower() == "bearer" else ""
