"""Concurrency helpers: threads with their own database connections."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from django.db import connection, connections, transaction

TIMEOUT_SECONDS = 30
"""Longest wait for a thread or a lock before the test fails, in seconds."""


def race(*calls: Callable[[], Any]) -> list[Any]:
    """Run the calls concurrently and return each result or raised exception, in the given order."""
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        try:
            start.wait(TIMEOUT_SECONDS)
            return call()
        except Exception as error:  # noqa: BLE001  the test judges the outcome
            return error
        finally:
            connections.close_all()

    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(run, call) for call in calls]
        return [future.result(TIMEOUT_SECONDS) for future in futures]


def start(call: Callable[[], Any]) -> "Future[Any]":
    """Run a call in its own thread with its own database connection."""

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
def held_open(write: Callable[[], Any]) -> Iterator[None]:
    """Hold a transaction open on another connection, after its writes, for the duration of the block; then commit."""
    done, may_commit = threading.Event(), threading.Event()

    def run() -> None:
        with transaction.atomic():
            write()
            done.set()
            assert may_commit.wait(TIMEOUT_SECONDS)

    future = start(run)
    try:
        while not done.wait(0.02):
            if future.done():
                future.result()
        yield
    finally:
        may_commit.set()
        future.result(TIMEOUT_SECONDS)


def wait_until_blocked(future: "Future[Any]", connections: int = 1, *, seconds: float = 0) -> None:
    """Wait until this many connections of this database have waited so long for a lock. Fails if the call ends."""
    pause = threading.Event()
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while _count_blocked(seconds) < connections:
        assert not future.done(), "the call ended without waiting for a lock"
        assert time.monotonic() < deadline, "no connection waits for a lock"
        pause.wait(0.01)


def wait_until_settled(*futures: "Future[Any]") -> None:
    """Wait until each call has ended or waits for a lock."""
    pause = threading.Event()
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while _count_blocked(0) < sum(not future.done() for future in futures):
        assert time.monotonic() < deadline, "a call neither ends nor waits for a lock"
        pause.wait(0.01)


def _count_blocked(seconds: float) -> int:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(DISTINCT locks.pid) FROM pg_locks AS locks JOIN pg_stat_activity USING (pid)"
            " WHERE datname = current_database() AND NOT granted"
            " AND clock_timestamp() - coalesce(waitstart, clock_timestamp()) >= make_interval(secs => %s)",
            [seconds],
        )
        return int(cursor.fetchone()[0])
