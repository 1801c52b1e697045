"""Forward-auth on the wire: what each gateway says of the request that it asks about, and how it is told the answer.

One dialect for each path of ours. A dialect reads its own headers and no other's: whatever else a client sent along
is not looked at.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import urlsplit

from keyvault.access.customers import Customer
from keyvault.access.principals import KeyHolder
from keyvault.wire.headers import client_address

SERVICE_TOKEN = "X-Service-Token"  # noqa: S105  a header's name
"""The gateway's own credential: Authorization is the client's."""

AUTH_STATUS = "X-Auth-Status"
AUTH_CODE = "X-Auth-Code"

ENVOY_ADDRESS = "X-Envoy-External-Address"
"""Not X-Forwarded-For: to that one Envoy's ext_authz appends its own address (envoyproxy/envoy#21519)."""


class Dialect(StrEnum):
    TRAEFIK = "traefik"
    NGINX = "nginx"
    ENVOY = "envoy"


@dataclass(frozen=True, slots=True)
class Names:
    """The headers of a dialect that tells everything in headers. Of `address` the right-most entry is the gateway's."""

    method: str
    uri: str
    host: str
    address: str


NAMES = {
    Dialect.TRAEFIK: Names("X-Forwarded-Method", "X-Forwarded-Uri", "X-Forwarded-Host", "X-Forwarded-For"),
    Dialect.NGINX: Names("X-Original-Method", "X-Original-URI", "X-Original-Host", "X-Original-Address"),
}
"""Envoy is not among them: it asks with the client's own method, path and Host."""


@dataclass(frozen=True, slots=True)
class Forwarded:
    """The client's request as its gateway tells it. `address` is None when there is none to be trusted."""

    method: str
    uri: str
    host: str
    address: str | None

    @property
    def hostname(self) -> str:
        """Without a port and a last dot, in lower case; "" when there is none to be read."""
        try:
            return (urlsplit(f"//{self.host}").hostname or "").removesuffix(".")
        except ValueError:
            return ""


@dataclass(frozen=True, slots=True)
class Misread:
    """The header that is missing, or came twice: the gateway is not set up as its sample is."""

    header: str


def read_forwarded(names: Names, headers: Mapping[str, str]) -> Forwarded | Misread:
    """What the gateway tells in its headers. A comma in the URI is left alone: a client may have sent it."""
    method, uri, host = (headers.get(name, "") for name in (names.method, names.uri, names.host))
    if method == "" or "," in method:
        return Misread(names.method)
    if not uri.startswith("/"):
        return Misread(names.uri)
    if "," in host:
        return Misread(names.host)
    return Forwarded(method, uri, host, last_address(headers.get(names.address)))


def last_address(addresses: str | None) -> str | None:
    """The right-most entry is what the gateway itself has seen; what stands further left its client may have sent."""
    return client_address(None, addresses, 1)


def identity_headers(holder: KeyHolder, customer: Customer | None, request_id: str) -> dict[str, str]:
    """Who was let in, for the upstream: always all of them, so that no client's own copy survives."""
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
    """What auth_request can tell from another: it turns every other status into a 500."""
    return status if status in _NGINX_PASSES else 403
