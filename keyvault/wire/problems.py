"""HTTP mapping of error codes: status, title and body (RFC 9457), and the challenge of a 401 (RFC 9110, 11.6.1).

`check` is the number of the checklist item in docs/errors.md that a client checks before a retry.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keyvault.domain.canonical import JsonValue
from keyvault.domain.errors import ErrorCode as Code
from keyvault.domain.errors import Fault

CONTENT_TYPE = "application/problem+json"

HEAD_TOO_LARGE = 431
"""Status of `request_invalid` for a request head above a server's bounds (RFC 6585, 5)."""


@dataclass(frozen=True, slots=True)
class ProblemType:
    """The description of one error code. `remedy`: what the client does. `challenge`: WWW-Authenticate of a 401."""

    status: int
    title: str
    cause: str
    remedy: str
    check: int | None = None
    challenge: str | None = None


_KEY = 'ApiKey realm="keyvault", header="X-Api-Key"'
_BEARER = 'Bearer realm="keyvault"'
_INVALID_TOKEN = f'{_BEARER}, error="invalid_token"'

PROBLEM_TYPES: dict[Code, ProblemType] = {
    Code.CREDENTIAL_IN_URL: ProblemType(
        400,
        "Credential in the URL",
        "The path or the query contains text shaped like a key string. Logs and proxies store URLs.",
        "Rotate the credential, and send credentials only in their header.",
        1,
    ),
    Code.CREDENTIAL_AMBIGUOUS: ProblemType(
        400,
        "Ambiguous credential",
        "X-Api-Key or Authorization was sent more than once, or contains a comma.",
        "Send each header once, with one credential.",
        1,
    ),
    Code.CREDENTIAL_MISSING: ProblemType(
        401,
        "Credential missing",
        "The request has no X-Api-Key header. A customer access token does not replace it.",
        "Send the API key in X-Api-Key.",
        1,
        _KEY,
    ),
    Code.CREDENTIAL_INVALID: ProblemType(
        401,
        "Credential invalid",
        "The string is malformed, mistyped, unknown or not an API key. The response does not disclose which.",
        "Compare it with the string in the secrets manager. Do not retry with the same string.",
        1,
        _KEY,
    ),
    Code.ENVIRONMENT_MISMATCH: ProblemType(
        401,
        "Wrong environment",
        "The key belongs to the other environment.",
        "Use that environment's base URL, which the detail states, or this environment's key.",
        2,
        _KEY,
    ),
    Code.KEY_NOT_ACTIVE: ProblemType(
        401,
        "Key not active",
        "The key is not active yet, or is suspended. A rotation suspends the old key before it revokes it.",
        "Use the replacement if there is one. Otherwise contact the technical account manager.",
        4,
        _KEY,
    ),
    Code.KEY_EXPIRED: ProblemType(
        401, "Key expired", "The key's expiry has passed.", "Use the key's replacement, or request one.", 4, _KEY
    ),
    Code.KEY_REVOKED: ProblemType(
        401,
        "Key revoked",
        "The key was revoked, reported as compromised, or destroyed. This is permanent.",
        "Use the key's replacement, or request one.",
        4,
        _KEY,
    ),
    Code.MERCHANT_MISMATCH: ProblemType(
        403,
        "Wrong merchant",
        "The request names a different merchant than the key was issued for.",
        "Use the key of the merchant that the request names.",
        2,
    ),
    Code.MERCHANT_SUSPENDED: ProblemType(
        403,
        "Merchant suspended",
        "The merchant, or its account in this environment, is suspended.",
        "Contact the technical account manager. A retry does not help.",
        5,
    ),
    Code.ENDPOINT_UNKNOWN: ProblemType(
        404,
        "Endpoint unknown",
        "The endpoint catalog has no such endpoint. An ambiguous path (escapes, `..`, `;`, `//`) matches no endpoint.",
        "Compare the method and the path with the catalog. Paths are case-sensitive.",
        3,
    ),
    Code.METHOD_NOT_ALLOWED: ProblemType(
        405, "Method not allowed", "The path exists, but not with this method.", "Use a method that Allow lists.", 3
    ),
    Code.METHOD_NOT_SUPPORTED: ProblemType(
        403,
        "Authorization method not supported",
        "The endpoint requires the other kind of API key.",
        "Use the endpoint's kind: public keys are for browsers and apps, private keys for backends.",
        3,
    ),
    Code.BEARER_NOT_SUPPORTED: ProblemType(
        401,
        "Bearer not supported",
        "The request has an Authorization header, which the endpoint does not support.",
        "Omit the Authorization header.",
        3,
        _KEY,
    ),
    Code.PRIVATE_KEY_IN_BROWSER: ProblemType(
        403,
        "Private key in a browser",
        "A private key was sent with an Origin header, so a browser may hold it. A suspected exposure is recorded.",
        "Call from a backend. If it forwards Origin, remove the header or have the credential set to report only.",
        3,
    ),
    Code.IP_NOT_ALLOWED: ProblemType(
        403,
        "Address not allowed",
        "The client's address is outside the credential's allowed networks, or unknown.",
        "Call from an allowed network, or have an operator change the list.",
        5,
    ),
    Code.CONTEXT_MISSING: ProblemType(
        403,
        "Context missing",
        "The request lacks the merchant or store context that the endpoint requires.",
        "Send the header or the path variable that the endpoint's authorization panel names.",
        5,
    ),
    Code.CUSTOMER_TOKEN_MISSING: ProblemType(
        401,
        "Customer access token missing",
        "The endpoint requires a signed-in customer.",
        "Send the customer access token as Authorization: Bearer, in addition to the private key.",
        5,
        _BEARER,
    ),
    Code.CUSTOMER_TOKEN_INVALID: ProblemType(
        401,
        "Customer access token invalid",
        "The token is malformed, unknown, or of another merchant or environment. The response does not disclose which.",
        "Issue a new one for the customer.",
        5,
        _INVALID_TOKEN,
    ),
    Code.CUSTOMER_TOKEN_EXPIRED: ProblemType(
        401,
        "Customer access token expired",
        "The token's lifetime, 15 minutes by default, is over.",
        "Issue a new one for the customer.",
        4,
        _INVALID_TOKEN,
    ),
    Code.CUSTOMER_TOKEN_REVOKED: ProblemType(
        401,
        "Customer access token revoked",
        "The merchant has revoked the token.",
        "Issue a new one if the customer signs in again.",
        4,
        _INVALID_TOKEN,
    ),
    Code.RATE_LIMITED: ProblemType(
        429,
        "Rate limited",
        "The limit of the account or the endpoint is exhausted, or the holder repeats the revocation of a revoked key. "
        "RateLimit-Policy and RateLimit state which.",
        "Wait for Retry-After, then send fewer requests. Retry a payment attempt with its original Idempotency-Key and "
        "body.",
    ),
    Code.VERIFIER_STALE: ProblemType(
        503,
        "Verifier stale",
        "The verifier's data about the key may be outdated, so it can neither allow nor deny the request.",
        "Wait for Retry-After and send the same request again.",
    ),
    Code.SERVICE_TOKEN_INVALID: ProblemType(
        401,
        "Service token missing or invalid",
        "The service plane requires a service token. The request's token is missing, unknown, expired or revoked.",
        "Send a service token as Authorization: Bearer (forward-auth: X-Service-Token). API keys and admin sessions "
        "are not accepted here.",
        1,
        _BEARER,
    ),
    Code.PERMISSION_MISSING: ProblemType(
        403,
        "Permission missing",
        "The service token or the operator may not do this, or not in this environment.",
        "Use one that has the permission named in the detail.",
    ),
    Code.NOT_FOUND: ProblemType(
        404, "Not found", "The object does not exist, or belongs to another merchant.", "Check the id."
    ),
    Code.REQUEST_INVALID: ProblemType(
        400,
        "Request invalid",
        "The body, the query or a header is invalid. `errors` lists each fault with a JSON Pointer. With status "
        f"{HEAD_TOO_LARGE}: request line and headers exceed 16 KiB, or there are more than 100 headers.",
        "Fix the listed faults. Unknown fields are faults too.",
    ),
    Code.URI_TOO_LONG: ProblemType(
        414,
        "URI too long",
        "The path and the query together exceed 8 KiB.",
        "Shorten the query. No endpoint needs as much.",
    ),
    Code.PAYLOAD_TOO_LARGE: ProblemType(
        413, "Payload too large", "The body is larger than 64 KiB.", "Send a smaller body, or fewer items in a batch."
    ),
    Code.REQUEST_TIMEOUT: ProblemType(
        408,
        "Request timeout",
        "The body did not arrive within 10 seconds. The request had no effect, and the connection is closed.",
        "Send the request again, with the whole body without delay.",
    ),
    Code.MEDIA_TYPE_UNSUPPORTED: ProblemType(
        415,
        "Media type unsupported",
        "The body is not application/json.",
        "Send JSON with Content-Type: application/json.",
    ),
    Code.STATE_CONFLICT: ProblemType(
        409,
        "Conflict with the present state",
        "The request is valid but conflicts with the current state: it was done already, or requires a second person.",
        "Read the object again, then decide.",
    ),
    Code.CURSOR_EXPIRED: ProblemType(
        410,
        "Position in the change feed expired",
        "The reader is unknown, fell too far behind, did not confirm in time, or has read changes that the database "
        "lacks.",
        "Drop everything in memory and start again without `after`.",
    ),
    Code.IDEMPOTENCY_KEY_MISSING: ProblemType(
        400,
        "Idempotency-Key missing",
        "A request that creates something has no Idempotency-Key.",
        "Send 1 to 255 printable ASCII characters: a new key for each operation, the same key for its retries.",
    ),
    Code.IDEMPOTENCY_IN_PROGRESS: ProblemType(
        409,
        "Still in progress",
        "The first request with this Idempotency-Key is still in progress.",
        "Wait for Retry-After, then send the same request again.",
    ),
    Code.IDEMPOTENCY_BODY_MISMATCH: ProblemType(
        422,
        "Another body under the same Idempotency-Key",
        "This Idempotency-Key was used with another body in the last 24 hours.",
        "Retry with the original body, or use a new key for a new operation.",
    ),
    Code.DEPENDENCY_UNAVAILABLE: ProblemType(
        503,
        "Dependency unavailable",
        "A required server does not respond, or this server is at capacity.",
        "Wait for Retry-After and try again.",
    ),
    Code.INTERNAL_ERROR: ProblemType(
        500,
        "Internal error",
        "An unexpected error occurred in the service.",
        "Report the request_id to support.",
    ),
}


