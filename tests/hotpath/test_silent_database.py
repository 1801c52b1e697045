"""A database that accepts statements and never answers: every client gets a 503 within seconds."""

import asyncio
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from django.db import connection
from django.db.models import QuerySet

from keyvault.hotpath.adapters import stores
from keyvault.hotpath.adapters.stores import PostgresStore, PreparedConnection, ShortTimeoutThread
from keyvault.hotpath.frontends.threaded_frontend import StoreUnavailableError
from keyvault.hotpath.messages.pending_requests import KEY, TOKEN, Found
from keyvault.models import Account, Credential
from keyvault.services.keys.records import find_keys
from tests.factories import account, issue, make_merchant

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]

NOBODY = frozenset({"0000000000000000"})


@pytest.fixture(autouse=True)
def no_sleepers(transactional_db: None) -> Iterator[None]:
    """End the sleeping backends: PostgreSQL does not notice that their client has disconnected."""
    yield
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE %s AND pid <> pg_backend_pid()",
            ["%pg_sleep(600)%"],
        )


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "ANSWER_SECONDS", 0.2)


def test_store_whose_reading_of_keys_hangs_gives_up_and_reads_the_next_one() -> None:
    async def ask() -> None:
        store = PostgresStore()
        await store.open()
        query, store._query = store._query, b"SELECT pg_sleep(600) WHERE 'x' <> ALL($1)"
        with pytest.raises(StoreUnavailableError):
            await store.find(KEY, NOBODY)
        store._query = query
        assert await store.find(KEY, NOBODY) == {}
        await store.close()

    asyncio.run(ask())


def test_store_whose_thread_hangs_gives_up_and_reads_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(ids: frozenset[str]) -> dict[str, Found]:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_sleep(600)")
        return {}

    async def ask() -> None:
        store = PostgresStore()
        await store.open()
        with monkeypatch.context() as patch:
            patch.setitem(stores._FIND, TOKEN, sleep)
            for _ in range(2):
                with pytest.raises(StoreUnavailableError):
                    await store.find(TOKEN, NOBODY)
        while True:
            try:
                assert await store.find(TOKEN, NOBODY) == {}
                break
            except StoreUnavailableError:
                continue  # the thread still runs an abandoned statement
        await store.close()

    asyncio.run(ask())


