"""Queries sent through libpq take part in Django's transactions and fail as Django's cursors do."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
import pytest
from django.db import (
    DatabaseError,
    DataError,
    IntegrityError,
    InternalError,
    OperationalError,
    ProgrammingError,
    close_old_connections,
    connection,
    connections,
    transaction,
)
from django.db.transaction import TransactionManagementError

from keyvault.services.postgres.connection_timeouts import abort_connection
from keyvault.services.postgres.raw_queries import execute, wait_for_notice
from tests.services.change_feed.test_follower import wait_until
from tests.services.racing import TIMEOUT_SECONDS, start

pytestmark = [pytest.mark.postgres, pytest.mark.django_db]

LONG = 8 * 1024 * 1024
"""Size of a value that exceeds the socket buffers, in bytes."""

FAILURES = {
    IntegrityError: "INSERT INTO entries VALUES ('known')",
    ProgrammingError: "SELECT nothing FROM entries",
    DataError: "SELECT 1 / 0",
    OperationalError: "DO $$ BEGIN RAISE lock_not_available; END $$",
}
FAILING = pytest.mark.parametrize("failing", FAILURES.values(), ids=[kind.__name__ for kind in FAILURES])

RunQuery = Callable[[str], object]


def by_libpq(text: str) -> object:
    return execute(text.encode())


def by_cursor(text: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(text)


@pytest.fixture(autouse=True)
def table(db: None) -> Iterator[None]:
    """Create the table `entries` with one row, on a connection outside Django's test transaction.

    No Django table is written, so none has to be emptied.
    """
    outer = connections["default"]
    connections["default"] = connections.create_connection("default")
    by_cursor("CREATE TABLE entries (name text PRIMARY KEY); INSERT INTO entries VALUES ('known')")
    yield
    connection.close()
    terminate("query LIKE '%pg_sleep(600)%'")
    by_cursor("DROP TABLE entries")
    connection.close()
    connections["default"] = outer


def terminate(condition: str) -> None:
    """Terminate the matching backends and wait until they are gone."""

    def run() -> None:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT pg_terminate_backend(pid, 30000) FROM pg_stat_activity"  # noqa: S608  the condition is a literal of this file
                f" WHERE datname = current_database() AND pid <> pg_backend_pid() AND {condition}"
            )
            assert all(is_gone for (is_gone,) in cursor.fetchall())

    start(run).result(TIMEOUT_SECONDS)


def pid() -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        return int(cursor.fetchone()[0])


def names() -> list[str]:
    """Return the rows that other connections see."""

    def run() -> list[str]:
        with connection.cursor() as cursor:
            cursor.execute("SELECT name FROM entries WHERE name <> 'known' ORDER BY name")
            return [name for (name,) in cursor.fetchall()]

    found: list[str] = start(run).result(TIMEOUT_SECONDS)
    return found


def insert(name: str) -> None:
    execute(b"INSERT INTO entries VALUES ($1)", [name.encode()])


# ---------------------------------------------------------------------------------------------------- transactions


def test_query_outside_a_transaction_is_committed_when_it_returns() -> None:
    insert("a")
    assert names() == ["a"]


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("is_committed", [True, False])
def test_query_in_a_transaction_is_committed_or_rolled_back_with_it(is_first: bool, is_committed: bool) -> None:
    """Also as the first statement: Django's driver sends BEGIN only with its own first statement."""
    with transaction.atomic():
        if not is_first:
            by_cursor("INSERT INTO entries VALUES ('a')")
        insert("b")
        by_cursor("INSERT INTO entries VALUES ('c')")
        insert("d")
        assert names() == []
        transaction.set_rollback(not is_committed)
    assert names() == ((["b", "c", "d"] if is_first else ["a", "b", "c", "d"]) if is_committed else [])


def test_query_of_several_statements_first_in_a_transaction_commits_none() -> None:
    with transaction.atomic():
        by_libpq("INSERT INTO entries VALUES ('a'); INSERT INTO entries VALUES ('b')")
        assert names() == []
        transaction.set_rollback(True)
    assert names() == []


def test_query_in_a_savepoint_is_rolled_back_with_it() -> None:
    with transaction.atomic():
        insert("a")
        with transaction.atomic():
            insert("b")
            transaction.set_rollback(True)
        insert("c")
    assert names() == ["a", "c"]


def test_query_after_a_transaction_is_outside_of_it() -> None:
    with transaction.atomic():
        insert("a")
        transaction.set_rollback(True)
    insert("b")
    assert names() == ["b"]


# --------------------------------------------------------------------------------------------------------- results


def test_query_of_several_statements_returns_a_result_for_each() -> None:
    numbers, inserted, nothing, missing = by_results(
        "SELECT n, n * n FROM generate_series(1, 3) AS n; INSERT INTO entries VALUES ('a');"
        " SELECT name FROM entries WHERE name = 'b'; SELECT NULL, ''"
    )
    assert numbers == [[b"1", b"1"], [b"2", b"4"], [b"3", b"9"]]
    assert inserted == []
    assert nothing == []
    assert missing == [[None, b""]]
    assert names() == ["a"]


