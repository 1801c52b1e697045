"""The error codes of the service, and the exceptions that carry them.

An authorization verdict is a value, see `access.decision`. An exception reports a request that cannot be carried
out, or a broken dependency. HTTP statuses and bodies are in `wire.problems`.

    KeyvaultError
    ├── RequestInvalidError         malformed request; lists each fault
    ├── NotFoundError               absent, or another merchant's: indistinguishable
    ├── PermissionMissingError      authenticated caller without the permission
    ├── StateConflictError          valid request that conflicts with the state, the version or four eyes
    ├── CursorExpiredError          a reader of the change feed that must start again with an empty memory
    ├── IdempotencyError            Idempotency-Key missing, in progress, or reused with another body
    ├── DependencyUnavailableError  a required server did not respond; retry
    │   └── VerifierStaleError      this process has not loaded the key's pepper version yet; retry
    ├── RateLimitedError            limit exceeded; see `access.limits`
    └── IntegrityError              stored data is inconsistent; the operation stops
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class ErrorCode(StrEnum):
    """Published error codes. Clients branch on them, so they never change."""

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
    CURSOR_EXPIRED = "cursor_expired"
    IDEMPOTENCY_KEY_MISSING = "idempotency_key_missing"
    IDEMPOTENCY_IN_PROGRESS = "idempotency_in_progress"
    IDEMPOTENCY_BODY_MISMATCH = "idempotency_body_mismatch"
    DEPENDENCY_UNAVAILABLE = "dependency_unavailable"
    INTERNAL_ERROR = "internal_error"


class KeyvaultError(Exception):
    """Base class; never raised itself. `detail` is for the caller, `internal` for the log only."""

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


ABSENT = "The object does not exist, or you have no access to it."
"""Detail of every 404. One text, so that a caller cannot tell absence from missing access."""


class NotFoundError(KeyvaultError):
    code = ErrorCode.NOT_FOUND

    def __init__(self, detail: str = ABSENT, *, internal: str = "") -> None:
        super().__init__(detail, internal=internal)


class PermissionMissingError(KeyvaultError):
    code = ErrorCode.PERMISSION_MISSING


class StateConflictError(KeyvaultError):
    code = ErrorCode.STATE_CONFLICT


class CursorExpiredError(KeyvaultError):
    code = ErrorCode.CURSOR_EXPIRED


class IdempotencyError(KeyvaultError):
    """`code` is one of the three idempotency codes. `retry_after_seconds` is set while the first attempt runs."""

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
