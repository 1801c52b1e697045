"""What an answer of the server means to us: a value, or one of the few errors of `backends.base`, status kept.

hvac's own exceptions carry no status, know no 412 and take a redirect for a success; so its adapter is given our own
reading of a reply. Text of the server is for the log; nothing that it echoes reaches a client.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import requests
from hvac.adapters import JSONAdapter

from keyvault.backends.base import (
    BackendConflictError,
    BackendDeniedError,
    BackendError,
    BackendInvalidError,
    BackendMissingError,
    BackendUnavailableError,
)

CONNECT_SECONDS: Final = 2.0
READ_SECONDS: Final = 5.0

_LONGEST_TEXT: Final = 200
_LEAST_SECRET: Final = 6
"""Characters: nothing shorter is a secret, and "1" is in many a sentence."""
_CONFLICT: Final = "check-and-set parameter did not match"
_NO_SUCH_LOGIN: Final = re.compile(r"invalid (role|secret)[ _]?id|invalid role or secret|role.*not found", re.I)
_RETRY_AFTER: Final = re.compile(r"[0-9]{1,6}")


class PlainAdapter(JSONAdapter):
    """hvac's adapter, but for what it makes of an answer that is no success, and of no answer at all.

    `seen` is told of every call: what came of it, in one word.
    """

    seen: Callable[[str], None] = staticmethod(lambda outcome: None)

    def request(self, *args: Any, **kwargs: Any) -> Any:
        """The answer's JSON object; the response itself where it has no body, or where the caller wants any status.

        Raises what `backends.base` knows.
        """
        try:
            answer = self._request(*args, **kwargs)
        except BackendError as error:
            self.seen(outcome_of(error))
            raise
        self.seen("ok")
        return answer

    def _request(self, *args: Any, **kwargs: Any) -> Any:
        try:
            answer = super().request(*args, **kwargs)
        except requests.exceptions.SSLError as error:
            raise BackendUnavailableError(
                "The secrets manager does not prove who it is.", internal=f"TLS: {type(error).__name__}"
            ) from None
        except (requests.exceptions.RequestException, OSError) as error:
            # The text of such an exception may hold the address, never a header or a body.
            raise BackendUnavailableError(
                "The secrets manager does not answer.", internal=f"{type(error).__name__}: {error}"[:_LONGEST_TEXT]
            ) from None
        if isinstance(answer, requests.Response) and 300 <= answer.status_code < 400:
            # hvac takes a 307 to another node for a success. The token is not sent after it.
            raise BackendUnavailableError(
                "The secrets manager's node is not the active one.",
                internal=f"{answer.status_code}: VAULT_ADDR names a node that redirects, or no Vault at all",
                status=answer.status_code,
            )
        if not isinstance(answer, dict) and getattr(answer, "status_code", 200) == 200:
            # A page of a proxy's. Whether the server got the request, it does not say.
            raise not_understood("a body that is no JSON object")
        return answer

    def _raise_for_error(self, method: str, url: str, response: requests.Response) -> None:
        raise read_failure(method, url, response)


def not_understood(what: str) -> BackendUnavailableError:
    """A success that does not say what we must know: as if there had been no answer."""
    return BackendUnavailableError("The secrets manager's answer cannot be understood.", internal=what, status=200)


@contextmanager
def understanding(what: str) -> Iterator[None]:
    """What is missing in an answer, or is of another kind than it should be, is an answer that is not understood."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise not_understood(f"{what}: {type(error).__name__}") from None


def outcome_of(error: BackendError) -> str:
    """`unavailable`, `denied`, `conflict`, `missing` or `invalid`."""
    kinds: dict[type[BackendError], str] = {
        BackendUnavailableError: "unavailable",
        BackendDeniedError: "denied",
        BackendConflictError: "conflict",
        BackendMissingError: "missing",
    }
    return next((word for kind, word in kinds.items() if isinstance(error, kind)), "invalid")


def read_failure(method: str, url: str, response: requests.Response) -> BackendError:
    """The error that a status of 400 or more means."""
    status, said = response.status_code, _errors(response)
    told = f"{method.upper()} {_path(url)}: {status} {said}"[:_LONGEST_TEXT].strip()
    if status == 400:
        if _CONFLICT in said:
            return BackendConflictError("The secret was written by somebody else meanwhile.", internal=told, status=400)
        if _NO_SUCH_LOGIN.search(said):
            return BackendDeniedError("The secrets manager does not know our login.", internal=told, status=400)
        return BackendInvalidError("The secrets manager does not accept the request.", internal=told, status=400)
    if status in {401, 403}:
        return BackendDeniedError("The secrets manager does not let us do that.", internal=told, status=status)
    if status == 404 and said:
        # A secret that is not there is a 404 without a word; one with words is a mount or an engine that is not.
        return BackendDeniedError("The secrets manager was not set up for this.", internal=told, status=404)
    if status == 404:
        return BackendMissingError("No readable secret is stored there.", internal=told, status=404)
    if status == 429 or status == 412 or status >= 500:
        return BackendUnavailableError(
            "The secrets manager cannot answer now.",
            internal=told,
            status=status,
            retry_after_seconds=_retry_after(response),
        )
    return BackendInvalidError("The secrets manager does not accept the request.", internal=told, status=status)


def _errors(response: requests.Response) -> str:
    """The server's own words, without what the request had that is nobody's business. A proxy's words are not told."""
    try:
        said = "; ".join(str(error).strip() for error in response.json().get("errors") or [])
    except (ValueError, AttributeError, TypeError):
        return f"not Vault's own answer, {len(response.content)} bytes"
    for text in _told_to(response.request):
        said = said.replace(text, "…")
    return said


def _told_to(request: requests.PreparedRequest) -> list[str]:
    """The token of a request and every text of its body, the longest first."""
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
    return sorted((text for text in texts if len(text) >= _LEAST_SECRET), key=len, reverse=True)


def _path(url: str) -> str:
    """What was asked, without the host."""
    return "/" + url.partition("//")[2].partition("/")[2].partition("?")[0]


def _retry_after(response: requests.Response) -> int:
    text = response.headers.get("Retry-After", "")
    return max(1, int(text)) if _RETRY_AFTER.fullmatch(text) else 1
