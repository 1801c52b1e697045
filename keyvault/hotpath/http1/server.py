"""The dedicated verifier's server: connections on listening sockets, their timer, and a graceful shutdown."""

import asyncio
import gc
import resource
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from email.utils import formatdate
from typing import Protocol

import uvloop

from keyvault.hotpath.engine.freshness import SWITCH_SECONDS
from keyvault.hotpath.http1.protocol import Bounds, Connection, Handler, Shared, Shortcut

BACKLOG = 2048
MAX_TICK_SECONDS = 0.25
MIN_TICK_SECONDS = 0.02

DRAIN_SECONDS = 5.0
"""Maximum time for responses in progress after a shutdown request, in seconds. Recorded data is written after it,
within the supervisor's timeout."""

IDLE_DRAIN_SECONDS = 1.0
"""Time that idle connections stay open during shutdown, in seconds. A request in transit then gets a response with
`close`, not a reset."""


SPARE_DESCRIPTORS = 256
"""File descriptors reserved for anything but client connections: databases, logs, the change feed."""


class RequestHandler(Protocol):
    """A request handler with background work between `start` and `stop`. `shortcut` is an optional direct call."""

    @property
    def handle(self) -> Handler: ...

    @property
    def shortcut(self) -> Shortcut | None: ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


class Http1Server:
    """A server on sockets that listen already. Call `start` and `stop` once each, in a running loop."""

    def __init__(self, handle: Handler, bounds: Bounds | None = None, shortcut: Shortcut | None = None) -> None:
        self._handle = handle
        self._shortcut = shortcut
        self._bounds = bounds or Bounds()
        self._listeners: list[asyncio.Server] = []

    async def start(self, sockets: Sequence[socket.socket]) -> None:
        loop = asyncio.get_running_loop()
        self._shared = Shared(self._handle, self._bounds, loop, self._shortcut)
        bounds = self._bounds
        shortest = min(
            bounds.head_seconds, bounds.body_seconds, bounds.idle_seconds, bounds.write_seconds, bounds.linger_seconds
        )
        self._tick_seconds = max(MIN_TICK_SECONDS, min(MAX_TICK_SECONDS, shortest / 4))
        self._tick()
        for listening in sockets:
            self._listeners.append(
                await loop.create_server(lambda: Connection(self._shared), sock=listening, backlog=BACKLOG)
            )

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._shared.connections)

    async def stop(self, drain_seconds: float = DRAIN_SECONDS, idle_seconds: float = IDLE_DRAIN_SECONDS) -> None:
        """Accept no more connections, complete pending responses, and return when all connections are closed. Bounded
        in time."""
        loop, shared = asyncio.get_running_loop(), self._shared
        for listener in self._listeners:
            listener.close()
        for connection in list(shared.connections):
            connection.close_after_response()
        now = loop.time()
        is_idle_closed = False
        while shared.connections and loop.time() < now + drain_seconds:
            if not is_idle_closed and loop.time() >= now + idle_seconds:
                is_idle_closed = True
                for connection in list(shared.connections):
                    connection.close_idle()
            await asyncio.sleep(MIN_TICK_SECONDS)
        awaited = {each.awaited for each in shared.connections if each.awaited is not None} | shared.orphans
        for connection in list(shared.connections):
            connection.abort()
        if awaited:
            ending = [asyncio.ensure_future(each) for each in awaited]
            await asyncio.wait(ending, timeout=max(0.0, now + drain_seconds - loop.time()))
        self._timer.cancel()

    def _tick(self) -> None:
        shared = self._shared
        shared.now = shared.loop.time()
        shared.end = f"date: {formatdate(usegmt=True)}\r\n\r\n".encode()
        for connection in list(shared.connections):
            connection.check(shared.now)
        self._timer = shared.loop.call_later(self._tick_seconds, self._tick)


def listen(host: str, port: int) -> socket.socket:
    """Return one of several listening sockets on the same port. The kernel distributes connections (SO_REUSEPORT)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


def run(load: Callable[[], RequestHandler], listening: socket.socket, report_ready: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT, then drain. Call it in the main thread; it returns when all is answered."""
    sys.setswitchinterval(SWITCH_SECONDS)
    bounds = Bounds()
    bounds = replace(bounds, connections=_fit_connections(bounds.connections))
    uvloop.run(_serve(load(), listening, bounds, report_ready))


def _fit_connections(wanted: int) -> int:
    """Return the number of connections that the descriptor limit allows. Up to twice as many may be open."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * wanted + SPARE_DESCRIPTORS
    if now < needed and now != resource.RLIM_INFINITY:
        now = needed if most == resource.RLIM_INFINITY else min(most, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (now, most))
    return wanted if now == resource.RLIM_INFINITY else max(1, min(wanted, (now - SPARE_DESCRIPTORS) // 2))


async def _serve(
    engine: RequestHandler, listening: socket.socket, bounds: Bounds, report_ready: Callable[[], None]
) -> None:
    loop = asyncio.get_running_loop()
    stop_requested = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop_requested.set)
    await engine.start()
    server = Http1Server(engine.handle, bounds, engine.shortcut)
    try:
        await server.start([listening])
        # Exempt existing objects from garbage collection during requests.
        gc.collect()
        gc.freeze()
        report_ready()
        await stop_requested.wait()
        await server.stop()
    finally:
        await engine.stop()
