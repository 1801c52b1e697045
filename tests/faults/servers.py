"""Temporary servers that can be stopped and restarted with their data: PostgreSQL, Redis, RabbitMQ."""

import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import psycopg

from tests.environment import ROOT
from tests.servers import postgres, redis
from tests.servers.openbao import find_vault
from tests.servers.throwaway import (
    FailedServerError,
    MissingServerError,
    Place,
    Plan,
    free_port,
    guard_order,
    let_end,
    new_directory,
    unprivileged_owner,
)

DATABASE_NAME = "keyvault_main"
"""Name in `tests.environment`."""

READY_SECONDS = 300
"""Maximum time of a start, in seconds. RabbitMQ takes a minute on a busy machine."""

STARTED_BY_THEMSELVES = frozenset({"openbao", "prometheus", "mount"})
"""Not started here. OpenBao must be unsealed, Prometheus needs addresses, and `mount` is the right to mount a disk."""


class Restartable:
    """One server under `again`. `stop` returns when the server has ended, `start` when it responds."""

    def __init__(self, plan: Plan, place: Place) -> None:
        self.url = plan.url
        self._plan = plan
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.restartable_guard", guard_order(plan, place)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._log = place.directory / "server.log"

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while not self._plan.is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                tail = self._log.read_text(errors="replace")[-2000:] if self._log.exists() else ""
                raise FailedServerError(f"{self._plan.serve[0]} does not answer:\n{tail}")
            time.sleep(0.03)

    def stop(self, how: signal.Signals) -> None:
        """Stop the server. Raises FailedServerError if it still responds: a start script may have left it running."""
        self._send_command(f"stop {int(how)}")
        if self._plan.is_ready():
            raise FailedServerError(f"{self._plan.serve[0]} still answers after {how.name}")

    def start(self) -> None:
        self._send_command("start")
        self.wait_until_ready()

    def _send_command(self, order: str) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{order}\n".encode())
        self._process.stdin.flush()
        if self._process.stdout.readline() != b"done\n":
            raise FailedServerError(f"{self._plan.serve[0]} did not {order}")

    def end(self) -> None:
        """End the server and delete its directory."""
        let_end(self._process)


@contextmanager
def running(name: str) -> Iterator[Restartable]:
    """Run a server. Raises MissingServerError if this machine has none of that name."""
    plan_at = _PLANS[name]
    owner = unprivileged_owner()
    place = Place(new_directory(f"kv-{name}-", owner), free_port(), owner)
    with ExitStack() as stack:
        # Until the server's own guard takes over.
        stack.callback(shutil.rmtree, place.directory, ignore_errors=True)
        server = Restartable(plan_at(place), place)
        stack.callback(server.end)
        server.wait_until_ready()
        yield server


def find_missing(names: frozenset[str]) -> list[str]:
    """Return those of these servers that this machine lacks."""
    found = {
        "postgres": postgres.find_postgres,
        "redis": redis.find_redis,
        "rabbitmq": _find_rabbitmq,
        "openbao": find_vault,
        "prometheus": _find_prometheus,
        "mount": _find_mount,
    }
    return sorted(name for name in names if found[name]() is None)


def _find_mount() -> Path | None:
    """Return `mount`, if this user may mount a small file system."""
    found = shutil.which("mount")
    if found is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([found, "-t", "tmpfs", "keyvault-probe", folder], capture_output=True, check=False)
        if done.returncode != 0:
            return None
        subprocess.run(["umount", folder], check=True)  # noqa: S607  beside `mount`
    return Path(found)


def make_database(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {DATABASE_NAME}")


# --- how each is run ----------------------------------------------------------------------------------------


def _postgres(place: Place) -> Plan:
    binary = postgres.find_postgres()
    if binary is None:
        raise MissingServerError("no PostgreSQL server on this machine")
    plan = postgres._plan(binary, place)
    # An immediate shutdown must keep committed data. The suite's own temporary server would lose the latest commits.
    return replace(plan, serve=[*plan.serve, "-c", "synchronous_commit=on"])


def _redis(place: Place) -> Plan:
    """Return a plan without persistence: a stop loses every waiting message."""
    binary = redis.find_redis()
    if binary is None:
        raise MissingServerError("no Redis server on this machine")
    return redis._plan(binary, place)


def _find_prometheus() -> Path | None:
    found = shutil.which("prometheus")
    return None if found is None else Path(found)


def _find_rabbitmq() -> Path | None:
    """Return the server's own script. Debian's on PATH is a parent of it, which would be killed instead."""
    found = shutil.which("rabbitmq-server")
    choices = (Path("/usr/lib/rabbitmq/bin/rabbitmq-server"), *([Path(found)] if found else []))
    return next((path for path in choices if path.exists()), None)


def _rabbitmq(place: Place) -> Plan:
    """Return a plan on loopback, with its own user. Queues are stored in its directory."""
    binary = _find_rabbitmq()
    if binary is None:
        raise MissingServerError("no RabbitMQ server on this machine")
    password = secrets.token_urlsafe(16)
    place.write(
        "rabbitmq.conf",
        f"listeners.tcp.1 = 127.0.0.1:{place.port}\n"
        f"default_user = keyvault\ndefault_pass = {password}\nloopback_users = none\n",
    )
    settings = {
        "RABBITMQ_CONFIG_FILE": str(place.directory / "rabbitmq.conf"),
        "RABBITMQ_MNESIA_BASE": str(place.directory),
        "RABBITMQ_LOG_BASE": str(place.directory),
        "RABBITMQ_NODENAME": f"keyvault{place.port}@localhost",
        "RABBITMQ_DIST_PORT": str(free_port()),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(place.directory / "plugins"),
        # With this option the start script becomes the server. Otherwise it stays the parent, and only it would be
        # killed.
        "RUNNING_UNDER_SYSTEMD": "true",
    }
    url = f"amqp://keyvault:{password}@127.0.0.1:{place.port}//"
    return Plan(
        url=url,
        serve=["env", *(f"{name}={value}" for name, value in settings.items()), str(binary)],
        is_ready=lambda: _speaks_amqp(url),
        stop_signal=signal.SIGTERM,
    )


def _speaks_amqp(url: str) -> bool:
    from kombu import Connection

    try:
        with Connection(url, connect_timeout=2) as connection:
            connection.ensure_connection(max_retries=1, timeout=2)
    except Exception:  # noqa: BLE001  any error means that it is not ready
        return False
    return True


_PLANS: dict[str, Callable[[Place], Plan]] = {"postgres": _postgres, "redis": _redis, "rabbitmq": _rabbitmq}
