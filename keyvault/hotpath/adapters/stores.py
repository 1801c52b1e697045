"""The primary database as the doors ask it: by Django's connections, and on PostgreSQL by those of an event loop."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, Final, Self, TypeVar

import psycopg
from django.db import InterfaceError, OperationalError, connection, connections
from psycopg.adapt import Transformer
from psycopg.pq import Format
from psycopg.pq.abc import PGresult
from psycopg.types.string import ByteaBinaryLoader

from keyvault.access.policy_snapshot import PolicySnapshot
from keyvault.hotpath.frontends.asyncio_frontend import AsyncStore, TellKeys
from keyvault.hotpath.frontends.threaded_frontend import StoreAwayError
from keyvault.hotpath.messages.questions import CUSTOMER, KEY, TOKEN, Found
from keyvault.services.catalog.policy_snapshot import read_rules
from keyvault.services.keys.records import find_customers, find_keys, find_tokens, key_rows, keys_of_raw
from keyvault.services.limits.limiter import failed_proofs
from keyvault.services.postgres.connection_timeouts import ANSWER_SECONDS, abort_connection, use_short_timeouts
from keyvault.services.postgres.raw_queries import check_results

_log = logging.getLogger(__name__)

R = TypeVar("R")
Rows = list[tuple[Any, ...]]

_FIND: Final[Mapping[str, Callable[[frozenset[str]], Mapping[str, Found]]]] = {
    KEY: find_keys,
    CUSTOMER: find_customers,
    TOKEN: find_tokens,
}

_CONNECT_SECONDS: Final = 2


class _Outage:
    """Told once a second, however many ask meanwhile."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._told_at = float("-inf")

    def tell(self, error: Exception) -> None:
        now = self._monotonic()
        if now - self._told_at >= _TOLD_SECONDS:
            self._told_at = now
            _log.error("nothing can be looked up", extra={"why": error})


_TOLD_SECONDS: Final = 1.0
_outage = _Outage()


class DatabaseStore:
    """By Django's connection of the calling thread; one that was lost is opened once more."""

    def find(self, kind: str, ids: frozenset[str], address: str | None) -> Mapping[str, Found]:
        with failed_proofs().look_up(address) if kind == KEY else nullcontext():
            return _ask(lambda: _FIND[kind](ids))

    def read_rules(self, known: PolicySnapshot | None) -> PolicySnapshot:
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
        _outage.tell(error)
        raise StoreAwayError(str(error)) from error


class ShortTimeoutThread:
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
                    abort_connection(self._lent.connection)
                raise StoreAwayError("the database does not answer in time")
            return running.result()
        finally:
            self._turn.release()

    def _work(self, job: Callable[[], R]) -> R:
        if self._lent is None and connection.vendor == "postgresql":
            use_short_timeouts()
            self._lent = connections["default"]
        return job()

    async def close(self) -> None:
        with suppress(StoreAwayError):
            await self.run(lambda: connection.close())
        self._pool.shutdown(wait=False)


