"""Forward-auth protocols: how each gateway describes the original request, and how it receives the verdict.

Each route has one dialect. A dialect reads only its own headers and ignores any others that a client sent.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import urlsplit

from keyvault.access.customers import Customer
from keyvault.access.principals import KeyHolder
from keyvault.wire.headers import client_address

SERVICE_TOKEN = "X-Service-Token"  # noqa: S105  a header's name
"""Header of the gateway's own credential, because Authorization carries the client's."""

AUTH_STATUS = "X-Auth-Status"
AUTH_CODE = "X-Auth-Code"

ENVOY_ADDRESS = "X-Envoy-External-Address"
"""Envoy's header of the client address. Its ext_authz appends Envoy's own address to X-Forwarded-For
(envoyproxy/envoy#21519)."""


class Dialect(StrEnum):
    TRAEFIK = "traefik"
    NGINX = "nginx"
    ENVOY = "envoy"


@dataclass(frozen=True, slots=True)
class Names:
    """Header names of a dialect. The gateway wrote only the right-most entry of `address`."""

    method: str
    uri: str
    host: str
    address: str


NAMES = {
    Dialect.TRAEFIK: Names("X-Forwarded-Method", "X-Forwarded-Uri", "X-Forwarded-Host", "X-Forwarded-For"),
    Dialect.NGINX: Names("X-Original-Method", "X-Original-URI", "X-Original-Host", "X-Original-Address"),
}
"""Header names by dialect. Envoy needs none: it sends the client's own method, path and Host."""


@dataclass(frozen=True, slots=True)
class Forwarded:
    """The client's request as the gateway reports it. `address` None: no trusted address."""

    method: str
    uri: str
    host: str
    address: str | None

    @property
    def hostname(self) -> str:
        """The host in lower case without port and trailing dot; "" if it cannot be parsed."""
        try:
            return (urlsplit(f"//{self.host}").hostname or "").removesuffix(".")
        except ValueError:
            return ""


@dataclass(frozen=True, slots=True)
class HeaderFault:
    """A required header is missing or repeated: the gateway is not configured like its sample."""

    header: str


def read_forwarded(names: Names, headers: Mapping[str, str]) -> Forwarded | HeaderFault:
    """Read the original request from the gateway's headers. A comma in the URI is valid: clients may send one."""
    method, uri, host = (headers.get(name, "") for name in (names.method, names.uri, names.host))
    if method == "" or "," in method:
        return HeaderFault(names.method)
    if not uri.startswith("/"):
        return HeaderFault(names.uri)
    if "," in host:
        return HeaderFault(names.host)
    return Forwarded(method, uri, host, last_address(headers.get(names.address)))


def last_address(addresses: str | None) -> str | None:
    """Return the right-most entry, which the gateway observed. The client may have sent all others."""
    return client_address(None, addresses, 1)


def identity_headers(holder: KeyHolder, customer: Customer | None, request_id: str) -> dict[str, str]:
    """Return the identity headers for the upstream. Always all of them, to overwrite a client's forged copies."""
    return {
        "X-Merchant-Id": holder.merchant_id,
        "X-Environment": holder.environment.value,
        "X-Key-Id": holder.key_id,
        "X-Credential-Id": holder.credential_id,
        "X-Customer-Id": "" if customer is None else customer.customer_id,
        "X-Request-Id": request_id,
    }


_NGINX_PASSES = frozenset({200, 401, 403})


def nginx_status(status: int) -> int:
    """Map a status to one that nginx auth_request passes on; it turns any other into a 500."""
    return status if status in _NGINX_PASSES else 403
