"""The HTTP client of the identity provider: its metadata and its signing keys, cached, with every call bounded.

A call has timeouts, an overall time limit and a maximum reply; it follows no redirect and ignores the environment's
proxies. After a call without a reply, further calls fail immediately for a pause: the console has few threads, and a
provider that hangs must not occupy them.
"""

import io
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from http.client import HTTPResponse
from typing import Any, cast

import requests
from requests.adapters import HTTPAdapter
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError

from keyvault.backends.outbound import BoundedConnection, RequestDeadline
from keyvault.backends.vault.breaker import Breaker
from keyvault.domain.errors import DependencyUnavailableError
from keyvault.wire.destinations import is_protected_url

CONNECT_SECONDS = 2.0
READ_SECONDS = 3.0
OVERALL_SECONDS = 5.0
"""Maximum time of one reply, headers included, in seconds."""

MAX_REPLY_BYTES = 262_144
"""Maximum size of a reply's body, in bytes."""

METADATA_SECONDS = 3600.0
"""Maximum age of the cached metadata, in seconds."""

KEYS_SECONDS = 600.0
"""Maximum age of the cached signing keys, in seconds. A withdrawn key stays accepted until then."""

REFETCH_SECONDS = 30.0
"""Minimum interval between two reads of the signing keys, in seconds. Unknown key ids cause no further reads."""

_WELL_KNOWN = "/.well-known/openid-configuration"
_ENDPOINTS = ("authorization_endpoint", "token_endpoint", "jwks_uri")
_READ_BYTES = 16_384
_MAX_HEADER_BYTES = 65_536

JsonWebKey = Mapping[str, Any]
"""One public key of the provider (RFC 7517)."""


class IdentityProviderError(DependencyUnavailableError):
    """The identity provider did not reply, or its reply does not conform to OpenID Connect Discovery 1.0."""


