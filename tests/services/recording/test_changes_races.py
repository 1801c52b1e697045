"""The change feed on PostgreSQL with concurrent connections, and after connections, writers or servers die.

Visible changes are applied without delay, none is skipped, and no undecided sequence is confirmed.
"""

import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from string import digits
from typing import Any

import psycopg
import pytest
from django.db import OperationalError, connection, connections, transaction
from psycopg.conninfo import conninfo_to_dict

from keyvault.models import Change, Confirmation, Key, Verifier
from keyvault.services.change_feed import follower
from keyvault.services.recording import changes
from tests.factories import issue, now
from tests.faults import servers
from tests.servers.throwaway import MissingServerError
from tests.services.change_feed.test_follower import RecordedFollower, change, key, running, wait_until
from tests.services.conftest import make_scene
from tests.services.racing import TIMEOUT_SECONDS, race, start, wait_until_blocked

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]

_NUMBERS = count()

ROOT = Path(__file__).resolve().parents[3]


class StepwiseTransaction:
    """A transaction on its own connection that the test advances step by step."""

    def __init__(self) -> None:
        parameters = connection.get_connection_params()
        for name in ("context", "cursor_factory"):
            parameters.pop(name, None)
        self.connection: psycopg.Connection[Any] = psycopg.connect(**parameters)
        self.drawn: list[int] = []

    def draw(self) -> int:
        """Draw a sequence as `announce_changes` does."""
        self.connection.execute(changes._HOLD, changes._LOCK)
        row = self.connection.execute(
            "INSERT INTO keyvault_change (subject_kind, subject_id, at) VALUES ('key', %s, now()) RETURNING sequence",
            [f"w{next(_NUMBERS)}"],
        ).fetchone()
        assert row is not None
        self.drawn.append(row[0])
        return self.drawn[-1]

    def commit(self) -> list[int]:
        """Commit, and return the sequences that are visible now."""
        self.connection.commit()
        visible, self.drawn = self.drawn, []
        return visible

    def rollback(self) -> None:
        self.connection.rollback()
        self.drawn = []

    def draw_and_roll_back(self, times: int) -> None:
        for _ in range(times):
            self.draw()
        self.rollback()


@pytest.fixture
def recorded(transactional_db: None) -> Iterator[RecordedFollower]:
    created = RecordedFollower()
    yield created
    created.follower.stop()
    follower._followers.discard(created.follower)


@contextmanager
def writers(number: int) -> Iterator[list[StepwiseTransaction]]:
    with ExitStack() as stack:
        created = []
        for _ in range(number):
            created.append(StepwiseTransaction())
            stack.callback(created[-1].connection.close)
        yield created


def confirmed() -> int:
    return Verifier.objects.get().confirmed_sequence


# ---------------------------------------------------------------------------------------------- delays


def test_feed_beside_a_long_unrelated_transaction_is_not_delayed(recorded: RecordedFollower) -> None:
    """A report, a backup or a bulk import delays neither a revocation nor its receipt."""
    with writers(1) as (long,):
        long.connection.execute("CREATE TABLE unrelated AS SELECT 1")  # has an xid, and keeps old snapshots alive
        recorded.follower.poll_once()
        sequence = change("a")
        recorded.follower.poll_once()
        assert recorded.applied == [key("a")]
        assert confirmed() == sequence
        long.rollback()


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_feed_transaction_that_drew_and_stays_open_delays_only_the_confirmation(
    recorded: RecordedFollower, end: str
) -> None:
    """Later changes are applied when committed; the lower sequence is not skipped when it commits late."""
    recorded.follower.poll_once()
    before, confirmations = confirmed(), len(recorded.confirmed)
    with writers(1) as (slow,):
        low = slow.draw()
        high = change("later")
        for _ in range(3):
            recorded.follower.poll_once()
        assert low < high
        assert recorded.applied == [key("later")]
        assert confirmed() == before
        assert len(recorded.confirmed) == confirmations + 3, (
            "the process has applied everything visible, so it is fresh"
        )
        getattr(slow, end)()
        recorded.follower.poll_once()
    assert [identity.rstrip(digits) for _, identity in recorded.applied] == (
        ["later", "w"] if end == "commit" else ["later"]
    )
    assert confirmed() == high
    assert recorded.cleared == 1


