"""WSGI middleware.

application = KeyvaultMiddleware(application, Verifier("https://keyvault.internal", "sandbox", token))
"""

from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

from keyvault_client.adapters.incoming import IDENTITY, AdapterOptions, ask_about, from_environ, identity_of
from keyvault_client.decisions import Decision, SyncVerifier

__all__ = ["KeyvaultMiddleware", "identity_of"]

Environ = dict[str, Any]
StartResponse = Callable[..., Any]
Application = Callable[[Environ, StartResponse], Iterable[bytes]]


class KeyvaultMiddleware:
    """Calls the application only for allowed requests. Wrap the whole application with it."""

    def __init__(self, application: Application, verifier: SyncVerifier, options: AdapterOptions | None = None) -> None:
        self._application = application
        self._verifier = verifier
        self._options = options or AdapterOptions()

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        environ.pop(IDENTITY, None)
        decision = self._verifier.verify(ask_about(from_environ(environ), self._options, environ))
        if decision.identity is None:
            headers = [*decision.headers, ("Content-Length", str(len(decision.body)))]
            start_response(status_line(decision.status), headers)
            return [decision.body]
        environ[IDENTITY] = decision.identity

        def start(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            return start_response(status, [*missing_headers(decision, (name for name, _ in headers)), *headers], *rest)

        return self._application(environ, start)


def status_line(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return f"{status} Refused"


def missing_headers(decision: Decision, names: Iterable[str]) -> list[tuple[str, str]]:
    """Return the decision's headers that the response does not have."""
    present = {name.lower() for name in names}
    return [(name, value) for name, value in decision.headers if name.lower() not in present]