_TRY_AGAIN = frozenset(
    {Code.RATE_LIMITED, Code.VERIFIER_STALE, Code.DEPENDENCY_UNAVAILABLE, Code.IDEMPOTENCY_IN_PROGRESS}
)
"""Codes whose responses always have a Retry-After."""


@dataclass(frozen=True, slots=True)
class Problem:
    """An error response: status, headers, and the body of `application/problem+json`."""

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
    """Build the response for a code. `errors` lists the `faults`; Retry-After is whole seconds, at least 1."""
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
    if retry_after_seconds is None and code in _TRY_AGAIN:
        retry_after_seconds = 1
    if retry_after_seconds is not None:
        headers["Retry-After"] = str(max(1, retry_after_seconds))
    return Problem(kind.status, headers, body)


def problems_page() -> str:
    """Return docs/errors.md: all codes, in the order in which a request is checked."""
    lines = [
        "# Errors",
        "",
        "Every error is `application/problem+json` (RFC 9457) with `status`, `code`, `detail` and `request_id`. Report",
        "the `request_id` to support. `check` is the number of a checklist item. Check it before a retry:",
        "",
        "1. The credential is in the documented header.",
        "2. The key belongs to this environment and merchant.",
        "3. The endpoint supports what was sent.",
        "4. Neither the key nor the customer access token has expired or been revoked.",
        "5. The merchant, store or customer context is present.",
        "",
        "Do not retry an authorization error indefinitely. `make errors` prints this page.",
        "",
        "| status | code | check | cause | remedy |",
        "|---|---|---|---|---|",
    ]
    for code, kind in PROBLEM_TYPES.items():
        lines.append(f"| {kind.status} | `{code}` | {kind.check or ''} | {kind.cause} | {kind.remedy} |")
    return "\n".join(lines)
