"""A temporary Redis without persistence, and with a password."""

import secrets
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError

from .throwaway import MissingServerError, Place, Plan, running

SETTINGS = """\
bind 127.0.0.1
protected-mode yes
port {port}
dir {directory}
requirepass {password}
save ""
appendonly no
maxmemory 128mb
maxmemory-policy noeviction
"""


def find_redis() -> Path | None:
    """Return the `redis-server` binary, or Valkey's, which is compatible; None without one."""
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    return Path(found) if found else None


def _answers(url: str) -> bool:
    client = Redis.from_url(url, socket_timeout=2, socket_connect_timeout=2)
    try:
        return bool(client.ping())
    except RedisError:
        return False
    finally:
        client.close()


def _plan(binary: Path, place: Place) -> Plan:
    password = secrets.token_urlsafe(16)
    url = f"redis://:{password}@127.0.0.1:{place.port}/0"
    # A file, because a process's arguments can be read by every local user.
    settings = SETTINGS.format(port=place.port, directory=place.directory, password=password)
    return Plan(
        url=url,
        serve=[str(binary), str(place.write("redis.conf", settings))],
        is_ready=lambda: _answers(url),
        stop_signal=signal.SIGTERM,
    )


@contextmanager
def redis_server() -> Iterator[str]:
    """Run Redis and yield the URL of its database 0."""
    binary = find_redis()
    if binary is None:
        raise MissingServerError("no Redis server on this machine (looked for redis-server on PATH)")
    with running("kv-redis-", lambda place: _plan(binary, place)) as url:
        yield url
