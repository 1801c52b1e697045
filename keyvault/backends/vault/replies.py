"""Maps a reply of the server to a value or an error of `backends.base`, with its status.

hvac's adapter is replaced: its exceptions carry no status, it has none for 412, and it treats a redirect as a success.
The server's text is only logged; no client receives it.
"""

import json
import re
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any, Final

import requests
import urllib3
from hvac.adapters import JSONAdapter

from keyvault.backends.base import (
    BackendConflictError,
    BackendDeniedError,
    BackendError,
    BackendInvalidError,
    BackendMissingError,
    BackendUnavailableError,
)
from keyvault.wire.trace_context import TRACEPARENT, current_traceparent

CONNECT_SECONDS: Final = 2.0
READ_SECONDS: Final = 5.0

_MAX_TEXT_LENGTH: Final = 200
_MIN_SECRET_LENGTH: Final = 6
"""Minimum length of a masked text, in characters: shorter texts are no secrets and appear in ordinary sentences."""
_CONFLICT: Final = "check-and-set parameter did not match"
_SEALED: Final = "Vault is sealed"
_READS: Final = frozenset({"GET", "HEAD", "LIST"})
"""The methods that change nothing."""
_NO_SUCH_LOGIN: Final = re.compile(r"invalid (role|secret)[ _]?id|invalid role or secret|role.*not found", re.I)
_RETRY_AFTER: Final = re.compile(r"[0-9]{1,6}")


