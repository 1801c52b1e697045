"""Real threads with connections of their own, let go at the same moment."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from django.db import connection, connections, transaction

PATIENCE_SECONDS = 30
"""How long anything here is waited for before the test fails: never reached when things go well."""


def race(*calls: Callable[[], Any]) -> list[Any]:
    """Makes the calls at once; what each returned, or the exception that it raised, in the order given."""
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        try:
            start.wait(PATIENCE_SECONDS)
            return call()
        except Exception as error:  # noqa: BLE001  the outcome of a race is the test's to judge
            return error
        finally:
            connections.close_all()

    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(run, call) for call in calls]
        return [future.result(PATIENCE_SECONDS) for future in futures]


def start(call: Callable[[], Any]) -> "Future[Any]":
    """The call goes on in a thread of its own, with a connection of its own."""

    def run() -> Any:
        try:
            return call()
        finally:
            connections.close_all()

    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(run)
    finally:
        pool.shutdown(wait=False)


@contextmanager
def held_open(act: Callable[[], Any]) -> Iterator[None]:
    """Inside the block, another connection has done the act and not yet committed; afterwards it commits."""
    done, may_commit = threading.Event(), threading.Event()

    def run() -> None:
        with transaction.atomic():
            act()
            done.set()
            assert may_commit.wait(PATIENCE_SECONDS)

    future = start(run)
    try:
        while not done.wait(0.02):
            if future.done():
                future.result()
        yield
    finally:
        may_commit.set()
        future.result(PATIENCE_SECONDS)


def wait_until_blocked(future: "Future[Any]", connections: int = 1) -> None:
    """Returns when so many connections of this PostgreSQL database wait for a lock; fails when the call ends before."""
    pause = threading.Event()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while _count_blocked() < connections:
        assert not future.done(), "it did not have to wait"
        assert time.monotonic() < deadline, "nobody waits for a lock"
        pause.wait(0.01)


def _count_blocked() -> int:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
        return int(cursor.fetchone()[0])
