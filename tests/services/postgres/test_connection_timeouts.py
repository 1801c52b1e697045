"""Aborting connections that wait for an unresponsive PostgreSQL server."""

import threading
from collections.abc import Iterator

import psycopg
import pytest
from django.db import connection

from keyvault.services.change_feed import follower
from keyvault.services.postgres.connection_timeouts import abort_connection, use_short_timeouts
from keyvault.services.postgres.raw_queries import execute
from keyvault.services.recording.changes import ChangeBatch, poll_feed
from tests.services.change_feed.test_follower import RecordedFollower, change, key, running, wait_until
from tests.services.racing import TIMEOUT_SECONDS

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]


@pytest.fixture(autouse=True)
def terminate_sleepers(transactional_db: None) -> Iterator[None]:
    """End `pg_sleep` calls afterwards: the server does not notice that their client is gone."""
    yield
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE %s AND pid <> pg_backend_pid()",
            ["%pg_sleep(600)%"],
        )


def test_abort_connection_ends_the_wait_of_another_thread() -> None:
    """The waiting thread gets the error of a lost connection, and the connection is unusable."""
    failed: list[BaseException] = []
    is_waiting = threading.Event()
    opened: list[psycopg.Connection[object]] = []

    def wait() -> None:
        use_short_timeouts()
        try:
            connection.ensure_connection()
            opened.append(connection.connection)
            is_waiting.set()
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_sleep(600)")
        except Exception as error:  # noqa: BLE001  the test compares the error
            failed.append(error)
        finally:
            connection.close()

    thread = threading.Thread(target=wait)
    thread.start()
    assert is_waiting.wait(TIMEOUT_SECONDS)
    abort_connection(opened[0])
    thread.join(TIMEOUT_SECONDS)
    assert [type(error).__name__ for error in failed] == ["OperationalError"]
    abort_connection(opened[0])
    abort_connection(None)


def test_follower_whose_poll_hangs_aborts_and_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that accepts data but never forwards it causes no error by itself."""
    monkeypatch.setattr(follower, "_WATCH_SECONDS", 0.05)
    monkeypatch.setattr(follower, "_TURN_SECONDS", 0.5)
    hung = threading.Event()

    def poll(above: int) -> ChangeBatch:
        if not hung.is_set():
            hung.set()
            execute(b"SELECT pg_sleep(600)")
        return poll_feed(above)

    monkeypatch.setattr(follower, "poll_feed", poll)
    recorded = RecordedFollower()
    with running(recorded):
        assert hung.is_set()
        change("a")
        wait_until(lambda: key("a") in recorded.applied, "a change after the abort")
