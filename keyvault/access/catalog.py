"""The endpoint catalog: every endpoint once, with its authorization requirements.

It is the only source of an endpoint's accepted credentials, Bearer and context requirements, limit, and behavior when
the limiter is unavailable. The service itself serves the built-in entries. Operators add upstream entries, which have
the same fields and no view. One `Catalog` holds both.

An ambiguous path matches no endpoint: see `is_canonical_path`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from keyvault.access.limits import Limit
from keyvault.domain.keys import KeyKind


class Bearer(StrEnum):
    """Whether an endpoint accepts a customer access token in addition to the key."""

    NONE = "none"
    OPTIONAL = "optional"
    REQUIRED = "required"


class LimiterFailurePolicy(StrEnum):
    """Behavior when the shared limiter is unavailable: a local share of the limit, or refusal; never unlimited."""

    LOCAL_SHARE = "local_share"
    REFUSE = "refuse"


class ContextPlace(StrEnum):
    PATH = "path"
    HEADER = "header"


@dataclass(frozen=True, slots=True)
class ContextSource:
    """The source of an upstream endpoint's merchant or store context: a path variable or a header."""

    place: ContextPlace
    name: str

    def __str__(self) -> str:
        return f"{self.place}:{self.name}"

    def read(self, variables: Mapping[str, str], headers: Mapping[str, str]) -> str | None:
        """Return the context of a request, or None. A repeated or blank header counts as absent."""
        value = variables.get(self.name) if self.place is ContextPlace.PATH else headers.get(self.name)
        return value.strip() or None if value is not None and "," not in value else None


def parse_context(text: str) -> ContextSource | None:
    """Parse `path:<variable>` or `header:<name>`; None for an empty text. Raises ValueError on anything else."""
    if text == "":
        return None
    place, _, name = text.partition(":")
    if place not in set(ContextPlace) or name == "":
        raise ValueError("path:<variable> or header:<name>")
    return ContextSource(ContextPlace(place), name)


@dataclass(frozen=True)
class Endpoint:
    """One catalog entry. `path` is relative to the environment's base URL; `<name>` matches one segment.

    `spends` False: requests are exempt from all limits.
    """

    name: str
    method: str
    path: str
    credentials: frozenset[KeyKind]
    bearer: Bearer = Bearer.NONE
    idempotent_by_key: bool = False
    summary: str = ""
    merchant_from: ContextSource | None = None
    store_from: ContextSource | None = None
    limit: Limit | None = None
    on_limiter_loss: LimiterFailurePolicy = LimiterFailurePolicy.LOCAL_SHARE
    spends: bool = True
    is_built_in: bool = True

    @cached_property
    def segments(self) -> tuple[str, ...]:
        return tuple(self.path.strip("/").split("/"))

    def matches_path(self, segments: tuple[str, ...]) -> bool:
        return len(segments) == len(self.segments) and all(
            want == have or (is_variable(want) and have != "")
            for want, have in zip(self.segments, segments, strict=True)
        )

    def variables(self, path: str) -> dict[str, str]:
        """Return the path's variables by name. The path must match this endpoint."""
        segments = path.partition("?")[0].strip("/").split("/")[-len(self.segments) :]
        return {want[1:-1]: have for want, have in zip(self.segments, segments, strict=True) if is_variable(want)}

    def read_contexts(
        self, path: str | None, headers: Mapping[str, str], merchant: str | None = None, store: str | None = None
    ) -> tuple[str | None, str | None]:
        """Return the merchant and store context of a request: from this endpoint's sources, else from the arguments.

        Blank values count as None. `path` must match this endpoint; None when the caller named the endpoint.
        """
        variables = {} if path is None else self.variables(path)
        sources = ((self.merchant_from, merchant), (self.store_from, store))
        found = [named if source is None else source.read(variables, headers) or named for source, named in sources]
        merchant, store = (text if text and text.strip() else None for text in found)
        return merchant, store

    def overlaps(self, other: "Endpoint") -> bool:
        """Return whether some request line matches both endpoints."""
        return (
            self.method == other.method
            and len(self.segments) == len(other.segments)
            and all(
                is_variable(one) or is_variable(two) or one == two
                for one, two in zip(self.segments, other.segments, strict=True)
            )
        )

    @property
    def kinds(self) -> str:
        """The accepted kinds as text: `private`, or `public or private`."""
        return " or ".join(sorted(self.credentials, reverse=True))


def is_variable(segment: str) -> bool:
    return segment.startswith("<") and segment.endswith(">")


