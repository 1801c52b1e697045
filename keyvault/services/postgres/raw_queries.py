"""Queries through libpq itself, for polls that run several times a second beside the verdicts.

A psycopg cursor holds the interpreter lock several times longer than these functions, and wakes up at each protocol
step. Verdicts would wait for it. These functions wait in poll(2), which releases the lock.
"""

import select
from collections.abc import Sequence
from typing import Any

from django.db import connection
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus, TransactionStatus
from psycopg.pq.abc import PGconn, PGresult

_SUCCESS = frozenset({ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK})


def execute(text: bytes, values: Sequence[bytes | None] = ()) -> list[PGresult]:
    """Run one statement with values, or several without, and return the results as text.

    Uses the calling thread's connection, and its transaction if one is open. Raises what Django's cursors raise.
    """
    connection.close_if_health_check_failed()
    connection.ensure_connection()
    connection.validate_no_broken_transaction()
    with connection.wrap_database_errors:
        raw: Any = connection.connection  # the type depends on the backend
        wire: PGconn = raw.pgconn
        if not raw.autocommit and wire.transaction_status == TransactionStatus.IDLE:
            _send_and_receive(wire, b"BEGIN")
        return _send_and_receive(wire, text, values)


def check_results(results: list[PGresult]) -> list[PGresult]:
    """Return the results if every statement succeeded. Raises psycopg.Error."""
    for result in results:
        if result.status not in _SUCCESS:
            raise error_from_result(result)
    return results


def wait_for_notice(wire: PGconn, seconds: float) -> None:
    """Wait until the server sends a notification or anything else, at most this many seconds.

    Raises psycopg.Error when the connection is lost.
    """
    if _poller(wire).poll(1000 * seconds):
        wire.consume_input()
        while wire.notifies():
            pass


def _send_and_receive(wire: PGconn, text: bytes, values: Sequence[bytes | None] = ()) -> list[PGresult]:
    if values:
        wire.send_query_params(text, values)
    else:
        wire.send_query(text)
    poller = _poller(wire)
    while wire.flush():  # a long query needs several writes, and blocks while replies are unread
        poller.modify(wire.socket, select.POLLIN | select.POLLOUT)
        poller.poll()
        wire.consume_input()
    poller.modify(wire.socket, select.POLLIN)
    results: list[PGresult] = []
    while True:
        while wire.is_busy():
            poller.poll()
            wire.consume_input()
        result = wire.get_result()
        if result is None:
            break
        results.append(result)
    return check_results(results)


def _poller(wire: PGconn) -> "select.poll":
    poller = select.poll()
    poller.register(wire.socket, select.POLLIN)
    return poller
