"""Requests of the service plane, their paths, and the data that a step still requires."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from keyvault.access.customers import CustomerRecord
from keyvault.access.limits import Bucket, Spend
from keyvault.access.policy_snapshot import PolicySnapshot
from keyvault.access.verification import TokenRecord
from keyvault.domain.errors import ErrorCode, Fault, KeyvaultError, RequestInvalidError
from keyvault.domain.keys import KeyRecord
from keyvault.wire.gateways import ENVOY_ADDRESS, NAMES, Dialect, Forwarded, HeaderFault, last_address, read_forwarded
from keyvault.wire.headers import mint_request_id

VERIFY, BATCH = "/v1/keys/verify", "/v1/keys/verify-batch"
ENVOY = "/v1/authorize/envoy/"
GATEWAYS: Final = {
    "/v1/authorize/traefik": Dialect.TRAEFIK,
    "/v1/authorize/nginx": Dialect.NGINX,
}

KEY, CUSTOMER, TOKEN, RULES = "key", "customer_token", "service_token", "rules"
"""Kinds of required data. The first three are read by id, and are also subject names in the change feed."""

Found = KeyRecord | CustomerRecord | TokenRecord


def is_engine_path(path: str) -> bool:
    """Return whether the engine answers this path. `path` has no query."""
    return path in _ENGINE_PATHS or path.startswith(ENVOY)


_ENGINE_PATHS: Final = frozenset({VERIFY, BATCH, *GATEWAYS})


class Headers(dict[str, str]):
    """Request headers with case-insensitive names, stored in lower case. Repeated headers are joined with a comma.

    The repr shows names only: values may be credentials.
    """

    def __repr__(self) -> str:
        return f"Headers({sorted(self)})"

    def get(self, name: str, default: str | None = None) -> str | None:  # type: ignore[override]  # narrower
        return super().get(name.lower(), default)


@dataclass(frozen=True, slots=True)
class PendingSpend:
    """An amount to spend for one request. `number` is the position in a batch."""

    number: int
    buckets: tuple[Bucket, ...]
    cost: int
    refuse_on_loss: bool


@dataclass(frozen=True, slots=True)
class DataRequirements:
    """Data that a step requires. `address`: the client's, whose lookups are throttled after too many failures."""

    ids: Mapping[str, frozenset[str]]
    spends: tuple[PendingSpend, ...] = ()
    address: str | None = None


class MissingDataError(Exception):
    """Required data has not been read."""

    def __init__(
        self, kind: str, identity: str = "", spend: PendingSpend | None = None, address: str | None = None
    ) -> None:
        super().__init__(kind)
        self.kind = kind
        self.identity = identity
        self.spend = spend
        self.address = address


class SeveralMissingDataError(Exception):
    """Several requests of a batch require data that has not been read."""

    def __init__(self, each: list[MissingDataError]) -> None:
        super().__init__(len(each))
        self.each = each


def merge_requirements(each: Iterable[MissingDataError]) -> DataRequirements:
    ids: dict[str, set[str]] = {}
    spends = []
    address = None
    for missing in each:
        address = address or missing.address
        if missing.spend is not None:
            spends.append(missing.spend)
        else:
            ids.setdefault(missing.kind, set()).add(missing.identity)
    return DataRequirements({kind: frozenset(found) for kind, found in ids.items()}, tuple(spends), address)


class PendingRequest:
    """One request with the data read for it so far."""

    __slots__ = (
        "at",
        "begun_at",
        "body",
        "decided",
        "found",
        "headers",
        "method",
        "request_id",
        "rules",
        "spent",
        "target",
    )

    def __init__(
        self, method: str, target: str, headers: Headers, body: bytes | None, random_bytes: Callable[[int], bytes]
    ) -> None:
        self.method = method
        self.target = target
        self.headers = headers
        self.body = body
        self.request_id = mint_request_id(random_bytes)
        self.found: dict[tuple[str, str], Found | Exception | None] = {}
        self.rules: PolicySnapshot | Exception | None = None
        self.spent: dict[int, Spend | Exception] = {}
        self.decided: dict[int, bytes] = {}
        self.at = datetime.min.replace(tzinfo=UTC)
        self.begun_at = 0.0
        """When the slow path began, in monotonic seconds."""


def find_dialect(pending: PendingRequest) -> Dialect | None:
    """Return the gateway dialect of the path; None for verify and its batch."""
    return dialect_of(pending.target)


def dialect_of(target: str) -> Dialect | None:
    path = target.partition("?")[0]
    return Dialect.ENVOY if path.startswith(ENVOY) else GATEWAYS.get(path)


def read_json_body(pending: PendingRequest) -> bytes:
    """Return the JSON body. Raises KeyvaultError when it is too large or has another media type."""
    body = pending.body
    if body is None:
        raise _BodyError(ErrorCode.PAYLOAD_TOO_LARGE, "The body is larger than 64 KiB.")
    media_type = (pending.headers.get("content-type") or "").partition(";")[0].strip().lower()
    if body and media_type != "application/json":
        raise _BodyError(ErrorCode.MEDIA_TYPE_UNSUPPORTED, "The body must be application/json.")
    return body or b"{}"


class _BodyError(KeyvaultError):
    def __init__(self, code: ErrorCode, detail: str) -> None:
        super().__init__(detail)
        self.code = code


def read_forwarded_request(pending: PendingRequest, dialect: Dialect) -> Forwarded:
    if dialect is Dialect.ENVOY:
        return Forwarded(
            method=pending.method,
            uri=pending.target.removeprefix(ENVOY.rstrip("/")),
            host=pending.headers.get("host") or "",
            address=last_address(pending.headers.get(ENVOY_ADDRESS)),
        )
    read = read_forwarded(NAMES[dialect], pending.headers)
    if isinstance(read, HeaderFault):
        fault = Fault("", f"{read.header} is missing or malformed.")
        raise RequestInvalidError("The gateway did not identify the request to check.", [fault])
    return read
