"""A Vault client of one role: logs in on first use, renews its token and counts its calls.

`VaultClient.call(lambda client: client.secrets.kv.v2.read_secret_version(...))` is the only entry point. After a
refusal (401, 403) the client logs in again and retries once, since the token may be revoked. A second refusal is
raised, and so is every further refusal within REFUSED_SECONDS. Nothing else is retried: after an ambiguous reply the
caller reads back.
"""

import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import hvac
import requests
from django.core.exceptions import ImproperlyConfigured

from keyvault.backends import meters
from keyvault.backends.base import BackendDeniedError, BackendError, BackendUnavailableError
from keyvault.backends.vault.breaker import Breaker
from keyvault.backends.vault.logins import Login, Token
from keyvault.backends.vault.replies import CONNECT_SECONDS, READ_SECONDS, PlainAdapter, parsing_reply
from keyvault.domain.plaintext import Plaintext

T = TypeVar("T")

RENEW_AFTER = 2 / 3
"""Fraction of a lease after which it is renewed, less a random part of up to 0.1. The jitter separates the renewals of
processes that started together."""

REFUSED_SECONDS = 30.0
"""Minimum time between the refusal of a new token and the next login, in seconds: another login would not help."""

RENEW_AGAIN_SECONDS = 5.0
"""Minimum time between renewals, in seconds."""


@dataclass(frozen=True, slots=True)
class VaultServer:
    """The server's address, CA file and timeouts (connect, read) in seconds. `ca_file` None: the CAs of this machine.

    Raises ImproperlyConfigured for an address that would send tokens and keys unencrypted.
    """

    address: str
    ca_file: Path | None = None
    timeout: tuple[float, float] = (CONNECT_SECONDS, READ_SECONDS)

    def __post_init__(self) -> None:
        parts = urlsplit(self.address)
        is_local = parts.hostname in {"127.0.0.1", "localhost", "::1"}
        if not parts.hostname or not (parts.scheme == "https" or (parts.scheme == "http" and is_local)):
            raise ImproperlyConfigured(
                "VAULT_ADDR: not a URL such as https://vault.example.com:8200; plain http is allowed for localhost only"
            )


def open_client(
    server: VaultServer, token: Plaintext | None = None, seen: Callable[[str, float], None] | None = None
) -> hvac.Client:
    """Return an hvac client that ignores the environment: its token, proxies, .netrc and namespace.

    It does not follow redirects, which would send the token and the body to another server. `seen` is called with the
    outcome of each call, see `replies.outcome_of`, and its duration in seconds.
    """
    session = requests.Session()
    session.trust_env = False
    session.verify = True if server.ca_file is None else str(server.ca_file)

    def adapter(**options: Any) -> PlainAdapter:
        made = PlainAdapter(**options)
        if seen is not None:
            made.seen = seen
        return made

    # A dictionary, since hvac's types allow neither a pair of timeouts nor a function as the adapter.
    options: dict[str, Any] = {
        "url": server.address,
        # With None hvac would read VAULT_TOKEN and the token file in the home directory.
        "token": "" if token is None else token.reveal(),
        "verify": session.verify,
        # With None hvac would read VAULT_CLIENT_CERT.
        "cert": (),
        "timeout": server.timeout,
        "session": session,
        "allow_redirects": False,
        "adapter": adapter,
    }
    return hvac.Client(**options)


@dataclass(slots=True)
class _HeldToken:
    """The current token. `renew_at`, `ends_at` in seconds of the client's clock; None: never."""

    token: Token
    renew_at: float | None
    ends_at: float | None