def test_feed_new_lock_holders_do_not_delay_earlier_confirmations(recorded: RecordedFollower) -> None:
    """Under constant load, each poll waits only for the holders that it saw."""
    recorded.follower.poll_once()
    with writers(2) as (one, other):
        first = one.draw()
        recorded.follower.poll_once()
        second = other.draw()
        one.commit()
        recorded.follower.poll_once()
        assert first <= confirmed() < second
        third = one.draw()
        other.commit()
        recorded.follower.poll_once()
        assert second <= confirmed() < third
        one.commit()


def test_feed_sequence_drawn_before_the_first_poll_is_not_missed(recorded: RecordedFollower) -> None:
    """The sequence is below the follower's start, so when it appears, the whole cache is cleared."""
    with writers(1) as (early,):
        low = early.draw()
        high = change("a")
        recorded.follower.poll_once()
        assert (recorded.cleared, confirmed()) == (1, 0)
        early.commit()
        recorded.follower.poll_once()
    assert recorded.cleared == 2
    assert confirmed() == high > low


def test_feed_savepoint_rolled_back_releases_its_sequence(recorded: RecordedFollower) -> None:
    """PostgreSQL releases the savepoint's lock on rollback, and its sequence can never appear."""
    recorded.follower.poll_once()
    with transaction.atomic():
        with transaction.atomic():
            changes.announce_changes({key("undone"): True}, now())
            transaction.set_rollback(True)
        last = changes.announce_changes({key("kept"): True}, now())
    recorded.follower.poll_once()
    assert recorded.applied == [key("kept")]
    assert confirmed() == last


@pytest.mark.parametrize("seed", range(6))
def test_feed_under_any_schedule_skips_nothing_and_confirms_nothing_undecided(
    recorded: RecordedFollower, seed: int
) -> None:
    """Interleave transactions that draw, commit and roll back with polls.

    Every committed row is applied exactly once, by the next poll; no undecided sequence is confirmed.
    """
    rng, visible = random.Random(seed), set[int]()  # noqa: S311  picks a schedule, not a secret
    recorded.follower.poll_once()
    start_at = confirmed()
    with writers(4) as some:
        for _ in range(80):
            writer = rng.choice(some)
            match rng.choice(["draw", "draw", "commit", "rollback", "poll"]):
                case "draw":
                    writer.draw()
                case "commit":
                    visible.update(writer.commit())
                case "rollback":
                    writer.rollback()
                case "poll":
                    recorded.follower.poll_once()
                    assert len(recorded.applied) == len(visible)
                    undecided = [sequence for other in some for sequence in other.drawn]
                    assert confirmed() < min(undecided, default=confirmed() + 1)
        for writer in some:
            visible.update(writer.commit())
    recorded.follower.poll_once()
    rows = Change.objects.filter(pk__gt=start_at).values_list("pk", "subject_kind", "subject_id")
    assert {sequence for sequence, *_ in rows} == visible
    assert sorted(recorded.applied) == sorted((kind, identity) for _, kind, identity in rows)
    assert recorded.cleared == 1
    with connection.cursor() as cursor:
        cursor.execute("SELECT last_value FROM keyvault_change_sequence_seq")
        assert confirmed() == cursor.fetchone()[0]


def test_feed_of_concurrent_writers_is_applied_completely(recorded: RecordedFollower) -> None:
    """The follower's thread applies each change once while threads write without pause."""

    def write(writer: int) -> list[str]:
        names = [f"{writer}-{number}" for number in range(40)]
        for name in names:
            change(name)
        return names

    with running(recorded):
        names = [name for own in race(*[partial(write, writer) for writer in range(4)]) for name in own]
        last = Change.objects.latest("sequence").pk
        wait_until(lambda: confirmed() == last, "the confirmation of the last change")
        assert sorted(recorded.applied) == sorted(map(key, names))
    steps = list(Confirmation.objects.order_by("id").values_list("sequence", flat=True))
    assert steps == sorted(set(steps)), "confirmations must increase"


