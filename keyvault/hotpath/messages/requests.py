"""Strict parsing of verify requests. A body that two parsers could read differently is rejected.

decode_verify(body) -> VerifyRequest | None      fast path, for valid bodies without escapes
read_verify(body) -> VerifyRequest               slow path: raises RequestInvalidError with every fault
read_batch(body) -> list[VerifyRequest]
"""

import ipaddress
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from keyvault.access.limits import MAX_COUNT
from keyvault.domain.environments import Environment
from keyvault.domain.errors import Fault, RequestInvalidError
from keyvault.domain.redaction import redact
from keyvault.wire.json_bodies import read_object

MAX_BATCH_REQUESTS: Final = 100
"""Maximum number of requests in one batch."""

_Name = Annotated[str, Meta(min_length=1, max_length=100)]
_Path = Annotated[str, Meta(min_length=1, max_length=8192)]
_Merchant = Annotated[str, Meta(min_length=1, max_length=64)]
_Store = Annotated[str, Meta(min_length=1, max_length=128)]


class VerifyRequest(Struct, forbid_unknown_fields=True, gc=False):
    """One request. A missing field is UNSET; a JSON null is None. The bounds match `_FIELDS` below."""

    key: str | None
    environment: Literal["sandbox", "production"]
    endpoint: _Name | UnsetType = UNSET
    method: str | UnsetType = UNSET
    path: _Path | UnsetType = UNSET
    merchant: _Merchant | UnsetType | None = UNSET
    store: _Store | UnsetType | None = UNSET
    customer_token: str | UnsetType | None = UNSET
    client_ip: str | UnsetType | None = UNSET
    origin: Annotated[str, Meta(max_length=500)] | UnsetType | None = UNSET
    user_agent: Annotated[str, Meta(max_length=8192)] | UnsetType | None = UNSET
    cost: Annotated[int, Meta(ge=1, le=MAX_COUNT)] | UnsetType = UNSET
    dry_run: bool | UnsetType = UNSET

    def __repr__(self) -> str:
        """Omit the key and the customer token."""
        return f"VerifyRequest({self.environment}, {self.endpoint or self.method})"


class VerifyBatch(Struct, forbid_unknown_fields=True, gc=False):
    requests: Annotated[list[VerifyRequest], Meta(min_length=1, max_length=MAX_BATCH_REQUESTS)]


class _Pieces(Struct, forbid_unknown_fields=True, gc=False):
    requests: Annotated[list[msgspec.Raw], Meta(min_length=1, max_length=MAX_BATCH_REQUESTS)]