@dataclass(slots=True)
class VaultClient:
    """The authenticated client of one role in one scope. Thread-safe; a forked process creates its own."""

    server: VaultServer
    login: Login
    name: str
    breaker: Breaker
    clock: Callable[[], float] = time.monotonic
    _held: _HeldToken | None = None
    _refused_until: float | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _local: threading.local = field(default_factory=threading.local)

    def call(self, request: Callable[[hvac.Client], T]) -> T:
        """Return the result of `request`. Raises errors of `backends.base` only, none of hvac or requests."""
        token = self._fresh_token()
        try:
            return self._request(request, token)
        except BackendDeniedError as error:
            if error.status not in {401, 403} or self._was_refused_just_now():
                raise
        # The token was revoked or has expired by the server's clock; with a wrong policy the retry fails, too.
        fresh = self._log_in(instead_of=token)
        try:
            return self._request(request, fresh)
        except BackendDeniedError:
            self._refused_until = self.clock() + REFUSED_SECONDS
            raise

    def _was_refused_just_now(self) -> bool:
        return self._refused_until is not None and self.clock() < self._refused_until

    # --- the token ------------------------------------------------------------------------------------------

    def _fresh_token(self) -> Plaintext:
        with self._lock:
            held, now = self._held, self.clock()
            if held is None or (held.ends_at is not None and held.ends_at <= now):
                return self._log_in()
            if held.renew_at is None or held.renew_at > now:
                return held.token.text
            # One thread renews while the others use the current token; after this time another thread may retry.
            held.renew_at = now + RENEW_AGAIN_SECONDS
        return self._renew(held)

    def _log_in(self, instead_of: Plaintext | None = None) -> Plaintext:
        """Log in, one thread at a time. A thread that waited for another uses the other thread's token."""
        with self._lock:
            held = self._held
            if instead_of is not None and held is not None and held.token.text.reveal() != instead_of.reveal():
                return held.token.text
            self._held = None
            try:
                token = self._request(self.login.log_in, None)
            except BackendUnavailableError as error:
                error.may_be_applied = False  # The caller's own request was not sent.
                raise
            self._hold(token)
        if instead_of is not None and held is not None and held.token.lease_seconds:
            self._end(held.token.text)
        return token.text

    def _renew(self, held: _HeldToken) -> Plaintext:
        try:
            answer = self._request(lambda client: client.auth.token.renew_self(), held.token.text)
            with parsing_reply("renewal"):
                auth = answer["auth"]
                renewed = Token(held.token.text, int(auth["lease_duration"]), bool(auth["renewable"]))
        except BackendUnavailableError:
            # The current token is still valid for some time, and the call itself fails if it is not.
            return held.token.text
        except BackendError:
            return self._log_in(instead_of=held.token.text)
        if renewed.lease_seconds < held.token.lease_seconds * RENEW_AFTER:
            # The token's maximum lifetime is near: a renewal no longer extends it.
            return self._log_in(instead_of=held.token.text)
        with self._lock:
            if self._held is held:
                self._hold(renewed)
        return renewed.text

    def _end(self, token: Plaintext) -> None:
        """Revoke a replaced token, which would stay valid for its whole period."""
        with suppress(BackendError):
            self._request(lambda client: client.auth.token.revoke_self(), token)

    def _hold(self, token: Token) -> None:
        now, lease = self.clock(), token.lease_seconds
        renew_at = ends_at = None
        if lease > 0:
            ends_at = now + lease
            jitter = secrets.randbelow(100) / 1000
            renew_at = now + lease * (RENEW_AFTER - jitter) if token.is_renewable else None
        self._held = _HeldToken(token, renew_at, ends_at)
        meters.note_lease(self.name, None if ends_at is None else lease)

    # --- one call -------------------------------------------------------------------------------------------

    def _request(self, request: Callable[[hvac.Client], T], token: Plaintext | None) -> T:
        left = self.breaker.seconds_left()
        if left > 0:
            meters.note_call(self.name, "not_asked")
            raise BackendUnavailableError(
                "The secrets manager is unavailable.",
                internal=f"{self.name}: circuit breaker open for {left:.1f} s more, after consecutive failures",
                retry_after_seconds=max(1, round(left)),
            )
        client = self._client()
        client.token = "" if token is None else token.reveal()
        try:
            answer = request(client)
        except BackendUnavailableError:
            self.breaker.failed()
            raise
        except BackendError as error:
            if error.status is not None:
                # Without a status, no request was sent: this host lacks the login.
                self.breaker.succeeded()
            raise
        finally:
            client.token = ""
        self.breaker.succeeded()
        return answer

    def _client(self) -> hvac.Client:
        """Return this thread's own client: sessions are not thread-safe."""
        if not hasattr(self._local, "client"):
            self._local.client = open_client(self.server, seen=partial(meters.note_call, self.name))
        client: hvac.Client = self._local.client
        return client
