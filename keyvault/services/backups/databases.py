"""Copy the database into a stream, and a stream into an empty database.

PostgreSQL: `pg_dump`, `pg_restore` and `psql`, of the server's version, on PATH. SQLite: its backup API, by way of a
file.
"""

import os
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import psycopg
from django.db import connection, connections
from django.db.migrations.recorder import MigrationRecorder
from psycopg import IsolationLevel, pq
from psycopg.conninfo import make_conninfo

from keyvault.backends.private_files import ensure_private_file
from keyvault.domain.errors import DependencyUnavailableError, IntegrityError, StateConflictError

_FACTS = (
    "SELECT installation_id, oldest_compatible_release,"
    " (SELECT coalesce(max(sequence), 0) FROM keyvault_change) FROM keyvault_installation"
)
_PEPPERS = "SELECT pepper_set, number FROM keyvault_pepperversion WHERE retired_at IS NULL ORDER BY pepper_set, number"

_MAX_ERROR_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class DatabaseFacts:
    """What a copy of the database says about itself.

    `change_sequence`: its newest change. `peppers`: set and number of those that its keys may need.
    """

    installation_id: str
    oldest_compatible_release: str
    change_sequence: int
    peppers: Sequence[tuple[str, int]]


@contextmanager
def copying_database(folder: Path) -> Iterator[tuple[DatabaseFacts, IO[bytes]]]:
    """Yield what the copy says about itself, and its stream. All of it is of one moment.

    Raises IntegrityError before setup, and DependencyUnavailableError if the copy fails, at the latest at the end.
    """
    if connection.vendor == "postgresql":
        with _copying_postgres() as copy:
            yield copy
    else:
        with _copying_sqlite(folder) as copy:
            yield copy


def write_database(folder: Path, chunks: Iterable[bytes], *, is_replacing: bool) -> None:
    """Write the copy in one transaction: after a failure or a kill the database is as before.

    Raises StateConflictError while other processes use the database, and DependencyUnavailableError if it fails.
    """
    if connection.vendor == "postgresql":
        _write_postgres(chunks, is_replacing=is_replacing)
    else:
        _write_sqlite(folder, chunks)
    connections.close_all()


def is_database_empty() -> bool:
    with connection.cursor() as cursor:
        return not connection.introspection.table_names(cursor)


# --- PostgreSQL ---------------------------------------------------------------------------------------------


@contextmanager
def _copying_postgres() -> Iterator[tuple[DatabaseFacts, IO[bytes]]]:
    conninfo, password = _read_conninfo()
    try:
        with psycopg.connect(conninfo, password=password) as reader:
            reader.isolation_level, reader.read_only = IsolationLevel.REPEATABLE_READ, True
            snapshot = cast("tuple[str]", reader.execute("SELECT pg_export_snapshot()").fetchone())[0]
            facts = _read_facts(reader)
            dump = ["pg_dump", "--format=custom", "--no-owner", "--no-privileges", f"--snapshot={snapshot}"]
            with _running([*dump, f"--dbname={conninfo}"], stdout=subprocess.PIPE) as process:
                yield facts, cast("IO[bytes]", process.stdout)
    except psycopg.Error as error:
        raise DependencyUnavailableError("The database cannot be copied. Try again.", internal=str(error)) from error


def _write_postgres(chunks: Iterable[bytes], *, is_replacing: bool) -> None:
    """Have `pg_restore` write its statements into the transaction of one `psql`.

    Its own `--clean` would fail for a database of a later schema, whose tables refer to those of the archive. `psql`
    commits only after `pg_restore` has succeeded; otherwise it rolls back.
    """
    _require_no_other_client()
    drop = _drop_statements() if is_replacing else ""
    connections.close_all()
    conninfo, _ = _read_conninfo()
    write = ["psql", "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", "--output=/dev/null"]
    read = ["pg_restore", "--no-owner", "--no-privileges", "--file=-"]
    replace = ["--clean", "--if-exists"] if is_replacing else []
    failure = None
    # A program that has failed closes its input. Its exit status and error output say why.
    with _running([*write, f"--dbname={conninfo}"], stdin=subprocess.PIPE) as writer:
        statements = cast("IO[bytes]", writer.stdin)
        with suppress(BrokenPipeError):
            statements.write(f"BEGIN;\n{drop}\n".encode())
            statements.flush()
        try:
            with _running([*read, *replace], stdin=subprocess.PIPE, stdout=statements) as reader:
                archive = cast("IO[bytes]", reader.stdin)
                with suppress(BrokenPipeError):
                    for chunk in chunks:
                        archive.write(chunk)
                with suppress(BrokenPipeError):
                    archive.close()
        except DependencyUnavailableError as error:
            failure = error
        with suppress(BrokenPipeError):
            if failure is None:
                statements.write(b"COMMIT;\n")
            statements.close()
    # Raised last: if `psql` has failed, `pg_restore` reports only a broken pipe.
    if failure is not None:
        raise failure


def _drop_statements() -> str:
    """Return SQL that drops this service's tables, those of other releases included, and what refers to them."""
    known = {MigrationRecorder.Migration._meta.db_table, *connection.introspection.django_table_names()}
    with connection.cursor() as cursor:
        found = connection.introspection.table_names(cursor)
    own = [name for name in found if name in known or name.startswith(("keyvault_", "rotation_"))]
    drops = [f"DROP TABLE {connection.ops.quote_name(name)} CASCADE;" for name in own]
    return "\n".join(["SET client_min_messages = warning;", *drops])


