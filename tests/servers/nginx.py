"""A temporary nginx in front of an upstream of the test."""

import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .throwaway import MissingServerError, Place, Plan, running

# Logs as distributions configure them by default.
# One process, which the guard can end with the run: workers would outlive a master that was killed.
SETTINGS = """\
daemon off;
master_process off;
pid {directory}/nginx.pid;
error_log stderr;
events {{ worker_connections 128; }}
http {{
    access_log {directory}/access.log;
    error_log {directory}/error.log;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    include {http};
}}
"""


def find_nginx() -> Path | None:
    """Return the `nginx` binary, which distributions install outside of users' PATH; None without one."""
    found = shutil.which("nginx")
    choices = (*([Path(found)] if found else []), Path("/usr/sbin/nginx"), Path("/usr/local/sbin/nginx"))
    return next((path for path in choices if path.exists()), None)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _plan(binary: Path, place: Place, http: str) -> Plan:
    settings = SETTINGS.format(directory=place.directory, http=place.write("http.conf", http))
    return Plan(
        url=f"http://127.0.0.1:{place.port}",
        serve=[
            *(str(binary), "-e", "stderr", "-p", str(place.directory)),
            *("-c", str(place.write("nginx.conf", settings))),
        ],
        is_ready=lambda: _answers(place.port),
        stop_signal=signal.SIGTERM,
    )


@contextmanager
def nginx_server(http: Callable[[Place], str]) -> Iterator[str]:
    """Run nginx and yield its URL. `http` returns the http context for a place, which listens on the place's port."""
    binary = find_nginx()
    if binary is None:
        raise MissingServerError("no nginx on this machine (looked for nginx on PATH and in /usr/sbin)")
    with running("kv-nginx-", lambda place: _plan(binary, place, http(place))) as url:
        yield url
