"""A temporary PostgreSQL: fast because its data is not durable, with a password because others can reach its port."""

import secrets
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from .throwaway import MissingServerError, Place, Plan, running

CONNECTIONS = 100
LOCALE = "C.UTF-8" if sys.platform == "linux" else "C"

# Durability after a crash of the machine does not matter here.
UNSAFE_BUT_FAST = ("fsync=off", "synchronous_commit=off", "full_page_writes=off")


def _packaged() -> list[Path]:
    """Return packaged installations, the newest first, which distributions install outside PATH."""
    found = [
        *Path("/usr/lib/postgresql").glob("*/bin/postgres"),
        *Path("/usr").glob("pgsql-*/bin/postgres"),
        *Path("/opt/homebrew/opt").glob("postgresql@*/bin/postgres"),
    ]
    return sorted(found, key=lambda path: _version(path.parent.parent.name), reverse=True)


def _version(folder: str) -> int:
    digits = "".join(letter for letter in folder.partition(".")[0] if letter.isdigit())
    return int(digits or 0)


def find_postgres() -> Path | None:
    """Return the `postgres` binary, with `initdb` beside it; None without one."""
    on_path = shutil.which("postgres")
    for candidate in (*_packaged(), *([Path(on_path).resolve()] if on_path else [])):
        if candidate.with_name("initdb").exists():
            return candidate
    return None


def _answers(url: str) -> bool:
    try:
        psycopg.connect(url, connect_timeout=2).close()
    except psycopg.OperationalError:
        return False
    return True


def _plan(binary: Path, place: Place, more: tuple[str, ...] = ()) -> Plan:
    password = secrets.token_urlsafe(16)
    data = place.directory / "data"
    url = f"postgresql://postgres:{password}@127.0.0.1:{place.port}/postgres"
    settings = (
        f"port={place.port}",
        "listen_addresses=127.0.0.1",
        f"unix_socket_directories={place.directory}",
        f"max_connections={CONNECTIONS}",
        "timezone=UTC",
        *UNSAFE_BUT_FAST,
        *more,
    )
    return Plan(
        url=url,
        prepare=(
            [
                str(binary.with_name("initdb")),
                f"--pgdata={data}",
                "--username=postgres",
                # The server listens where every local user can connect, and a superuser of it runs programs.
                f"--pwfile={place.write('password', password)}",
                "--auth=password",
                "--encoding=UTF8",
                f"--locale={LOCALE}",
                "--no-sync",
                "--no-instructions",
            ],
        ),
        serve=[str(binary), "-D", str(data), *(part for setting in settings for part in ("-c", setting))],
        is_ready=lambda: _answers(url),
        # Immediate shutdown loses data, which does not matter, and ends the children and the shared memory.
        stop_signal=signal.SIGQUIT,
    )


@contextmanager
def postgres_server(*settings: str) -> Iterator[str]:
    """Run a temporary PostgreSQL and yield the URL of its database `postgres`, as superuser.

    `settings`: values of its option `-c`.
    """
    binary = find_postgres()
    if binary is None:
        raise MissingServerError(
            "no PostgreSQL server on this machine (looked in /usr/lib/postgresql/*/bin and on PATH)"
        )
    with running("kv-postgres-", lambda place: _plan(binary, place, settings)) as url:
        yield url
