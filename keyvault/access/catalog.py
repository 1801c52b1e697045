"""The endpoint catalog: every endpoint once, and what it asks of a caller (D9).

Doors look here and nowhere else for the credential, the Bearer and the context that an endpoint needs, for its
limit, and for what happens when the limiter is lost. The built-in entries are ours to serve; an operator adds
upstream ones, which have the same fields and no view. Both make one `Catalog`.

A path is read in one way or not at all: see `is_canonical_path`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from keyvault.access.limits import Limit
from keyvault.domain.keys import KeyKind


class Bearer(StrEnum):
    """Whether an endpoint takes a customer access token beside the key (D6, D7)."""

    NONE = "none"
    OPTIONAL = "optional"
    REQUIRED = "required"


class LimiterFailurePolicy(StrEnum):
    """What becomes of a request when the shared limiter is lost: never unlimited."""

    LOCAL_SHARE = "local_share"
    REFUSE = "refuse"


class ContextPlace(StrEnum):
    PATH = "path"
    HEADER = "header"


@dataclass(frozen=True, slots=True)
class ContextSource:
    """Where an upstream endpoint's merchant or store context stands: a path variable or a header."""

    place: ContextPlace
    name: str

    def __str__(self) -> str:
        return f"{self.place}:{self.name}"

    def read(self, variables: Mapping[str, str], headers: Mapping[str, str]) -> str | None:
        """The context of a request, or None. A header that came twice, or is blank, gives none."""
        value = variables.get(self.name) if self.place is ContextPlace.PATH else headers.get(self.name)
        return value.strip() or None if value is not None and "," not in value else None


def parse_context(text: str) -> ContextSource | None:
    """`path:<variable>` or `header:<name>` as a source; None for no text. Raises ValueError on anything else."""
    if text == "":
        return None
    place, _, name = text.partition(":")
    if place not in set(ContextPlace) or name == "":
        raise ValueError("path:<variable> or header:<name>")
    return ContextSource(ContextPlace(place), name)


@dataclass(frozen=True)
class Endpoint:
    """One entry. In `path`, relative to the environment's base URL, `<name>` stands for one segment.

    `spends` False: no limit holds back a request for it.
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
        """The path's variables by name; the path is one that this endpoint matched."""
        segments = path.partition("?")[0].strip("/").split("/")[-len(self.segments) :]
        return {want[1:-1]: have for want, have in zip(self.segments, segments, strict=True) if is_variable(want)}

    def read_contexts(
        self, path: str | None, headers: Mapping[str, str], merchant: str | None = None, store: str | None = None
    ) -> tuple[str | None, str | None]:
        """The merchant and the store that a request carries where this endpoint reads them, else whom the caller named;
        blanks name nobody.

        `path` is one that this endpoint matched, or None when it was asked for by name.
        """
        variables = {} if path is None else self.variables(path)
        sources = ((self.merchant_from, merchant), (self.store_from, store))
        found = [named if source is None else source.read(variables, headers) or named for source, named in sources]
        merchant, store = (text if text and text.strip() else None for text in found)
        return merchant, store

    def overlaps(self, other: "Endpoint") -> bool:
        """Whether some request line is for both."""
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
        """The accepted kinds in words: `private`, or `public or private`."""
        return " or ".join(sorted(self.credentials, reverse=True))


def is_variable(segment: str) -> bool:
    return segment.startswith("<") and segment.endswith(">")


@dataclass(frozen=True, slots=True)
class NoMatchingEndpoint:
    """No such endpoint; `allowed` lists the methods of the path when only the method is wrong."""

    allowed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Catalog:
    """All endpoints of the moment, by name and by request line."""

    endpoints: tuple[Endpoint, ...]
    _by_name: dict[str, Endpoint] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {endpoint.name: endpoint for endpoint in self.endpoints})

    def with_added(self, added: Iterable[Endpoint]) -> "Catalog":
        return Catalog((*self.endpoints, *added))

    def find(self, name: str) -> Endpoint | NoMatchingEndpoint:
        return self._by_name.get(name, NoMatchingEndpoint())

    def match(self, method: str, path: str, base_path: str = "") -> Endpoint | NoMatchingEndpoint:
        """The endpoint of a request line. `base_path` (say `/sandbox`) may stand before the path or not.

        A path that could be read in two ways matches nothing: it is refused, never guessed.
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


# What RFC 3986 (section 3.3) lets stand in a segment as it is, less `;`, which some servers cut at.
_PLAIN = re.compile(r"[A-Za-z0-9._~!$&'()*+,=:@-]+")


def is_canonical_path(path: str) -> bool:
    """Whether every server reads the path alike: visible ASCII, no escapes, dot or empty segments, parameters."""
    return path.startswith("/") and all(map(is_plain_segment, path.split("/")[1:]))


def is_plain_segment(segment: str) -> bool:
    return segment not in {".", ".."} and _PLAIN.fullmatch(segment) is not None


_PRIVATE, _PUBLIC = frozenset({KeyKind.PRIVATE}), frozenset({KeyKind.PUBLIC})

ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        "orders.retrieve",
        "GET",
        "/merchants/orders/<order_token>",
        _PRIVATE,
        Bearer.OPTIONAL,
        summary="One order of the key's merchant.",
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
        summary="The account's client configuration.",
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
        spends=False,  # Nor may an empty bucket keep a customer's stolen token alive.
        summary="Revokes a customer access token.",
    ),
    Endpoint(
        "customers.me",
        "GET",
        "/customers/me",
        _PRIVATE,
        Bearer.REQUIRED,
        summary="The customer that the Bearer stands for.",
    ),
    Endpoint(
        "credentials.acknowledge",
        "POST",
        "/credentials/acknowledge",
        _PRIVATE,
        summary="The merchant's half of the proof that a rotation's replacement arrived.",
    ),
    Endpoint(
        "credentials.revoke_self",
        "POST",
        "/credentials/revoke-self",
        _PRIVATE,
        # Whoever found the key used up its quota first would otherwise keep it alive.
        spends=False,
        summary="Ends the presented key.",
    ),
)

BUILT_IN = Catalog(ENDPOINTS)