class ThreadStore(AsyncStore):
    """The database for an event loop, by one thread: for SQLite, whose reads are shorter than any hand-over."""

    def __init__(self) -> None:
        self._store = DatabaseStore()
        self._thread = ShortTimeoutThread("reads")

    async def find(self, kind: str, ids: frozenset[str]) -> Mapping[str, Found]:
        return await self._thread.run(lambda: self._store.find(kind, ids, None))

    async def read_rules(self, known: PolicySnapshot | None) -> PolicySnapshot:
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
        self._idle: list[Reader] = []
        self._is_closed = False
        self._query = _keys_query()

    async def find(self, kind: str, ids: frozenset[str]) -> Mapping[str, Found]:
        if kind != KEY:
            return await super().find(kind, ids)
        wanted = _array(ids)
        while True:
            reader = self._take_idle()
            is_last = reader is None
            try:
                reader = reader or await Reader.connect(self._query)
                rows = await reader.read(wanted)
            except (psycopg.Error, TimeoutError) as error:
                self._lose(reader)
                if is_last or isinstance(error, TimeoutError):
                    _outage.tell(error)
                    raise StoreAwayError(str(error)) from error
            else:
                self._give_back(reader)
                return keys_of_raw(rows)

    def find_keys(self, ids: frozenset[str], tell: TellKeys) -> None:
        """By an idle connection, and without the coroutines of `find`, which cost more than the hand-over."""
        reader = self._take_idle()
        if reader is None:
            super().find_keys(ids, tell)
            return

        def take(rows: Rows | Exception) -> None:
            if isinstance(rows, TimeoutError):
                self._lose(reader)
                _outage.tell(rows)
                tell(StoreAwayError(str(rows)))
            elif isinstance(rows, Exception):
                self._lose(reader)
                super(PostgresStore, self).find_keys(ids, tell)
            else:
                self._give_back(reader)
                try:
                    found = keys_of_raw(rows)
                except Exception as error:  # noqa: BLE001  rows of which no record can be made
                    tell(error)
                else:
                    tell(found)

        reader.read_async(_array(ids), take)

    def _take_idle(self) -> "Reader | None":
        while self._idle:
            reader = self._idle.pop()
            if not reader.is_closed:
                return reader
        return None

    def _give_back(self, reader: "Reader") -> None:
        if self._is_closed:
            reader.close()
        else:
            self._idle.append(reader)

    def _lose(self, reader: "Reader | None") -> None:
        """The others were lost with it, or planned the same statement for tables that have changed since."""
        for lost in (reader, *self._idle):
            if lost is not None:
                lost.close()
        self._idle.clear()

    async def close(self) -> None:
        self._is_closed = True
        for reader in self._idle:
            reader.close()
        await super().close()


