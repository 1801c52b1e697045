"""Passkeys (WebAuthn): registration and authentication by allauth, with the challenge in the session of the request.

allauth reads the request from the context that its middleware sets.
"""

import struct
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from allauth.mfa.models import Authenticator
from allauth.mfa.webauthn.internal import auth
from django.conf import settings
from django.core.exceptions import ValidationError
from django.http.request import split_domain_port

from keyvault.models import Operator
from keyvault.services.sessions.second_factors import PASSKEY, NewFactor

_MALFORMED = (
    *(ValidationError, ValueError, TypeError, LookupError, AttributeError),
    *(ArithmeticError, RecursionError, struct.error),
)
"""Errors of allauth and fido2 for a response that is wrong, or no response at all."""


def are_passkeys_possible(host: str) -> bool:
    """Whether browsers allow our passkeys on a page of this host: a domain, with https except on localhost."""
    parts = urlsplit(settings.CONSOLE_ORIGIN)
    ours = parts.hostname or ""
    is_domain = not _is_address(ours) and (parts.scheme == "https" or ours == "localhost")
    return is_domain and split_domain_port(host)[0] == ours


def begin_registration(operator: Operator) -> dict[str, Any]:
    """Return the options for the browser, as JSON values."""
    return dict(auth.begin_registration(operator, False))


def complete_registration(credential: Any, name: str) -> NewFactor | None:
    """Return the new passkey; None: the response of the browser is wrong."""
    try:
        auth.complete_registration(auth.parse_registration_response(credential))
    except _MALFORMED:
        return None
    return NewFactor(PASSKEY, {"name": name, "credential": credential})


def begin_authentication(operator: Operator) -> dict[str, Any]:
    """Return the options for the browser, as JSON values."""
    return dict(auth.begin_authentication(operator))


def verifier_of(operator: Operator, response: Any) -> Callable[[], Authenticator | None]:
    """Return a function that verifies the response of the browser. Each challenge is accepted once."""

    def verify() -> Authenticator | None:
        try:
            return auth.complete_authentication(operator, auth.parse_authentication_response(response))
        except _MALFORMED:
            return None

    return verify


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