def test_reading_behind_a_slow_one_has_its_own_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: a timeout aborts the connection of its own reading, never that of another."""
    monkeypatch.setattr(stores, "ANSWER_SECONDS", 2.0)

    def sleep() -> str:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_sleep(1.2)")
        return "answered"

    async def ask() -> None:
        thread = ShortTimeoutThread("reads")
        assert list(await asyncio.gather(thread.run(sleep), thread.run(sleep))) == ["answered"] * 2
        await thread.close()

    asyncio.run(ask())


def test_store_plans_its_statements_again_after_a_migration() -> None:
    """After a migration under a running verifier, no request fails with "cached plan must not change result type"."""

    async def ask() -> None:
        store = PostgresStore()
        store._query = b"SELECT * FROM fickle WHERE id = ANY($1)"
        assert await store.find(KEY, NOBODY) == {}
        for column, read in (("one", store.find(KEY, NOBODY)), ("two", result_of(store))):
            (reader,) = store._idle
            await asyncio.to_thread(execute, f"ALTER TABLE fickle ADD COLUMN {column} integer")
            assert await read == {}
            assert reader.is_closed
            assert len(store._idle) == 1
        await store.close()

    execute("CREATE TABLE fickle (id text)")
    try:
        asyncio.run(ask())
    finally:
        execute("DROP TABLE fickle")


@pytest.mark.parametrize("way", ["find", "find_keys"])
def test_reading_that_has_ended_leaves_no_timer_to_end_the_next_one(way: str) -> None:
    async def ask() -> None:
        store = PostgresStore()
        await store.find(KEY, NOBODY)
        (reader,) = store._idle
        loop, timers = reader._loop, list[asyncio.TimerHandle]()
        reader._loop = mock.Mock(wraps=loop)

        def call_later(*wanted: Any) -> asyncio.TimerHandle:
            timers.append(loop.call_later(*wanted))
            return timers[-1]

        reader._loop.call_later.side_effect = call_later
        for _ in range(2):
            assert await (store.find(KEY, NOBODY) if way == "find" else result_of(store)) == {}
        assert [timer.cancelled() for timer in timers] == [True, True]
        assert store._idle == [reader]
        await store.close()

    asyncio.run(ask())


def test_store_whose_idle_connections_were_lost_reads_by_another() -> None:
    """After a restart of the database, an idle connection shows its loss only by unread data."""

    async def ask() -> None:
        store = PostgresStore()
        await asyncio.gather(store.find(KEY, NOBODY), store.find(KEY, NOBODY))
        readers = list(store._idle)
        assert len(readers) == 2
        await asyncio.to_thread(terminate_others)
        async with asyncio.timeout(5):
            while not all(reader.is_closed for reader in readers):
                await asyncio.sleep(0.01)
        assert await store.find(KEY, NOBODY) == {}
        assert len(store._idle) == 1
        await store.close()

    asyncio.run(ask())


def test_store_whose_connection_is_lost_fails_and_reads_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stores, "ANSWER_SECONDS", 5.0)

    async def ask() -> None:
        store = PostgresStore()
        query, store._query = store._query, b"SELECT pg_sleep(600) WHERE 'x' <> ALL($1)"
        waiting = asyncio.create_task(store.find(KEY, NOBODY))
        while not await asyncio.to_thread(terminate_others, "pg_sleep(600)"):
            await asyncio.sleep(0.01)
        with pytest.raises(StoreUnavailableError):
            await waiting
        store._query = query
        assert await store.find(KEY, NOBODY) == {}
        await store.close()

    asyncio.run(ask())


def test_reading_that_was_canceled_passes_its_answer_to_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: the answer of a canceled statement is never taken for the answer of the next one."""
    monkeypatch.setattr(stores, "ANSWER_SECONDS", 5.0)

    async def ask() -> None:
        store = PostgresStore()
        assert await store.find(KEY, NOBODY) == {}
        (reader,) = store._idle
        given_up = asyncio.create_task(store.find(KEY, NOBODY))
        await asyncio.sleep(0)
        given_up.cancel()
        assert await store.find(KEY, frozenset({"1" * 16})) == {}
        assert reader.is_closed
        assert reader not in store._idle
        await store.close()

    asyncio.run(ask())


def test_statement_larger_than_the_socket_buffer_is_sent_completely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stores, "ANSWER_SECONDS", 20.0)

    async def ask() -> None:
        store = PostgresStore()
        store._query = b"SELECT cardinality($1)"
        reader = await PreparedConnection.connect(store._query)
        many = frozenset(f"{number:016}" for number in range(400_000))
        assert await reader.read(stores._array(many)) == [(len(many),)]
        assert await reader.read(stores._array(NOBODY)) == [(1,)]
        reader.close()
        reader.close()
        await store.close()

    asyncio.run(ask())


async def result_of(store: PostgresStore, ids: frozenset[str] = NOBODY) -> object:
    """Return the result that `find_keys` passes to its callback."""
    results, has_result = list[object](), asyncio.Event()

    def note(found: object) -> None:
        results.append(found)
        has_result.set()

    store.find_keys(ids, note)
    assert not results, "the callback must not run inside the call"
    async with asyncio.timeout(10):
        await has_result.wait()
    (found,) = results
    return found


def test_keys_read_by_callback_reuse_one_connection() -> None:
    async def ask() -> None:
        store = PostgresStore()
        assert [await result_of(store) for _ in range(3)] == [{}] * 3
        (reader,) = store._idle
        assert await result_of(store) == {}
        assert store._idle == [reader]
        await store.close()

    asyncio.run(ask())


def test_keys_of_a_lost_connection_are_read_by_another() -> None:
    async def ask() -> None:
        store = PostgresStore()
        await asyncio.gather(store.find(KEY, NOBODY), store.find(KEY, NOBODY))
        lost = list(store._idle)
        await asyncio.to_thread(terminate_others)
        assert await result_of(store) == {}
        assert all(reader.is_closed for reader in lost)
        assert len(store._idle) == 1
        await store.close()

    asyncio.run(ask())


