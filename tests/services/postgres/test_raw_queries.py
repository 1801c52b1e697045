"""What is asked by libpq itself takes part in all that Django's cursors take part in, and fails as they fail."""

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
from tests.services.change_feed.test_follower import await_that
from tests.services.racing import TIMEOUT_SECONDS, start

pytestmark = [pytest.mark.postgres, pytest.mark.django_db]

LONG = 8 * 1024 * 1024
"""Bytes: more than the sockets below take at once."""

FAILURES = {
    IntegrityError: "INSERT INTO asked VALUES ('known')",
    ProgrammingError: "SELECT nothing FROM asked",
    DataError: "SELECT 1 / 0",
    OperationalError: "DO $$ BEGIN RAISE lock_not_available; END $$",
}
FAILING = pytest.mark.parametrize("failing", FAILURES.values(), ids=[kind.__name__ for kind in FAILURES])

Ask = Callable[[str], object]


def by_libpq(text: str) -> object:
    return execute(text.encode())


def by_cursor(text: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(text)


@pytest.fixture(autouse=True)
def table(db: None) -> Iterator[None]:
    """`asked`, in which one name is known; and a connection outside of Django's transaction around the test. None of
    Django's own tables is touched, so none has to be emptied."""
    around = connections["default"]
    connections["default"] = connections.create_connection("default")
    by_cursor("CREATE TABLE asked (name text PRIMARY KEY); INSERT INTO asked VALUES ('known')")
    yield
    connection.close()
    terminate("query LIKE '%pg_sleep(600)%'")
    by_cursor("DROP TABLE asked")
    connection.close()
    connections["default"] = around


def terminate(condition: str) -> None:
    """Returns when those are gone; called from a connection of its own."""

    def run() -> None:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT pg_terminate_backend(pid, 30000) FROM pg_stat_activity"  # noqa: S608  a condition of this file's
                f" WHERE datname = current_database() AND pid <> pg_backend_pid() AND {condition}"
            )
            assert all(is_gone for (is_gone,) in cursor.fetchall())

    start(run).result(TIMEOUT_SECONDS)


def pid() -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        return int(cursor.fetchone()[0])


def names() -> list[str]:
    """Those that others see."""

    def run() -> list[str]:
        with connection.cursor() as cursor:
            cursor.execute("SELECT name FROM asked WHERE name <> 'known' ORDER BY name")
            return [name for (name,) in cursor.fetchall()]

    found: list[str] = start(run).result(TIMEOUT_SECONDS)
    return found


def insert(name: str) -> None:
    execute(b"INSERT INTO asked VALUES ($1)", [name.encode()])


# ---------------------------------------------------------------------------------------------------- transactions


def test_ask_outside_a_transaction_is_committed_when_it_returns() -> None:
    insert("a")
    assert names() == ["a"]


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("is_kept", [True, False])
def test_ask_in_a_transaction_stands_and_falls_with_it(is_first: bool, is_kept: bool) -> None:
    """Also as its first statement: Django's driver begins a transaction no sooner than with one of its own."""
    with transaction.atomic():
        if not is_first:
            by_cursor("INSERT INTO asked VALUES ('a')")
        insert("b")
        by_cursor("INSERT INTO asked VALUES ('c')")
        insert("d")
        assert names() == []
        transaction.set_rollback(not is_kept)
    assert names() == ((["b", "c", "d"] if is_first else ["a", "b", "c", "d"]) if is_kept else [])


def test_ask_several_statements_as_the_first_of_a_transaction_commits_none_of_them() -> None:
    with transaction.atomic():
        by_libpq("INSERT INTO asked VALUES ('a'); INSERT INTO asked VALUES ('b')")
        assert names() == []
        transaction.set_rollback(True)
    assert names() == []


def test_ask_in_a_savepoint_is_undone_with_it() -> None:
    with transaction.atomic():
        insert("a")
        with transaction.atomic():
            insert("b")
            transaction.set_rollback(True)
        insert("c")
    assert names() == ["a", "c"]


def test_ask_after_a_transaction_is_outside_of_it() -> None:
    with transaction.atomic():
        insert("a")
        transaction.set_rollback(True)
    insert("b")
    assert names() == ["b"]


# --------------------------------------------------------------------------------------------------------- results


