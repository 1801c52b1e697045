"""HTTP mapping of error codes: status, title and body (RFC 9457), and the challenge of a 401 (RFC 9110, 11.6.1).

`check` is the number of the checklist item in ERRORS.md that a client works through before a retry.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keyvault.domain.canonical import JsonValue
from keyvault.domain.errors import ErrorCode as Code
from keyvault.domain.errors import Fault

CONTENT_TYPE = "application/problem+json"


@dataclass(frozen=True, slots=True)
class ProblemType:
    """The description of one error code. `cure`: what the client does about it; `check`, `challenge`: see above."""

    status: int
    title: str
    cause: str
    cure: str
    check: int | None = None
    challenge: str | None = None


_KEY = 'ApiKey realm="keyvault", header="X-Api-Key"'
_BEARER = 'Bearer realm="keyvault"'
_INVALID_TOKEN = f'{_BEARER}, error="invalid_token"'

PROBLEM_TYPES: dict[Code, ProblemType] = {
    Code.CREDENTIAL_IN_URL: ProblemType(
        400,
        "Credential in the URL",
        "Something shaped like a key string stands in the path or the query, where logs and proxies keep it.",
        "Send it in its header, and have this one rotated.",
        1,
    ),
    Code.CREDENTIAL_AMBIGUOUS: ProblemType(
        400,
        "Ambiguous credential",
        "X-Api-Key or Authorization came more than once, or holds a comma.",
        "Send each header once, with one credential.",
        1,
    ),
    Code.CREDENTIAL_MISSING: ProblemType(
        401,
        "Credential missing",
        "The request has no X-Api-Key header. A customer access token alone never replaces it.",
        "Send the API key in X-Api-Key.",
        1,
        _KEY,
    ),
    Code.CREDENTIAL_INVALID: ProblemType(
        401,
        "Credential invalid",
        "The string is malformed, mistyped, unknown or not an API key; which of these is not told.",
        "Compare it with what the secrets manager holds. Do not try again with the same string.",
        1,
        _KEY,
    ),
    Code.ENVIRONMENT_MISMATCH: ProblemType(
        401,
        "Wrong environment",
        "The key is one of the other environment's.",
        "Send it to that environment's base URL, which the detail names, or use this environment's key.",
        2,
        _KEY,
    ),
    Code.KEY_NOT_ACTIVE: ProblemType(
        401,
        "Key not active",
        "The key is not active yet, or is suspended; a rotation's old key is suspended before it is revoked.",
        "Use the replacement where there is one; else ask the technical account manager.",
        4,
        _KEY,
    ),
    Code.KEY_EXPIRED: ProblemType(
        401, "Key expired", "The key's expiry has passed.", "Use the key's replacement, or ask for one.", 4, _KEY
    ),
    Code.KEY_REVOKED: ProblemType(
        401,
        "Key revoked",
        "The key was revoked, reported as compromised, or destroyed. That is for ever.",
        "Use the key's replacement, or ask for one.",
        4,
        _KEY,
    ),
    Code.MERCHANT_MISMATCH: ProblemType(
        403,
        "Wrong merchant",
        "The request names another merchant than the one that the key was issued for.",
        "Use the key of the merchant that the request is about.",
        2,
    ),
    Code.MERCHANT_SUSPENDED: ProblemType(
        403,
        "Merchant suspended",
        "The merchant, or its account in this environment, is suspended.",
        "Ask the technical account manager; trying again does not help.",
        5,
    ),
    Code.ENDPOINT_UNKNOWN: ProblemType(
        404,
        "Endpoint unknown",
        "The endpoint catalog has no such endpoint. A path that could be read in two ways (escapes, `..`, `;`, `//`) "
        "is none.",
        "Compare method and path with the catalog; paths are case-sensitive.",
        3,
    ),
    Code.METHOD_NOT_ALLOWED: ProblemType(
        405, "Method not allowed", "The path is known, but not with this method.", "Use a method that Allow lists.", 3
    ),
    Code.METHOD_NOT_SUPPORTED: ProblemType(
        403,
        "Authorization method not supported",
        "The endpoint takes the other kind of API key.",
        "Public keys start flows in a browser or an app, private keys belong to a backend: send the endpoint's kind.",
        3,
    ),
    Code.BEARER_NOT_SUPPORTED: ProblemType(
        401,
        "Bearer not supported",
        "Authorization was sent to an endpoint that does not document it.",
        "Leave Authorization out.",
        3,
        _KEY,
    ),
    Code.PRIVATE_KEY_IN_BROWSER: ProblemType(
        403,
        "Private key in a browser",
        "A private key came with an Origin header, so that a browser may hold it. It is noted as suspected exposure.",
        "Call from a backend. One that forwards Origin strips it, or has its credential set to report only.",
        3,
    ),
    Code.IP_NOT_ALLOWED: ProblemType(
        403,
        "Address not allowed",
        "The client's address is outside the credential's list, or is not known although there is a list.",
        "Call from a listed network, or have the list changed by an operator.",
        5,
    ),
    Code.CONTEXT_MISSING: ProblemType(
        403,
        "Context missing",
        "The endpoint needs a merchant or store context that the request does not carry.",
        "Send the header or the path variable that the endpoint's authorization panel names.",
        5,
    ),
    Code.CUSTOMER_TOKEN_MISSING: ProblemType(
        401,
        "Customer access token missing",
        "The endpoint needs a signed-in customer.",
        "Send the customer access token as Authorization: Bearer, beside the private key.",
        5,
        _BEARER,
    ),
    Code.CUSTOMER_TOKEN_INVALID: ProblemType(
        401,
        "Customer access token invalid",
        "It is malformed, unknown, or another merchant's or environment's; which of these is not told.",
        "Issue a new one for the customer.",
        5,
        _INVALID_TOKEN,
    ),
    Code.CUSTOMER_TOKEN_EXPIRED: ProblemType(
        401,
        "Customer access token expired",
        "Its lifetime, 15 minutes unless asked otherwise, is over.",
        "Issue a new one for the customer.",
        4,
        _INVALID_TOKEN,
    ),
    Code.CUSTOMER_TOKEN_REVOKED: ProblemType(
        401,
        "Customer access token revoked",
        "The merchant has revoked it.",
        "Issue a new one if the customer signs in again.",
        4,
        _INVALID_TOKEN,
    ),
    Code.RATE_LIMITED: ProblemType(
        429,
        "Rate limited",
        "The account's or the endpoint's limit is used up, or a key that was revoked already is revoked by its holder "
        "again and again; RateLimit-Policy and RateLimit say which.",
        "Wait as long as Retry-After says, then go on slower. A payment attempt is retried with its own "
        "Idempotency-Key and body.",
    ),
    Code.VERIFIER_STALE: ProblemType(
        503,
        "Verifier stale",
        "The verifier cannot vouch for what it knows of the key right now, so it says neither yes nor no.",
        "Wait as long as Retry-After says and send the same request again.",
    ),
    Code.SERVICE_TOKEN_INVALID: ProblemType(
        401,
        "Service token missing or invalid",
        "The service plane was called without a valid service token: it is missing, unknown, expired or revoked.",
        "Send a service token as Authorization: Bearer (forward-auth: X-Service-Token). An API key or an admin session "
        "opens nothing here.",
        1,
        _BEARER,
    ),
    Code.PERMISSION_MISSING: ProblemType(
        403,
        "Permission missing",
        "The service token or the operator may not do this, or not in this environment.",
        "Use one that has the permission which the detail names.",
    ),
    Code.NOT_FOUND: ProblemType(
        404, "Not found", "There is no such thing, or it is somebody else's: the same answer.", "Check the id."
    ),
    Code.REQUEST_INVALID: ProblemType(
        400,
        "Request invalid",
        "The body, the query or a header does not fit; `errors` lists each fault with a JSON Pointer.",
        "Mend what is listed. Unknown fields are faults too.",
    ),
    Code.URI_TOO_LONG: ProblemType(
        414,
        "URI too long",
        "Path and query together are longer than 8 KiB.",
        "Ask for less at once; no endpoint needs as much.",
    ),
    Code.PAYLOAD_TOO_LARGE: ProblemType(
        413, "Payload too large", "The body is larger than 64 KiB.", "Send less; no endpoint needs as much."
    ),
    Code.REQUEST_TIMEOUT: ProblemType(
        408,
        "Request timeout",
        "The body did not arrive within 10 seconds. Nothing was done.",
        "Send the request again, with the whole body at once; the connection is closed.",
    ),
    Code.MEDIA_TYPE_UNSUPPORTED: ProblemType(
        415, "Media type unsupported", "The body is not application/json.", "Send JSON, and say so in Content-Type."
    ),
    Code.STATE_CONFLICT: ProblemType(
        409,
        "Conflict with the present state",
        "The request is right, the moment is not: something was done already, or takes a second person.",
        "Read the thing again, then decide.",
    ),
    Code.IDEMPOTENCY_KEY_MISSING: ProblemType(
        400,
        "Idempotency-Key missing",
        "A request that creates something came without an Idempotency-Key.",
        "Send 1 to 255 printable ASCII characters, new for each attempt's intent and the same for its retries.",
    ),
    Code.IDEMPOTENCY_IN_PROGRESS: ProblemType(
        409,
        "Still in progress",
        "The first request with this Idempotency-Key is still at work.",
        "Wait as long as Retry-After says, then send the same again.",
    ),
    Code.IDEMPOTENCY_BODY_MISMATCH: ProblemType(
        422,
        "Another body under the same Idempotency-Key",
        "This Idempotency-Key was used with another body in the last 24 hours.",
        "Retry with the original body, or use a new key for a new intent.",
    ),
    Code.DEPENDENCY_UNAVAILABLE: ProblemType(
        503,
        "Dependency unavailable",
        "A server that is needed for this does not answer, or this one has as many requests as it can take.",
        "Wait as long as Retry-After says and try again.",
    ),
    Code.INTERNAL_ERROR: ProblemType(
        500,
        "Internal error",
        "Something went wrong on our side. No input reaches this on purpose.",
        "Give the request_id to support.",
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
    """Return ERRORS.md: all codes, in the order in which a request is checked."""
    lines = [
        "# Errors",
        "",
        "Every error is `application/problem+json` (RFC 9457) with `status`, `code`, `detail` and `request_id`; give",
        "the last to support. `check` is the number of what to go through before trying again: (1) the credential is",
        "in the documented header; (2) the key belongs to this environment and merchant; (3) the endpoint supports",
        "what was sent; (4) neither key nor customer access token has expired or been revoked; (5) merchant, store or",
        "customer context is there. An authorization error is not retried for ever. This page is `make errors`.",
        "",
        "| status | code | check | cause | cure |",
        "|---|---|---|---|---|",
    ]
    for code, kind in PROBLEM_TYPES.items():
        lines.append(f"| {kind.status} | `{code}` | {kind.check or ''} | {kind.cause} | {kind.cure} |")
    return "\n".join(lines)
