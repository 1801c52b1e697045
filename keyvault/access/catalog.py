"""The endpoint catalog: every endpoint of the integration plane once, and what it asks of a caller.

Doors look here and nowhere else for the credential, the Bearer and the context an endpoint needs (D9).
Upstream endpoints that operators add, limits and failure policies come on top of these built-in entries.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from keyvault.domain.keys import KeyKind


class Bearer(StrEnum):
    """Whether an endpoint takes a customer access token beside the key (D6, D7)."""

    NONE = "none"
    OPTIONAL = "optional"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One entry. In `path`, relative to the environment's base URL, `<name>` stands for one segment."""

    name: str
    method: str
    path: str
    credential: KeyKind
    bearer: Bearer = Bearer.NONE
    idempotent_by_key: bool = False
    summary: str = ""

    @property
    def segments(self) -> tuple[str, ...]:
        return tuple(self.path.strip("/").split("/"))

    def matches_path(self, segments: tuple[str, ...]) -> bool:
        return len(segments) == len(self.segments) and all(
            want == have or (want.startswith("<") and have != "")
            for want, have in zip(self.segments, segments, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Miss:
    """No such endpoint; `allowed` lists the methods of the path when only the method is wrong."""

    allowed: tuple[str, ...] = ()


ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        "orders.retrieve",
        "GET",
        "/merchants/orders/<order_token>",
        KeyKind.PRIVATE,
        Bearer.OPTIONAL,
        summary="One order of the key's merchant.",
    ),
    Endpoint(
        "orders.create",
        "POST",
        "/merchants/orders",
        KeyKind.PRIVATE,
        idempotent_by_key=True,
        summary="Creates an order.",
    ),
    Endpoint(
        "client.configuration",
        "GET",
        "/client/configuration",
        KeyKind.PUBLIC,
        summary="The account's client configuration.",
    ),
    Endpoint(
        "customer_tokens.create",
        "POST",
        "/customers/<customer_id>/access-tokens",
        KeyKind.PRIVATE,
        idempotent_by_key=True,
        summary="Issues a customer access token, shown once.",
    ),
    Endpoint(
        "customer_tokens.revoke",
        "DELETE",
        "/customers/access-tokens/<token_id>",
        KeyKind.PRIVATE,
        summary="Revokes a customer access token.",
    ),
    Endpoint(
        "customers.me",
        "GET",
        "/customers/me",
        KeyKind.PRIVATE,
        Bearer.REQUIRED,
        summary="The customer that the Bearer stands for.",
    ),
    Endpoint(
        "credentials.acknowledge",
        "POST",
        "/credentials/acknowledge",
        KeyKind.PRIVATE,
        summary="The merchant's half of the proof that a rotation's replacement arrived.",
    ),
    Endpoint(
        "credentials.revoke_self",
        "POST",
        "/credentials/revoke-self",
        KeyKind.PRIVATE,
        summary="Ends the presented key.",
    ),
)

_BY_NAME = {endpoint.name: endpoint for endpoint in ENDPOINTS}


def find_endpoint(name: str) -> Endpoint | Miss:
    return _BY_NAME.get(name, Miss())


def match_endpoint(method: str, path: str, base_path: str = "") -> Endpoint | Miss:
    """The endpoint of a request line. `base_path` (say `/sandbox`) may stand before the path or not.

    A path that could be read in two ways (escapes, dot or empty segments, parameters, other than visible
    ASCII) matches nothing: it is refused, never guessed.
    """
    route = path.partition("?")[0]
    if base_path and route.startswith(f"{base_path}/"):
        route = route.removeprefix(base_path)
    segments = tuple(route.split("/"))[1:]
    if not route.startswith("/") or not all(map(_is_plain, segments)):
        return Miss()
    allowed = tuple(endpoint for endpoint in ENDPOINTS if endpoint.matches_path(segments))
    for endpoint in allowed:
        if endpoint.method == method:
            return endpoint
    return Miss(tuple(endpoint.method for endpoint in allowed))


# What RFC 3986 (section 3.3) lets stand in a segment as it is, less `;`, which some servers cut at.
_PLAIN = re.compile(r"[A-Za-z0-9._~!$&'()*+,=:@-]+")


def _is_plain(segment: str) -> bool:
    return segment not in {".", ".."} and _PLAIN.fullmatch(segment) is not None
