"""One POST to somebody else's server: nowhere but to the address that was judged, and never for long.

The name is resolved once, every address that it has must be one that we may connect to, and one of these very
addresses is then connected to, so that a name which says something else a moment later (DNS rebinding) gains nothing.
The certificate is checked for the name all the same. No redirect is followed, no proxy of the environment is asked,
and the answer's body is thrown away.

`http.client` writes the request and reads the reply, over a connection that this module opens and bounds. urllib3
limits the time of each read but not of the whole exchange: a server that sends a byte now and then would hold a worker.
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
MOST_BYTES = 65_536
"""Of an answer, its headers included: what is longer is cut off there."""
_DRAIN_SECONDS = 1.0
"""For the rest of an answer whose status is known: a server that is not cut off in mid-sentence logs no error."""

_USER_AGENT = "Keyvault-Webhooks/1"

Address = tuple[Any, ...]
Resolve = Callable[[str, int], Sequence[Address]]
"""The socket addresses of a host and port, as `socket.getaddrinfo` has them in its last column."""


class OutboundError(DependencyUnavailableError):
    """No answer, or none that could be read; `detail` says why."""


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    retry_after: str | None


class Deadline:
    """How long the whole of it may still take."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self, at_most: float = OVERALL_SECONDS) -> float:
        """Seconds, more than none. Raises TimeoutError afterwards."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("it took too long")
        return min(left, at_most)


def resolve_name(host: str, port: int) -> Sequence[Address]:
    """By the host's own resolver."""
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
    """Sends it once. Raises OutboundError: it may have arrived all the same.

    `own_networks`: those beside the public ones that may be connected to, over plain http too. `trust`: whose
    certificates count, by default those of the host.
    """
    deadline = Deadline(within_seconds)
    try:
        addresses = _judged(destination, own_networks, _resolved(destination, resolve, deadline))
        with _connected(addresses, deadline) as plain:
            if destination.scheme == "http":
                return _asked(plain, destination, headers, body, deadline)
            plain.settimeout(deadline.left())
            context = trust or _system_trust()
            with context.wrap_socket(plain, server_hostname=destination.host) as secured:
                return _asked(secured, destination, headers, body, deadline)
    except (OSError, HTTPException) as error:
        raise OutboundError(_reason(error), internal=f"{destination.host}: {error!r}"[:300]) from error


@cache
def _system_trust() -> ssl.SSLContext:
    return ssl.create_default_context()


def _resolved(destination: Destination, resolve: Resolve, deadline: Deadline) -> Sequence[Address]:
    """In a thread of its own: a resolver has time limits of its own, and they are long."""
    found: list[Sequence[Address]] = []
    faults: list[OSError] = []

    def look_up() -> None:
        try:
            found.append(resolve(destination.host, destination.port))
        except (OSError, UnicodeError) as error:
            faults.append(OSError(f"the name cannot be resolved: {error}"))

    thread = threading.Thread(target=look_up, name="webhook-resolver", daemon=True)
    thread.start()
    thread.join(deadline.left(CONNECT_SECONDS))
    if faults:
        raise faults[0]
    if not found or not found[0]:
        raise TimeoutError("the name was not resolved in time")
    return found[0]


def _judged(
    destination: Destination, own_networks: Sequence[IPNetwork], addresses: Sequence[Address]
) -> Sequence[Address]:
    """All of them, or none: a name that also stands for an address of ours is not to be trusted at all."""
    for address in addresses:
        if not may_connect(address[0], own_networks):
            raise OutboundError("The name stands for an address that is not public.", internal=f"{address[0]}")
        if destination.scheme == "http" and not is_within(address[0], own_networks):
            raise OutboundError("Plain http is for the networks in KEYVAULT_WEBHOOK_NETWORKS only.")
    return addresses


def _connected(addresses: Sequence[Address], deadline: Deadline) -> socket.socket:
    """To the first that answers; the time for connecting is shared among all of them."""
    connecting = Deadline(deadline.left(CONNECT_SECONDS))
    fault: OSError = OSError("there is no address")
    for address in addresses:
        connection = socket.socket(socket.AF_INET6 if len(address) == 4 else socket.AF_INET)
        try:
            connection.settimeout(connecting.left())
            connection.connect(address)
            # Headers and body are two writes: the second must not wait for an acknowledgement of the first.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            connection.close()
            fault = error
        else:
            return connection
    raise fault


def _asked(
    connection: socket.socket, destination: Destination, headers: Mapping[str, str], body: bytes, deadline: Deadline
) -> Reply:
    bounded = _Bounded(connection, deadline)
    client = HTTPConnection(destination.host, destination.port)
    client.sock = cast(socket.socket, bounded)
    told = {
        "Host": destination.authority,
        "User-Agent": _USER_AGENT,
        "Content-Type": "application/json",
        "Connection": "close",
        **headers,
    }
    client.request("POST", destination.target, body, told)
    response = HTTPResponse(client.sock, method="POST")
    response.begin()
    reply = Reply(response.status, response.headers.get("Retry-After"))
    with suppress(OSError, HTTPException):
        bounded.deadline = Deadline(deadline.left(_DRAIN_SECONDS))
        while response.read1():
            pass
    response.close()
    return reply


class _Bounded(io.RawIOBase):
    """A connection as `http.client` uses it: each act within what is left of the time and of the answer's bytes."""

    def __init__(self, connection: socket.socket, deadline: Deadline) -> None:
        self.deadline = deadline
        self._connection, self._left = connection, MOST_BYTES

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
        self._connection.settimeout(self.deadline.left())
        count = self._connection.recv_into(buffer, min(len(buffer), self._left))
        self._left -= count
        return count


def _reason(error: OSError | HTTPException) -> str:
    """In plain words, without what the other side wrote."""
    if isinstance(error, TimeoutError):
        return "It took too long."
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"The certificate is not good: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return "No TLS connection could be made."
    if isinstance(error, HTTPException):
        return "The answer was no HTTP."
    if isinstance(error, ConnectionRefusedError):
        return "Nobody listens there."
    return f"The connection failed: {error}"[:200]
