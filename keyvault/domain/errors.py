"""Every error code of the service, and the exceptions that carry one.

A verdict (may this key do that?) is a value, see `access.decision`; an exception is for a request that
cannot be carried out or for broken machinery. Statuses and bodies are HTTP and live in `wire.problems`.

    KeyvaultError
    ├── RequestInvalidError         what was asked is malformed; lists each fault
    ├── NotFoundError               absent, or somebody else's: the same answer
    ├── PermissionMissingError      a proven caller who may not do this
    ├── StateConflictError          right request, wrong moment (state, version, four eyes)
    ├── IdempotencyError            the same Idempotency-Key again: unusable, at work, or with another body
    ├── DependencyUnavailableError  a server that we need did not answer; try again
    │   └── VerifierStaleError      this process does not know yet what the key was hashed with; try again
    ├── RateLimitedError            too often; see `access.limits`
    └── IntegrityError              stored data contradicts itself; stop rather than run wrong
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class ErrorCode(StrEnum):
    """Stable for ever: clients branch on these."""

    CREDENTIAL_IN_URL = "credential_in_url"
    CREDENTIAL_AMBIGUOUS = "credential_ambiguous"
    CREDENTIAL_MISSING = "credential_missing"
    CREDENTIAL_INVALID = "credential_invalid"
    ENVIRONMENT_MISMATCH = "environment_mismatch"
    KEY_NOT_ACTIVE = "key_not_active"
    KEY_EXPIRED = "key_expired"
    KEY_REVOKED = "key_revoked"
    MERCHANT_MISMATCH = "merchant_mismatch"
    MERCHANT_SUSPENDED = "merchant_suspended"
    ENDPOINT_UNKNOWN = "endpoint_unknown"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    METHOD_NOT_SUPPORTED = "method_not_supported"
    BEARER_NOT_SUPPORTED = "bearer_not_supported"
    PRIVATE_KEY_IN_BROWSER = "private_key_in_browser"
    IP_NOT_ALLOWED = "ip_not_allowed"
    CONTEXT_MISSING = "context_missing"
    CUSTOMER_TOKEN_MISSING = "customer_token_missing"  # noqa: S105  a code, no secret
    CUSTOMER_TOKEN_INVALID = "customer_token_invalid"  # noqa: S105  a code, no secret
    CUSTOMER_TOKEN_EXPIRED = "customer_token_expired"  # noqa: S105  a code, no secret
    CUSTOMER_TOKEN_REVOKED = "customer_token_revoked"  # noqa: S105  a code, no secret
    RATE_LIMITED = "rate_limited"
    VERIFIER_STALE = "verifier_stale"
    SERVICE_TOKEN_INVALID = "service_token_invalid"  # noqa: S105  a code, no secret
    PERMISSION_MISSING = "permission_missing"
    NOT_FOUND = "not_found"
    REQUEST_INVALID = "request_invalid"
    URI_TOO_LONG = "uri_too_long"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    REQUEST_TIMEOUT = "request_timeout"
    MEDIA_TYPE_UNSUPPORTED = "media_type_unsupported"
    STATE_CONFLICT = "state_conflict"
    IDEMPOTENCY_KEY_MISSING = "idempotency_key_missing"
    IDEMPOTENCY_IN_PROGRESS = "idempotency_in_progress"
    IDEMPOTENCY_BODY_MISMATCH = "idempotency_body_mismatch"
    DEPENDENCY_UNAVAILABLE = "dependency_unavailable"
    INTERNAL_ERROR = "internal_error"


class KeyvaultError(Exception):
    """The root; never raised itself. `detail` is for the caller, `internal` for the log only."""

    code: ErrorCode = ErrorCode.INTERNAL_ERROR

    def __init__(self, detail: str, *, internal: str = "") -> None:
        super().__init__(detail)
        self.detail = detail
        self.internal = internal


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a request: `pointer` is a JSON Pointer (RFC 6901) into its body."""

    pointer: str
    detail: str


class RequestInvalidError(KeyvaultError):
    code = ErrorCode.REQUEST_INVALID

    def __init__(self, detail: str, faults: Sequence[Fault] = ()) -> None:
        super().__init__(detail)
        self.faults = tuple(faults)


ABSENT = "There is no such thing, or it is not yours to see."
"""One text for both, so that nothing can be told from it."""


class NotFoundError(KeyvaultError):
    code = ErrorCode.NOT_FOUND

    def __init__(self, detail: str = ABSENT, *, internal: str = "") -> None:
        super().__init__(detail, internal=internal)


class PermissionMissingError(KeyvaultError):
    code = ErrorCode.PERMISSION_MISSING


class StateConflictError(KeyvaultError):
    code = ErrorCode.STATE_CONFLICT


class IdempotencyError(KeyvaultError):
    """`code` is one of the three idempotency codes. `retry_after_seconds` while the first attempt is at work."""

    def __init__(self, code: ErrorCode, detail: str, *, retry_after_seconds: int | None = None) -> None:
        super().__init__(detail)
        self.code = code
        self.retry_after_seconds = retry_after_seconds


class DependencyUnavailableError(KeyvaultError):
    code = ErrorCode.DEPENDENCY_UNAVAILABLE

    def __init__(self, detail: str, *, internal: str = "", retry_after_seconds: int = 1) -> None:
        super().__init__(detail, internal=internal)
        self.retry_after_seconds = retry_after_seconds


class VerifierStaleError(DependencyUnavailableError):
    code = ErrorCode.VERIFIER_STALE


class IntegrityError(KeyvaultError):
    code = ErrorCode.INTERNAL_ERROR
