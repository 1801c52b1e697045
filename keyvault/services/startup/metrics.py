"""Expose the meters in Prometheus' text format, without ids, merchants or secret material."""

import logging
import os
import socket
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from time import monotonic
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIEnvironment

from django.conf import settings
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from keyvault.backends import meters  # noqa: F401  registers its meters before their first event
from keyvault.wire.planes import METRICS

CONTENT_TYPE = CONTENT_TYPE_LATEST

_log = logging.getLogger(__name__)

MAX_CONNECTIONS = 8
"""Maximum connections of one process's listener, each with a thread. A further one is closed immediately."""

_CONNECTION_SECONDS = 10.0
"""Maximum duration of a connection, in seconds."""


def expose_meters() -> bytes:
    """Return this process's meters, or with PROMETHEUS_MULTIPROC_DIR those of all processes that share it."""
    return generate_latest(_registry())


def allocate_meter_files() -> None:
    """Allocate the blocks of this process's mapped meter files.

    The library leaves holes in them. A write to a hole of a mapped file kills the process when the disk is full.
    """
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    for path in Path(folder).glob(f"*_{os.getpid()}.db") if folder else ():
        with path.open("r+b") as file, suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def _registry() -> CollectorRegistry:
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if not folder:
        return REGISTRY
    _remove_dead_processes(Path(folder))
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=folder)  # type: ignore[no-untyped-call]  # the library's
    return registry


def _remove_dead_processes(folder: Path) -> None:
    """Remove the gauges of processes that have ended."""
    for file in folder.glob("gauge_live*_*.db"):
        pid = int(file.stem.rpartition("_")[2])
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            # A concurrent scrape may have removed it.
            with suppress(FileNotFoundError):
                mark_process_dead(pid, path=str(folder))  # type: ignore[no-untyped-call]  # the library's
        except PermissionError:
            continue


def serve_metrics_or_exit(who: str) -> WSGIServer | None:
    """Serve the meters at the address of KEYVAULT_METRICS, in a thread of their own, and return the listener.

    Return None if the setting names no address. Exit with one line if the address cannot be used.
    """
    if settings.METRICS_ADDRESS is None:
        return None
    host, port = settings.METRICS_ADDRESS
    try:
        listener = _MetricsListener((host, port), _QuietHandler)
    except OSError as error:
        sys.exit(f"the {who} does not start: KEYVAULT_METRICS: {host}:{port} cannot be used: {error.strerror}")
    listener.set_app(_answer_scrape)
    threading.Thread(target=listener.serve_forever, name="metrics", daemon=True).start()
    return listener


def _answer_scrape(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
    if environ["PATH_INFO"] != METRICS:
        start_response("404 Not Found", [("Content-Type", "text/plain")])
        return [b"Only /metrics is served here.\n"]
    start_response("200 OK", [("Content-Type", CONTENT_TYPE), ("Cache-Control", "no-store")])
    return [expose_meters()]


class _MetricsListener(ThreadingMixIn, WSGIServer):
    """Listens on an address that the processes of one program share: each answers with the sum."""

    allow_reuse_port = True
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._ends_at: dict[Any, float] = {}
        """When each open connection is ended, by its socket."""
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Bind without the lookup of the host's name that HTTPServer makes: it may wait for a name server."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]  # str for these families
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of the connection's own, or close a connection that is one too many."""
        with self._lock:
            has_room = len(self._ends_at) < MAX_CONNECTIONS
            if has_room:
                self._ends_at[request] = monotonic() + _CONNECTION_SECONDS
        if has_room:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._ends_at.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End connections that have lasted too long, even if they still send or read. Runs every half second."""
        now = monotonic()
        with self._lock:
            late = [request for request, ends_at in self._ends_at.items() if ends_at <= now]
        for request in late:
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a scraper that went away, as a line like any other."""
        _log.warning("a scrape failed", exc_info=True)


class _QuietHandler(WSGIRequestHandler):
    """Writes no line for a scrape: the log has JSON lines only."""

    timeout = _CONNECTION_SECONDS

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class's name
        pass
