"""Exceptions of the client.

    KeyvaultError
    ├── RefusedError               the client refused before it sent anything
    ├── KeySourceError             the key source returned no key
    ├── NoAnswerError              no complete answer: no connection, a cut connection
    │   └── DeadlineError          no complete answer before the deadline
    ├── AnswerError                the service answered, but not with a readable success
    │   ├── InvalidRequestError    400 and other 4xx: the request must change
    │   ├── AuthenticationError    401: the key or the customer access token
    │   ├── PermissionDeniedError  403
    │   ├── NotFoundError          404
    │   ├── ConflictError          409 and 422: the state, or the Idempotency-Key
    │   ├── RateLimitedError       429
    │   ├── UnavailableError       5xx
    │   └── UnexpectedAnswerError  redirects, and a success that is not readable
    ├── WebhookError
    │   ├── WebhookSignatureError  the message is not from the service, or too old
    │   └── WebhookSecretError     the receiver's secrets are not valid
    ├── SealedError                the sealed key cannot be opened with this private key
    └── CommandFailedError         the command of the rotate-agent failed

All have `request_id`, `code` and `check`, which are None where the service gave none. No exception contains a key.
"""

import re

_CODE = re.compile(r"[a-z_]{1,64}")


class KeyvaultError(Exception):
    """Root of all exceptions of this package.

    Attributes:
        status: HTTP status of the answer, or None without one.
        code: error code, such as `key_revoked`.
        check: number of the item in the error checklist.
        request_id: name of the request in the service's logs. Report it to support.
        retry_after_seconds: minimum wait that the answer asks for, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        code: str | None = None,
        check: int | None = None,
        request_id: str | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.check = check
        self.request_id = request_id
        self.retry_after_seconds = retry_after_seconds


class RefusedError(KeyvaultError):
    """The client refused to send. `refusal`: what is wrong, such as `base_url`, `environment`, `key` or `path`."""

    def __init__(self, message: str, *, refusal: str = "") -> None:
        super().__init__(message)
        self.refusal = refusal


class KeySourceError(KeyvaultError):
    """The key source returned no key, see `__cause__`."""


class NoAnswerError(KeyvaultError):
    """There is no complete answer. The service may have processed the request: repeat it with its Idempotency-Key."""


class DeadlineError(NoAnswerError):
    """There was no complete answer before the deadline."""


class AnswerError(KeyvaultError):
    """The service answered, but not with a readable success."""


class InvalidRequestError(AnswerError):
    """The request must change."""


class AuthenticationError(AnswerError):
    """The API key or the customer access token was not accepted."""


class PermissionDeniedError(AnswerError):
    """The key is valid, and the request is not allowed with it."""


class NotFoundError(AnswerError):
    """The object is absent, or belongs to another merchant or environment."""


class ConflictError(AnswerError):
    """The state does not allow the request, or the Idempotency-Key belongs to another body."""


class RateLimitedError(AnswerError):
    """The limit of the account or the endpoint is exhausted."""


class UnavailableError(AnswerError):
    """The service, or a proxy in front of it, cannot answer now."""


class UnexpectedAnswerError(AnswerError):
    """A redirect, which is never followed, or a success that is not readable."""


class WebhookError(KeyvaultError):
    """A webhook message was not verified."""


class WebhookSignatureError(WebhookError):
    """The message is not from the service, or too old. Answer 401."""


class WebhookSecretError(WebhookError):
    """The receiver's own secrets are not valid."""


class SealedError(KeyvaultError):
    """The text was changed, or sealed to another recipient key."""


class CommandFailedError(KeyvaultError):
    """The command of `--exec` failed. The key file has the replacement; the agent runs the command again."""


_BY_STATUS: dict[int, type[AnswerError]] = {
    401: AuthenticationError,
    403: PermissionDeniedError,
    404: NotFoundError,
    409: ConflictError,
    422: ConflictError,
    429: RateLimitedError,
}


def answer_error(
    status: int, code: str | None, check: int | None, request_id: str | None, retry_after_seconds: float | None
) -> AnswerError:
    """Return the exception for an answer that is no success."""
    if status in _BY_STATUS:
        kind = _BY_STATUS[status]
    elif 400 <= status < 500:
        kind = InvalidRequestError
    elif status >= 500:
        kind = UnavailableError
    else:
        kind = UnexpectedAnswerError
    return kind(
        f"{status} {printable_code(code)}, request_id {request_id!a:.80}",
        status=status,
        code=code,
        check=check,
        request_id=request_id,
        retry_after_seconds=retry_after_seconds,
    )


def printable_code(code: str | None) -> str:
    """Return an error code for a log line. An answer of another server may contain anything."""
    return code if code is not None and _CODE.fullmatch(code) else "without a code"
