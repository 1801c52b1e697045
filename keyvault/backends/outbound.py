"""One POST to an external server: only to a checked address, and within a time limit.

The name is resolved once and every address must be allowed. The connection goes to one of these addresses, so that
DNS rebinding has no effect; the certificate is still verified for the name. Redirects are not followed, proxies of the
environment are ignored, and the reply's body is discarded.

`http.client` writes the request and reads the reply over a connection that this module opens and limits. urllib3, which
reads with `http.client` as well, limits the time of each read but not of all reads. A server that sends a header byte
by byte, or one 100 Continue after another, would block a worker without end.
"""

import io
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any, cast

from keyvault.domain.errors import DependencyUnavailableError
from keyvault.domain.networks import IPNetwork, is_within
from keyvault.wire.destinations import Destination, may_connect

CONNECT_SECONDS = 2.0
OVERALL_SECONDS = 10.0
MAX_RESOLVERS = 32
"""Maximum threads that resolve names concurrently, including those whose caller has timed out."""
MAX_BODY_BYTES = 65_536
"""Maximum size of a reply with its headers, in bytes; the rest is not read."""
_DRAIN_SECONDS = 1.0
"""Maximum time to read the body after the status, in seconds. An unread body would break the server's connection."""

_USER_AGENT = "Keyvault-Webhooks/1"

_resolvers = threading.BoundedSemaphore(MAX_RESOLVERS)

Address = tuple[Any, ...]
Resolve = Callable[[str, int], Sequence[Address]]
"""Resolves a host and port to socket addresses, as `socket.getaddrinfo` returns them in its last column."""


class OutboundError(DependencyUnavailableError):
    """No reply, or an unreadable one; `detail` has the reason."""


class ResolversBusyError(OutboundError):
    """This process has no thread left to resolve the name. The error does not mean that the endpoint has failed."""


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    retry_after: str | None


class RequestDeadline:
    """A time limit that has begun."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self, at_most: float = OVERALL_SECONDS) -> float:
        """Return the remaining seconds: more than 0, capped at `at_most`. Raises TimeoutError when none remain."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the time limit has passed")
        return min(left, at_most)


