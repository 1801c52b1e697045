"""The feed's guarantee on a real PostgreSQL, with real connections: nothing visible waits, nothing is skipped, and
nothing is confirmed that may still change. And what becomes of it when connections, writers and servers die.
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
from keyvault.services.recording.changes import FeedRewoundError
from tests.factories import issue, now
from tests.faults import servers
from tests.servers.throwaway import MissingServerError
from tests.services.change_feed.test_follower import Memory, await_that, change, following, key
from tests.services.conftest import make_scene
from tests.services.racing import TIMEOUT_SECONDS, race, start, wait_until_blocked

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]

_NUMBERS = count()

ROOT = Path(__file__).resolve().parents[3]


class Writer:
    """A transaction on a connection of its own, that goes as far as the test says."""

    def __init__(self) -> None:
        parameters = connection.get_connection_params()
        for name in ("context", "cursor_factory"):
            parameters.pop(name, None)
        self.connection: psycopg.Connection[Any] = psycopg.connect(**parameters)
        self.drawn: list[int] = []

    def draw(self) -> int:
        """As `announce_changes` does."""
        self.connection.execute(changes._HOLD, changes._LOCK)
        row = self.connection.execute(
            "INSERT INTO keyvault_change (subject_kind, subject_id, at) VALUES ('key', %s, now()) RETURNING sequence",
            [f"w{next(_NUMBERS)}"],
        ).fetchone()
        assert row is not None
        self.drawn.append(row[0])
        return self.drawn[-1]

    def commit(self) -> list[int]:
        """The sequences that are visible now."""
        self.connection.commit()
        visible, self.drawn = self.drawn, []
        return visible

    def rollback(self) -> None:
        self.connection.rollback()
        self.drawn = []


@pytest.fixture
def memory(transactional_db: None) -> Iterator[Memory]:
    made = Memory()
    yield made
    made.follower.stop()
    follower._followers.discard(made.follower)


@contextmanager
def writers(number: int) -> Iterator[list[Writer]]:
    with ExitStack() as stack:
        made = []
        for _ in range(number):
            made.append(Writer())
            stack.callback(made[-1].connection.close)
        yield made


def confirmed() -> int:
    return Verifier.objects.get().confirmed_sequence


# ---------------------------------------------------------------------------------------------- what may delay what


def test_feed_is_delayed_by_no_long_transaction_that_alters_no_verdict(memory: Memory) -> None:
    """A report, a backup, a bulk import that runs for an hour: neither a revocation nor its receipt waits for it."""
    with writers(1) as (long,):
        long.connection.execute("CREATE TABLE unrelated AS SELECT 1")  # has an xid, and keeps old snapshots alive
        memory.follower.poll_once()
        sequence = change("a")
        memory.follower.poll_once()
        assert memory.applied == [key("a")]
        assert confirmed() == sequence
        long.rollback()


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_feed_transaction_that_drew_and_lingers_delays_the_confirmation_alone(memory: Memory, end: str) -> None:
    """Later changes are applied as they are committed; its own lower sequence is not skipped when it commits late."""
    memory.follower.poll_once()
    before, vouched = confirmed(), len(memory.confirmed)
    with writers(1) as (lingering,):
        low = lingering.draw()
        high = change("later")
        for _ in range(3):
            memory.follower.poll_once()
        assert low < high
        assert memory.applied == [key("later")]
        assert confirmed() == before
        assert len(memory.confirmed) == vouched + 3, "what is visible is applied, so the process may vouch"
        getattr(lingering, end)()
        memory.follower.poll_once()
    assert [identity.rstrip(digits) for _, identity in memory.applied] == (
        ["later", "w"] if end == "commit" else ["later"]
    )
    assert confirmed() == high
    assert memory.forgotten == 1


def test_feed_new_holders_do_not_delay_the_confirmation_of_what_was_before_them(memory: Memory) -> None:
    """A feed that is always busy is confirmed all the same: each look waits for those alone that it saw."""
    memory.follower.poll_once()
    with writers(2) as (one, other):
        first = one.draw()
        memory.follower.poll_once()
        second = other.draw()
        one.commit()
        memory.follower.poll_once()
        assert first <= confirmed() < second
        third = one.draw()
        other.commit()
        memory.follower.poll_once()
        assert second <= confirmed() < third
        one.commit()


def test_feed_change_that_was_drawn_before_the_follower_came_is_not_missed(memory: Memory) -> None:
    """Its sequence is below where the follower began; when it appears, everything is forgotten."""
    with writers(1) as (early,):
        low = early.draw()
        high = change("a")
        memory.follower.poll_once()
        assert (memory.forgotten, confirmed()) == (1, 0)
        early.commit()
        memory.follower.poll_once()
    assert memory.forgotten == 2
    assert confirmed() == high > low


def test_feed_savepoint_undone_lets_its_sequence_go_too(memory: Memory) -> None:
    """The lock of an undone part is let go by PostgreSQL at once, and the part's sequence can appear no more."""
    memory.follower.poll_once()
    with transaction.atomic():
        with transaction.atomic():
            changes.announce_changes({key("undone"): True}, now())
            transaction.set_rollback(True)
        last = changes.announce_changes({key("kept"): True}, now())
    memory.follower.poll_once()
    assert memory.applied == [key("kept")]
    assert confirmed() == last


