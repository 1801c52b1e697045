"""How the programs of PostgreSQL get the connection, and the errors of a failed copy."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from psycopg import pq

from keyvault.domain.errors import DependencyUnavailableError, StateConflictError
from keyvault.services.backups import databases, restore

SECRETS = {option.keyword.decode() for option in pq.Conninfo.get_defaults() if option.dispchar == b"*"}


def connect_with(monkeypatch: pytest.MonkeyPatch, **parameters: str) -> None:
    monkeypatch.setattr(databases, "connection", SimpleNamespace(get_connection_params=lambda: parameters))


def test_connection_string_has_no_password_and_no_parameter_of_psycopg(monkeypatch: pytest.MonkeyPatch) -> None:
    connect_with(monkeypatch, dbname="kv", password="swordfish", sslkey="/k", keepalives="0", cursor_factory="x")
    conninfo, password = databases._read_conninfo()
    assert (set(conninfo.split()), password) == ({"dbname=kv", "sslkey=/k", "keepalives=0"}, "swordfish")


@pytest.mark.parametrize("name", sorted(SECRETS - {"password"}))
def test_other_secret_of_libpq_is_refused_because_the_list_of_processes_would_show_it(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    connect_with(monkeypatch, dbname="kv", **{name: "swordfish"})
    with pytest.raises(StateConflictError, match=name) as refused:
        databases._read_conninfo()
    assert "swordfish" not in str(refused.value)


def test_database_of_another_service_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of its tables may have names of ours, such as `django_migrations`."""
    tables = ["django_migrations", "shop_order"]
    introspection = SimpleNamespace(table_names=lambda: tables)
    monkeypatch.setattr(restore, "connection", SimpleNamespace(introspection=introspection))
    with pytest.raises(StateConflictError, match="another service"):
        restore._require_own_tables()
    tables.append("keyvault_installation")
    restore._require_own_tables()


def test_copy_of_an_unreachable_postgresql_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: no traceback."""
    connect_with(monkeypatch, host="127.0.0.1", port="1", dbname="kv", password="swordfish")
    with pytest.raises(DependencyUnavailableError, match="Try again") as failed, databases._copying_postgres():
        pass
    assert "refused" in failed.value.internal
    assert "swordfish" not in failed.value.internal


def test_copy_that_loses_its_connection_to_postgresql_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    connect_with(monkeypatch, dbname="kv")

    @contextmanager
    def connect(*_: object, **__: object) -> Iterator[SimpleNamespace]:
        rows = SimpleNamespace(fetchone=lambda: ("snapshot", "0", 0), fetchall=list)
        yield SimpleNamespace(execute=lambda _: rows)
        raise psycopg.OperationalError("server closed the connection")

    @contextmanager
    def run(*_: object, **__: object) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(stdout=None)

    monkeypatch.setattr(psycopg, "connect", connect)
    monkeypatch.setattr(databases, "_running", run)
    with pytest.raises(DependencyUnavailableError, match="Try again"), databases._copying_postgres():
        pass


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database of SQLite, which a restore writes to."""
    path = tmp_path / "db.sqlite3"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE kept (name)")
    monkeypatch.setattr(databases, "connection", SimpleNamespace(settings_dict={"NAME": path}))
    monkeypatch.setattr(databases, "connections", SimpleNamespace(close_all=lambda: None))
    return path


def dump_sqlite(folder: Path) -> bytes:
    """Return a database that is larger than `target`."""
    with closing(sqlite3.connect(folder / "source.sqlite3", isolation_level=None)) as connection:
        connection.execute("CREATE TABLE restored AS SELECT zeroblob(100000) AS content")
    return (folder / "source.sqlite3").read_bytes()


def test_write_to_a_full_disk_names_no_other_process(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump, connect = dump_sqlite(tmp_path), sqlite3.connect

    def connect_to_full(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*arguments, **options)
        if arguments[0] == target:
            connection.execute("PRAGMA max_page_count=1")  # which SQLite raises to the present size
        return connection

    with monkeypatch.context() as full:
        full.setattr(sqlite3, "connect", connect_to_full)
        with pytest.raises(DependencyUnavailableError, match="cannot be written") as failed:
            databases._write_sqlite(tmp_path, [dump])
    assert "full" in failed.value.internal
    with closing(connect(target)) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("kept",)]


def test_write_to_a_database_in_use_says_what_to_stop(target: Path, tmp_path: Path) -> None:
    dump = dump_sqlite(tmp_path)
    with closing(sqlite3.connect(target)) as other:
        other.execute("PRAGMA journal_mode=WAL")
        other.execute("SELECT * FROM kept").fetchall()
        with pytest.raises(StateConflictError, match="Stop every server"):
            databases._write_sqlite(tmp_path, [dump])