# ------------------------------------------------------------------------------------------------ assumptions


def test_feed_sequence_has_no_cache() -> None:
    """A cached value would be drawn long before its transaction takes the lock."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT cache_size FROM pg_sequences WHERE sequencename = 'keyvault_change_sequence_seq'")
        assert cursor.fetchone() == (1,)


def test_feed_reads_holders_before_rows_at_any_isolation_level(
    recorded: RecordedFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one snapshot, a commit between the two reads would be neither a holder nor a row."""
    wait = "SELECT coalesce(pg_advisory_lock(6)::text, '')"
    monkeypatch.setattr(changes, "_HOLDERS", wait)

    def poll() -> changes.ChangeBatch:
        with connection.cursor() as cursor:
            cursor.execute("SET default_transaction_isolation = 'repeatable read'")
        return changes.poll_feed(0)

    with writers(1) as (gate,):
        gate.connection.execute("SELECT pg_advisory_xact_lock(6)")
        waiting = start(poll)
        wait_until_blocked(waiting)
        sequence = change("concurrent")
        gate.rollback()
        (row,) = waiting.result(TIMEOUT_SECONDS).rows
        assert (row.sequence, row.subject) == (sequence, key("concurrent"))


@pytest.mark.parametrize(
    "setting", ["TimeZone TO 'Asia/Kathmandu'", "DateStyle TO 'SQL, DMY'", "extra_float_digits TO -15"]
)
def test_feed_time_of_a_row_is_independent_of_session_settings(setting: str) -> None:
    """A changed setting of the host must not look like a rewound feed."""
    change("a")
    rows = changes.poll_feed(0).rows
    with connection.cursor() as cursor:
        cursor.execute(f"SET {setting}")
    try:
        assert changes.poll_feed(0).rows == rows
    finally:
        connection.close()


def test_feed_on_a_standby_is_not_followed(recorded: RecordedFollower, monkeypatch: pytest.MonkeyPatch) -> None:
    """A standby knows neither the lock's holders nor its own lag."""
    monkeypatch.setattr(changes, "_LAST_DRAWN", "SELECT 7, true")
    with pytest.raises(OperationalError, match="standby"):
        recorded.follower.poll_once()
    assert recorded.confirmed == []


@pytest.mark.parametrize(
    ("before", "inside"),
    [("off", "on"), ("local", "on"), ("remote_write", "on"), ("on", "on"), ("remote_apply", "remote_apply")],
)
def test_feed_change_is_committed_durably_whatever_the_host_setting(before: str, inside: str) -> None:
    """An acknowledged revocation must survive a power loss; a stronger setting is kept."""

    def show() -> str:
        cursor.execute("SHOW synchronous_commit")
        return str(cursor.fetchone()[0])

    with connection.cursor() as cursor:
        cursor.execute("SELECT set_config('synchronous_commit', %s, false)", [before])
        try:
            with transaction.atomic():
                changes.announce_changes({key("a"): True}, now())
                assert show() == inside
            assert show() == before
        finally:
            cursor.execute("RESET synchronous_commit")


def test_feed_whose_sequence_went_back_is_followed_from_there(recorded: RecordedFollower) -> None:
    """A crash may take back sequences of rolled-back transactions. No committed change is missing."""
    change("before")
    recorded.follower.poll_once()
    with writers(1) as (writer,):
        writer.draw_and_roll_back(100)
    recorded.follower.poll_once()
    was = confirmed()
    with connection.cursor() as cursor:
        cursor.execute("SELECT setval('keyvault_change_sequence_seq', %s)", [was - 80])
    cleared = recorded.cleared
    again = change("after")
    assert again < was - 64
    recorded.follower.poll_once()
    assert (recorded.cleared, recorded.lost) == (cleared + 1, 0)
    assert confirmed() == again
    last = change("later")
    recorded.follower.poll_once()
    assert (recorded.applied[-1], confirmed()) == (key("later"), last)


