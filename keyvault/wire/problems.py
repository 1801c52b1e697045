"""Error codes on the wire: status, title and body (RFC 9457), and the challenge of a 401 (RFC 9110, 11.6.1).

The one table from a code to what HTTP says about it. `check` is the number of the item of D23 that a client
goes through before it tries again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keyvault.domain.canonical import JsonValue
from keyvault.domain.errors import ErrorCode as Code
from keyvault.domain.errors import Fault

CONTENT_TYPE = "application/problem+json"


@dataclass(frozen=True, slots=True)
class ProblemType:
    status: int
    title: str
    check: int | None = None
    challenge: str | None = None


_KEY = 'ApiKey realm="keyvault", header="X-Api-Key"'
_BEARER = 'Bearer realm="keyvault"'
_INVALID_TOKEN = f'{_BEARER}, error="invalid_token"'

PROBLEM_TYPES: dict[Code, ProblemType] = {
    Code.CREDENTIAL_IN_URL: ProblemType(400, "Credential in the URL", 1),
    Code.CREDENTIAL_AMBIGUOUS: ProblemType(400, "Ambiguous credential", 1),
    Code.CREDENTIAL_MISSING: ProblemType(401, "Credential missing", 1, _KEY),
    Code.CREDENTIAL_INVALID: ProblemType(401, "Credential invalid", 1, _KEY),
    Code.ENVIRONMENT_MISMATCH: ProblemType(401, "Wrong environment", 2, _KEY),
    Code.KEY_NOT_ACTIVE: ProblemType(401, "Key not active", 4, _KEY),
    Code.KEY_EXPIRED: ProblemType(401, "Key expired", 4, _KEY),
    Code.KEY_REVOKED: ProblemType(401, "Key revoked", 4, _KEY),
    Code.MERCHANT_MISMATCH: ProblemType(403, "Wrong merchant", 2),
    Code.MERCHANT_SUSPENDED: ProblemType(403, "Merchant suspended", 5),
    Code.ENDPOINT_UNKNOWN: ProblemType(404, "Endpoint unknown", 3),
    Code.METHOD_NOT_ALLOWED: ProblemType(405, "Method not allowed", 3),
    Code.METHOD_NOT_SUPPORTED: ProblemType(403, "Authorization method not supported", 3),
    Code.BEARER_NOT_SUPPORTED: ProblemType(401, "Bearer not supported", 3, _KEY),
    Code.PRIVATE_KEY_IN_BROWSER: ProblemType(403, "Private key in a browser", 3),
    Code.CUSTOMER_TOKEN_MISSING: ProblemType(401, "Customer access token missing", 5, _BEARER),
    Code.CUSTOMER_TOKEN_INVALID: ProblemType(401, "Customer access token invalid", 5, _INVALID_TOKEN),
    Code.SERVICE_TOKEN_INVALID: ProblemType(401, "Service token missing or invalid", 1, _BEARER),
    Code.PERMISSION_MISSING: ProblemType(403, "Permission missing"),
    Code.NOT_FOUND: ProblemType(404, "Not found"),
    Code.REQUEST_INVALID: ProblemType(400, "Request invalid"),
    Code.PAYLOAD_TOO_LARGE: ProblemType(413, "Payload too large"),
    Code.MEDIA_TYPE_UNSUPPORTED: ProblemType(415, "Media type unsupported"),
    Code.STATE_CONFLICT: ProblemType(409, "Conflict with the present state"),
    Code.DEPENDENCY_UNAVAILABLE: ProblemType(503, "Dependency unavailable"),
    Code.INTERNAL_ERROR: ProblemType(500, "Internal error"),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """What a door sends: a status, headers, and a body for `application/problem+json`."""

    status: int
    headers: Mapping[str, str]
    body: Mapping[str, JsonValue]


def problem(
    code: Code,
    detail: str,
    request_id: str,
    *,
    faults: Sequence[Fault] = (),
    allowed_methods: Sequence[str] = (),
    retry_after_seconds: int | None = None,
) -> Problem:
    """The answer for a code. `faults` are listed under `errors`; Retry-After is whole seconds, at least 1."""
    kind = PROBLEM_TYPES[code]
    body: dict[str, JsonValue] = {
        "type": f"urn:keyvault:problem:{code}",
        "title": kind.title,
        "status": kind.status,
        "code": code.value,
        "detail": detail,
        "request_id": request_id,
    }
    if kind.check is not None:
        body["check"] = kind.check
    if faults:
        body["errors"] = [{"pointer": fault.pointer, "detail": fault.detail} for fault in faults]
    headers = {"Cache-Control": "no-store"}
    if kind.challenge is not None:
        headers["WWW-Authenticate"] = kind.challenge
    if code is Code.METHOD_NOT_ALLOWED:
        headers["Allow"] = ", ".join(allowed_methods)
    if retry_after_seconds is None and code is Code.DEPENDENCY_UNAVAILABLE:
        retry_after_seconds = 1
    if retry_after_seconds is not None:
        headers["Retry-After"] = str(max(1, retry_after_seconds))
    return Problem(kind.status, headers, body)