@pytest.mark.parametrize("seed", range(6))
def test_feed_any_schedule_of_writers_skips_nothing_and_confirms_nothing_undecided(memory: Memory, seed: int) -> None:
    """Several transactions draw, commit and roll back in any order, with looks anywhere between: every committed row
    is applied exactly once, and as soon as it is visible; no confirmation passes a sequence that is undecided.
    """
    chance, visible = random.Random(seed), set[int]()  # noqa: S311  a schedule, not a secret
    memory.follower.poll_once()
    start_at = confirmed()
    with writers(4) as some:
        for _ in range(80):
            writer = chance.choice(some)
            match chance.choice(["draw", "draw", "commit", "rollback", "look"]):
                case "draw":
                    writer.draw()
                case "commit":
                    visible.update(writer.commit())
                case "rollback":
                    writer.rollback()
                case "look":
                    memory.follower.poll_once()
                    assert len(memory.applied) == len(visible)
                    undecided = [sequence for other in some for sequence in other.drawn]
                    assert confirmed() < min(undecided, default=confirmed() + 1)
        for writer in some:
            visible.update(writer.commit())
    memory.follower.poll_once()
    rows = Change.objects.filter(pk__gt=start_at).values_list("pk", "subject_kind", "subject_id")
    assert {sequence for sequence, *_ in rows} == visible
    assert sorted(memory.applied) == sorted((kind, identity) for _, kind, identity in rows)
    assert memory.forgotten == 1
    with connection.cursor() as cursor:
        cursor.execute("SELECT last_value FROM keyvault_change_sequence_seq")
        assert confirmed() == cursor.fetchone()[0]


def test_feed_of_writers_at_full_speed_is_applied_whole(memory: Memory) -> None:
    """Threads write as fast as they can while the follower's own thread follows: each change is applied, once."""

    def write(writer: int) -> list[str]:
        names = [f"{writer}-{number}" for number in range(40)]
        for name in names:
            change(name)
        return names

    with following(memory):
        names = [name for own in race(*[partial(write, writer) for writer in range(4)]) for name in own]
        last = Change.objects.latest("sequence").pk
        await_that(lambda: confirmed() == last, "the confirmation of the last change")
        assert sorted(memory.applied) == sorted(map(key, names))
    steps = list(Confirmation.objects.order_by("id").values_list("sequence", flat=True))
    assert steps == sorted(set(steps)), "each step goes forward"


# ------------------------------------------------------------------------------------------------ what it rests on


def test_feed_sequence_has_no_cache() -> None:
    """A cached value would be drawn long before its transaction takes the lock."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT cache_size FROM pg_sequences WHERE sequencename = 'keyvault_change_sequence_seq'")
        assert cursor.fetchone() == (1,)


def test_feed_reads_the_rows_after_the_holders_whatever_the_databases_isolation(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one snapshot for all three, a commit between them would be neither a holder nor a row."""
    wait = "SELECT coalesce(pg_advisory_lock(6)::text, '')"
    monkeypatch.setattr(changes, "_HOLDERS", wait)

    def look() -> changes.ChangeBatch:
        with connection.cursor() as cursor:
            cursor.execute("SET default_transaction_isolation = 'repeatable read'")
        return changes.poll_feed(0)

    with writers(1) as (gate,):
        gate.connection.execute("SELECT pg_advisory_xact_lock(6)")
        waiting = start(look)
        wait_until_blocked(waiting)
        sequence = change("meanwhile")
        gate.rollback()
        (row,) = waiting.result(TIMEOUT_SECONDS).rows
        assert (row.sequence, row.subject) == (sequence, key("meanwhile"))


