"""A database that takes every question and answers none: whoever asks hears within seconds that there is no verdict."""

import asyncio
from collections.abc import Iterator

import pytest
from django.db import connection

from keyvault.hotpath import stores
from keyvault.hotpath.answering import KEY, TOKEN, Found
from keyvault.hotpath.blocking import StoreAwayError
from keyvault.hotpath.stores import ImpatientThread, PostgresStore

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]

NOBODY = frozenset({"0000000000000000"})


@pytest.fixture(autouse=True)
def no_sleepers(transactional_db: None) -> Iterator[None]:
    """The server does not notice that nobody listens any more to one that sleeps."""
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
        query, store._query = store._query, b"SELECT pg_sleep(600) WHERE 'x' <> ALL(%s)"
        with pytest.raises(StoreAwayError):
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
                with pytest.raises(StoreAwayError):
                    await store.find(TOKEN, NOBODY)
        while True:
            try:
                assert await store.find(TOKEN, NOBODY) == {}
                break
            except StoreAwayError:
                continue  # the thread is still at what nobody waits for any more
        await store.close()

    asyncio.run(ask())


def test_reading_that_waited_for_a_slow_one_keeps_its_own_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: who gives up hangs up on his own reading, never on another's."""
    monkeypatch.setattr(stores, "ANSWER_SECONDS", 2.0)

    def sleep() -> str:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_sleep(1.2)")
        return "answered"

    async def ask() -> None:
        thread = ImpatientThread("reads")
        assert list(await asyncio.gather(thread.run(sleep), thread.run(sleep))) == ["answered"] * 2
        await thread.close()

    asyncio.run(ask())


def test_store_whose_statement_was_planned_for_another_table_plans_it_anew() -> None:
    """A migration under a verifier that runs: "cached plan must not change result type" is nobody's answer."""

    async def ask() -> None:
        store = PostgresStore()
        store._query = b"SELECT * FROM fickle WHERE id = ANY(%s)"
        assert await store.find(KEY, NOBODY) == {}
        (reader,) = store._idle
        reader.prepare_threshold = 0  # as psycopg does of its own accord, unless Django tells it not to
        assert await store.find(KEY, NOBODY) == {}
        await asyncio.to_thread(execute, "ALTER TABLE fickle ADD COLUMN more integer")
        assert await store.find(KEY, NOBODY) == {}
        assert reader.closed
        assert len(store._idle) == 1
        await store.close()

    execute("CREATE TABLE fickle (id text)")
    try:
        asyncio.run(ask())
    finally:
        execute("DROP TABLE fickle")


def execute(statement: str) -> None:
    try:
        with connection.cursor() as cursor:
            cursor.execute(statement)
    finally:
        connection.close()
