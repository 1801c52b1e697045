"""The primary database for the frontends: Django's connections, and on PostgreSQL also asynchronous ones."""

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
from keyvault.backends import meters
from keyvault.hotpath.frontends.asyncio_frontend import AsyncStore, KeysCallback
from keyvault.hotpath.frontends.threaded_frontend import StoreUnavailableError
from keyvault.hotpath.messages.pending_requests import CUSTOMER, KEY, TOKEN, Found
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
    """Log a lost database, at most once a second."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._reported_at = float("-inf")

    def report(self, error: Exception) -> None:
        now = self._monotonic()
        if now - self._reported_at >= _REPORT_INTERVAL_SECONDS:
            self._reported_at = now
            _log.error("the database cannot be read", extra={"why": error})


_REPORT_INTERVAL_SECONDS: Final = 1.0
_outage = _Outage()


class DatabaseStore:
    """Read on the calling thread's Django connection. A lost connection is reopened once."""

    def find(self, kind: str, ids: frozenset[str], address: str | None) -> Mapping[str, Found]:
        with failed_proofs().look_up(address) if kind == KEY else nullcontext():
            return _read_with_retry(lambda: _FIND[kind](ids))

    def read_rules(self, known: PolicySnapshot | None) -> PolicySnapshot:
        return _read_with_retry(lambda: read_rules(known))


def _read_with_retry(read: Callable[[], R]) -> R:
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
        _outage.report(error)
        raise StoreUnavailableError(str(error)) from error


class ShortTimeoutThread:
    """A thread with its own database connection, for an event loop that waits for it a limited time only.

    One job at a time: aborting the connection of a slow job never affects another job.
    """

    def __init__(self, name: str, seconds: float | None = None) -> None:
        """Set up the thread. `seconds`: maximum duration of a job, and of the wait for the one before it.

        Default: ANSWER_SECONDS.
        """
        self._pool = ThreadPoolExecutor(1, name)
        self._turn = asyncio.Lock()
        self._seconds = seconds
        self._database: Any = None
        """The thread's own connection. Untyped: a backend without type information."""

    async def run(self, job: Callable[[], R]) -> R:
        """Run `job` on the thread. Raises StoreUnavailableError after the time limit, and any exception of `job`."""
        seconds = ANSWER_SECONDS if self._seconds is None else self._seconds
        try:
            async with asyncio.timeout(seconds):
                await self._turn.acquire()
        except TimeoutError:
            raise StoreUnavailableError("the previous read has not ended in time") from None
        try:
            running = asyncio.get_running_loop().run_in_executor(self._pool, self._work, job)
            if not (await asyncio.wait({running}, timeout=seconds))[0]:
                running.cancel()  # if it has not begun
                if self._database is not None:
                    abort_connection(self._database.connection)
                raise StoreUnavailableError("the database did not answer in time")
            return running.result()
        finally:
            self._turn.release()

    def _work(self, job: Callable[[], R]) -> R:
        if self._database is None and connection.vendor == "postgresql":
            use_short_timeouts()
            self._database = connections["default"]
        return job()

    async def close(self) -> None:
        with suppress(StoreUnavailableError):
            await self.run(lambda: connection.close())
        self._pool.shutdown(wait=False)


class ThreadStore(AsyncStore):
    """The database for an event loop, on one thread. That suffices for SQLite: a read is shorter than a hand-over."""

    def __init__(self) -> None:
        self._store = DatabaseStore()
        self._thread = ShortTimeoutThread("reads")

    async def find(self, kind: str, ids: frozenset[str]) -> Mapping[str, Found]:
        return await self._thread.run(lambda: self._store.find(kind, ids, None))

    async def read_rules(self, known: PolicySnapshot | None) -> PolicySnapshot:
        return await self._thread.run(lambda: self._store.read_rules(known))

    async def open(self) -> None:
        with suppress(StoreUnavailableError):  # the next read tries again
            await self._thread.run(lambda: connection.ensure_connection())

    async def close(self) -> None:
        await self._thread.close()


