"""Signed cookies of the devices on which an operator has signed in (OWASP, "Device Cookies")."""

import secrets
from dataclasses import dataclass
from datetime import timedelta

from django.core import signing
from django.utils.crypto import constant_time_compare, salted_hmac

from keyvault.models import Operator

DEVICE_LIFETIME = timedelta(days=90)
"""Lifetime of a device cookie after the device's last sign-in."""

_SALT = "keyvault.services.sessions.devices"


@dataclass(frozen=True, slots=True)
class KnownDevice:
    """A device on which the operator has signed in, and the address of its last sign-in; None: unknown."""

    name: str
    address: str | None


def write_device(row: Operator, device: KnownDevice | None, address: str | None) -> str:
    """Return the cookie of a device after a sign-in from the address; None: of a new device."""
    name = secrets.token_urlsafe(12) if device is None else device.name
    claims = {"operator": row.pk, "device": name, "address": address, "bound": _binding(row)}
    return signing.dumps(claims, salt=_SALT)


def read_device(row: Operator, cookie: str) -> KnownDevice | None:
    """Return the device in the cookie. None: forged, expired, another operator's, or from before a password change."""
    if not row.is_active:
        return None
    try:
        claims = signing.loads(cookie, salt=_SALT, max_age=DEVICE_LIFETIME)
    except signing.BadSignature:
        return None
    if claims["operator"] != row.pk or not constant_time_compare(claims["bound"], _binding(row)):
        return None
    return KnownDevice(claims["device"], claims["address"])


def _binding(row: Operator) -> str:
    """Return a digest that binds the cookie to the operator's password and version, as Django binds sessions."""
    return salted_hmac(_SALT, row.get_session_auth_hash(), algorithm="sha256").hexdigest()[:32]
