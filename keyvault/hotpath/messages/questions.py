"""What the service plane is asked, and by which paths; and what a step still needs for its answer."""

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
"""What may be needed; the first three by id, and named like the subjects of changes."""

Found = KeyRecord | CustomerRecord | TokenRecord


def is_ours(path: str) -> bool:
    """Whether this is one of the paths that the engine answers; the path without its query."""
    return path in _OURS or path.startswith(ENVOY)


_OURS: Final = frozenset({VERIFY, BATCH, *GATEWAYS})


class Headers(dict[str, str]):
    """By name in any case; the keys are lower case, and of what came twice both values, with a comma between.

    Their repr names them only: credentials are among them.
    """

    def __repr__(self) -> str:
        return f"Headers({sorted(self)})"

    def get(self, name: str, default: str | None = None) -> str | None:  # type: ignore[override]  # narrower
        return super().get(name.lower(), default)


@dataclass(frozen=True, slots=True)
class Payment:
    """What is to be spent for one question, of a batch by its number."""

    number: int
    buckets: tuple[Bucket, ...]
    cost: int
    refuse_on_loss: bool


@dataclass(frozen=True, slots=True)
class DataRequirements:
    """What a step lacks. `address` of the client: look-ups of those that fail too often wait for each other."""

    ids: Mapping[str, frozenset[str]]
    payments: tuple[Payment, ...] = ()
    address: str | None = None


class MissingDataError(Exception):
    """This cannot be decided without what it names."""

    def __init__(
        self, kind: str, identity: str = "", payment: Payment | None = None, address: str | None = None
    ) -> None:
        super().__init__(kind)
        self.kind = kind
        self.identity = identity
        self.payment = payment
        self.address = address


class SeveralMissingDataError(Exception):
    """Several of them, on their way to one answer."""

    def __init__(self, each: list[MissingDataError]) -> None:
        super().__init__(len(each))
        self.each = each


def needs_of(each: Iterable[MissingDataError]) -> DataRequirements:
    ids: dict[str, set[str]] = {}
    payments = []
    address = None
    for lacking in each:
        address = address or lacking.address
        if lacking.payment is not None:
            payments.append(lacking.payment)
        else:
            ids.setdefault(lacking.kind, set()).add(lacking.identity)
    return DataRequirements({kind: frozenset(found) for kind, found in ids.items()}, tuple(payments), address)


class PendingRequest:
    """One request, and what was read for it so far."""

    __slots__ = ("at", "body", "decided", "found", "headers", "method", "paid", "request_id", "rules", "target")

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
        self.paid: dict[int, Spend | Exception] = {}
        self.decided: dict[int, bytes] = {}
        self.at = datetime.min.replace(tzinfo=UTC)


def dialect_of(question: PendingRequest) -> Dialect | None:
    """None: it is no gateway that asks."""
    path = question.target.partition("?")[0]
    return Dialect.ENVOY if path.startswith(ENVOY) else GATEWAYS.get(path)


def body_of(question: PendingRequest) -> bytes:
    """Raises KeyvaultError: it is too large, or no JSON by its type."""
    body = question.body
    if body is None:
        raise _BodyError(ErrorCode.PAYLOAD_TOO_LARGE, "The body is larger than 64 KiB.")
    media_type = (question.headers.get("content-type") or "").partition(";")[0].strip().lower()
    if body and media_type != "application/json":
        raise _BodyError(ErrorCode.MEDIA_TYPE_UNSUPPORTED, "The body must be application/json.")
    return body or b"{}"


class _BodyError(KeyvaultError):
    def __init__(self, code: ErrorCode, detail: str) -> None:
        super().__init__(detail)
        self.code = code


def forwarded_of(question: PendingRequest, dialect: Dialect) -> Forwarded:
    if dialect is Dialect.ENVOY:
        return Forwarded(
            method=question.method,
            uri=question.target.removeprefix(ENVOY.rstrip("/")),
            host=question.headers.get("host") or "",
            address=last_address(question.headers.get(ENVOY_ADDRESS)),
        )
    read = read_forwarded(NAMES[dialect], question.headers)
    if isinstance(read, HeaderFault):
        fault = Fault("", f"{read.header} is missing, or cannot be read.")
        raise RequestInvalidError("The gateway does not say which request it asks about.", [fault])
    return read
