"""Run the dedicated verifier in the foreground: one process per core that only verifies."""

import hashlib
import json
import os
import re
import select
import socket
import stat
import sys
import time
from argparse import ArgumentTypeError
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connections

from keyvault.backends.private_files import ensure_private_directory
from keyvault.management.commands.run import port_number
from keyvault.management.service import CHECKOUT, READY_SECONDS, ServiceError
from keyvault.management.supervisor import Program, StopRequestedError, Supervisor, stopping_on_signals
from keyvault.services.startup.startup_checks import require_plane
from keyvault.wire.planes import Plane

MAX_WORKERS = 256
BACKLOG = 2048


class Command(BaseCommand):
    help = (
        "Serve verify, verify-batch, forward-auth, health and metrics only, with several processes that share one port "
        "or Unix socket. SIGTERM or Ctrl-C stops it after the pending requests. It needs the database, not the "
        "ordinary server."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        cores = len(os.sched_getaffinity(0))
        parser.add_argument(
            "--workers", type=worker_count, default=cores, help=f"number of processes (default {cores})"
        )
        place = parser.add_mutually_exclusive_group(required=True)
        place.add_argument("--port", type=port_number)
        place.add_argument("--socket", type=Path, help="path of a Unix socket (mode 0660)")
        parser.add_argument("--host", default="127.0.0.1", help="an address of this machine (default 127.0.0.1)")
        parser.add_argument("--json", action="store_true", help="print one JSON object when it is ready")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            require_plane(Plane.SERVICE)
        except ImproperlyConfigured as error:
            raise CommandError(f"the verifier does not start: {error}") from None
        try:
            with stopping_on_signals():
                if options["socket"] is not None:
                    with listening_at(options["socket"].absolute()) as listener:
                        self._serve({"socket": str(options["socket"].absolute())}, options, listener)
                else:
                    host, port = options["host"], options["port"]
                    require_free_address(host, port)
                    self._serve({"url": f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"}, options)
        except StopRequestedError as stop:
            self.stderr.write(f"{stop}: all programs have stopped.")
        except ServiceError as error:
            raise CommandError(str(error)) from None

    def _serve(self, place: dict[str, str], options: dict[str, Any], listener: socket.socket | None = None) -> None:
        if not settings.REDIS_URL:
            self.stderr.write(
                "Without KEYVAULT_REDIS_URL each process counts limits separately: each of the "
                f"{options['workers']} workers, and the ordinary server, allows up to the whole limit."
            )
        connections.close_all()
        ready_reader, ready_writer = os.pipe()
        os.set_blocking(ready_reader, False)
        with Supervisor(
            _programs(options, ready_writer, listener),
            _environ(next(iter(place.values()))),
            CHECKOUT,
            logs=None,
            stops_together=True,
        ) as workers:
            ready = wait_until_ready(workers, ready_reader)
            answer = {**place, "workers": len(ready), "pids": ready}
            where = next(iter(place.values()))
            self.stdout.write(
                json.dumps(answer)
                if options["json"]
                else f"Verifying at {where} with {len(ready)} process{'es' if len(ready) > 1 else ''}. "
                "Press Ctrl-C to stop."
            )
            self.stdout.flush()
            while True:
                workers.wait(3600)
                workers.restart_ended()
                _read_ready(ready_reader)


def worker_count(text: str) -> int:
    if not re.fullmatch("[0-9]{1,5}", text) or not 1 <= int(text) <= MAX_WORKERS:
        raise ArgumentTypeError(f"{text[:40]!r} is not a number of workers. Use 1 to {MAX_WORKERS}.")
    return int(text)


def require_free_address(host: str, port: int) -> None:
    """Check that nothing listens on the address: SO_REUSEPORT would share its requests. Raises ServiceError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # Not SO_REUSEPORT. SO_REUSEADDR ignores connections that are still closing, never a listener.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError as error:
            why = error.strerror or "not an address of this machine"
            raise ServiceError(f"Port {port} on {host} cannot be used: {why}. Choose another --port.") from None


@contextmanager
def listening_at(path: Path) -> Iterator[socket.socket]:
    """Listen on a Unix socket and remove it at the end. Raises ServiceError when the path is in use or not a socket."""
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise ServiceError(f"{path} exists and is not a socket. Choose another --socket.")
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise ServiceError(f"{path} is in use. Stop the program that uses it, or choose another --socket.")
        path.unlink()  # left by a verifier that was killed
    with socket.socket(socket.AF_UNIX) as listener:
        before = os.umask(0o117)
        try:
            listener.bind(str(path))
        except OSError as error:
            raise ServiceError(f"{path} cannot be used: {error.strerror or error}.") from None
        finally:
            os.umask(before)
        try:
            listener.listen(BACKLOG)
            yield listener
        finally:
            path.unlink(missing_ok=True)


def wait_until_ready(workers: Supervisor, ready_reader: int) -> list[int]:
    """Wait for all workers and return their process ids. Raises ServiceError when one fails."""
    deadline = time.monotonic() + READY_SECONDS
    ready: list[int] = []
    while True:
        ready += _read_ready(ready_reader)
        if len(ready) == len(workers.programs):
            return sorted(ready)
        ended = [program.name for program in workers.programs if not workers.is_running(program.name)]
        if ended or time.monotonic() > deadline:
            name = ended[0] if ended else workers.programs[0].name
            what = "has exited" if ended else "is not ready in time"
            raise ServiceError(f"{name} {what}. Its log says why.")
        select.select([ready_reader], [], [], 0.1)


def _read_ready(ready_reader: int) -> list[int]:
    with suppress(BlockingIOError):
        return [int(line) for line in os.read(ready_reader, 65536).split()]
    return []


def _programs(options: dict[str, Any], ready_writer: int, listener: socket.socket | None) -> tuple[Program, ...]:
    command = [sys.executable, "-m", "keyvault.project.verifier", "--ready", str(ready_writer)]
    descriptors = [ready_writer]
    if listener is None:
        command += ["--host", options["host"], "--port", str(options["port"])]
    else:
        command += ["--listener", str(listener.fileno())]
        descriptors.append(listener.fileno())
    return tuple(
        Program(f"verifier-{number}", tuple(command), descriptors=tuple(descriptors))
        for number in range(1, options["workers"] + 1)
    )


def _environ(place: str) -> dict[str, str]:
    """Return the workers' environment, with a metrics folder separate from other servers on the same data folder."""
    digest = hashlib.blake2b(place.encode(), digest_size=6).hexdigest()
    folder = ensure_private_directory(settings.DATA_DIR / f"metrics-verifier-{digest}")
    for file in folder.glob("*.db"):
        file.unlink()
    return {
        "DJANGO_SETTINGS_MODULE": "keyvault.project.settings",
        "PROMETHEUS_MULTIPROC_DIR": str(folder),
        **os.environ,
    }
