"""What waits for a database that says nothing gives up: nobody else would tell it."""

import threading
from collections.abc import Iterator

import psycopg
import pytest
from django.db import connection

from keyvault.services.change_feed import follower
from keyvault.services.postgres.connection_timeouts import abort_connection, use_short_timeouts
from keyvault.services.postgres.raw_queries import execute
from keyvault.services.recording.changes import ChangeBatch, poll_feed
from tests.services.change_feed.test_follower import Memory, await_that, change, following, key
from tests.services.racing import TIMEOUT_SECONDS

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]


@pytest.fixture(autouse=True)
def no_sleepers(transactional_db: None) -> Iterator[None]:
    """The server does not notice that nobody listens any more to one that sleeps."""
    yield
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE %s AND pid <> pg_backend_pid()",
            ["%pg_sleep(600)%"],
        )


def test_hang_up_ends_the_wait_of_another_thread() -> None:
    """The waiting thread hears of it as of any connection that was lost, and the connection is of no more use."""
    failed: list[BaseException] = []
    is_waiting = threading.Event()
    lent: list[psycopg.Connection[object]] = []

    def wait() -> None:
        use_short_timeouts()
        try:
            connection.ensure_connection()
            lent.append(connection.connection)
            is_waiting.set()
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_sleep(600)")
        except Exception as error:  # noqa: BLE001  that is what is looked at
            failed.append(error)
        finally:
            connection.close()

    thread = threading.Thread(target=wait)
    thread.start()
    assert is_waiting.wait(TIMEOUT_SECONDS)
    abort_connection(lent[0])
    thread.join(TIMEOUT_SECONDS)
    assert [type(error).__name__ for error in failed] == ["OperationalError"]
    abort_connection(lent[0])
    abort_connection(None)


def test_follower_whose_look_hangs_hangs_up_and_follows_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that takes everything and passes on nothing: no error ever comes by itself, and still it heals."""
    monkeypatch.setattr(follower, "_WATCH_SECONDS", 0.05)
    monkeypatch.setattr(follower, "_TURN_SECONDS", 0.5)
    hung = threading.Event()

    def look(above: int) -> ChangeBatch:
        if not hung.is_set():
            hung.set()
            execute(b"SELECT pg_sleep(600)")
        return poll_feed(above)

    monkeypatch.setattr(follower, "poll_feed", look)
    memory = Memory()
    with following(memory):
        assert hung.is_set()
        change("a")
        await_that(lambda: key("a") in memory.applied, "a change after it")