class PostgresStore(ThreadStore):
    """Read keys, which any request may need, on asynchronous connections, and everything else on the thread."""

    def __init__(self) -> None:
        super().__init__()
        self._idle: list[PreparedConnection] = []
        self._is_closed = False
        self._query = _keys_query()

    async def find(self, kind: str, ids: frozenset[str]) -> Mapping[str, Found]:
        if kind != KEY:
            return await super().find(kind, ids)
        wanted = _array(ids)
        while True:
            prepared = self._take_idle()
            is_last = prepared is None
            try:
                prepared = prepared or await PreparedConnection.connect(self._query)
                rows = await prepared.read(wanted)
            except (psycopg.Error, TimeoutError) as error:
                self._discard(prepared)
                if is_last or isinstance(error, TimeoutError):
                    _outage.report(error)
                    raise StoreUnavailableError(str(error)) from error
            else:
                self._give_back(prepared)
                return keys_of_raw(rows)

    def find_keys(self, ids: frozenset[str], callback: KeysCallback) -> None:
        """Find keys on an idle connection, without the coroutines of `find`, which cost more than the query."""
        prepared = self._take_idle()
        if prepared is None:
            super().find_keys(ids, callback)
            return

        begun_at = time.monotonic()

        def receive(rows: Rows | Exception) -> None:
            meters.reads.note(time.monotonic() - begun_at)
            if isinstance(rows, TimeoutError):
                self._discard(prepared)
                _outage.report(rows)
                callback(StoreUnavailableError(str(rows)))
            elif isinstance(rows, Exception):
                self._discard(prepared)
                super(PostgresStore, self).find_keys(ids, callback)
            else:
                self._give_back(prepared)
                try:
                    found = keys_of_raw(rows)
                except Exception as error:  # noqa: BLE001  rows that do not convert to records
                    callback(error)
                else:
                    callback(found)

        prepared.read_async(_array(ids), receive)

    def _take_idle(self) -> "PreparedConnection | None":
        while self._idle:
            prepared = self._idle.pop()
            if not prepared.is_closed:
                return prepared
        return None

    def _give_back(self, prepared: "PreparedConnection") -> None:
        if self._is_closed:
            prepared.close()
        else:
            self._idle.append(prepared)

    def _discard(self, prepared: "PreparedConnection | None") -> None:
        """Close this connection and all idle ones. They were lost too, or hold a plan for tables that have changed."""
        for lost in (prepared, *self._idle):
            if lost is not None:
                lost.close()
        self._idle.clear()

    async def close(self) -> None:
        self._is_closed = True
        for prepared in self._idle:
            prepared.close()
        await super().close()


