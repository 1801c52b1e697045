"""PostgreSQL asked by libpq itself, for what a process does every fraction of a second beside its verdicts.

Verdicts wait for whatever holds the interpreter: cursors cost it several times what they ask for, and wake up for each
step of an exchange. This one waits once, without it.
"""

import select
from collections.abc import Sequence
from typing import Any

from django.db import connection
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus, TransactionStatus
from psycopg.pq.abc import PGconn, PGresult

_GOOD = frozenset({ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK})


def ask(text: bytes, values: Sequence[bytes | None] = ()) -> list[PGresult]:
    """The results of a statement with these values, or of several without any, as text; on the calling thread's
    connection and in its transaction, where it is in one. Raises what Django's cursors raise."""
    connection.close_if_health_check_failed()
    connection.ensure_connection()
    connection.validate_no_broken_transaction()
    with connection.wrap_database_errors:
        lent: Any = connection.connection  # untyped, of a backend that types do not know
        wire: PGconn = lent.pgconn
        if not lent.autocommit and wire.transaction_status == TransactionStatus.IDLE:
            _exchange(wire, b"BEGIN")
        return _exchange(wire, text, values)


def checked(results: list[PGresult]) -> list[PGresult]:
    """These, where the server did what it was asked. Raises psycopg.Error."""
    for result in results:
        if result.status not in _GOOD:
            raise error_from_result(result)
    return results


def wait_for_notice(wire: PGconn, seconds: float) -> None:
    """Until the server has told something, of what LISTEN asked for or otherwise, and at most so long. Raises
    psycopg.Error when the connection is lost."""
    if _readable(wire).poll(1000 * seconds):
        wire.consume_input()
        while wire.notifies():
            pass


def _exchange(wire: PGconn, text: bytes, values: Sequence[bytes | None] = ()) -> list[PGresult]:
    if values:
        wire.send_query_params(text, values)
    else:
        wire.send_query(text)
    waited_for = _readable(wire)
    while wire.flush():  # a long question does not go out at once, nor while answers wait to be read
        waited_for.modify(wire.socket, select.POLLIN | select.POLLOUT)
        waited_for.poll()
        wire.consume_input()
    waited_for.modify(wire.socket, select.POLLIN)
    results: list[PGresult] = []
    while True:
        while wire.is_busy():
            waited_for.poll()
            wire.consume_input()
        result = wire.get_result()
        if result is None:
            break
        results.append(result)
    return checked(results)


def _readable(wire: PGconn) -> "select.poll":
    found = select.poll()
    found.register(wire.socket, select.POLLIN)
    return found
