"""Exceptions of REST views as problem documents (RFC 9457)."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from django.core.exceptions import RequestDataTooBig, SuspiciousOperation
from django.db import DataError, InterfaceError, OperationalError
from django.http import Http404
from rest_framework import exceptions as drf
from rest_framework.response import Response
from rest_framework.views import APIView

from keyvault.access.decision import Denial
from keyvault.access.limits import RateLimitedError
from keyvault.api.middleware import request_id_of
from keyvault.backends import meters
from keyvault.domain.errors import (
    ABSENT,
    DependencyUnavailableError,
    ErrorCode,
    Fault,
    IdempotencyError,
    KeyvaultError,
    RequestInvalidError,
)
from keyvault.domain.redaction import redact
from keyvault.wire.limits import limit_headers
from keyvault.wire.planes import Plane, find_plane
from keyvault.wire.problems import CONTENT_TYPE, Problem, problem

_log = logging.getLogger(__name__)


class DeniedError(Exception):
    """Carries a denial from a view to the exception handler; not a KeyvaultError."""

    def __init__(self, denial: Denial, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(denial.detail)
        self.denial = denial
        self.headers = dict(headers or {})


def handle_exception(error: Exception, context: Mapping[str, Any]) -> Response | None:
    """REST framework's exception handler. An unexpected exception is logged and answered with 500."""
    request_id = request_id_of(getattr(context.get("request"), "_request", None))
    view: APIView = context["view"]
    # Django gives every view an `options` method, but without a metadata class REST framework answers it with 405.
    view_methods = [method for method in view.allowed_methods if method != "OPTIONS"]
    found = _problem(error, request_id, view_methods)
    if found is None:
        _log.error("unhandled", exc_info=error, extra={"request_id": request_id})
        found = problem(ErrorCode.INTERNAL_ERROR, "Something went wrong on our side.", request_id)
    if find_plane(context["request"]._request.path_info) is Plane.SERVICE:
        # Denials on the integration plane are verdicts, and counted with them.
        meters.note_denial(Plane.SERVICE, str(found.body["code"]))
    # REST framework overwrites the response's headers with the view's, so these are set on the view.
    allow = {"Allow": ", ".join(view_methods)} if view_methods else {}
    view.headers = {**view.headers, **allow, **found.headers}
    return Response(dict(found.body), found.status, content_type=CONTENT_TYPE)


def _problem(error: Exception, request_id: str, view_methods: Sequence[str]) -> Problem | None:
    match error:
        case DeniedError(denial=denial, headers=headers):
            found = problem(
                denial.code,
                denial.detail,
                request_id,
                allowed_methods=denial.allowed_methods,
                retry_after_seconds=denial.retry_after_seconds,
            )
            return replace(found, headers={**found.headers, **headers})
        case RateLimitedError(spend=spend):
            found = problem(error.code, error.detail, request_id, retry_after_seconds=spend.retry_after_seconds)
            return replace(found, headers={**found.headers, **limit_headers(spend)})
        case KeyvaultError():
            _log_internal(error, request_id)
            return problem(
                error.code,
                error.detail,
                request_id,
                faults=_faults_of(error),
                retry_after_seconds=_retry_after(error),
            )
        case drf.ValidationError():
            faults = list(_faults(error.detail, ""))
            return problem(ErrorCode.REQUEST_INVALID, "The request is invalid.", request_id, faults=faults)
        case drf.ParseError():
            return _invalid(str(error.detail), request_id)
        case drf.MethodNotAllowed():
            return problem(ErrorCode.METHOD_NOT_ALLOWED, str(error.detail), request_id, allowed_methods=view_methods)
        case drf.UnsupportedMediaType():
            detail = "The body must be application/json."
            return problem(ErrorCode.MEDIA_TYPE_UNSUPPORTED, detail, request_id)
        case drf.NotFound() | Http404():
            return problem(ErrorCode.NOT_FOUND, ABSENT, request_id)
        case OperationalError() | InterfaceError():
            _log.error("database unavailable", exc_info=error, extra={"request_id": request_id})
            return problem(
                ErrorCode.DEPENDENCY_UNAVAILABLE,
                "The database is unavailable. Try again.",
                request_id,
                retry_after_seconds=1,
            )
        case DataError():
            return _invalid("The database cannot store a value of the request. Check lengths and ranges.", request_id)
        case RequestDataTooBig():
            return problem(ErrorCode.PAYLOAD_TOO_LARGE, "The body is larger than 64 KiB.", request_id)
        case SuspiciousOperation():  # after RequestDataTooBig, which is one
            return _invalid("The request is malformed, or its query has more than 1,000 parameters.", request_id)
        case drf.PermissionDenied() | drf.NotAuthenticated():
            return problem(
                ErrorCode.SERVICE_TOKEN_INVALID, "Send a service token in Authorization: Bearer.", request_id
            )
        case _:
            return None


def _invalid(detail: str, request_id: str) -> Problem:
    """Return a problem about the request as a whole: its JSON Pointer is empty."""
    return problem(ErrorCode.REQUEST_INVALID, detail, request_id, faults=[Fault("", detail)])


def _faults_of(error: KeyvaultError) -> Sequence[Fault]:
    if not isinstance(error, RequestInvalidError):
        return ()
    return error.faults or (Fault("", error.detail),)


def _retry_after(error: KeyvaultError) -> int | None:
    if isinstance(error, DependencyUnavailableError | IdempotencyError):
        return error.retry_after_seconds
    return 5 if error.code is ErrorCode.DEPENDENCY_UNAVAILABLE else None


def _log_internal(error: KeyvaultError, request_id: str) -> None:
    """Log the detail that the response leaves out, for support."""
    if error.internal:
        _log.info("refused", extra={"request_id": request_id, "code": error.code, "internal": error.internal})


def _faults(detail: Any, pointer: str) -> Iterator[Fault]:
    """Flatten REST framework's nested details into faults, each with its JSON Pointer."""
    if isinstance(detail, Mapping):
        for name, inner in detail.items():
            # A member name from the client may be a key, which no response repeats, or hold half a surrogate pair,
            # which UTF-8 cannot encode.
            shown = redact(str(name).encode(errors="backslashreplace").decode())
            step = "" if name == "non_field_errors" else f"/{shown.replace('~', '~0').replace('/', '~1')}"
            yield from _faults(inner, pointer + step)
    elif isinstance(detail, list):
        for index, inner in enumerate(detail):
            yield from _faults(inner, pointer if isinstance(inner, str) else f"{pointer}/{index}")
    else:
        yield Fault(pointer, redact(str(detail)))  # REST framework quotes an invalid choice