class PlainAdapter(JSONAdapter):
    """hvac's JSON adapter with our own handling of failed calls.

    `seen` is called with the outcome of every call, see `outcome_of`, and its duration in seconds.
    """

    seen: Callable[[str, float], None] = staticmethod(lambda outcome, seconds: None)

    def request(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return the reply's JSON object, or the response when it has no body or the caller accepts any status.

        Raises errors of `backends.base`.
        """
        begun_at = monotonic()
        try:
            answer = self._request(method, *args, **kwargs)
        except BackendError as error:
            if method.upper() in _READS:
                error.may_be_applied = False
            self.seen(outcome_of(error), monotonic() - begun_at)
            raise
        self.seen("ok", monotonic() - begun_at)
        return answer

    def _request(self, *args: Any, headers: dict[str, str] | None = None, **kwargs: Any) -> Any:
        if traceparent := current_traceparent():
            headers = {**(headers or {}), TRACEPARENT: traceparent}
        try:
            answer = super().request(*args, headers=headers, **kwargs)
        except requests.exceptions.SSLError as error:
            raise BackendUnavailableError(
                "The secrets manager's certificate is not trusted.",
                internal=f"TLS: {type(error).__name__}",
                may_be_applied=not _is_unsent(error),
            ) from None
        except (requests.exceptions.RequestException, OSError) as error:
            # The text of such an exception may contain the address, never a header or a body.
            raise BackendUnavailableError(
                "The secrets manager is unavailable.",
                internal=f"{type(error).__name__}: {error}"[:_MAX_TEXT_LENGTH],
                may_be_applied=not _is_unsent(error),
            ) from None
        if isinstance(answer, requests.Response) and 300 <= answer.status_code < 400:
            # hvac treats a 307 to another node as a success. The token is not sent to the other node.
            raise BackendUnavailableError(
                "The secrets manager's node is not the active one.",
                internal=f"{answer.status_code}: VAULT_ADDR is a node that redirects, or not a Vault",
                status=answer.status_code,
                # A standby also redirects after it lost the reply to a request that it had forwarded.
                may_be_applied=True,
            )
        if not isinstance(answer, dict) and getattr(answer, "status_code", 200) == 200:
            # A proxy's page: the server may or may not have received the request.
            raise invalid_reply_error("the body is not a JSON object", may_be_applied=True)
        return answer

    def _raise_for_error(self, method: str, url: str, response: requests.Response) -> None:
        raise read_failure(method, url, response)


def _is_unsent(error: Exception) -> bool:
    """Return whether the request was certainly not sent: there was no connection, or the certificate is not trusted."""
    reason = getattr(error.args[0] if error.args else None, "reason", None)
    if isinstance(reason, urllib3.exceptions.SSLError):
        # Other TLS errors may follow the request, for example while the reply is read.
        return any(isinstance(cause, ssl.SSLCertVerificationError) for cause in reason.args)
    return isinstance(reason, urllib3.exceptions.NewConnectionError | urllib3.exceptions.ConnectTimeoutError)


def invalid_reply_error(what: str, *, may_be_applied: bool) -> BackendUnavailableError:
    """Return the error for a success without the expected data, which is treated like a missing reply."""
    return BackendUnavailableError(
        "The secrets manager's response is not valid.", internal=what, status=200, may_be_applied=may_be_applied
    )


@contextmanager
def parsing_reply(what: str, *, may_be_applied: bool = False) -> Iterator[None]:
    """Convert errors about missing or wrong data in a reply. Raises BackendUnavailableError."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise invalid_reply_error(f"{what}: {type(error).__name__}", may_be_applied=may_be_applied) from None


def outcome_of(error: BackendError) -> str:
    """Return `unavailable`, `denied`, `conflict`, `missing` or `invalid`."""
    kinds: dict[type[BackendError], str] = {
        BackendUnavailableError: "unavailable",
        BackendDeniedError: "denied",
        BackendConflictError: "conflict",
        BackendMissingError: "missing",
    }
    return next((outcome for kind, outcome in kinds.items() if isinstance(error, kind)), "invalid")


def read_failure(method: str, url: str, response: requests.Response) -> BackendError:
    """Return the error for a status of 400 or more."""
    status, said = response.status_code, _errors(response)
    internal = f"{method.upper()} {_path(url)}: {status} {said}"[:_MAX_TEXT_LENGTH].strip()
    if status == 400:
        if _CONFLICT in said:
            return BackendConflictError("Another writer changed the secret meanwhile.", internal=internal, status=400)
        if _NO_SUCH_LOGIN.search(said):
            return BackendDeniedError("The secrets manager does not know our login.", internal=internal, status=400)
        return BackendInvalidError("The secrets manager does not accept the request.", internal=internal, status=400)
    if status in {401, 403}:
        return BackendDeniedError("The secrets manager denied access.", internal=internal, status=status)
    if status == 404 and said:
        # A 404 for a missing secret has no errors; one with errors is for a missing mount or engine.
        return BackendDeniedError("The secrets manager is not set up for this.", internal=internal, status=404)
    if status == 404:
        return BackendMissingError("No readable secret is stored there.", internal=internal, status=404)
    if status == 429 or status == 412 or status >= 500:
        return BackendUnavailableError(
            "The secrets manager is temporarily unavailable.",
            internal=internal,
            status=status,
            # The server rejects these before it carries them out. A 503 without its text may be a proxy's.
            may_be_applied=not (status in {412, 429} or (status == 503 and _SEALED in said)),
            retry_after_seconds=_retry_after(response),
        )
    return BackendInvalidError("The secrets manager does not accept the request.", internal=internal, status=status)


def _errors(response: requests.Response) -> str:
    """Return the server's error texts with the request's secrets masked; a proxy's text is omitted."""
    try:
        said = "; ".join(str(error).strip() for error in response.json().get("errors") or [])
    except (ValueError, AttributeError, TypeError):
        return f"not Vault's own answer, {len(response.content)} bytes"
    for text in _request_texts(response.request):
        said = said.replace(text, "…")
    return said


def _request_texts(request: requests.PreparedRequest) -> list[str]:
    """Return the token of a request and every text of its body, the longest first."""
    texts = [request.headers.get("X-Vault-Token") or ""]
    bodies: list[Any] = []
    with suppress(ValueError):
        bodies.append(json.loads(request.body or b"null"))
    while bodies:
        body = bodies.pop()
        if isinstance(body, dict):
            bodies += body.values()
        elif isinstance(body, list):
            bodies += body
        elif isinstance(body, str):
            texts.append(body)
    return sorted((text for text in texts if len(text) >= _MIN_SECRET_LENGTH), key=len, reverse=True)


def _path(url: str) -> str:
    """Return the path of the URL, without host and query."""
    return "/" + url.partition("//")[2].partition("/")[2].partition("?")[0]


def _retry_after(response: requests.Response) -> int:
    text = response.headers.get("Retry-After", "")
    return max(1, int(text)) if _RETRY_AFTER.fullmatch(text) else 1
