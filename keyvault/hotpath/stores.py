"""The primary database as the doors ask it: by Django's connections, and on PostgreSQL by those of an event loop."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Final, TypeVar

import psycopg
from django.db import InterfaceError, OperationalError, connection, connections

from keyvault.access.rule_book import RuleBook
from keyvault.hotpath.answering import CUSTOMER, KEY, TOKEN, Found
from keyvault.hotpath.blocking import StoreAwayError
from keyvault.services.impatience import ANSWER_SECONDS, hang_up, take_impatient_connection
from keyvault.services.limits import failed_proofs
from keyvault.services.lookup import key_rows
from keyvault.services.reads import find_customers, find_keys, find_tokens, keys_of, read_rules

_log = logging.getLogger(__name__)

R = TypeVar("R")

_FIND: Final[Mapping[str, Callable[[frozenset[str]], Mapping[str, Found]]]] = {
    KEY: find_keys,
    CUSTOMER: find_customers,
    TOKEN: find_tokens,
}

_CONNECT_SECONDS: Final = 2


class DatabaseStore:
    """By Django's connection of the calling thread; one that was lost is opened once more."""

    def find(self, kind: str, ids: frozenset[str], address: str | None) -> Mapping[str, Found]:
        with failed_proofs().look_up(address) if kind == KEY else nullcontext():
            return _ask(lambda: _FIND[kind](ids))

    def read_rules(self, known: RuleBook | None) -> RuleBook:
        return _ask(lambda: read_rules(known))


def _ask(read: Callable[[], R]) -> R:
    try:
        return read()
    except (OperationalError, InterfaceError):
        if connection.in_atomic_block:
            raise
        connection.close()
    try:
        return read()
    except (OperationalError, InterfaceError) as error:
        connection.close()
        _log.exception("nothing can be looked up")
        raise StoreAwayError(str(error)) from error


class ImpatientThread:
    """A thread with a database connection of its own, for an event loop that never waits for it for long.

    One job at a time: what hangs up a connection when a job takes too long never meets another job on it.
    """

    def __init__(self, name: str, seconds: float | None = None) -> None:
        """`seconds` for a job from its beginning, and as many for the job before it to end; ANSWER_SECONDS unless
        told."""
        self._pool = ThreadPoolExecutor(1, name)
        self._turn = asyncio.Lock()
        self._seconds = seconds
        self._lent: Any = None
        """The thread's own connection: private and untyped, of a backend that types do not know."""

    async def run(self, job: Callable[[], R]) -> R:
        """Raises StoreAwayError when it has not ended in time, whatever becomes of the thread, and what `job` does."""
        seconds = ANSWER_SECONDS if self._seconds is None else self._seconds
        try:
            async with asyncio.timeout(seconds):
                await self._turn.acquire()
        except TimeoutError:
            raise StoreAwayError("the database does not answer whoever asked before") from None
        try:
            running = asyncio.get_running_loop().run_in_executor(self._pool, self._work, job)
            if not (await asyncio.wait({running}, timeout=seconds))[0]:
                running.cancel()  # where it was not begun yet
                if self._lent is not None:
                    hang_up(self._lent.connection)
                raise StoreAwayError("the database does not answer in time")
            return running.result()
        finally:
            self._turn.release()

    def _work(self, job: Callable[[], R]) -> R:
        if self._lent is None and connection.vendor == "postgresql":
            take_impatient_connection()
            self._lent = connections["default"]
        return job()

    async def close(self) -> None:
        with suppress(StoreAwayError):
            await self.run(lambda: connection.close())
        self._pool.shutdown(wait=False)


class ThreadStore:
    """The database for an event loop, by one thread: for SQLite, whose reads are shorter than any hand-over."""

    def __init__(self) -> None:
        self._store = DatabaseStore()
        self._thread = ImpatientThread("reads")

    async def find(self, kind: str, ids: frozenset[str]) -> Mapping[str, Found]:
        return await self._thread.run(lambda: self._store.find(kind, ids, None))

    async def read_rules(self, known: RuleBook | None) -> RuleBook:
        return await self._thread.run(lambda: self._store.read_rules(known))

    async def open(self) -> None:
        with suppress(StoreAwayError):  # whoever asks for something tries again
            await self._thread.run(lambda: connection.ensure_connection())

    async def close(self) -> None:
        await self._thread.close()


class PostgresStore(ThreadStore):
    """Keys, which each request may need, by connections of the loop's own; what is seldom read, by the thread."""

    def __init__(self) -> None:
        super().__init__()
        self._idle: list[psycopg.AsyncConnection[Any]] = []
        self._query = _keys_query()

    async def find(self, kind: str, ids: frozenset[str]) -> Mapping[str, Found]:
        if kind != KEY:
            return await super().find(kind, ids)
        while True:
            reader, is_last, has_hung_up = None, not self._idle, list[bool]()
            try:
                reader = self._idle.pop() if self._idle else await _connect()
                with _hanging_up(reader) as has_hung_up:
                    cursor = await reader.execute(self._query, (list(ids),), prepare=True)
                    rows = await cursor.fetchall()
            except psycopg.Error as error:
                # The others were lost with it, or planned the same statement for tables that have changed since.
                for lost in (reader, *self._idle):
                    if lost is not None:
                        await lost.close()
                self._idle.clear()
                if is_last or has_hung_up:
                    _log.exception("nothing can be looked up")
                    raise StoreAwayError(str(error)) from error
            else:
                self._idle.append(reader)
                return keys_of(rows)

    async def close(self) -> None:
        for reader in self._idle:
            await reader.close()
        await super().close()


@contextmanager
def _hanging_up(reader: "psycopg.AsyncConnection[Any]") -> Iterator[list[bool]]:
    """What is asked of it meanwhile fails when it takes too long; the list is not empty then."""
    has_hung_up: list[bool] = []

    def lose_patience() -> None:
        has_hung_up.append(True)
        hang_up(reader)

    timer = asyncio.get_running_loop().call_later(ANSWER_SECONDS, lose_patience)
    try:
        yield has_hung_up
    finally:
        timer.cancel()


def _keys_query() -> bytes:
    """The one that Django makes, for an array of ids: a statement of another length for each batch is planned anew."""
    text, _ = key_rows(["id"]).query.sql_with_params()
    if text.count("IN (%s)") != 1:
        raise RuntimeError(f"the query of keys is not as it was: {text}")
    return text.replace("IN (%s)", "= ANY(%s)").encode()


async def _connect() -> "psycopg.AsyncConnection[Any]":
    chosen = connection.get_connection_params()
    for name in ("context", "cursor_factory", "server_side_binding"):
        chosen.pop(name, None)
    # Django turns preparing off, and planning this query costs more than running it.
    chosen |= {"autocommit": True, "connect_timeout": _CONNECT_SECONDS, "prepare_threshold": 0}
    return await psycopg.AsyncConnection.connect(**chosen)
