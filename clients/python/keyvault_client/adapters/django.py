"""Django middleware.

    # settings.py
    MIDDLEWARE = ["keyvault_client.adapters.django.KeyvaultMiddleware", …]
    KEYVAULT_VERIFIER = Verifier("https://keyvault.internal", "sandbox", token)
    KEYVAULT_OPTIONS = AdapterOptions(trusted_proxies=1)  # optional

A view reads `request.keyvault`, an Identity. Put the middleware first, so that nothing runs for a refused request.
"""

from collections.abc import Callable

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse, HttpResponseBase

from keyvault_client.adapters.incoming import AdapterOptions, Incoming, ask_about, from_environ, from_scope
from keyvault_client.decisions import Decision, SyncVerifier


class KeyvaultMiddleware:
    """Calls the view only for allowed requests. Under ASGI, Django runs it in a thread."""

    sync_capable, async_capable = True, False

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self._get_response = get_response
        self._verifier = configured_verifier()

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        decision = self._verifier.verify(ask_about(incoming_of(request), configured_options(), request))
        if decision.identity is None:
            return refusal_response(decision)
        request.keyvault = decision.identity  # type: ignore[attr-defined]  # as Django's own middleware adds `user`
        response = self._get_response(request)
        for name, value in decision.headers:
            response.headers.setdefault(name, value)
        return response


def configured_verifier() -> SyncVerifier:
    """Return the verifier of the settings. Raises ImproperlyConfigured without one."""
    verifier: SyncVerifier | None = getattr(settings, "KEYVAULT_VERIFIER", None)
    if verifier is None:
        raise ImproperlyConfigured("Set KEYVAULT_VERIFIER to a keyvault_client.Verifier.")
    return verifier


def configured_options() -> AdapterOptions:
    options: AdapterOptions = getattr(settings, "KEYVAULT_OPTIONS", None) or AdapterOptions()
    return options


def incoming_of(request: HttpRequest) -> Incoming:
    scope = getattr(request, "scope", None)
    return from_environ(request.META) if scope is None else from_scope(scope)


def refusal_response(decision: Decision) -> HttpResponse:
    return HttpResponse(decision.body, status=decision.status, headers=dict(decision.headers))
