"""HTTP connections with a deadline for the whole exchange, and the two runners that perform effects.

httpx limits each read of a socket. A server that sends a byte now and then never exceeds such a limit, so the sync
runner limits all operations of an exchange by one deadline. The async runner cancels the exchange. The sync
runner cannot limit name resolution: it waits for it, and the deadline may have passed then.
"""

import os
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import cache
from typing import Any

import anyio
import httpcore
import httpx
from anyio import to_thread

from keyvault.domain.plaintext import Plaintext
from keyvault_client.effects import ClientEffect, Failure, HttpReply, Pause, ReadKey, Result, SendRequest, Steps

MAX_REPLY_BYTES = 4 << 20
"""Maximum size of a reply's body. The service's largest reply is smaller."""

_KEEP_ALIVE_SECONDS = 30.0
_MAX_CONNECTIONS = 100

# Redirects are not followed, and the environment gives neither a proxy nor a .netrc.
_OPTIONS: Mapping[str, Any] = {"follow_redirects": False, "trust_env": False}

_deadline: ContextVar[float | None] = ContextVar("keyvault_client_deadline", default=None)


class _ReplyTooLargeError(Exception):
    """The body of a reply exceeds MAX_REPLY_BYTES."""


def _remaining(timeout: float | None) -> float | None:
    """Return the time that an operation has, in seconds. Raises ReadTimeout when the deadline has passed."""
    deadline = _deadline.get()
    if deadline is None:
        return timeout
    left = deadline - time.monotonic()
    if left <= 0:
        raise httpcore.ReadTimeout("the deadline has passed")
    return left if timeout is None else min(left, timeout)