def test_keys_whose_reading_hangs_time_out_and_the_next_one_is_read() -> None:
    async def ask() -> None:
        store = PostgresStore()
        query, store._query = store._query, b"SELECT pg_sleep(600) WHERE 'x' <> ALL($1) AND cardinality($1) > 1"
        assert await result_of(store) == {}
        (reader,) = store._idle
        assert isinstance(await result_of(store, NOBODY | {"1" * 16}), StoreUnavailableError)
        assert (reader.is_closed, store._idle) == (True, [])
        store._query = query
        assert await result_of(store) == {}
        await store.close()

    asyncio.run(ask())


def test_keys_with_invalid_rows_are_reported_and_delay_no_other() -> None:
    """Such a row can come from a newer release."""

    async def ask() -> None:
        store = PostgresStore()
        store._query = b"SELECT 1 WHERE cardinality($1::text[]) > 1"
        assert await result_of(store) == {}
        assert isinstance(await result_of(store, NOBODY | {"1" * 16}), IndexError)
        assert len(store._idle) == 1
        assert await result_of(store) == {}
        await store.close()

    asyncio.run(ask())


def test_reading_with_unreadable_rows_is_reported_and_ends_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def ask() -> None:
        store = PostgresStore()
        assert await result_of(store) == {}
        (reader,) = store._idle
        with monkeypatch.context() as patch:
            patch.setattr(reader, "_rows", mock.Mock(side_effect=ZeroDivisionError))
            assert await result_of(store) == {}, "by another connection"
        assert reader.is_closed
        assert reader not in store._idle
        await store.close()

    asyncio.run(ask())


def test_connection_in_use_when_the_store_closes_is_closed_after_its_answer() -> None:
    async def ask() -> None:
        store = PostgresStore()
        assert await result_of(store) == {}
        (reader,) = store._idle
        reading = asyncio.create_task(result_of(store))
        await asyncio.sleep(0)
        await store.close()
        assert await reading == {}
        assert (reader.is_closed, store._idle) == (True, [])

    asyncio.run(ask())


def test_keys_are_equal_by_every_way_of_reading_them() -> None:
    """Networks as PostgreSQL sends them, dates, limits of the account."""
    make_merchant("acme")
    QuerySet(Account).update(limit_count=7, limit_seconds=60)
    keys = [issue(account(), label=f"number {days}", expires_in_days=days)[0] for days in (None, 30, 60, 90)]
    lists: list[list[str]] = [[], ["192.0.2.0/24"], ["192.0.2.0/24", "2001:db8::/32"], ["192.0.2.0/24"]]
    for key, networks in zip(keys, lists, strict=True):
        QuerySet(Credential).filter(pk=key.credential_id).update(networks=networks)
    ids = frozenset(key.key_id for key in keys)
    expected = find_keys(ids)
    assert [len(expected[key.key_id].networks) for key in keys] == [0, 1, 2, 1]

    async def ask() -> None:
        store = PostgresStore()
        for _ in range(2):
            assert await result_of(store, ids) == expected == await store.find(KEY, ids)
        await store.close()

    asyncio.run(ask())


def test_ids_that_no_key_can_have_are_not_queried() -> None:
    assert stores._array(["a" * 16, 'x","y', "a\\", ""]) == b'{"' + b"a" * 16 + b'"}'


def test_statement_of_keys_uses_the_indexes_of_empty_tables() -> None:
    """The statement is planned once, while the tables are empty."""
    with connection.cursor() as cursor:
        # Emptied by DELETE after earlier tests, they would keep their pages and statistics.
        cursor.execute("SET session_replication_role = replica; TRUNCATE keyvault_merchant, keyvault_key CASCADE")
        cursor.execute("SET session_replication_role = origin")
        cursor.execute(stores._SETTINGS.decode())
        cursor.execute(f"PREPARE probe (text[]) AS {stores._keys_query().decode()}")
        cursor.execute("EXPLAIN EXECUTE probe('{a,b}')")
        plan = "\n".join(line for (line,) in cursor.fetchall())
    connection.close()
    assert "Seq Scan" not in plan
    assert "Hash" not in plan
    assert "Merge" not in plan
    assert plan.count("Index Cond") == 4


def terminate_others(running: str = "") -> int:
    """Return the number of calls."""
    try:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                " AND strpos(query, %s) > 0 AND (%s = '' OR state = 'active')",
                [running or "keyvault_key", running],
            )
            return len(cursor.fetchall())
    finally:
        connection.close()


def execute(statement: str) -> None:
    try:
        with connection.cursor() as cursor:
            cursor.execute(statement)
    finally:
        connection.close()
