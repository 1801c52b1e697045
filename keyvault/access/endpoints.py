"""Validation of upstream endpoints that operators add. Lists every fault.

A valid endpoint matches the same requests in every entry point.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from keyvault.access.catalog import (
    Bearer,
    ContextPlace,
    ContextSource,
    Endpoint,
    LimiterFailurePolicy,
    is_plain_segment,
    is_variable,
    parse_context,
)
from keyvault.access.limits import Limit, find_limit_fault
from keyvault.domain.errors import Fault
from keyvault.domain.free_text import find_text_fault
from keyvault.domain.keys import KeyKind

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")

MAX_NAME_LENGTH, MAX_PATH_LENGTH, MAX_SUMMARY_LENGTH, MAX_HEADER_LENGTH = 100, 300, 200, 64
MAX_SEGMENTS = 20

RESERVED = frozenset({"v1", "admin", "static", "healthz", "readyz", "metrics", "sandbox", "production"})
"""First path segments of the service's own routes. Those of the base URLs are reserved as well."""

_NAME = re.compile(r"[a-z][a-z0-9_]*(?:\.[a-z][a-z0-9_]*)+")
_VARIABLE = re.compile(r"[a-z_][a-z0-9_]*")
# Gateways drop a header with an underscore, or treat it as one with a hyphen.
_HEADER = re.compile(r"[A-Za-z][A-Za-z0-9-]*")
_NO_CONTEXT = frozenset({"x-api-key", "authorization", "proxy-authorization", "x-service-token", "cookie", "host"})


@dataclass(frozen=True, slots=True)
class EndpointDraft:
    """An unvalidated upstream endpoint; only the types are certain. Both limit numbers None: no limit."""

    name: str
    method: str
    path: str
    credentials: frozenset[KeyKind]
    bearer: Bearer = Bearer.NONE
    idempotent_by_key: bool = False
    summary: str = ""
    merchant_from: str = ""
    store_from: str = ""
    limit_count: int | None = None
    limit_seconds: int | None = None
    on_limiter_loss: LimiterFailurePolicy = LimiterFailurePolicy.LOCAL_SHARE


def read_endpoint(
    draft: EndpointDraft, others: Iterable[Endpoint], base_segments: frozenset[str]
) -> Endpoint | tuple[Fault, ...]:
    """Validate a draft. Returns the endpoint, or its faults by field.

    `others`: the live endpoints that it must not overlap. `base_segments`: the first segments of the base URLs' paths.
    """
    faults = [
        *_name_faults(draft.name),
        *_path_faults(draft.path, base_segments),
        *_credential_faults(draft),
        *_context_faults("/merchant_from", draft.merchant_from, draft.path),
        *_context_faults("/store_from", draft.store_from, draft.path),
        *_limit_faults(draft.limit_count, draft.limit_seconds),
    ]
    if draft.method not in METHODS:
        faults.append(Fault("/method", f"one of {', '.join(METHODS)}"))
    if draft.summary and (fault := find_text_fault(draft.summary, MAX_SUMMARY_LENGTH)) is not None:
        faults.append(Fault("/summary", fault))
    if faults:
        return tuple(faults)
    endpoint = _endpoint(draft)
    return tuple(_overlaps(endpoint, others)) or endpoint


def _endpoint(draft: EndpointDraft) -> Endpoint:
    no_limit = draft.limit_count is None or draft.limit_seconds is None
    return Endpoint(
        name=draft.name,
        method=draft.method,
        path=draft.path,
        credentials=draft.credentials,
        bearer=draft.bearer,
        idempotent_by_key=draft.idempotent_by_key,
        summary=draft.summary,
        merchant_from=parse_context(draft.merchant_from),
        store_from=parse_context(draft.store_from),
        limit=None if no_limit else Limit(draft.limit_count or 0, draft.limit_seconds or 0),
        on_limiter_loss=draft.on_limiter_loss,
        is_built_in=False,
    )


def _overlaps(endpoint: Endpoint, others: Iterable[Endpoint]) -> Iterator[Fault]:
    for other in others:
        if other.name == endpoint.name:
            yield Fault("/name", "an endpoint of this name already exists")
        if endpoint.overlaps(other):
            yield Fault("/path", f"overlaps {other.name} ({other.method} {other.path}): some requests would match both")


def _name_faults(name: str) -> Iterator[Fault]:
    if len(name) > MAX_NAME_LENGTH or _NAME.fullmatch(name) is None:
        yield Fault("/name", f"words of a-z, 0-9 and _ joined by dots, such as refunds.create; up to {MAX_NAME_LENGTH}")


def _path_faults(path: str, base_segments: frozenset[str]) -> Iterator[Fault]:
    segments = path.split("/")[1:]
    if not path.startswith("/") or len(path) > MAX_PATH_LENGTH or len(segments) > MAX_SEGMENTS:
        yield Fault(
            "/path", f"must start with /, with at most {MAX_SEGMENTS} segments and {MAX_PATH_LENGTH} characters"
        )
        return
    if not all(_is_segment(segment) for segment in segments):
        yield Fault("/path", "each segment must be plain (no %, ;, .., // or trailing slash) or a <variable>")
        return
    variables = _variables(path)
    if len(set(variables)) != len(variables):
        yield Fault("/path", "each variable may appear only once")
    if is_variable(segments[0]):
        yield Fault("/path", "the first segment must not be a variable, which could match a path of this service")
    # An intermediate server may match paths without regard to case.
    if segments[0].lower() in RESERVED | base_segments:
        yield Fault("/path", f"/{segments[0]} is reserved for this service")


def _is_segment(segment: str) -> bool:
    if is_variable(segment):
        return _VARIABLE.fullmatch(segment[1:-1]) is not None
    return is_plain_segment(segment)


def _variables(path: str) -> list[str]:
    return [segment[1:-1] for segment in path.split("/") if is_variable(segment)]


def _credential_faults(draft: EndpointDraft) -> Iterator[Fault]:
    if not draft.credentials:
        yield Fault("/credentials", "at least one kind of key is required")
    elif draft.bearer is not Bearer.NONE and draft.credentials != {KeyKind.PRIVATE}:
        yield Fault("/bearer", "a customer access token is accepted only with the private key")


def _context_faults(pointer: str, text: str, path: str) -> Iterator[Fault]:
    try:
        source = parse_context(text)
    except ValueError:
        yield Fault(pointer, "path:<variable>, header:<name> or empty")
        return
    if source is not None and (fault := _source_fault(source, path)) is not None:
        yield Fault(pointer, fault)


def _source_fault(source: ContextSource, path: str) -> str | None:
    if source.place is ContextPlace.PATH:
        return None if source.name in _variables(path) else f"the path has no variable <{source.name}>"
    if len(source.name) > MAX_HEADER_LENGTH or _HEADER.fullmatch(source.name) is None:
        return f"a header's name has at most {MAX_HEADER_LENGTH} letters, digits and hyphens"
    if source.name.lower() in _NO_CONTEXT:
        return f"{source.name} has another purpose"
    return None


def _limit_faults(count: int | None, seconds: int | None) -> Iterator[Fault]:
    if (count is None) != (seconds is None):
        yield Fault("/limit_count" if count is None else "/limit_seconds", "set both numbers or neither")
    elif count is not None and seconds is not None and (fault := find_limit_fault(count, seconds)) is not None:
        yield Fault("/limit_count", fault)