class PreparedConnection:
    """An asynchronous connection with one prepared statement, driven through libpq.

    psycopg's coroutines cost several times as much as waiting for the socket. One query at a time. Raises
    psycopg.Error, or TimeoutError after ANSWER_SECONDS. An error or a canceled caller closes the connection.
    """

    def __init__(self, connection: "psycopg.AsyncConnection[Any]") -> None:
        self._connection = connection
        self._pgconn = connection.pgconn
        self._transformer = Transformer.from_context(connection)
        self._loop = asyncio.get_running_loop()
        self._results: list[PGresult] = []
        self._callback: Callable[[list[PGresult] | Exception], None] | None = None
        self._timeout: asyncio.TimerHandle | None = None
        # A duplicate, which stays open when libpq closes its own after a lost connection.
        self._socket = os.dup(self._pgconn.socket)
        self._is_closed = False
        self._loop.add_reader(self._socket, self._receive)

    @classmethod
    async def connect(cls, query: bytes) -> Self:
        """Connect and prepare `query`, whose only parameter $1 is an array of texts."""
        connection = await _connect()
        connection.adapters.register_loader("jsonb", ByteaBinaryLoader)  # as raw bytes
        prepared = cls(connection)
        wire = prepared._pgconn
        await prepared._run(lambda: wire.send_query(_SETTINGS))
        await prepared._run(lambda: wire.send_prepare(_STATEMENT, query, [_TEXT_ARRAY_OID]))
        return prepared

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    async def read(self, wanted: bytes) -> Rows:
        """Return the statement's rows for this array."""
        return self._rows(await self._run(partial(self._send, wanted)))

    def read_async(self, wanted: bytes, callback: Callable[[Rows | Exception], None]) -> None:
        """Read as `read` does, and call `callback` once, after this method has returned.

        On an error the connection is closed.
        """
        self._begin(partial(self._send, wanted), partial(self._return_rows, callback))

    def _send(self, wanted: bytes) -> None:
        self._pgconn.send_query_prepared(_STATEMENT, [wanted], result_format=Format.BINARY)

    def _rows(self, results: list[PGresult]) -> Rows:
        (result,) = results
        self._transformer.set_pgresult(result)
        return self._transformer.load_rows(0, result.ntuples, tuple)

    def _return_rows(self, callback: Callable[[Rows | Exception], None], results: list[PGresult] | Exception) -> None:
        if isinstance(results, Exception):
            callback(results)
            return
        try:
            rows = self._rows(check_results(results))
        except Exception as error:  # noqa: BLE001  passed on unchanged
            self.close()
            callback(error)
        else:
            callback(rows)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            if self._timeout is not None:
                self._timeout.cancel()
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            os.close(self._socket)
            self._pgconn.finish()

    async def _run(self, send: Callable[[], None]) -> list[PGresult]:
        answer: asyncio.Future[list[PGresult]] = self._loop.create_future()

        def receive(results: list[PGresult] | Exception) -> None:
            if answer.done():
                return
            if isinstance(results, Exception):
                answer.set_exception(results)
            else:
                answer.set_result(results)

        try:
            self._begin(send, receive)
            return check_results(await answer)
        except BaseException:
            self.close()
            raise

    def _begin(self, send: Callable[[], None], callback: Callable[[list[PGresult] | Exception], None]) -> None:
        """Send a query. `callback` is called once, after this method has returned."""
        self._callback = callback
        self._timeout = self._loop.call_later(
            ANSWER_SECONDS, self._fail, TimeoutError("the database did not answer in time")
        )
        try:
            send()
            if self._pgconn.flush():
                self._loop.add_writer(self._socket, self._continue_sending)
        except Exception as error:  # noqa: BLE001  passed on unchanged
            self._loop.call_soon(self._fail, error)

    def _end(self, results: list[PGresult] | Exception) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
        callback, self._callback, self._timeout = self._callback, None, None
        if callback is not None:
            callback(results)

    def _continue_sending(self) -> None:
        """Continue sending: a long query does not fit into one write."""
        try:
            if not self._pgconn.flush():
                self._loop.remove_writer(self._socket)
        except psycopg.Error as error:
            self._fail(error)

    def _receive(self) -> None:
        """Receive data. Also called without a query, which is how a lost connection is noticed."""
        wire = self._pgconn
        try:
            wire.consume_input()
            while not wire.is_busy():
                result = wire.get_result()
                if result is None:
                    break
                self._results.append(result)
            else:
                return  # more results are pending
        except psycopg.Error as error:
            self._fail(error)
            return
        results, self._results = self._results, []
        self._end(results)

    def _fail(self, error: Exception) -> None:
        self.close()
        self._end(error)


_STATEMENT: Final = b"keys"
_TEXT_ARRAY_OID: Final = 1009
"""OID of the type text[]."""

_SETTINGS: Final = b"""
SET plan_cache_mode = force_generic_plan;
SET enable_seqscan = off;
SET enable_hashjoin = off;
SET enable_mergejoin = off;
SET jit = off
"""
"""Planning takes longer than reading: plan once, and use indexes even while the tables are small."""


def _array(ids: Collection[str]) -> bytes:
    """Return a PostgreSQL array literal. Drops texts that are no ids and could end the quotation."""
    if not "".join(ids).isalnum():
        ids = [identity for identity in ids if identity.isalnum()]
    return ('{"' + '","'.join(ids) + '"}').encode()


def _keys_query() -> bytes:
    """Return Django's key query with an array parameter: a list of another length would be planned anew."""
    text, _ = key_rows(["id"]).query.sql_with_params()
    if text.count("IN (%s)") != 1 or text.count("%") != 1:
        raise RuntimeError(f"unexpected form of the key query: {text}")
    return text.replace("IN (%s)", "= ANY($1)").encode()


async def _connect() -> "psycopg.AsyncConnection[Any]":
    chosen = connection.get_connection_params()
    for name in ("context", "cursor_factory", "server_side_binding"):
        chosen.pop(name, None)
    chosen |= {"autocommit": True, "connect_timeout": _CONNECT_SECONDS}
    return await psycopg.AsyncConnection.connect(**chosen)