def by_results(text: str) -> list[list[list[bytes | None]]]:
    return [
        [[result.get_value(row, column) for column in range(result.nfields)] for row in range(result.ntuples)]
        for result in execute(text.encode())
    ]


def test_query_parameters_are_never_read_as_a_statement() -> None:
    value = "'); DROP TABLE entries; -- $1 %s \\ \" Ladenkasse 🛒 収納"
    insert(value)
    (result,) = execute(b"SELECT $2::text || name FROM entries WHERE name = $1", [value.encode(), "→".encode()])
    assert result.get_value(0, 0) == f"→{value}".encode()


@pytest.mark.parametrize("is_value", [True, False])
def test_query_larger_than_the_socket_buffers_completes(is_value: bool) -> None:
    """The client must read and write alternately, or both sides wait for each other."""
    opened: list[Any] = []
    value = b"0123456789abcdef" * (LONG // 16)

    def run() -> bytes | None:
        connection.ensure_connection()
        opened.append(connection.connection)
        with socket.socket(fileno=os.dup(connection.connection.fileno())) as wire:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
        (result,) = execute(b"SELECT $1::text", [value]) if is_value else execute(b"SELECT '%b'" % value)
        return result.get_value(0, 0)

    pending = start(run)
    try:
        assert pending.result(TIMEOUT_SECONDS) == value
    finally:
        abort_connection(opened[0])


# ---------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize(("kind", "failing"), FAILURES.items(), ids=[kind.__name__ for kind in FAILURES])
def test_query_that_fails_raises_as_a_cursor_does_and_keeps_the_connection(
    kind: type[DatabaseError], failing: str
) -> None:
    before = pid()
    raised = []
    for run_query in (by_cursor, by_libpq):
        with pytest.raises(DatabaseError) as error:
            run_query(failing)
        raised.append((type(error.value), type(error.value.__cause__), str(error.value)))
    assert raised[0][0] is kind
    assert raised[0] == raised[1]
    insert("a")
    assert names() == ["a"]
    assert pid() == before


@pytest.mark.parametrize("place", [0, 1, 2])
@FAILING
def test_query_of_several_statements_with_a_failing_one_does_none(failing: str, place: int) -> None:
    statements = ["INSERT INTO entries VALUES ('a')", "INSERT INTO entries VALUES ('b')"]
    statements.insert(place, failing)
    with pytest.raises(DatabaseError):
        by_libpq(";".join(statements))
    assert names() == []
    insert("c")
    assert names() == ["c"]


def test_query_whose_commit_fails_raises() -> None:
    """A check at the end of the transaction has no result among those of the statements."""
    by_cursor("ALTER TABLE entries ADD CONSTRAINT once UNIQUE (name) DEFERRABLE INITIALLY DEFERRED")
    by_cursor("ALTER TABLE entries DROP CONSTRAINT entries_pkey")
    with pytest.raises(IntegrityError):
        by_libpq("INSERT INTO entries VALUES ('a'); INSERT INTO entries VALUES ('a')")
    assert names() == []


def outcomes_in_a_block(run_query: RunQuery, middle: Callable[[RunQuery], object]) -> list[object]:
    """Run a block that suppresses the failure of its middle statement, and return the outcome of each step."""
    outcomes: list[object] = []

    def attempt(step: Callable[[], object]) -> None:
        try:
            step()
            outcomes.append("succeeded")
        except Exception as error:  # noqa: BLE001  the outcome is compared
            outcomes.append(type(error))

    def block() -> None:
        with transaction.atomic():
            attempt(lambda: run_query("INSERT INTO entries VALUES ('before')"))
            attempt(lambda: middle(run_query))
            outcomes.append((connection.needs_rollback, connection.errors_occurred))
            attempt(lambda: run_query("INSERT INTO entries VALUES ('after')"))
            outcomes.append((connection.needs_rollback, connection.errors_occurred))

    attempt(block)
    outcomes.append((connection.connection is None, connection.errors_occurred, names()))
    close_old_connections()
    attempt(lambda: run_query("SELECT 1"))
    return outcomes


@FAILING
def test_query_that_fails_breaks_its_transaction_as_a_cursor_does(failing: str) -> None:
    """If the caller suppresses the error, the next query fails, and nothing is committed."""
    outcomes = outcomes_in_a_block(by_libpq, lambda run_query: run_query(failing))
    assert outcomes == outcomes_in_a_block(by_cursor, lambda run_query: run_query(failing))
    assert outcomes[3] is InternalError
    assert names() == []


def _fail_inside(_: RunQuery) -> None:
    with suppress(ZeroDivisionError), transaction.atomic(savepoint=False):
        raise ZeroDivisionError


def test_query_in_a_broken_transaction_is_refused_as_by_a_cursor() -> None:
    outcomes = outcomes_in_a_block(by_libpq, _fail_inside)
    assert outcomes == outcomes_in_a_block(by_cursor, _fail_inside)
    assert outcomes[3] is TransactionManagementError
    assert names() == []


def test_query_on_a_connection_closed_in_a_transaction_is_refused() -> None:
    """A new connection would be outside the transaction. (A cursor reports a server error instead.)"""
    outcomes = outcomes_in_a_block(by_libpq, lambda _: connection.close())
    assert outcomes[3] is TransactionManagementError
    assert outcomes[-1] == "succeeded"
    assert names() == []


def test_query_on_a_connection_lost_in_a_transaction_fails_as_by_a_cursor() -> None:
    def lose(_: RunQuery) -> None:
        terminate(f"pid = {connection.connection.info.backend_pid}")

    outcomes = outcomes_in_a_block(by_libpq, lose)
    assert outcomes == outcomes_in_a_block(by_cursor, lose)
    assert outcomes[3] is OperationalError
    assert outcomes[-1] == "succeeded"
    assert names() == []


@pytest.mark.parametrize("run_query", [by_cursor, by_libpq])
def test_query_on_a_lost_connection_fails_and_the_next_one_succeeds(run_query: RunQuery) -> None:
    terminate(f"pid = {pid()}")
    with pytest.raises(OperationalError):
        run_query("SELECT 1")
    assert connection.errors_occurred
    close_old_connections()
    run_query("SELECT 1")


@pytest.mark.parametrize("run_query", [by_cursor, by_libpq])
def test_query_after_close_old_connections_replaces_a_lost_connection(run_query: RunQuery) -> None:
    """A thread calls `close_old_connections` between two tasks, so a connection lost in between fails no query."""
    lost = pid()
    close_old_connections()
    terminate(f"pid = {lost}")
    run_query("INSERT INTO entries VALUES ('after')")
    assert names() == ["after"]
    assert pid() != lost


def test_abort_connection_ends_a_query_of_another_thread() -> None:
    """The query raises the error of a lost connection, as a cursor does."""
    opened: list[Any] = []

    def run() -> None:
        connection.ensure_connection()
        opened.append(connection.connection)
        by_libpq("SELECT pg_sleep(600)")

    pending = start(run)
    try:
        wait_until(_is_a_backend_asleep, "the query to start")
    finally:
        abort_connection(opened[0])
    with pytest.raises(OperationalError):
        pending.result(TIMEOUT_SECONDS)


def _is_a_backend_asleep() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'")
        return bool(cursor.fetchone()[0])


# --------------------------------------------------------------------------------------------------------- notices


@contextmanager
def listening() -> "Iterator[psycopg.Connection[Any]]":
    parameters = connection.get_connection_params()
    for name in ("context", "cursor_factory"):
        parameters.pop(name, None)
    with psycopg.connect(**parameters, autocommit=True) as listener:
        listener.execute("LISTEN entries")
        yield listener


def test_wait_for_notice_returns_when_notified() -> None:
    with listening() as listener:
        waiting = start(lambda: wait_for_notice(listener.pgconn, 20 * TIMEOUT_SECONDS))
        try:
            by_cursor("NOTIFY entries")
            waiting.result(TIMEOUT_SECONDS)
        finally:
            abort_connection(listener)


def test_wait_for_notice_without_a_notice_returns_after_its_timeout() -> None:
    with listening() as listener:
        started = time.monotonic()
        waiting = start(lambda: wait_for_notice(listener.pgconn, 0.05))
        try:
            waiting.result(TIMEOUT_SECONDS)
        finally:
            abort_connection(listener)
        assert time.monotonic() - started >= 0.05


def test_wait_for_notice_consumes_all_pending_notices() -> None:
    """The next wait is for a later notice."""
    with listening() as listener:
        by_cursor("BEGIN; NOTIFY entries, 'a'; NOTIFY entries, 'b'; COMMIT")
        wait_for_notice(listener.pgconn, TIMEOUT_SECONDS)
        assert listener.pgconn.notifies() is None
        started = time.monotonic()
        wait_for_notice(listener.pgconn, 0.05)
        assert time.monotonic() - started >= 0.05


def test_wait_for_notice_on_a_lost_connection_raises() -> None:
    """If the server's last message ends the first wait, the next one raises."""
    with listening() as listener:

        def wait() -> None:
            wait_for_notice(listener.pgconn, 20 * TIMEOUT_SECONDS)
            wait_for_notice(listener.pgconn, 20 * TIMEOUT_SECONDS)

        lost = f"pid = {listener.info.backend_pid}"
        waiting = start(wait)
        try:
            terminate(lost)
            with pytest.raises(psycopg.Error):
                waiting.result(TIMEOUT_SECONDS)
        finally:
            abort_connection(listener)
    with pytest.raises(psycopg.Error):
        wait_for_notice(listener.pgconn, TIMEOUT_SECONDS)