def resolve_name(host: str, port: int) -> Sequence[Address]:
    """Resolve a name with the host's resolver."""
    return [found[4] for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def post(
    destination: Destination,
    headers: Mapping[str, str],
    body: bytes,
    *,
    own_networks: Sequence[IPNetwork] = (),
    resolve: Resolve = resolve_name,
    trust: ssl.SSLContext | None = None,
    within_seconds: float = OVERALL_SECONDS,
) -> Reply:
    """Send one POST. Raises OutboundError; the request may have arrived nevertheless.

    `own_networks`: allowed networks besides the public addresses, also over plain http. `trust`: the trusted CAs, by
    default those of the host.
    """
    deadline = RequestDeadline(within_seconds)
    try:
        addresses = _require_allowed(destination, own_networks, _resolve_in_time(destination, resolve, deadline))
        with _connect(addresses, deadline) as plain:
            if destination.scheme == "http":
                return _exchange(plain, destination, headers, body, deadline)
            plain.settimeout(deadline.left())
            context = trust or _system_trust()
            with context.wrap_socket(plain, server_hostname=destination.host) as secured:
                return _exchange(secured, destination, headers, body, deadline)
    except (OSError, HTTPException) as error:
        raise OutboundError(_reason(error), internal=f"{destination.host}: {error!r}"[:300]) from error


@cache
def _system_trust() -> ssl.SSLContext:
    return ssl.create_default_context()


def _resolve_in_time(destination: Destination, resolve: Resolve, deadline: RequestDeadline) -> Sequence[Address]:
    """Resolve in a separate thread, since the resolver's own timeouts are long."""
    resolvers = _resolvers  # The thread may outlive this attempt, and returns what it took.
    found: list[Sequence[Address]] = []
    faults: list[OSError] = []

    def resolve_host() -> None:
        try:
            found.append(resolve(destination.host, destination.port))
        except (OSError, UnicodeError) as error:
            faults.append(OSError(f"the name cannot be resolved: {error}"))
        finally:
            resolvers.release()

    if not resolvers.acquire(timeout=deadline.left(CONNECT_SECONDS)):
        raise ResolversBusyError("Too many names are being resolved.", internal=destination.host)
    thread = threading.Thread(target=resolve_host, name="webhook-resolver", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        resolvers.release()
        raise
    thread.join(deadline.left(CONNECT_SECONDS))
    if faults:
        raise faults[0]
    if not found or not found[0]:
        raise TimeoutError("the name was not resolved in time")
    return found[0]


def _require_allowed(
    destination: Destination, own_networks: Sequence[IPNetwork], addresses: Sequence[Address]
) -> Sequence[Address]:
    """Return the addresses if all are allowed: a name that also has an internal address is not trusted."""
    for address in addresses:
        if not may_connect(address[0], own_networks):
            raise OutboundError("The name resolves to an address that is not public.", internal=f"{address[0]}")
        if destination.scheme == "http" and not is_within(address[0], own_networks):
            raise OutboundError("Plain http is allowed only to the networks in KEYVAULT_WEBHOOK_NETWORKS.")
    return addresses


def _connect(addresses: Sequence[Address], deadline: RequestDeadline) -> socket.socket:
    """Connect to the first address that accepts; all addresses share the connection timeout."""
    connecting = RequestDeadline(deadline.left(CONNECT_SECONDS))
    fault: OSError = OSError("the name has no address")
    for address in addresses:
        connection = socket.socket(socket.AF_INET6 if len(address) == 4 else socket.AF_INET)
        try:
            connection.settimeout(connecting.left())
            connection.connect(address)
            # Headers and body are two writes: Nagle's algorithm would delay the second one.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            connection.close()
            fault = error
        else:
            return connection
    raise fault


def _exchange(
    connection: socket.socket,
    destination: Destination,
    headers: Mapping[str, str],
    body: bytes,
    deadline: RequestDeadline,
) -> Reply:
    bounded = BoundedConnection(connection, deadline, MAX_BODY_BYTES)
    client = HTTPConnection(destination.host, destination.port)
    client.sock = cast(socket.socket, bounded)
    request_headers = {
        "Host": destination.authority,
        "User-Agent": _USER_AGENT,
        "Content-Type": "application/json",
        "Connection": "close",
        **headers,
    }
    client.request("POST", destination.target, body, request_headers)
    response = HTTPResponse(client.sock, method="POST")
    response.begin()
    reply = Reply(response.status, response.headers.get("Retry-After"))
    with suppress(OSError, HTTPException):
        bounded.deadline = RequestDeadline(deadline.left(_DRAIN_SECONDS))
        while response.read1():
            pass
    response.close()
    return reply


class BoundedConnection(io.RawIOBase):
    """A connection for `http.client` that limits the total time and the reply's bytes, headers included."""

    def __init__(
        self,
        connection: socket.socket,
        deadline: RequestDeadline,
        max_bytes: int,
        read_seconds: float = OVERALL_SECONDS,
    ) -> None:
        self.deadline = deadline
        self._connection, self._left, self._read_seconds = connection, max_bytes, read_seconds
        # A reader of its own keeps the connection open when `http.client` closes it before the body is read.
        self._reader = connection.makefile("rb", buffering=0)

    def sendall(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            self._connection.settimeout(self.deadline.left())
            left = left[self._connection.send(left) :]

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._left == 0:
            return 0
        self._connection.settimeout(self.deadline.left(self._read_seconds))
        count = self._reader.readinto(memoryview(buffer)[: self._left]) or 0
        self._left -= count
        return count

    def close(self) -> None:
        self._reader.close()
        super().close()


def _reason(error: OSError | HTTPException) -> str:
    """Describe an error without text from the server."""
    if isinstance(error, TimeoutError):
        return "The request timed out."
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"The certificate is not valid: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return "The TLS handshake failed."
    if isinstance(error, HTTPException):
        return "The response is not valid HTTP."
    if isinstance(error, ConnectionRefusedError):
        return "The connection was refused."
    return f"The connection failed: {error}"[:200]