def _require_no_other_client() -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            " AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
        )
        (others,) = cursor.fetchone()
    if others:
        raise _in_use_error(f"{others} other connections")


def _read_conninfo() -> tuple[str, str | None]:
    """Return the connection string without the password, which is visible in no process list, and the password.

    Raises StateConflictError for another secret: the programs take only the password from their environment.
    """
    options = {option.keyword.decode(): option for option in pq.Conninfo.get_defaults()}
    parameters = {name: value for name, value in connection.get_connection_params().items() if name in options}
    password = parameters.pop("password", None)
    for name, value in parameters.items():
        if value and options[name].dispchar == b"*":
            raise StateConflictError(
                f"KEYVAULT_DATABASE_URL sets {name}, which the list of processes would show while a program of "
                "PostgreSQL runs. Use a password or a key file without a passphrase."
            )
    return make_conninfo("", **parameters), password or None


@contextmanager
def _running(
    command: list[str], stdin: int | None = None, stdout: int | IO[bytes] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program of PostgreSQL. Raises DependencyUnavailableError if it is missing or fails."""
    name = command[0]
    if (program := shutil.which(name)) is None:
        raise DependencyUnavailableError(
            f"{name} is not on PATH. Install PostgreSQL's client programs of the server's version."
        )
    _, password = _read_conninfo()
    environ = {**os.environ, **({"PGPASSWORD": password} if password else {})}
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(  # noqa: S603  programs of PostgreSQL, without a shell
            [program, *command[1:]], env=environ, stderr=errors, stdin=stdin, stdout=stdout
        )
        try:
            yield process
            if process.stdout is not None:
                process.stdout.close()
            status = process.wait()
        finally:
            # If the other side failed, the program must not treat the part that it has as complete.
            process.kill()
            process.wait()
        if status != 0:
            errors.seek(0)
            why = errors.read().decode(errors="replace").strip()[:_MAX_ERROR_CHARACTERS]
            raise DependencyUnavailableError(f"{name} failed.", internal=f"exit status {status}: {why}")


# --- SQLite -------------------------------------------------------------------------------------------------


@contextmanager
def _copying_sqlite(folder: Path) -> Iterator[tuple[DatabaseFacts, IO[bytes]]]:
    path = folder / "database.sqlite3"
    copy_sqlite(Path(connection.settings_dict["NAME"]), path)
    with closing(sqlite3.connect(path)) as reader:
        facts = _read_facts(reader)
    with path.open("rb") as file:
        yield facts, file


def copy_sqlite(source_path: Path, target_path: Path) -> None:
    """Copy a SQLite database, of one moment, while others write to it, into one file of its own.

    Raises IntegrityError if it is damaged, and DependencyUnavailableError if it cannot be read.
    """
    ensure_private_file(target_path)
    source_uri = f"{source_path.absolute().as_uri()}?mode=ro"
    try:
        with (
            closing(sqlite3.connect(source_uri, uri=True, timeout=20)) as source,
            closing(sqlite3.connect(target_path)) as target,
        ):
            source.backup(target)
            target.execute("PRAGMA journal_mode=DELETE")
            # The constraints call functions of Django's.
            target.execute("PRAGMA ignore_check_constraints=ON")
            (found,) = target.execute("PRAGMA quick_check").fetchone()
    except sqlite3.Error as error:
        raise DependencyUnavailableError(
            "A SQLite file cannot be copied.", internal=f"{source_path}: {error}"
        ) from error
    if found != "ok":
        raise IntegrityError("A SQLite file is damaged.", internal=f"{source_path}: {found}")


def _write_sqlite(folder: Path, chunks: Iterable[bytes]) -> None:
    connections.close_all()
    copy = folder / "database.sqlite3"
    ensure_private_file(copy)
    with copy.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
    name = connection.settings_dict["NAME"]
    with closing(sqlite3.connect(copy)) as source, closing(sqlite3.connect(name, timeout=0)) as target:
        try:
            # Fails if another process has the file open. The backup API then replaces all pages, or none.
            target.execute("PRAGMA journal_mode=DELETE")
            source.backup(target)
        except sqlite3.Error as error:
            # The low byte is the primary code.
            if error.sqlite_errorcode & 0xFF in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}:
                raise _in_use_error(str(error)) from error
            raise DependencyUnavailableError("The database cannot be written.", internal=str(error)) from error


# --- both ---------------------------------------------------------------------------------------------------


def _read_facts(reader: Any) -> DatabaseFacts:
    """Read the facts through a connection of `psycopg` or `sqlite3`."""
    try:
        found = reader.execute(_FACTS).fetchone()
        peppers = reader.execute(_PEPPERS).fetchall()
    except (psycopg.errors.UndefinedTable, sqlite3.OperationalError) as error:
        raise IntegrityError("The database is not set up: there is nothing to back up.", internal=str(error)) from error
    if found is None:
        raise IntegrityError("The database is not set up: there is nothing to back up.")
    installation_id, oldest, sequence = found
    return DatabaseFacts(installation_id, oldest, sequence, [(name, number) for name, number in peppers])


def _in_use_error(why: str) -> StateConflictError:
    return StateConflictError(
        "Other processes use the database. Stop every server, verifier, worker and beat on all hosts, and try again.",
        internal=why,
    )