_decode = msgspec.json.Decoder(VerifyRequest).decode
_decode_batch = msgspec.json.Decoder(VerifyBatch).decode
_split = msgspec.json.Decoder(_Pieces).decode
_encode = msgspec.json.Encoder().encode
_UNREADABLE: Final = (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def decode_verify(body: bytes) -> VerifyRequest | None:
    """Return the request; None when the slow path must parse it.

    The decoder does not detect duplicate names. In a text without escapes they leave more quotes than the decoded
    fields need.
    """
    if b"\\" in body:
        return None
    try:
        request = _decode(body)
    except _UNREADABLE:
        return None
    return request if _encode(request).count(b'"') == body.count(b'"') and _is_plain(request) else None


def decode_plain_verify(body: bytes) -> VerifyRequest | None:
    """Return the request if it has the most common shape: key, environment, endpoint, optionally client_ip, then
    user_agent.

    In a text without escapes each quote begins or ends a string. The expected number of quotes proves that no field is
    duplicated and no other field is present.
    """
    if b"\\" in body:
        return None
    try:
        request = _decode(body)
    except _UNREADABLE:
        return None
    if request.endpoint is UNSET or request.key is None:
        return None
    quotes, address, agent = body.count(b'"'), request.client_ip, request.user_agent
    if address is UNSET:
        return request if quotes == 12 else None
    if quotes != (16 if agent is UNSET else 18 if agent is None else 20):
        return None
    canonical = _canonical_address(address) if address else None
    if canonical is None:
        return None
    request.client_ip = canonical
    return request


def decode_batch(body: bytes) -> list[VerifyRequest] | None:
    """Return the requests of a batch; None when the slow path must parse it."""
    if b"\\" in body:
        return None
    try:
        batch = _decode_batch(body)
    except _UNREADABLE:
        return None
    if _encode(batch).count(b'"') != body.count(b'"') or not all(map(_is_plain, batch.requests)):
        return None
    return batch.requests


def split_batch(body: bytes) -> list[msgspec.Raw] | None:
    """Return the unparsed bytes of each request; None when the slow path must parse the batch."""
    if b"\\" in body or body.count(b'"requests"') != 1:
        return None  # without escapes a duplicate name appears twice
    try:
        return _split(body).requests
    except _UNREADABLE:
        return None


def _is_plain(request: VerifyRequest) -> bool:
    """Check what the decoder's types cannot express, and put the address into its canonical form."""
    address = request.client_ip
    if address:
        canonical = _canonical_address(address)
        if canonical is None:
            return False
        request.client_ip = canonical
    elif address == "":
        return False
    if request.endpoint is not UNSET:
        return request.method is UNSET and request.path is UNSET
    return (
        isinstance(request.method, str)
        and isinstance(request.path, str)
        and _METHOD.fullmatch(request.method) is not None
    )


# --- slow path --------------------------------------------------------------------------------------------


def read_verify(body: bytes) -> VerifyRequest:
    """Parse a request. Raises RequestInvalidError, listing every fault with its JSON Pointer."""
    faults: list[Fault] = []
    request = _read_one(_read_object(body), "", faults)
    if request is None:
        raise RequestInvalidError("The request is invalid.", faults)
    return request


def read_batch(body: bytes) -> list[VerifyRequest]:
    """Parse a batch. One malformed request rejects it. Raises RequestInvalidError."""
    value = _read_object(body)
    faults = [Fault(f"/{_escaped(name)}", _UNKNOWN) for name in sorted(value) if name != "requests"]
    if faults:
        raise RequestInvalidError("The request is invalid.", faults)
    request: list[VerifyRequest | None] = []
    match value.get("requests", UNSET):
        case [*each] if 1 <= len(each) <= MAX_BATCH_REQUESTS:
            request = [_read_one(one, f"/requests/{number}", faults) for number, one in enumerate(each)]
        case []:
            faults.append(Fault("/requests", "Ensure this field has at least 1 elements."))
        case [*_]:
            faults.append(Fault("/requests", f"Ensure this field has no more than {MAX_BATCH_REQUESTS} elements."))
        case other:
            faults.append(Fault("/requests", _absence(other) or "Not a list."))
    if faults:
        raise RequestInvalidError("The request is invalid.", faults)
    return [one for one in request if one is not None]


def _read_object(body: bytes) -> dict[str, Any]:
    try:
        return read_object(body)
    except ValueError as error:
        raise RequestInvalidError(str(error), [Fault("", str(error))]) from None


_UNKNOWN = "There is no such field."
_METHOD = re.compile("[A-Z]{1,16}")


def _read_one(value: Any, pointer: str, faults: list[Fault]) -> VerifyRequest | None:
    """Return the request, or None after adding to `faults`."""
    found = [*_faults_of(value, pointer)]
    faults += found
    if found:
        return None
    request = VerifyRequest(**value)
    if isinstance(request.client_ip, str):
        request.client_ip = _canonical_address(request.client_ip)
    if request.cost is not UNSET:
        request.cost = int(request.cost)
    return request


def _faults_of(value: Any, pointer: str) -> Iterator[Fault]:
    if not isinstance(value, dict):
        yield Fault(pointer, "Not an object.")
        return
    unknown = sorted(set(value) - set(_FIELDS))
    if unknown:
        yield from (Fault(f"{pointer}/{_escaped(name)}", _UNKNOWN) for name in unknown)
        return
    is_whole = True
    for name, (may_be_null, find_fault) in _FIELDS.items():
        given = value.get(name, UNSET)
        if given is UNSET and name not in {"key", "environment"}:
            continue
        fault = _absence(given) if given is UNSET or (given is None and not may_be_null) else None
        if fault is None and given is not None:
            fault = find_fault(given)
        if fault is not None:
            is_whole = False
            yield Fault(f"{pointer}/{name}", fault)
    by_name, by_line = "endpoint" in value, {"method", "path"} & set(value)
    if is_whole and (by_name == bool(by_line) or (by_line and len(by_line) != 2)):
        yield Fault(pointer, "Give `endpoint`, or both `method` and `path`.")


def _absence(given: object) -> str | None:
    if given is UNSET:
        return "This field is required."
    return "This field may not be null." if given is None else None


def _escaped(name: str) -> str:
    """Return a JSON Pointer token.

    A client's field name may be a key, which must not be echoed, or have half a surrogate pair, which has no encoding.
    """
    return redact(name.encode(errors="backslashreplace").decode()).replace("~", "~0").replace("/", "~1")


def _raw_text(value: object) -> str | None:
    """Accept any text: the verdict reports its faults."""
    return None if isinstance(value, str) else "Not a string."


def _text(length: int, *, may_be_blank: bool = False) -> Callable[[object], str | None]:
    def find_fault(value: object) -> str | None:
        if not isinstance(value, str):
            return "Not a string."
        if value == "" and not may_be_blank:
            return "This field may not be blank."
        if len(value) > length:
            return f"Ensure this field has no more than {length} characters."
        if "\x00" in value:
            return "Null characters are not allowed."
        if any("\ud800" <= character <= "\udfff" for character in value):
            return "Half a surrogate pair is not allowed."
        return None

    return find_fault


def _method(value: object) -> str | None:
    fault = _text(16)(value)
    return (
        fault
        if not isinstance(value, str) or _METHOD.fullmatch(value)
        else "Use 1 to 16 characters of A-Z, such as GET."
    )


def _address(value: object) -> str | None:
    fault = _text(64)(value)
    if fault is not None or not isinstance(value, str):
        return fault
    if _canonical_address(value) is not None:
        return None
    return "A zone index is valid on one machine only." if "%" in value else "Not an IP address."


@lru_cache(maxsize=16_384)
def _canonical_address(text: str) -> str | None:
    """Return IPv4 or IPv6 in canonical form, an IPv4-mapped address as IPv4; None for anything else."""
    if len(text) > 64 or "%" in text:
        return None
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return str(getattr(address, "ipv4_mapped", None) or address)


def _cost(value: object) -> str | None:
    """Accept 2.0 too: in JSON Schema a number without a fraction is an integer."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value % 1:
        return "Not an integer."
    if value < 1:
        return "Ensure this value is greater than or equal to 1."
    return None if value <= MAX_COUNT else f"Ensure this value is less than or equal to {MAX_COUNT}."


def _boolean(value: object) -> str | None:
    return None if isinstance(value, bool) else "Not a boolean."


def _environment(value: object) -> str | None:
    if not isinstance(value, str):
        return "Not a string."
    if value in set(Environment):
        return None
    shown = redact(value.encode(errors="backslashreplace").decode())[:64]
    return f'"{shown}" is none of {", ".join(Environment)}.'


_FIELDS: dict[str, tuple[bool, Callable[[object], str | None]]] = {
    "key": (True, _raw_text),
    "environment": (False, _environment),
    "endpoint": (False, _text(100)),
    "method": (False, _method),
    "path": (False, _text(8192)),
    "merchant": (True, _text(64)),
    "store": (True, _text(128)),
    "customer_token": (True, _raw_text),
    "client_ip": (True, _address),
    "origin": (True, _text(500, may_be_blank=True)),
    "user_agent": (True, _text(8192, may_be_blank=True)),
    "cost": (False, _cost),
    "dry_run": (False, _boolean),
}
"""For each field: whether it may be null, and a function that returns the fault of a non-null value."""