def test_follower_that_cannot_report_applies_without_confirming(recorded: RecordedFollower) -> None:
    """Receipts treat a silent verifier as expired, so it must not answer from its cache."""
    recorded.follower.poll_once()
    confirmations = len(recorded.confirmed)
    with writers(1) as (blocking,):
        blocking.connection.execute("SELECT 1 FROM keyvault_verifier FOR UPDATE")
        change("a")
        with pytest.raises(OperationalError):
            recorded.follower.poll_once()
        assert recorded.applied == [key("a")]
        assert len(recorded.confirmed) == confirmations
        blocking.rollback()
    recorded.follower.poll_once()
    assert recorded.applied == [key("a")]
    assert confirmed() == Change.objects.latest("sequence").pk


def test_follower_report_restores_the_lock_timeout(recorded: RecordedFollower) -> None:
    """The short timeout is for the report only; the connection has other uses."""

    def lock_timeout() -> str:
        with connection.cursor() as cursor:
            cursor.execute("SHOW lock_timeout")
            return str(cursor.fetchone()[0])

    before = lock_timeout()
    recorded.follower.poll_once()
    assert confirmed() >= 0
    assert lock_timeout() == before


# ------------------------------------------------------------------------------------------------- failures


def listeners() -> set[int]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN %%'")
        return {pid for (pid,) in cursor.fetchall()}


def _has_listener_besides(known: set[int]) -> bool:
    return bool(listeners() - known)


def _has_applied(recorded: RecordedFollower, number: int) -> bool:
    return key(number) in recorded.applied


def _has_confirmed(recorded: RecordedFollower, before: int) -> bool:
    return len(recorded.confirmed) > before


def terminate(condition: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"  # noqa: S608  the condition is a literal of this file
            f" WHERE datname = current_database() AND pid <> pg_backend_pid() AND {condition}"
        )