class IdentityProviderClient:
    """The client of one issuer. Thread-safe; each process has its own caches."""

    def __init__(self, issuer: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._issuer = issuer
        self._clock = clock
        self._breaker = Breaker(clock, trips_after=1)
        self._lock = threading.Lock()
        self._metadata: dict[str, Any] | None = None
        self._metadata_at = 0.0
        self._keys: tuple[JsonWebKey, ...] = ()
        self._keys_at: float | None = None
        self._keys_read_at: float | None = None

    def session(self) -> requests.Session:
        """Return a session for one call, such as that of the token endpoint."""
        session = requests.Session()
        session.trust_env = False
        session.max_redirects = 0
        session.headers["Accept-Encoding"] = "identity"
        adapter = _BoundedAdapter(self._breaker)
        session.mount("https://", adapter)
        session.mount("http://", adapter)
        return session

    def metadata(self) -> Mapping[str, Any]:
        """Return the provider's metadata, whose endpoints are checked. Raises IdentityProviderError."""
        with self._lock:
            return self._current_metadata()

    def find_keys(self, key_id: str) -> list[JsonWebKey]:
        """Return the signing keys with this id. An unknown id causes one more read. Raises IdentityProviderError."""
        with self._lock:
            now = self._clock()
            if self._keys_at is None or now - self._keys_at >= KEYS_SECONDS:
                self._read_keys(now)
            found = self._keys_with(key_id)
            if not found and (self._keys_read_at is None or now - self._keys_read_at >= REFETCH_SECONDS):
                self._read_keys(now)
                found = self._keys_with(key_id)
            return found

    def _current_metadata(self) -> Mapping[str, Any]:
        now = self._clock()
        if self._metadata is None or now - self._metadata_at >= METADATA_SECONDS:
            document = self._get(self._issuer.removesuffix("/") + _WELL_KNOWN)
            if document.get("issuer") != self._issuer:
                raise IdentityProviderError(
                    "The identity provider's metadata names another issuer.",
                    internal=f"expected {self._issuer}, got {document.get('issuer')!r}"[:300],
                )
            for name in _ENDPOINTS:
                if not is_protected_url(document.get(name)):
                    raise IdentityProviderError(f"The identity provider's metadata has no {name} over https.")
            self._metadata, self._metadata_at = document, now
        return self._metadata

    def _read_keys(self, now: float) -> None:
        document = self._get(self._current_metadata()["jwks_uri"])
        self._keys_read_at = now
        keys = document.get("keys")
        if not isinstance(keys, list):
            raise IdentityProviderError("The identity provider's reply has no signing keys.")
        self._keys = tuple(key for key in keys if isinstance(key, dict))
        self._keys_at = now

    def _keys_with(self, key_id: str) -> list[JsonWebKey]:
        return [key for key in self._keys if key.get("kid") == key_id]

    def _get(self, url: str) -> dict[str, Any]:
        try:
            with self.session() as session:
                reply = session.get(url)
            if reply.status_code != 200:
                raise IdentityProviderError(
                    "The identity provider replied with an error. Try again later.",
                    internal=f"{url}: status {reply.status_code}",
                )
            document = reply.json()
        except requests.RequestException as error:
            raise IdentityProviderError(
                "The identity provider does not reply. Try again later.", internal=f"{url}: {error!r}"[:300]
            ) from error
        if not isinstance(document, dict):
            raise IdentityProviderError("The identity provider's reply is not a JSON object.", internal=url)
        return document


class _BoundedReply(HTTPResponse):
    """A reply within OVERALL_SECONDS: urllib3 limits each read, so it would wait for slow headers without end."""

    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        deadline = RequestDeadline(OVERALL_SECONDS)
        bounded = BoundedConnection(sock, deadline, MAX_REPLY_BYTES + _MAX_HEADER_BYTES, READ_SECONDS)
        super().__init__(cast(socket.socket, bounded), *args, **kwargs)


class _BoundedHTTPConnection(HTTPConnection):
    response_class = _BoundedReply


class _BoundedHTTPSConnection(HTTPSConnection):
    response_class = _BoundedReply


class _BoundedHTTPPool(HTTPConnectionPool):
    ConnectionCls = _BoundedHTTPConnection


class _BoundedHTTPSPool(HTTPSConnectionPool):
    ConnectionCls = _BoundedHTTPSConnection


class _BoundedAdapter(HTTPAdapter):
    """Transport that bounds time and size. Certificates are verified with the host's CAs and `SSL_CERT_FILE`."""

    def __init__(self, breaker: Breaker) -> None:
        self._breaker = breaker
        super().__init__()

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, ssl_context=ssl.create_default_context(), **kwargs)
        self.poolmanager.pool_classes_by_scheme = {"http": _BoundedHTTPPool, "https": _BoundedHTTPSPool}

    def cert_verify(self, conn: Any, url: str, verify: Any, cert: Any) -> None:
        """Keep the context's CAs; requests would replace them with those of certifi."""
        conn.cert_reqs = "CERT_REQUIRED"

    def send(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> requests.Response:
        """Send the request and read the whole reply. Raises requests.RequestException."""
        if self._breaker.seconds_left() > 0:
            raise requests.ConnectionError("the identity provider did not reply just now", request=request)
        try:
            response = self._exchange(request, **kwargs)
        except requests.RequestException:
            self._breaker.failed()
            raise
        self._breaker.succeeded()
        return response

    def _exchange(self, request: requests.PreparedRequest, **kwargs: Any) -> requests.Response:
        response = super().send(request, **{**kwargs, "stream": True, "timeout": (CONNECT_SECONDS, READ_SECONDS)})
        try:
            body = _read_body(response.raw)
        except (OSError, HTTPError) as error:
            raise requests.ConnectionError(f"the reply is unreadable: {error}", request=request) from error
        finally:
            response.close()
        response.raw = io.BytesIO(body)
        return response


def _read_body(raw: Any) -> bytes:
    body = bytearray()
    while chunk := raw.read1(_READ_BYTES, decode_content=False):
        body += chunk
        if len(body) > MAX_REPLY_BYTES:
            raise OSError("it is too large")
    return bytes(body)
