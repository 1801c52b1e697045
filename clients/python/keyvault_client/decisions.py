"""The question that a backend service asks about a request, and the decision about it."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, Protocol

from keyvault.domain.plaintext import Plaintext
from keyvault_client.keystrings import as_plaintext

PROBLEM_TYPE = "application/problem+json"
MAX_USER_AGENT = 8192
"""Longest user agent that the service accepts, in characters."""

_MAX_PATH = 8192
_MAX_ORIGIN = 500
_MAX_MERCHANT = 64
_MAX_STORE = 128
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(slots=True)
class Question:
    """A request for an endpoint. Attributes that are None are omitted, except `key`, which is sent as null.

    Attributes:
        key: value of the header X-Api-Key.
        endpoint: name of the endpoint in the catalog. Give it, or `method` and `path`.
        path: the path with the query, as received.
        merchant, store: the contexts that some endpoints require.
        customer_token: the customer access token of the header Authorization.
        cost: tokens to spend of the limit; None means 1.
    """

    key: Plaintext | str | None = None
    endpoint: str | None = None
    method: str | None = None
    path: str | None = field(default=None, repr=False)
    merchant: str | None = None
    store: str | None = None
    customer_token: Plaintext | str | None = None
    client_ip: str | None = None
    origin: str | None = None
    user_agent: str | None = None
    cost: int | None = None

    def __post_init__(self) -> None:
        self.key = None if self.key is None else as_plaintext(self.key)
        self.customer_token = None if self.customer_token is None else as_plaintext(self.customer_token)

    def encode(self, environment: str) -> bytes:
        members: dict[str, Any] = {"environment": environment}
        for name in ("endpoint", "method", "path", "merchant", "store", "client_ip", "origin", "user_agent", "cost"):
            value = getattr(self, name)
            if value is not None:
                members[name] = value
        token = self.customer_token
        return json.dumps(
            members
            | {"key": None if self.key is None else as_plaintext(self.key).reveal()}
            | ({} if token is None else {"customer_token": as_plaintext(token).reveal()})
        ).encode()


def canonical_address(text: str) -> str | None:
    """Return IPv4 or IPv6 in canonical form, an IPv4-mapped address as IPv4.

    None for anything else, and for a zone index, which is valid on one machine only.
    """
    try:
        address = ip_address(text)
    except ValueError:
        return None
    if getattr(address, "scope_id", None) is not None:
        return None
    return str(getattr(address, "ipv4_mapped", None) or address)


def are_headers_acceptable(user_agent: str, origin: str) -> bool:
    """Whether the service accepts the values of these headers."""
    both = user_agent + origin
    if len(both) <= _MAX_ORIGIN and both.isascii() and "\0" not in both:
        return True  # The fast path of almost every request.
    return len(user_agent) <= MAX_USER_AGENT and len(origin) <= _MAX_ORIGIN and _is_text(both)


def is_path_acceptable(path: str) -> bool:
    """Whether the service accepts the path."""
    return len(path) <= _MAX_PATH and _is_text(path)


def are_contexts_acceptable(merchant: str | None, store: str | None) -> bool:
    """Whether the service accepts the merchant and the store that the caller names."""
    return (merchant is None or (0 < len(merchant) <= _MAX_MERCHANT and _is_text(merchant))) and (
        store is None or (0 < len(store) <= _MAX_STORE and _is_text(store))
    )


def _is_text(text: str) -> bool:
    return "\0" not in text and (text.isascii() or _SURROGATE.search(text) is None)


@dataclass(frozen=True, slots=True)
class Identity:
    """The verified caller of an allowed request. `customer_id`: None without a customer access token."""

    key_id: str
    credential_id: str
    kind: str
    merchant_id: str
    environment: str
    customer_id: str | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about a request. `Decision()` is a refusal.

    Attributes:
        identity: of an allowed request; None: the request is refused.
        status, headers, body: the response to a refused request. `headers` also belong to an allowed one.
        code, check, request_id: of a refusal.
        cause: why the service made no decision; None if it made one.
    """

    identity: Identity | None = None
    status: int = 503
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    code: str | None = None
    check: int | None = None
    request_id: str | None = None
    cause: str | None = None

    @property
    def allowed(self) -> bool:
        return self.identity is not None

    def header(self, name: str) -> str | None:
        return next((value for own, value in self.headers if own.lower() == name.lower()), None)


class SyncVerifier(Protocol):
    """What an adapter needs: a Verifier or a LocalVerifier."""

    def verify(self, question: Question) -> Decision: ...


def _refuse(
    status: int,
    code: str,
    title: str,
    detail: str,
    *,
    headers: Mapping[str, str] | None = None,
    cause: str | None = None,
) -> Decision:
    """Return a refusal that the client made without the service."""
    problem = {
        "type": f"urn:keyvault:problem:{code}",
        "title": title,
        "status": status,
        "code": code,
        "detail": detail,
    }
    own = {"Content-Type": PROBLEM_TYPE, "Cache-Control": "no-store"} | dict(headers or {})
    return Decision(None, status, tuple(own.items()), json.dumps(problem).encode(), code, cause=cause)


def refuse_unavailable(cause: str, retry_after: str = "1") -> Decision:
    """Fail closed. The client learns neither the cause nor anything about the service token."""
    return _refuse(
        503,
        "dependency_unavailable",
        "Dependency unavailable",
        "The request cannot be verified now. Try again.",
        headers={"Retry-After": retry_after},
        cause=cause,
    )


def refuse_unreadable(cause: str) -> Decision:
    """Refuse a request that the service cannot judge."""
    return _refuse(
        400,
        "request_invalid",
        "Request invalid",
        "The method, the path or a header is invalid or too long.",
        cause=cause,
    )