@dataclass(frozen=True, slots=True)
class NoMatchingEndpoint:
    """No endpoint matches. `allowed` lists the methods of the path when only the method is wrong."""

    allowed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Catalog:
    """An immutable set of endpoints, with look-up by name and by request line."""

    endpoints: tuple[Endpoint, ...]
    _by_name: dict[str, Endpoint] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {endpoint.name: endpoint for endpoint in self.endpoints})

    def with_added(self, added: Iterable[Endpoint]) -> "Catalog":
        return Catalog((*self.endpoints, *added))

    def find(self, name: str) -> Endpoint | NoMatchingEndpoint:
        return self._by_name.get(name, NoMatchingEndpoint())

    def match(self, method: str, path: str, base_path: str = "") -> Endpoint | NoMatchingEndpoint:
        """Return the endpoint of a request line. The path may start with `base_path` (such as `/sandbox`).

        An ambiguous path matches nothing.
        """
        route = path.partition("?")[0]
        if base_path and route.startswith(f"{base_path}/"):
            route = route.removeprefix(base_path)
        if not is_canonical_path(route):
            return NoMatchingEndpoint()
        segments = tuple(route.split("/"))[1:]
        matched = tuple(endpoint for endpoint in self.endpoints if endpoint.matches_path(segments))
        for endpoint in matched:
            if endpoint.method == method:
                return endpoint
        return NoMatchingEndpoint(tuple(dict.fromkeys(endpoint.method for endpoint in matched)))


# The unescaped segment characters of RFC 3986 (section 3.3), except `;`, at which some servers truncate.
_PLAIN = re.compile(r"[A-Za-z0-9._~!$&'()*+,=:@-]+")


def is_canonical_path(path: str) -> bool:
    """Return whether all servers parse the path alike: visible ASCII; no escapes, dot or empty segments, parameters."""
    return path.startswith("/") and all(map(is_plain_segment, path.split("/")[1:]))


def is_plain_segment(segment: str) -> bool:
    return segment not in {".", ".."} and _PLAIN.fullmatch(segment) is not None


_PRIVATE, _PUBLIC = frozenset({KeyKind.PRIVATE}), frozenset({KeyKind.PUBLIC})

ACKNOWLEDGEMENT = "credentials.acknowledge"
REPLACEMENT = "credentials.replacement"
RECIPIENT_KEY = "credentials.recipient_key"
WITHOUT_TRAFFIC = (ACKNOWLEDGEMENT, REPLACEMENT, RECIPIENT_KEY)
"""Endpoints whose calls count as use of a key, but not as traffic that proves a rotation."""

ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        "orders.retrieve",
        "GET",
        "/merchants/orders/<order_token>",
        _PRIVATE,
        Bearer.OPTIONAL,
        summary="Retrieves an order of the key's merchant.",
    ),
    Endpoint(
        "orders.create",
        "POST",
        "/merchants/orders",
        _PRIVATE,
        idempotent_by_key=True,
        summary="Creates an order.",
    ),
    Endpoint(
        "client.configuration",
        "GET",
        "/client/configuration",
        _PUBLIC,
        summary="Retrieves the account's client configuration.",
    ),
    Endpoint(
        "customer_tokens.create",
        "POST",
        "/customers/<customer_id>/access-tokens",
        _PRIVATE,
        idempotent_by_key=True,
        summary="Issues a customer access token, shown once.",
    ),
    Endpoint(
        "customer_tokens.revoke",
        "DELETE",
        "/customers/access-tokens/<token_id>",
        _PRIVATE,
        spends=False,  # An exhausted limit must not prevent the revocation of a stolen token.
        summary="Revokes a customer access token.",
    ),
    Endpoint(
        "customers.me",
        "GET",
        "/customers/me",
        _PRIVATE,
        Bearer.REQUIRED,
        summary="Retrieves the customer that the Bearer token identifies.",
    ),
    Endpoint(
        ACKNOWLEDGEMENT,
        "POST",
        "/credentials/acknowledge",
        _PRIVATE,
        summary="Acknowledges that the merchant has received a rotation's replacement key.",
    ),
    Endpoint(
        REPLACEMENT,
        "GET",
        "/credentials/replacement",
        _PRIVATE,
        summary="Retrieves the open rotation's replacement, sealed to the credential's recipient key.",
    ),
    Endpoint(
        RECIPIENT_KEY,
        "PUT",
        "/credentials/recipient-key",
        _PRIVATE,
        summary="Sets the X25519 key to which replacements are sealed.",
    ),
    Endpoint(
        "credentials.revoke_self",
        "POST",
        "/credentials/revoke-self",
        _PRIVATE,
        # An attacker with the leaked key could otherwise exhaust its limit to prevent the revocation.
        spends=False,
        summary="Revokes the presented key.",
    ),
)

BUILT_IN = Catalog(ENDPOINTS)