def test_ask_several_statements_gives_a_result_for_each() -> None:
    numbers, inserted, nothing, missing = by_results(
        "SELECT n, n * n FROM generate_series(1, 3) AS n; INSERT INTO asked VALUES ('a');"
        " SELECT name FROM asked WHERE name = 'b'; SELECT NULL, ''"
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


def test_ask_values_are_never_read_as_a_statement() -> None:
    said = "'); DROP TABLE asked; -- $1 %s \\ \" Ladenkasse 🛒 収納"
    insert(said)
    (result,) = execute(b"SELECT $2::text || name FROM asked WHERE name = $1", [said.encode(), "→".encode()])
    assert result.get_value(0, 0) == f"→{said}".encode()


@pytest.mark.parametrize("is_value", [True, False])
def test_ask_what_no_socket_takes_at_once_goes_through(is_value: bool) -> None:
    """Nor is the answer read at once. Nobody would ever wake up whoever waits for the answer to half of a question."""
    lent: list[Any] = []
    said = b"0123456789abcdef" * (LONG // 16)

    def run() -> bytes | None:
        connection.ensure_connection()
        lent.append(connection.connection)
        with socket.socket(fileno=os.dup(connection.connection.fileno())) as wire:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
        (result,) = execute(b"SELECT $1::text", [said]) if is_value else execute(b"SELECT '%b'" % said)
        return result.get_value(0, 0)

    asked = start(run)
    try:
        assert asked.result(TIMEOUT_SECONDS) == said
    finally:
        abort_connection(lent[0])


# ---------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize(("kind", "failing"), FAILURES.items(), ids=[kind.__name__ for kind in FAILURES])
def test_ask_that_fails_raises_as_a_cursor_does_and_leaves_a_good_connection(
    kind: type[DatabaseError], failing: str
) -> None:
    before = pid()
    raised = []
    for say in (by_cursor, by_libpq):
        with pytest.raises(DatabaseError) as error:
            say(failing)
        raised.append((type(error.value), type(error.value.__cause__), str(error.value)))
    assert raised[0][0] is kind
    assert raised[0] == raised[1]
    insert("a")
    assert names() == ["a"]
    assert pid() == before


@pytest.mark.parametrize("place", [0, 1, 2])
@FAILING
def test_ask_several_statements_of_which_one_fails_does_none(failing: str, place: int) -> None:
    statements = ["INSERT INTO asked VALUES ('a')", "INSERT INTO asked VALUES ('b')"]
    statements.insert(place, failing)
    with pytest.raises(DatabaseError):
        by_libpq(";".join(statements))
    assert names() == []
    insert("c")
    assert names() == ["c"]


def test_ask_whose_commit_fails_raises() -> None:
    """What is checked at the end of a transaction has no result of its own among those of the statements."""
    by_cursor("ALTER TABLE asked ADD CONSTRAINT once UNIQUE (name) DEFERRABLE INITIALLY DEFERRED")
    by_cursor("ALTER TABLE asked DROP CONSTRAINT asked_pkey")
    with pytest.raises(IntegrityError):
        by_libpq("INSERT INTO asked VALUES ('a'); INSERT INTO asked VALUES ('a')")
    assert names() == []


def _in_a_block(say: Ask, act: Callable[[Ask], object]) -> list[object]:
    """What becomes of a block whose middle statement fails and is let pass, step by step."""
    told: list[object] = []

    def attempt(step: Callable[[], object]) -> None:
        try:
            step()
            told.append("fine")
        except Exception as error:  # noqa: BLE001  that is what is told
            told.append(type(error))

    def block() -> None:
        with transaction.atomic():
            attempt(lambda: say("INSERT INTO asked VALUES ('before')"))
            attempt(lambda: act(say))
            told.append((connection.needs_rollback, connection.errors_occurred))
            attempt(lambda: say("INSERT INTO asked VALUES ('after')"))
            told.append((connection.needs_rollback, connection.errors_occurred))

    attempt(block)
    told.append((connection.connection is None, connection.errors_occurred, names()))
    close_old_connections()
    attempt(lambda: say("SELECT 1"))
    return told


@FAILING
def test_ask_that_failed_breaks_its_transaction_as_a_cursor_does(failing: str) -> None:
    """Whoever lets the fault pass is told at the next question, and nothing of it is kept."""
    told = _in_a_block(by_libpq, lambda say: say(failing))
    assert told == _in_a_block(by_cursor, lambda say: say(failing))
    assert told[3] is InternalError
    assert names() == []


def _fail_inside(_: Ask) -> None:
    with suppress(ZeroDivisionError), transaction.atomic(savepoint=False):
        raise ZeroDivisionError


def test_ask_in_a_broken_transaction_is_refused_as_a_cursor_is() -> None:
    told = _in_a_block(by_libpq, _fail_inside)
    assert told == _in_a_block(by_cursor, _fail_inside)
    assert told[3] is TransactionManagementError
    assert names() == []


def test_ask_on_a_connection_that_was_closed_in_a_transaction_is_refused() -> None:
    """A new one would be outside of the transaction. (A cursor takes that for a fault of the server.)"""
    told = _in_a_block(by_libpq, lambda _: connection.close())
    assert told[3] is TransactionManagementError
    assert told[-1] == "fine"
    assert names() == []


def test_ask_on_a_connection_that_was_lost_in_a_transaction_fails_as_a_cursor_does() -> None:
    def lose(_: Ask) -> None:
        terminate(f"pid = {connection.connection.info.backend_pid}")

    told = _in_a_block(by_libpq, lose)
    assert told == _in_a_block(by_cursor, lose)
    assert told[3] is OperationalError
    assert told[-1] == "fine"
    assert names() == []


@pytest.mark.parametrize("say", [by_cursor, by_libpq])
def test_ask_on_a_connection_that_was_lost_fails_and_the_next_one_is_good(say: Ask) -> None:
    terminate(f"pid = {pid()}")
    with pytest.raises(OperationalError):
        say("SELECT 1")
    assert connection.errors_occurred
    close_old_connections()
    say("SELECT 1")


@pytest.mark.parametrize("say", [by_cursor, by_libpq])
def test_ask_of_a_new_turn_finds_a_lost_connection_itself(say: Ask) -> None:
    """Each turn of a thread ends with `close_old_connections`: the first question after that fails for nobody."""
    lost = pid()
    close_old_connections()
    terminate(f"pid = {lost}")
    say("INSERT INTO asked VALUES ('after')")
    assert names() == ["after"]
    assert pid() != lost


def test_hang_up_ends_an_ask_of_another_thread() -> None:
    """As it ends a cursor's: with the error of a connection that was lost."""
    lent: list[Any] = []

    def run() -> None:
        connection.ensure_connection()
        lent.append(connection.connection)
        by_libpq("SELECT pg_sleep(600)")

    asked = start(run)
    try:
        await_that(_is_somebody_asleep, "the question")
    finally:
        abort_connection(lent[0])
    with pytest.raises(OperationalError):
        asked.result(TIMEOUT_SECONDS)


def _is_somebody_asleep() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'")
        return bool(cursor.fetchone()[0])


# --------------------------------------------------------------------------------------------------------- notices


@contextmanager
def listening() -> "Iterator[psycopg.Connection[Any]]":
    chosen = connection.get_connection_params()
    for name in ("context", "cursor_factory"):
        chosen.pop(name, None)
    with psycopg.connect(**chosen, autocommit=True) as made:
        made.execute("LISTEN asked")
        yield made


def test_wait_for_notice_ends_with_the_notice() -> None:
    with listening() as listener:
        waiting = start(lambda: wait_for_notice(listener.pgconn, 20 * TIMEOUT_SECONDS))
        try:
            by_cursor("NOTIFY asked")
            waiting.result(TIMEOUT_SECONDS)
        finally:
            abort_connection(listener)


def test_wait_for_notice_without_one_ends_with_its_time() -> None:
    with listening() as listener:
        started = time.monotonic()
        waiting = start(lambda: wait_for_notice(listener.pgconn, 0.05))
        try:
            waiting.result(TIMEOUT_SECONDS)
        finally:
            abort_connection(listener)
        assert time.monotonic() - started >= 0.05


def test_wait_for_notice_takes_all_that_were_told_at_once() -> None:
    """The next wait is for the next one."""
    with listening() as listener:
        by_cursor("BEGIN; NOTIFY asked, 'a'; NOTIFY asked, 'b'; COMMIT")
        wait_for_notice(listener.pgconn, TIMEOUT_SECONDS)
        assert listener.pgconn.notifies() is None
        started = time.monotonic()
        wait_for_notice(listener.pgconn, 0.05)
        assert time.monotonic() - started >= 0.05


def test_wait_for_notice_on_a_connection_that_is_lost_raises() -> None:
    """Its last words are no reason to believe in it: if the first wait ends with them, the next one raises."""
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