def test_follower_is_woken_by_the_commit(recorded: RecordedFollower, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next regular poll is too far away to find the change."""
    monkeypatch.setattr(follower, "POLL_SECONDS", 2 * TIMEOUT_SECONDS)
    with running(recorded):
        wait_until(lambda: bool(listeners()), "the listener")
        change("a")
        wait_until(lambda: recorded.applied == [key("a")], "the change")
        recorded.follower._stop.set()
        change("wakes it to stop")


def test_follower_recovers_from_a_lost_notification(
    recorded: RecordedFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(recorded):
        wait_until(lambda: bool(listeners()), "the listener")
        monkeypatch.setattr(changes, "CHANNEL", "unused_channel")
        change("a")
        wait_until(lambda: recorded.applied == [key("a")], "the change")


def test_follower_whose_listener_is_killed_loses_nothing_and_listens_again(recorded: RecordedFollower) -> None:
    with running(recorded):
        for number in range(3):
            wait_until(lambda: bool(listeners()), "the listener")
            before = listeners()
            terminate("query LIKE 'LISTEN %'")
            change(number)
            wait_until(partial(_has_applied, recorded, number), "the change")
            wait_until(partial(_has_listener_besides, before), "another listener")
        assert recorded.applied == [key(number) for number in range(3)]
        last = Change.objects.latest("sequence").pk
        wait_until(lambda: confirmed() == last, "the receipt")
    assert recorded.cleared == 1


def test_follower_whose_connections_are_all_killed_loses_nothing(recorded: RecordedFollower) -> None:
    with running(recorded):
        for number in range(3):
            confirmations = len(recorded.confirmed)
            terminate("backend_type = 'client backend'")
            change(number)
            wait_until(partial(_has_applied, recorded, number), "the change")
            wait_until(partial(_has_confirmed, recorded, confirmations), "a poll")
        assert recorded.applied == [key(number) for number in range(3)]
    assert recorded.cleared == 1


@contextmanager
def pointed_at(url: str) -> Iterator[None]:
    """Point new connections at this server for the duration of the block."""
    parts = conninfo_to_dict(url)
    target = connections.settings["default"]
    before = dict(target)
    connection.close()
    target |= {
        "NAME": parts["dbname"],
        "USER": parts["user"],
        "PASSWORD": parts["password"],
        "HOST": parts["host"],
        "PORT": str(parts["port"]),
    }
    try:
        yield
    finally:
        target.clear()
        target |= before
        connection.close()


@pytest.fixture
def own_server(recorded: RecordedFollower) -> Iterator[servers.Restartable]:
    """A PostgreSQL server that the test stops and starts, with the tables of the feed. New connections go to it."""
    with ExitStack() as stack:
        try:
            server = stack.enter_context(servers.running("postgres"))
        except MissingServerError as missing:
            pytest.skip(missing.reason)
        stack.enter_context(pointed_at(server.url))
        with connection.schema_editor() as editor:
            for model in (Change, Verifier, Confirmation):
                editor.create_model(model)
        yield server


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT], ids=["fast", "immediate"])
def test_follower_of_a_restarted_database_is_stale_meanwhile_and_recovers(
    recorded: RecordedFollower, own_server: servers.Restartable, how: signal.Signals
) -> None:
    """Without the database no process is fresh; afterwards, later changes are applied."""
    with running(recorded):
        change("before")
        connection.close()
        wait_until(lambda: recorded.applied == [key("before")], "the change")
        own_server.stop(how)
        wait_until(lambda: recorded.follower._is_failing, "the outage")
        confirmations = len(recorded.confirmed)
        wait_until(lambda: not recorded.follower.is_fresh, "the end of its freshness")
        assert len(recorded.confirmed) == confirmations
        assert follower.is_feed_followed() is False
        own_server.start()
        change("after")
        wait_until(lambda: recorded.applied == [key("before"), key("after")], "the change")
        wait_until(lambda: recorded.follower.is_fresh, "fresh state")
    assert recorded.cleared == 1


def test_follower_of_a_database_that_crashed_before_its_report_recovers(
    recorded: RecordedFollower, own_server: servers.Restartable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sequences that the follower saw were drawn by a transaction that rolled back, and were never durable."""
    change("before")
    recorded.follower.poll_once()
    with writers(1) as (writer,):
        writer.draw_and_roll_back(100)

    def crash() -> None:
        own_server.stop(signal.SIGQUIT)
        raise OperationalError("the server crashed")

    with monkeypatch.context() as patch:
        patch.setattr(recorded.follower, "_write_report", crash)
        with pytest.raises(OperationalError):
            recorded.follower.poll_once()
    connection.close()
    own_server.start()
    sequence = change("after")
    recorded.follower.poll_once()
    assert (recorded.lost, confirmed()) == (0, sequence)


KILLED_BEFORE_NOTIFYING = """
import os, signal, sys
import django
django.setup()
from keyvault.services.recording import changes
changes.notify_host = lambda subjects: os.kill(os.getpid(), signal.SIGKILL)
from keyvault.access.permissions import Permission
from keyvault.access.principals import WORKER
from keyvault.services.keys import lifecycle
from tests.factories import grant
key = lifecycle.get_key(sys.argv[1])
lifecycle.discard_key(grant(WORKER, Permission.ISSUANCE_EXECUTE, key.credential.account), key)
"""


@pytest.mark.long
def test_feed_contains_the_change_of_a_writer_killed_before_it_notified(recorded: RecordedFollower) -> None:
    """Killed between the commit and the host generation: processes of this host find the change as other hosts do."""
    scene = make_scene()
    issued, _ = issue(scene.sandbox)
    recorded.follower.poll_once()
    generation = changes.generation().memory[0]
    done = subprocess.run(
        [sys.executable, "-c", KILLED_BEFORE_NOTIFYING, issued.key_id],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert Key.objects.get().state == "deactivated"
    assert changes.generation().memory[0] == generation, "no process of this host was notified"
    recorded.follower.poll_once()
    assert recorded.applied == [("key", issued.key_id)]
    assert confirmed() == Change.objects.latest("sequence").pk