class Reader:
    """A connection of the loop's own and the one statement that it runs, asked one thing at a time, by libpq alone:
    psycopg's coroutines cost several times what they wait for.

    Raises psycopg.Error, or TimeoutError after ANSWER_SECONDS; then it is closed, and when whoever asks is cancelled.
    """

    def __init__(self, connection: "psycopg.AsyncConnection[Any]") -> None:
        self._connection = connection
        self._wire = connection.pgconn
        self._decoded = Transformer.from_context(connection)
        self._loop = asyncio.get_running_loop()
        self._results: list[PGresult] = []
        self._tell: Callable[[list[PGresult] | Exception], None] | None = None
        self._patience: asyncio.TimerHandle | None = None
        # Its own, which stays open when libpq finds the connection lost and closes that one.
        self._socket = os.dup(self._wire.socket)
        self._is_closed = False
        self._loop.add_reader(self._socket, self._take)

    @classmethod
    async def connect(cls, query: bytes) -> Self:
        """`query` of one array of texts, $1."""
        connection = await _connect()
        connection.adapters.register_loader("jsonb", ByteaBinaryLoader)  # as it comes
        reader = cls(connection)
        wire = reader._wire
        await reader._ask(lambda: wire.send_query(_SETTINGS))
        await reader._ask(lambda: wire.send_prepare(_STATEMENT, query, [_TEXTS]))
        return reader

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    async def read(self, wanted: bytes) -> Rows:
        """The rows of the statement for this array."""
        return self._rows(await self._ask(partial(self._send, wanted)))

    def read_async(self, wanted: bytes, tell: Callable[[Rows | Exception], None]) -> None:
        """The same for `tell`, which is called once and later; or the error, and then it is closed."""
        self._begin(partial(self._send, wanted), partial(self._tell_rows, tell))

    def _send(self, wanted: bytes) -> None:
        self._wire.send_query_prepared(_STATEMENT, [wanted], result_format=Format.BINARY)

    def _rows(self, results: list[PGresult]) -> Rows:
        (result,) = results
        self._decoded.set_pgresult(result)
        return self._decoded.load_rows(0, result.ntuples, tuple)

    def _tell_rows(self, tell: Callable[[Rows | Exception], None], told: list[PGresult] | Exception) -> None:
        if isinstance(told, Exception):
            tell(told)
            return
        try:
            rows = self._rows(check_results(told))
        except Exception as error:  # noqa: BLE001  for whoever asked, as it is
            self.close()
            tell(error)
        else:
            tell(rows)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            if self._patience is not None:
                self._patience.cancel()
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            os.close(self._socket)
            self._wire.finish()

    async def _ask(self, send: Callable[[], None]) -> list[PGresult]:
        answer: asyncio.Future[list[PGresult]] = self._loop.create_future()

        def take(told: list[PGresult] | Exception) -> None:
            if answer.done():
                return
            if isinstance(told, Exception):
                answer.set_exception(told)
            else:
                answer.set_result(told)

        try:
            self._begin(send, take)
            return check_results(await answer)
        except BaseException:
            self.close()
            raise

    def _begin(self, send: Callable[[], None], tell: Callable[[list[PGresult] | Exception], None]) -> None:
        """`tell` is called once, and after this has returned."""
        self._tell = tell
        self._patience = self._loop.call_later(
            ANSWER_SECONDS, self._fail, TimeoutError("the database does not answer in time")
        )
        try:
            send()
            if self._wire.flush():
                self._loop.add_writer(self._socket, self._send_on)
        except Exception as error:  # noqa: BLE001  for whoever waits, as it is
            self._loop.call_soon(self._fail, error)

    def _end(self, told: list[PGresult] | Exception) -> None:
        if self._patience is not None:
            self._patience.cancel()
        tell, self._tell, self._patience = self._tell, None, None
        if tell is not None:
            tell(told)

    def _send_on(self) -> None:
        """A long question does not go out at once."""
        try:
            if not self._wire.flush():
                self._loop.remove_writer(self._socket)
        except psycopg.Error as error:
            self._fail(error)

    def _take(self) -> None:
        """What has come; also where nobody asked: that is how a connection which is lost is noticed."""
        wire = self._wire
        try:
            wire.consume_input()
            while not wire.is_busy():
                result = wire.get_result()
                if result is None:
                    break
                self._results.append(result)
            else:
                return  # there is more to come
        except psycopg.Error as error:
            self._fail(error)
            return
        results, self._results = self._results, []
        self._end(results)

    def _fail(self, error: Exception) -> None:
        self.close()
        self._end(error)


_STATEMENT: Final = b"keys"
_TEXTS: Final = 1009
"""The type text[]."""

_SETTINGS: Final = b"""
SET plan_cache_mode = force_generic_plan;
SET enable_seqscan = off;
SET enable_hashjoin = off;
SET enable_mergejoin = off;
SET jit = off
"""
"""Planning takes longer than reading, so it is done once; by the indexes, however small the tables are by then."""


def _array(ids: Collection[str]) -> bytes:
    """As PostgreSQL reads one; without what is no id of anybody, and could end a quotation."""
    if not "".join(ids).isalnum():
        ids = [identity for identity in ids if identity.isalnum()]
    return ('{"' + '","'.join(ids) + '"}').encode()


def _keys_query() -> bytes:
    """The one that Django makes, for an array of ids: a statement of another length for each batch is planned anew."""
    text, _ = key_rows(["id"]).query.sql_with_params()
    if text.count("IN (%s)") != 1 or text.count("%") != 1:
        raise RuntimeError(f"the query of keys is not as it was: {text}")
    return text.replace("IN (%s)", "= ANY($1)").encode()


async def _connect() -> "psycopg.AsyncConnection[Any]":
    chosen = connection.get_connection_params()
    for name in ("context", "cursor_factory", "server_side_binding"):
        chosen.pop(name, None)
    chosen |= {"autocommit": True, "connect_timeout": _CONNECT_SECONDS}
    return await psycopg.AsyncConnection.connect(**chosen)
