"""Passkeys (WebAuthn): registration and authentication by allauth, with the challenge in the session of the request.

allauth reads the request from the context that its middleware sets.
"""

import json
import re
import struct
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import urlsplit

from allauth.mfa.models import Authenticator
from allauth.mfa.webauthn.internal import auth
from django.conf import settings
from django.core.exceptions import ValidationError
from django.http.request import split_domain_port
from fido2 import cbor
from fido2.cose import UnsupportedKey
from fido2.utils import websafe_decode

from keyvault.models import Operator
from keyvault.services.sessions.second_factors import PASSKEY, NewFactor

_MALFORMED = (
    *(ValidationError, ValueError, TypeError, LookupError, AttributeError),
    *(ArithmeticError, RecursionError, struct.error),
)
"""Errors of allauth and fido2 for a response that is wrong, or no response at all."""

_BASE64URL: Final = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)


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
        read = _read_response(credential, "attestationObject")
        attestation: Any = cbor.decode(websafe_decode(read["response"]["attestationObject"]))
        _require_bytes(attestation["authData"])
        response = auth.parse_registration_response(read)
        passkey = response.response.attestation_object.auth_data.credential_data
        if passkey is None or isinstance(passkey.public_key, UnsupportedKey):
            return None
        auth.complete_registration(response)
    except _MALFORMED:
        return None
    return NewFactor(PASSKEY, {"name": name, "credential": read})


def begin_authentication(operator: Operator) -> dict[str, Any]:
    """Return the options for the browser, as JSON values."""
    return dict(auth.begin_authentication(operator))


def verifier_of(operator: Operator, response: Any) -> Callable[[], Authenticator | None]:
    """Return a function that verifies the response of the browser. Each challenge is accepted once."""

    def verify() -> Authenticator | None:
        try:
            read = _read_response(response, "authenticatorData", "signature")
            return auth.complete_authentication(operator, auth.parse_authentication_response(read))
        except _MALFORMED:
            return None

    return verify


def _read_response(response: Any, *names: str) -> dict[str, Any]:
    """Return the members of a browser's response that fido2 verifies, all of them texts. Raises one of _MALFORMED.

    fido2 passes a value that is no text to `bytes`, which for a number allocates that many bytes.
    """
    parts = {name: _require_base64url(response["response"][name]) for name in ("clientDataJSON", *names)}
    _require_base64url(json.loads(websafe_decode(parts["clientDataJSON"]))["challenge"])
    return {**{name: _require_base64url(response[name]) for name in ("id", "rawId")}, "response": parts}


def _require_base64url(value: Any) -> str:
    if not isinstance(value, str) or _BASE64URL.fullmatch(value) is None:
        raise ValueError("no text in base64url")
    return value


def _require_bytes(value: Any) -> None:
    if not isinstance(value, bytes):
        raise TypeError("no bytes")


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