class _DeadlineStream(httpcore.NetworkStream):
    def __init__(self, stream: httpcore.NetworkStream) -> None:
        self._stream = stream

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _remaining(timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, _remaining(timeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return _DeadlineStream(self._stream.start_tls(ssl_context, server_hostname, _remaining(timeout)))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class _DeadlineBackend(httpcore.SyncBackend):
    def connect_tcp(self, host: str, port: int, timeout: float | None = None, *options: Any, **named: Any) -> Any:
        """Connect to the first address that answers. The addresses share the time, as one may drop every packet."""
        try:
            addresses = [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error
        for untried in range(len(addresses), 0, -1):
            left = _remaining(timeout)
            share = None if left is None else left / untried
            try:
                return _DeadlineStream(super().connect_tcp(addresses[-untried], port, share, *options, **named))
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                if untried == 1:
                    raise
        raise httpcore.ConnectError("the host has no address")

    def connect_unix_socket(self, path: str, timeout: float | None = None, *options: Any, **named: Any) -> Any:
        return _DeadlineStream(super().connect_unix_socket(path, _remaining(timeout), *options, **named))


class _ReplyStream(httpx.SyncByteStream):
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        yield from self._stream

    def close(self) -> None:
        self._stream.close()


class DeadlineTransport(httpx.BaseTransport):
    """An httpx transport whose operations all end before the deadline of the request.

    httpx cannot set the network backend of its own transport, so this one uses httpcore, on which httpx is built.
    """

    def __init__(self, tls: ssl.SSLContext | None, socket: str | None) -> None:
        self._pool = httpcore.ConnectionPool(
            ssl_context=tls or _default_tls(),
            max_connections=_MAX_CONNECTIONS,
            max_keepalive_connections=_MAX_CONNECTIONS,
            keepalive_expiry=_KEEP_ALIVE_SECONDS,
            uds=socket,
            network_backend=_DeadlineBackend(),
        )

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        url = httpcore.URL(
            scheme=request.url.raw_scheme,
            host=request.url.raw_host,
            port=request.url.port,
            target=request.url.raw_path,
        )
        reply = self._pool.handle_request(
            httpcore.Request(
                request.method, url, headers=request.headers.raw, content=request.stream, extensions=request.extensions
            )
        )
        return httpx.Response(
            reply.status, headers=reply.headers, stream=_ReplyStream(reply.stream), extensions=reply.extensions
        )

    def close(self) -> None:
        self._pool.close()


class SyncRunner:
    """Performs effects with blocking calls. Threads share its connections; a forked process makes its own."""

    def __init__(self, tls: ssl.SSLContext | None = None, socket: str | None = None) -> None:
        self._make: Callable[[], httpx.BaseTransport] = lambda: DeadlineTransport(tls, socket)
        self._client: httpx.Client | None = None
        self._process = 0
        self.sleep: Callable[[float], None] = time.sleep

    def run(self, steps: Steps[Result]) -> Result:
        outcome: object = None
        while True:
            try:
                effect = steps.send(outcome)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]  # StopIteration is not generic
            outcome = self._perform(effect)

    def close(self) -> None:
        if self._client is not None and self._process == os.getpid():
            self._client.close()
        self._client = None

    def _perform(self, effect: ClientEffect) -> object:
        match effect:
            case SendRequest():
                return self.send(effect)
            case Pause(seconds):
                self.sleep(seconds)
                return None
            case ReadKey():
                return _read_key(effect)

    def send(self, send: SendRequest) -> HttpReply | Failure:
        if self._client is None or self._process != os.getpid():
            self._client, self._process = httpx.Client(transport=self._make(), **_OPTIONS), os.getpid()
        token = _deadline.set(send.deadline)
        try:
            with self._client.stream(
                send.method, send.url, headers=_revealed(send.headers), content=send.body, timeout=_timeout(send)
            ) as reply:
                return _reply(reply, _collect(reply.iter_raw()))
        except Exception as error:  # noqa: BLE001  every fault of the exchange is the same to the caller: no answer
            return _failure(error)
        finally:
            _deadline.reset(token)


class AsyncRunner:
    """Performs effects on the running event loop of asyncio or trio."""

    def __init__(self, tls: ssl.SSLContext | None = None, socket: str | None = None) -> None:
        limits = httpx.Limits(
            max_connections=_MAX_CONNECTIONS,
            max_keepalive_connections=_MAX_CONNECTIONS,
            keepalive_expiry=_KEEP_ALIVE_SECONDS,
        )
        self._make: Callable[[], httpx.AsyncBaseTransport] = lambda: httpx.AsyncHTTPTransport(
            verify=tls or _default_tls(), uds=socket, limits=limits, trust_env=False
        )
        self._client: httpx.AsyncClient | None = None
        self.sleep: Callable[[float], Awaitable[None]] = anyio.sleep

    async def run(self, steps: Steps[Result]) -> Result:
        outcome: object = None
        while True:
            try:
                effect = steps.send(outcome)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]  # StopIteration is not generic
            outcome = await self._perform(effect)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
        self._client = None

    async def _perform(self, effect: ClientEffect) -> object:
        match effect:
            case SendRequest():
                return await self.send(effect)
            case Pause(seconds):
                await self.sleep(seconds)
                return None
            case ReadKey():
                return await to_thread.run_sync(_read_key, effect)

    async def send(self, send: SendRequest) -> HttpReply | Failure:
        if self._client is None:
            self._client = httpx.AsyncClient(transport=self._make(), **_OPTIONS)
        try:
            with anyio.fail_after(send.deadline - time.monotonic()):
                async with self._client.stream(
                    send.method, send.url, headers=_revealed(send.headers), content=send.body, timeout=None
                ) as reply:
                    chunks, size = [], 0
                    async for chunk in reply.aiter_raw():
                        chunks.append(chunk)
                        size = _require_size(size + len(chunk))
                    return _reply(reply, b"".join(chunks))
        except Exception as error:  # noqa: BLE001  every fault of the exchange is the same to the caller: no answer
            return _failure(error)


@cache
def _default_tls() -> ssl.SSLContext:
    """Trust the public certificate authorities. Reading them takes a while, so all clients share one context."""
    return httpx.create_ssl_context(trust_env=False)


def _timeout(send: SendRequest) -> float:
    return max(send.deadline - time.monotonic(), 0.001)


def _revealed(headers: Mapping[str, str | Plaintext]) -> dict[str, str]:
    # A compressed body could expand beyond the limit of its size.
    own = {"Accept-Encoding": "identity"}
    return own | {name: text.reveal() if isinstance(text, Plaintext) else text for name, text in headers.items()}


def _collect(chunks: Iterable[bytes]) -> bytes:
    found, size = [], 0
    for chunk in chunks:
        found.append(chunk)
        size = _require_size(size + len(chunk))
    return b"".join(found)


def _require_size(size: int) -> int:
    if size > MAX_REPLY_BYTES:
        raise _ReplyTooLargeError
    return size


def _reply(reply: httpx.Response, body: bytes) -> HttpReply:
    return HttpReply(reply.status_code, {name.lower(): value for name, value in reply.headers.items()}, body)


def _failure(error: Exception) -> Failure:
    """Describe a fault without its text and its traceback, which could contain a header of the request."""
    is_deadline = isinstance(error, TimeoutError | httpx.TimeoutException | httpcore.TimeoutException)
    if isinstance(error, _ReplyTooLargeError):
        return Failure(f"the reply is larger than {MAX_REPLY_BYTES} bytes")
    if isinstance(error, httpx.ConnectError | httpcore.ConnectError):
        return Failure(f"no connection: {error}", is_deadline)
    return Failure("the deadline has passed" if is_deadline else type(error).__name__, is_deadline)


def _read_key(effect: ReadKey) -> Plaintext | Exception:
    try:
        return effect.source.read(effect.timeout)
    except Exception as error:  # noqa: BLE001  a source is the user's own code
        return error
