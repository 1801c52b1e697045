"""The embedded service as programs of one supervisor: an HTTP server, and a Celery worker that runs beat in a thread.

With any other broker than the files in the data folder, beat is a separate program.

with stopping_on_signals(), supervise(port) as service:
    wait_until_ready(service, port)
"""

import errno
import fcntl
import http.client
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from django.conf import settings

import keyvault
from keyvault.backends.private_files import ensure_private_directory
from keyvault.management.supervisor import Program, Supervisor

ADDRESS = "127.0.0.1"
CHECKOUT = Path(keyvault.__file__).resolve().parent.parent
READY_SECONDS = 60.0

SERVER, WORKER, BEAT = "server", "worker", "beat"

CONNECTIONS = 512
"""Maximum number of connections that the server has open; further ones wait in the kernel until one is closed.

With its files and database connections the process stays below 1,024 descriptors, the usual soft limit.
"""

HEADER_READ_MILLISECONDS = 30_000
"""Maximum time in which a request's headers arrive. A connection without a request is closed after it, too."""


class ServiceError(Exception):
    """The service cannot start or did not become ready; the text gives the reason and the remedy."""


def require_free_port(port: int) -> None:
    """Check, before anything starts, that nothing listens on the port. Raises ServiceError.

    Granian listens with SO_REUSEPORT: two servers on one port would both start, and share its requests.
    """
    free = find_free_port()
    taken = f"Port {port} on {ADDRESS} is in use. Stop the program that uses it, or run: make run PORT={free}"
    with socket.socket() as probe:
        probe.settimeout(2)
        if probe.connect_ex((ADDRESS, port)) == 0:
            raise ServiceError(taken)
    with socket.socket() as probe:
        # Not SO_REUSEPORT. SO_REUSEADDR ignores connections that are still closing, never a listener.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ADDRESS, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ServiceError(taken) from None
            raise ServiceError(f"Port {port} on {ADDRESS} cannot be used: {error.strerror}.") from None


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        port: int = probe.getsockname()[1]
        return port


def local_url(port: int) -> str:
    return f"http://{ADDRESS}:{port}"


def origin_for(port: int, environ: Mapping[str, str] = os.environ) -> str:
    """Return the service's public URL: KEYVAULT_ORIGIN, or else the local URL of the port."""
    return environ.get("KEYVAULT_ORIGIN") or local_url(port)


@contextmanager
def lock_data_folder(port: int) -> Iterator[None]:
    """Allow one supervisor per data folder. Raises ServiceError while another one runs there.

    Meanwhile `find_running_origin` returns the origin of its service.
    """
    with _lock_file().open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ServiceError(
                f"Another Keyvault uses the data folder {settings.DATA_DIR}. Stop it, or set another KEYVAULT_DATA_DIR."
            ) from None
        lock.truncate(0)
        lock.write(origin_for(port))
        lock.flush()
        try:
            yield
        finally:
            lock.truncate(0)


def find_running_origin() -> str | None:
    """Return the origin of the service that a supervisor runs on this data folder; None: none runs.

    If the supervisor was killed, it is the last origin.
    """
    try:
        return _lock_file().read_text() or None
    except FileNotFoundError:
        return None


def _lock_file() -> Path:
    path: Path = settings.DATA_DIR / "run.lock"
    return path


def supervise(port: int, environ: Mapping[str, str] = os.environ) -> Supervisor:
    """Return a supervisor of all programs on this machine's data folder, not yet started."""
    environment = {
        "DJANGO_SETTINGS_MODULE": "keyvault.project.settings",
        **environ,
        "KEYVAULT_ORIGIN": origin_for(port, environ),
        "PROMETHEUS_MULTIPROC_DIR": str(_empty_folder(settings.DATA_DIR / "metrics")),
    }
    return Supervisor(_programs(port), environment, CHECKOUT, settings.DATA_DIR / "logs")


def _empty_folder(path: Path) -> Path:
    """Delete the counters of an earlier run: its processes have ended."""
    for file in ensure_private_directory(path).glob("*.db"):
        file.unlink()
    return path


def wait_until_ready(service: Supervisor, port: int) -> None:
    """Wait until the server is ready. Raises ServiceError, with the end of its log, when it exits or stays unready."""
    deadline = time.monotonic() + READY_SECONDS
    seen = "it does not answer"
    while service.is_running(SERVER) and time.monotonic() < deadline:
        answer = _get_readyz(port)
        if answer is not None:
            status, seen = answer
            if status == http.HTTPStatus.OK:
                return
        service.wait(0.1)
    if not service.is_running(SERVER):
        seen = "it has exited"
    raise ServiceError(f"The server did not become ready: {seen}.\n{service.log_tail(SERVER)}")


def _get_readyz(port: int) -> tuple[int, str] | None:
    connection = http.client.HTTPConnection(ADDRESS, port, timeout=5)
    try:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        body = json.loads(answer.read())
        failing = [name for name, state in body.get("checks", {}).items() if state != "ok"]
        return answer.status, f"not ready: {', '.join(failing)}"
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()


def _programs(port: int) -> tuple[Program, ...]:
    # On the file broker the worker runs the beat.
    beats = () if settings.IS_FILE_BROKER else (beat_program(),)
    return (server_program(port), worker_program(), *beats)


def server_program(port: int) -> Program:
    """Return the HTTP server's program. Needs no Django settings."""
    command = (
        *(sys.executable, "-m", "granian", "keyvault.project.asgi:application", "--interface", "asgi"),
        *("--host", ADDRESS, "--port", str(port), "--http", "1", "--no-ws"),
        # Granian counts connections here, not requests.
        *("--backpressure", str(CONNECTIONS)),
        *("--http1-header-read-timeout", str(HEADER_READ_MILLISECONDS)),
        # One process: limits and usage counts of the embedded service live in its memory.
        *("--workers", "1"),
        # A worker ignores a stop signal that arrives while it still loads.
        *("--workers-kill-timeout", "5"),
        *("--no-access-log", "--log-level", "warning"),
    )
    # Granian's main process stops its own worker process.
    return Program(SERVER, command, orphan_signal=signal.SIGTERM)


_CELERY = (
    sys.executable,
    # It runs as the user who started it, in a container often root; only that user can read the keystore.
    *("-W", "ignore:You're running the worker with superuser privileges"),
    *("-m", "celery", "--quiet", "-A", "keyvault.project"),
)


def worker_program() -> Program:
    """Return the program of the Celery worker. Needs no Django settings."""
    threads = ("worker", "--pool", "threads", "--concurrency", "4", "--loglevel", "INFO")
    return Program(WORKER, (*_CELERY, *threads, "--without-gossip", "--without-mingle", "--without-heartbeat"))


def beat_program() -> Program:
    """Return the program of the Celery beat. Needs no Django settings."""
    return Program(BEAT, (*_CELERY, "beat", "--loglevel", "INFO", "--pidfile", ""))
