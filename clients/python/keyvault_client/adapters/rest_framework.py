"""Django REST framework.

    # settings.py, with KEYVAULT_VERIFIER as in `adapters.django`, without its middleware
    REST_FRAMEWORK = {
        "DEFAULT_AUTHENTICATION_CLASSES": ["keyvault_client.adapters.rest_framework.KeyvaultAuthentication"],
        "DEFAULT_PERMISSION_CLASSES": ["keyvault_client.adapters.rest_framework.IsVerified"],
        "EXCEPTION_HANDLER": "keyvault_client.adapters.rest_framework.exception_handler",
    }

A view reads `request.auth`, an Identity. It may name its endpoint: `keyvault_endpoint = "orders.create"`.
"""

import json
from dataclasses import dataclass, replace
from typing import Any

from django.http import HttpResponseBase
from rest_framework.authentication import BaseAuthentication
from rest_framework.exceptions import APIException
from rest_framework.permissions import BasePermission
from rest_framework.request import Request

from keyvault_client.adapters.django import configured_options, configured_verifier, incoming_of, refusal_response
from keyvault_client.adapters.incoming import ask_about
from keyvault_client.decisions import Decision, Identity


@dataclass(frozen=True, slots=True)
class KeyvaultUser:
    """`request.user` of a verified request."""

    identity: Identity
    is_authenticated: bool = True
    is_anonymous: bool = False
    is_active: bool = True

    @property
    def pk(self) -> str:
        """The key id, which throttles and logs use as the user's name."""
        return self.identity.key_id

    def __str__(self) -> str:
        return self.identity.key_id


class RefusedRequest(APIException):
    """The answer to a refused request. Without `exception_handler` its media type is that of the renderer.

    `request_id`, `code` and `check`: as the exceptions of `keyvault_client.errors` have them.
    """

    def __init__(self, decision: Decision) -> None:
        super().__init__()
        self.decision = decision
        self.request_id, self.code, self.check = decision.request_id, decision.code, decision.check
        self.status_code = decision.status
        # The framework would turn the members of the problem document into texts.
        self.detail = json.loads(decision.body)
        self.auth_header = decision.header("WWW-Authenticate")
        retry_after = decision.header("Retry-After") or ""
        self.wait = int(retry_after) if retry_after.isdecimal() else None


class KeyvaultAuthentication(BaseAuthentication):
    """Asks about each request, also about one without a key: only the service knows what the endpoint requires."""

    def authenticate(self, request: Request) -> tuple[Any, Any]:
        # The view is known after the request was routed, and before it is authenticated.
        view = (request.parser_context or {}).get("view")
        options = configured_options()
        endpoint = getattr(view, "keyvault_endpoint", None)
        if endpoint is not None:
            options = replace(options, endpoint=endpoint)
        decision = configured_verifier().verify(ask_about(incoming_of(request._request), options, request))
        if decision.identity is None:
            raise RefusedRequest(decision)
        return KeyvaultUser(decision.identity), decision.identity


class IsVerified(BasePermission):
    """Allows only requests that KeyvaultAuthentication has verified."""

    def has_permission(self, request: Request, view: Any) -> bool:
        return isinstance(request.auth, Identity)


def exception_handler(exception: Exception, context: dict[str, Any]) -> HttpResponseBase | None:
    """Answer a refused request with the service's problem document, and other exceptions as the framework does."""
    if isinstance(exception, RefusedRequest):
        return refusal_response(exception.decision)
    # `rest_framework.views` imports this module when the settings name it.
    from rest_framework.views import exception_handler as default_exception_handler

    return default_exception_handler(exception, context)