@pytest.mark.parametrize(
    "setting", ["TimeZone TO 'Asia/Kathmandu'", "DateStyle TO 'SQL, DMY'", "extra_float_digits TO -15"]
)
def test_feed_time_of_a_row_is_the_same_however_the_session_is_set(setting: str) -> None:
    """A host's setting that somebody changes would else look like a feed that went back."""
    change("a")
    rows = changes.poll_feed(0).rows
    with connection.cursor() as cursor:
        cursor.execute(f"SET {setting}")
    try:
        assert changes.poll_feed(0).rows == rows
    finally:
        connection.close()


def test_feed_is_not_followed_on_a_standby(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A standby knows neither who holds the lock nor how old it is."""
    monkeypatch.setattr(changes, "_LAST_DRAWN", "SELECT 7, true")
    with pytest.raises(OperationalError, match="standby"):
        memory.follower.poll_once()
    assert memory.confirmed == []


@pytest.mark.parametrize(
    ("before", "inside"),
    [("off", "on"), ("local", "on"), ("remote_write", "on"), ("on", "on"), ("remote_apply", "remote_apply")],
)
def test_feed_change_is_committed_durably_however_the_host_set_it(before: str, inside: str) -> None:
    """Who was told that a key is revoked must not see it back after a power cut; a stronger choice is kept."""

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


def test_feed_whose_sequence_went_back_is_never_vouched_for_again(memory: Memory) -> None:
    """What a restored or failed-over database looks like, though no row that was applied is missing from it."""
    memory.follower.poll_once()
    with writers(1) as (writer,):
        writer.draw()
        writer.rollback()
    memory.follower.poll_once()
    vouched, was = len(memory.confirmed), confirmed()
    with connection.cursor() as cursor:
        cursor.execute("SELECT setval('keyvault_change_sequence_seq', %s)", [max(1, was - 1)])
        with pytest.raises(FeedRewoundError):
            memory.follower.poll_once()
        cursor.execute("SELECT setval('keyvault_change_sequence_seq', %s)", [was + 5])
    with pytest.raises(FeedRewoundError):
        memory.follower.poll_once()
    assert len(memory.confirmed) == vouched


def test_follower_that_cannot_report_applies_and_does_not_vouch(memory: Memory) -> None:
    """Whoever waits for receipts takes a silent verifier for expired: it must not say yes from memory then."""
    memory.follower.poll_once()
    vouched = len(memory.confirmed)
    with writers(1) as (blocking,):
        blocking.connection.execute("SELECT 1 FROM keyvault_verifier FOR UPDATE")
        change("a")
        with pytest.raises(OperationalError):
            memory.follower.poll_once()
        assert memory.applied == [key("a")]
        assert len(memory.confirmed) == vouched
        blocking.rollback()
    memory.follower.poll_once()
    assert memory.applied == [key("a")]
    assert confirmed() == Change.objects.latest("sequence").pk


def test_follower_that_reported_is_as_patient_as_before(memory: Memory) -> None:
    """The receipts' patience is theirs alone: the connection is used for more."""

    def patience() -> str:
        with connection.cursor() as cursor:
            cursor.execute("SHOW lock_timeout")
            return str(cursor.fetchone()[0])

    before = patience()
    memory.follower.poll_once()
    assert confirmed() >= 0
    assert patience() == before


# ------------------------------------------------------------------------------------------------- what may be lost


def listeners() -> set[int]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN %%'")
        return {pid for (pid,) in cursor.fetchall()}


def _listens_beside(known: set[int]) -> bool:
    return bool(listeners() - known)


def _has_applied(memory: Memory, number: int) -> bool:
    return key(number) in memory.applied


def _has_vouched(memory: Memory, before: int) -> bool:
    return len(memory.confirmed) > before


def terminate(condition: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"  # noqa: S608  a condition of this test's
            f" WHERE datname = current_database() AND pid <> pg_backend_pid() AND {condition}"
        )


def test_follower_is_woken_by_the_commit(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not found by the next poll, which is far away here."""
    monkeypatch.setattr(follower, "POLL_SECONDS", 2 * TIMEOUT_SECONDS)
    with following(memory):
        await_that(lambda: bool(listeners()), "the listener")
        change("a")
        await_that(lambda: memory.applied == [key("a")], "the change")
        memory.follower._stop.set()
        change("wakes it for the end")


def test_follower_heals_a_lost_message(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    with following(memory):
        await_that(lambda: bool(listeners()), "the listener")
        monkeypatch.setattr(changes, "CHANNEL", "nobody_listens_there")
        change("a")
        await_that(lambda: memory.applied == [key("a")], "the change")


def test_follower_whose_listener_is_killed_loses_nothing_and_listens_again(memory: Memory) -> None:
    with following(memory):
        for number in range(3):
            await_that(lambda: bool(listeners()), "the listener")
            before = listeners()
            terminate("query LIKE 'LISTEN %'")
            change(number)
            await_that(partial(_has_applied, memory, number), "the change")
            await_that(partial(_listens_beside, before), "another listener")
        assert memory.applied == [key(number) for number in range(3)]
        last = Change.objects.latest("sequence").pk
        await_that(lambda: confirmed() == last, "the receipt")
    assert memory.forgotten == 1


def test_follower_all_of_whose_connections_are_killed_loses_nothing(memory: Memory) -> None:
    with following(memory):
        for number in range(3):
            vouched = len(memory.confirmed)
            terminate("backend_type = 'client backend'")
            change(number)
            await_that(partial(_has_applied, memory, number), "the change")
            await_that(partial(_has_vouched, memory, vouched), "a look")
        assert memory.applied == [key(number) for number in range(3)]
    assert memory.forgotten == 1


@contextmanager
def pointed_at(url: str) -> Iterator[None]:
    """Every connection that is opened inside the block goes there."""
    parts = conninfo_to_dict(url)
    chosen = connections.settings["default"]
    before = dict(chosen)
    connection.close()
    chosen |= {
        "NAME": parts["dbname"],
        "USER": parts["user"],
        "PASSWORD": parts["password"],
        "HOST": parts["host"],
        "PORT": str(parts["port"]),
    }
    try:
        yield
    finally:
        chosen.clear()
        chosen |= before
        connection.close()


def _make_feed() -> None:
    with connection.schema_editor() as editor:
        for model in (Change, Verifier, Confirmation):
            editor.create_model(model)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT], ids=["fast", "immediate"])
def test_follower_of_a_database_that_is_restarted_vouches_for_nothing_meanwhile_and_then_heals(
    memory: Memory, how: signal.Signals
) -> None:
    """A server of the test's own is shut down and started again: no look, no vouching; what came after is applied."""
    with ExitStack() as stack:
        try:
            server = stack.enter_context(servers.running("postgres"))
        except MissingServerError as missing:
            pytest.skip(missing.reason)
        stack.enter_context(pointed_at(server.url))
        _make_feed()
        with following(memory):
            change("before")
            connection.close()
            await_that(lambda: memory.applied == [key("before")], "the change")
            server.stop(how)
            await_that(lambda: memory.follower._is_failing, "the outage")
            vouched = len(memory.confirmed)
            await_that(lambda: not memory.follower.is_fresh, "the end of its freshness")
            assert len(memory.confirmed) == vouched
            assert follower.is_feed_followed() is False
            server.start()
            change("after")
            await_that(lambda: memory.applied == [key("before"), key("after")], "the change")
            await_that(lambda: memory.follower.is_fresh, "its freshness")
        assert memory.forgotten == 1


KILLED_BEFORE_TELLING = """
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


def test_feed_tells_what_a_writer_killed_after_its_commit_did_not(memory: Memory) -> None:
    """Killed between the commit and the shared word: this host's processes find it as those of other hosts do."""
    scene = make_scene()
    issued, _ = issue(scene.sandbox)
    memory.follower.poll_once()
    word = changes.generation().words[0]
    done = subprocess.run(
        [sys.executable, "-c", KILLED_BEFORE_TELLING, issued.key_id],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert Key.objects.get().state == "deactivated"
    assert changes.generation().words[0] == word, "nobody of this host was told"
    memory.follower.poll_once()
    assert memory.applied == [("key", issued.key_id)]
    assert confirmed() == Change.objects.latest("sequence").pk
