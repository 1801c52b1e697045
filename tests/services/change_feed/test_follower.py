"""The change feed follower: applies changes, confirms them, and reports whether its cache is fresh."""

import logging
import multiprocessing
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import pytest
from django.conf import settings
from django.db import DatabaseError, OperationalError, connection, transaction
from django.test import Client, override_settings
from hypothesis import example, given
from hypothesis import strategies as st

from keyvault.domain.ids import Subject
from keyvault.models import Change, Confirmation, Verifier
from keyvault.services.change_feed import follower
from keyvault.services.change_feed.follower import Follower
from keyvault.services.recording import changes
from keyvault.services.recording.changes import ChangeBatch, FeedRewoundError, Position, Row
from keyvault.services.usage.recorder import usage_log
from tests.factories import have_peppers, now
from tests.services.racing import TIMEOUT_SECONDS, held_open, start
from tests.services.rows import disable_triggers


def on_every_database(test: Callable[..., None]) -> Callable[..., None]:
    marked: Callable[..., None] = pytest.mark.database(pytest.mark.django_db(transaction=True)(test))
    return marked


class RecordedFollower:
    """A follower and a record of its callbacks."""

    def __init__(self) -> None:
        self.applied: list[Subject] = []
        self.cleared = 0
        self.confirmed: list[tuple[float, float]] = []
        self.withdrawn = 0
        self.lost = 0
        self.follower = Follower(self.apply, self._confirm, self._lose, "test")

    def apply(self, subjects: Collection[Subject] | None) -> None:
        if subjects is None:
            self.cleared += 1
        else:
            self.applied += subjects

    def _confirm(self, monotonic: float, wall: float) -> None:
        if monotonic == float("-inf"):
            self.withdrawn += 1
        else:
            self.confirmed.append((monotonic, wall))

    def _lose(self) -> None:
        assert not self.withdrawn, "the freshness was withdrawn before the loss was reported"
        self.lost += 1


@pytest.fixture
def recorded() -> Iterator[RecordedFollower]:
    instance = RecordedFollower()
    yield instance
    instance.follower.stop()
    follower._followers.discard(instance.follower)


def key(number: int | str) -> Subject:
    return "key", str(number)


def change(*numbers: int | str) -> int:
    with transaction.atomic():
        sequence = changes.announce_changes({key(number): True for number in numbers}, now())
    assert sequence is not None
    return sequence


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting for {what}"
        pause.wait(0.01)


# ----------------------------------------------------------------------------------------------------- the position


def row(sequence: int, number: int | str, at: str = "now") -> Row:
    return Row(sequence, key(number), at)


class FeedModel:
    """Model of a database with concurrent transactions.

    A transaction locks, draws a sequence, becomes visible and releases the lock; a poll reads in three steps.
    """

    def __init__(self, most_rows: int) -> None:
        self.most_rows = most_rows
        self.drawn = 0
        self.locks: dict[str, list[int]] = {}
        self.visible: set[int] = set()
        self.settled: set[int] = set()
        self.begun = 0

    def begin(self) -> None:
        self.begun += 1
        self.locks[f"t{self.begun}"] = []

    def draw(self, which: int) -> None:
        if undecided := self.undecided():
            self.drawn += 1
            self.locks[undecided[which % len(undecided)]].append(self.drawn)

    def end(self, which: int, *, by_commit: bool) -> None:
        if undecided := self.undecided():
            name = undecided[which % len(undecided)]
            if by_commit:
                self.visible |= set(self.locks[name])
            self.locks[f"{name} ended"] = self.locks.pop(name)

    def release(self) -> None:
        """PostgreSQL makes a commit visible before it releases the locks."""
        for name in list(self.locks):
            if name.endswith("ended"):
                self.settled |= set(self.locks.pop(name)) & self.visible

    def undecided(self) -> list[str]:
        return [name for name in self.locks if not name.endswith("ended")]

    def lowest_undecided(self) -> int:
        return min((sequence for name in self.undecided() for sequence in self.locks[name]), default=self.drawn + 1)

    def names(self) -> frozenset[str]:
        return frozenset(name.removesuffix(" ended") for name in self.locks)

    def rows(self, above: int) -> list[Row]:
        rows = [row(sequence, sequence) for sequence in sorted(self.visible) if sequence > above]
        return rows[: self.most_rows + 1]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "draw", "draw", "commit", "rollback", "release", "poll", "poll"]), st.integers(0, 9)
    ),
    max_size=60,
)
LONG_TRANSACTION = [("begin", 0), ("draw", 0), ("begin", 0), *[("draw", 1)] * 5, ("commit", 1), ("release", 0)]
POLL = [("poll", 0)] * 3
TAKEOVER = [("begin", 0), ("draw", 0), *POLL, ("begin", 0), ("draw", 1), ("commit", 0), ("release", 0), *POLL]


@given(STEPS, st.sampled_from([2, 1000]), st.booleans())
@example([*LONG_TRANSACTION, *POLL, *POLL, ("commit", 0), ("release", 0), *POLL], 1000, True)
@example([*POLL, *LONG_TRANSACTION, *POLL, *POLL, ("commit", 0), ("release", 0), *POLL], 1000, True)
@example([*POLL, *LONG_TRANSACTION, *POLL, *POLL, ("rollback", 0), ("release", 0)], 1000, False)
@example(TAKEOVER, 1000, False)
def test_position_in_any_order_applies_every_row_and_confirms_none_too_early(
    steps: list[tuple[str, int]], most_rows: int, is_placed_late: bool
) -> None:
    """Interleave transactions that draw, commit and roll back with polls that read in three steps.

    Every committed row is applied exactly once; a confirmed sequence is decided and applied.
    """
    with mock.patch.object(changes, "MAX_ROWS", most_rows), mock.patch.object(changes, "OVERLAP", 2):
        feed, position, covered, applied = FeedModel(most_rows), Position(), set[int](), list[int]()

        def finish(drawn: int, names: frozenset[str], due: set[int]) -> None:
            poll = ChangeBatch(drawn, names, feed.rows(position.floor))
            new = position.find_new(poll)
            if new is None:
                covered.update(feed.visible)
            else:
                applied.extend(int(subject[1]) for subject in new)
                covered.update(applied)
            position.advance(poll)
            assert due <= covered, "a settled row was not applied by the next poll"
            assert position.confirmed < feed.lowest_undecided(), "confirmed past an undecided sequence"
            assert {sequence for sequence in feed.visible if sequence <= position.confirmed} <= covered

        def run() -> Iterator[None]:
            while True:
                drawn = feed.drawn
                yield
                names, due = feed.names(), set(feed.settled)
                yield
                finish(drawn, names, due)
                yield

        polls = run()
        if not is_placed_late:
            finish(0, frozenset(), set())
        for name, which in steps:
            if name == "poll":
                next(polls)
            elif name in ("commit", "rollback"):
                feed.end(which, by_commit=name == "commit")
            elif name == "draw":
                feed.draw(which)
            else:
                getattr(feed, name)()
        while feed.undecided():
            feed.end(0, by_commit=True)
        feed.release()
        for _ in range(9):
            next(polls)
        assert feed.visible <= covered
        assert position.confirmed == feed.drawn
        if most_rows > len(feed.visible):
            assert len(applied) == len(set(applied)), "a row was applied twice"


def test_position_when_a_row_disappears_raises_feed_rewound() -> None:
    """A standby that took over without the last change knows less than a process that applied it."""
    position = Position()
    for poll in (ChangeBatch(0, frozenset(), []), ChangeBatch(2, frozenset(), [row(1, 1), row(2, 2)])):
        position.find_new(poll)
        position.advance(poll)
    for drawn in (1, 40):
        with pytest.raises(FeedRewoundError):
            position.find_new(ChangeBatch(drawn, frozenset(), [row(1, 1)]))


def test_position_checks_the_newest_row_however_many_sequences_were_rolled_back_since() -> None:
    """A restored backup without it is noticed, although no row is among the latest sequences."""
    position = Position()
    for drawn in (1, 1_000, 2_000):
        poll = ChangeBatch(drawn, frozenset(), [row(1, 1)])
        assert position.find_new(poll) == (None if drawn == 1 else [])
        position.advance(poll)
        assert position.floor == 0
    with pytest.raises(FeedRewoundError):
        position.find_new(ChangeBatch(2_000, frozenset(), []))


def test_position_after_a_crash_that_took_back_rolled_back_sequences_starts_again() -> None:
    """Nothing that was committed is missing. A sequence that is drawn again is applied and confirmed as any other."""
    position = Position()
    for poll in (ChangeBatch(1, frozenset(), [row(1, 1)]), ChangeBatch(200, frozenset(), [row(1, 1)])):
        position.find_new(poll)
        position.advance(poll)
    assert position.confirmed == 200
    open_after = ChangeBatch(34, frozenset({"a writer"}), [row(1, 1)])
    assert position.find_new(open_after) is None
    assert not position.advance(open_after)
    assert position.confirmed == 0, "the writer may have drawn any of them"
    committed = ChangeBatch(35, frozenset(), [row(1, 1), row(34, "again"), row(35, "next")])
    assert position.find_new(committed) is None, "the writer may have committed rows that no poll returns"
    assert position.advance(committed)
    assert position.confirmed == 35
    last = ChangeBatch(36, frozenset(), [*committed.rows, row(36, 3)])
    assert position.find_new(last) == [key(3)]
    position.advance(last)
    assert position.confirmed == 36


@pytest.mark.parametrize("drawn_again", [row(2, "another"), row(2, 2, "later")])
@pytest.mark.parametrize("is_just_placed", [False, True])
def test_position_when_a_sequence_is_drawn_again_raises_feed_rewound(drawn_again: Row, is_just_placed: bool) -> None:
    """A restored database draws its sequences again; none of its rows may count as applied."""
    position = Position()
    seen = ChangeBatch(2, frozenset(), [row(1, 1), row(2, 2)])
    for poll in [seen] if is_just_placed else [ChangeBatch(0, frozenset(), []), seen]:
        position.find_new(poll)
        position.advance(poll)
    assert position.find_new(ChangeBatch(3, frozenset(), [row(1, 1), row(2, 2), row(3, 3)])) == [key(3)]
    with pytest.raises(FeedRewoundError):
        position.find_new(ChangeBatch(3, frozenset(), [row(1, 1), drawn_again, row(3, 3)]))


# ------------------------------------------------------------------------------------------------------- one poll


@on_every_database
def test_follower_first_poll_clears_the_cache_and_registers(recorded: RecordedFollower) -> None:
    """Entries cached before the first poll may be outdated."""
    sequence = change("old")
    recorded.follower.poll_once()
    assert (recorded.cleared, recorded.applied) == (1, [])
    row = Verifier.objects.get()
    assert (row.verifier_id, row.entry_point, row.stopped_at) == (usage_log.reporter_id, "test", None)
    assert row.confirmed_sequence == sequence
    assert row.staleness_ms >= settings.MAX_STALENESS_SECONDS * 1000
    assert list(Confirmation.objects.values_list("sequence", flat=True)) == [sequence]


@on_every_database
def test_follower_applies_a_change_once_and_confirms_it(recorded: RecordedFollower) -> None:
    recorded.follower.poll_once()
    Confirmation.objects.all().delete()
    first, second = change("a", "b"), change("a")
    for _ in range(3):
        recorded.follower.poll_once()
    assert recorded.applied == [key("a"), key("b")]
    assert Verifier.objects.get().confirmed_sequence == second
    assert list(Confirmation.objects.values_list("sequence", flat=True)) == [second]
    assert first < second
    third = change("c")
    recorded.follower.poll_once()
    assert recorded.applied == [key("a"), key("b"), key("c")]
    assert list(Confirmation.objects.order_by("id").values_list("sequence", flat=True)) == [second, third]
    assert recorded.cleared == 1


@on_every_database
def test_follower_without_changes_reports_at_intervals(recorded: RecordedFollower) -> None:
    """A write at each poll would cost too much; no write at all would count as silence."""
    recorded.follower.poll_once()
    steps = Confirmation.objects.count()
    # An earlier time distinguishes the next report from this one, also within one millisecond.
    seen_at = Verifier.objects.get().seen_at - timedelta(seconds=1)
    Verifier.objects.update(seen_at=seen_at)
    recorded.follower.poll_once()
    assert Verifier.objects.get().seen_at == seen_at
    assert recorded.follower._reported_at is not None
    recorded.follower._reported_at -= settings.MAX_STALENESS_SECONDS / 4
    recorded.follower.poll_once()
    assert Verifier.objects.get().seen_at > seen_at
    assert Confirmation.objects.count() == steps


@on_every_database
def test_follower_whose_report_was_written_without_a_reply_repeats_it(
    recorded: RecordedFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection was lost after the commit: repeating the report is harmless, and each step is one row."""
    recorded.follower.poll_once()
    Confirmation.objects.all().delete()
    sequence, confirmations, write = change("a"), len(recorded.confirmed), Follower._write_report

    def write_without_reply(written_by: Follower) -> None:
        write(written_by)
        raise OperationalError("gone")

    with monkeypatch.context() as outage:
        outage.setattr(Follower, "_write_report", write_without_reply)
        recorded.follower._try_poll()
    assert Verifier.objects.get().confirmed_sequence == sequence
    before = Verifier.objects.get().seen_at
    for _ in range(2):
        recorded.follower.poll_once()
        assert list(Confirmation.objects.values_list("sequence", flat=True)) == [sequence]
    row = Verifier.objects.get()
    assert row.seen_at >= before
    assert (row.confirmed_sequence, row.stopped_at) == (sequence, None)
    assert recorded.applied == [key("a")]
    assert len(recorded.confirmed) > confirmations + 1


@on_every_database
def test_follower_confirms_as_of_the_start_of_its_poll(
    recorded: RecordedFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A poll may miss a change made while it reads, so both clocks are read before it."""
    began: list[tuple[float, float]] = []

    def poll(above: int) -> ChangeBatch:
        began.append((time.monotonic(), time.time()))
        return changes.poll_feed(above)

    monkeypatch.setattr(follower, "poll_feed", poll)
    recorded.follower.poll_once()
    ((monotonic, wall),) = recorded.confirmed
    assert began[-2][0] < monotonic <= began[-1][0]
    assert began[-2][1] < wall <= began[-1][1]
    assert recorded.follower.is_fresh


@on_every_database
@pytest.mark.parametrize("was", ["absent", "expired", "reported in time"])
def test_follower_not_yet_counted_by_receipts_polls_again_before_it_confirms(
    recorded: RecordedFollower, monkeypatch: pytest.MonkeyPatch, was: str
) -> None:
    """Before its row is written, receipts do not wait for it, and its poll may have read earlier state."""
    if was != "absent":
        recorded.follower.poll_once()
        assert recorded.follower._reported_at is not None
        recorded.follower._reported_at -= settings.MAX_STALENESS_SECONDS * (2 if was == "expired" else 1)
    seen: list[tuple[float, bool]] = []

    def poll(above: int) -> ChangeBatch:
        reported = Verifier.objects.filter(seen_at__gt=long_ago).exists()
        seen.append((time.monotonic(), reported))
        return changes.poll_feed(above)

    long_ago = now() - timedelta(hours=1)
    Verifier.objects.update(seen_at=long_ago)
    monkeypatch.setattr(follower, "poll_feed", poll)
    recorded.follower.poll_once()
    assert [reported for _, reported in seen] == ([False] if was == "reported in time" else [False, True])
    assert recorded.confirmed[-1][0] <= seen[-1][0]
    assert len(recorded.confirmed) == (1 if was == "absent" else 2)
    if len(seen) == 2:
        assert recorded.confirmed[-1][0] > seen[0][0]


@on_every_database
def test_follower_whose_callback_fails_confirms_nothing_and_retries(
    recorded: RecordedFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded.follower.poll_once()
    change("a")
    before = Verifier.objects.get().confirmed_sequence, len(recorded.confirmed)

    def fail(subjects: object) -> None:
        raise RuntimeError("a bug")

    with monkeypatch.context() as broken:
        broken.setattr(recorded.follower, "apply", fail)
        with pytest.raises(RuntimeError):
            recorded.follower.poll_once()
    assert (Verifier.objects.get().confirmed_sequence, len(recorded.confirmed)) == before
    recorded.follower.poll_once()
    assert recorded.applied == [key("a")]


@on_every_database
def test_follower_too_far_behind_clears_the_cache(recorded: RecordedFollower, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an outage, more changes may wait than one poll reads."""
    monkeypatch.setattr(changes, "MAX_ROWS", 3)
    monkeypatch.setattr(changes, "OVERLAP", 0)
    recorded.follower.poll_once()
    change("a", "b", "c", "d", "e")
    recorded.follower.poll_once()
    assert (recorded.cleared, recorded.applied) == (2, [])
    last = change("f")
    recorded.follower.poll_once()
    assert (recorded.cleared, recorded.applied) == (2, [key("f")])
    assert Verifier.objects.get().confirmed_sequence == last


@on_every_database
def test_follower_of_a_rewound_feed_never_confirms_again(recorded: RecordedFollower) -> None:
    """A restored backup may lack revocations that this process applied; neither is trusted until a restart."""
    recorded.follower.poll_once()
    change("a")
    last = change("b")
    recorded.follower.poll_once()
    confirmations = len(recorded.confirmed)
    disable_triggers()
    Change.objects.filter(pk=last).delete()
    with pytest.raises(FeedRewoundError):
        recorded.follower.poll_once()
    assert (recorded.lost, recorded.withdrawn) == (1, 1)
    assert not recorded.follower.is_fresh
    Change.objects.create(sequence=last, subject_kind="key", subject_id="b", at=now())
    with pytest.raises(FeedRewoundError):
        recorded.follower.poll_once()
    assert len(recorded.confirmed) == confirmations


@on_every_database
def test_follower_of_a_feed_whose_sequence_was_drawn_again_never_confirms_again(recorded: RecordedFollower) -> None:
    """A restored database reuses sequences; a revocation under a reused one must not be skipped."""
    recorded.follower.poll_once()
    last = change("a")
    recorded.follower.poll_once()
    confirmations = len(recorded.confirmed)
    disable_triggers()
    Change.objects.filter(pk=last).delete()
    Change.objects.create(sequence=last, subject_kind="key", subject_id="b", at=now())
    with pytest.raises(FeedRewoundError):
        recorded.follower.poll_once()
    assert (recorded.lost, len(recorded.confirmed)) == (1, confirmations)


@on_every_database
def test_follower_forked_from_a_process_that_lost_the_feed_has_lost_it_too(recorded: RecordedFollower) -> None:
    recorded.follower.poll_once()
    last = change("a")
    recorded.follower.poll_once()
    disable_triggers()
    Change.objects.filter(pk=last).delete()
    with pytest.raises(FeedRewoundError):
        recorded.follower.poll_once()
    recorded.follower.forget()
    with pytest.raises(FeedRewoundError):
        recorded.follower.poll_once()


@on_every_database
def test_follower_whose_generation_file_cannot_be_opened_confirms_nothing(
    recorded: RecordedFollower, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the file the follower cannot see changes announced on this host. The outage is logged once."""

    def fail() -> None:
        raise OSError("too many open files")

    caplog.set_level(logging.INFO, follower.__name__)
    monkeypatch.setattr(follower, "_report_seconds", lambda: 0.0)
    recorded.follower.poll_once()
    before = Verifier.objects.get().seen_at, len(recorded.confirmed)
    with monkeypatch.context() as outage:
        outage.setattr(changes.generation(), "remap", fail)
        change("a")
        for _ in range(4):
            recorded.follower._try_poll()
    assert (Verifier.objects.get().seen_at, len(recorded.confirmed)) == before
    assert recorded.applied == [key("a")]
    recorded.follower._try_poll()
    assert len(recorded.confirmed) > before[1]
    messages = [record.message for record in caplog.records if record.name == follower.__name__]
    assert messages == ["the change feed cannot be followed", "the change feed is followed again"]


@on_every_database
def test_follower_recreates_a_deleted_generation_file(recorded: RecordedFollower) -> None:
    """The next poll restores the file that the host's processes share."""
    path = settings.DATA_DIR / "generation"
    memory = changes.generation().memory
    seen = memory[0]
    path.unlink()
    recorded.follower.poll_once()
    assert path.exists()
    assert memory[0] != seen


@pytest.mark.django_db(transaction=True)
def test_follower_on_sqlite_during_a_long_write_confirms_without_a_report(recorded: RecordedFollower) -> None:
    """SQLite has one lock for writers: the poll confirms its changes, and the report is written later."""
    other = RecordedFollower()
    other.follower.poll_once()
    change("a")

    def poll() -> None:
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA busy_timeout = 10")
        other.follower.poll_once()

    before = Verifier.objects.get().confirmed_sequence
    with held_open(lambda: Change.objects.create(subject_kind="key", subject_id="b", at=now())):
        start(poll).result(TIMEOUT_SECONDS)
        assert other.applied == [key("a")]
        assert len(other.confirmed) == 2
        assert Verifier.objects.get().confirmed_sequence == before
    start(poll).result(TIMEOUT_SECONDS)
    assert other.applied == [key("a"), key("b")]
    assert Verifier.objects.get().confirmed_sequence == Change.objects.latest("sequence").pk
    follower._followers.discard(other.follower)


# ------------------------------------------------------------------------------------------------------ the thread


@contextmanager
def running(recorded: RecordedFollower) -> Iterator[None]:
    recorded.follower.start()
    try:
        wait_until(lambda: bool(recorded.confirmed), "the first poll")
        yield
    finally:
        recorded.follower.stop()


@on_every_database
def test_follower_thread_applies_changes_and_deregisters_when_stopped(recorded: RecordedFollower) -> None:
    with running(recorded):
        recorded.follower.start()  # `start` is repeatable
        assert [thread.name for thread in threading.enumerate()].count("feed") == 1
        sequence = change("a")
        wait_until(lambda: recorded.applied == [key("a")], "the change")
        wait_until(lambda: Verifier.objects.get().confirmed_sequence == sequence, "the receipt")
        assert Verifier.objects.get().stopped_at is None
    assert Verifier.objects.get().stopped_at is not None
    assert (recorded.withdrawn, recorded.follower.is_fresh) == (1, False), "a deregistered follower is not fresh"
    assert "feed" not in [thread.name for thread in threading.enumerate()]
    change("b")
    with running(recorded):
        wait_until(lambda: key("b") in recorded.applied, "the change made while it was stopped")
        wait_until(lambda: Verifier.objects.get().stopped_at is None, "the new registration")


@pytest.mark.django_db(transaction=True)
def test_follower_thread_on_sqlite_polls_when_a_change_is_announced(
    recorded: RecordedFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an announcement the next poll would not begin before the test has failed."""
    monkeypatch.setattr(follower, "POLL_SECONDS", 10 * TIMEOUT_SECONDS)
    with running(recorded):
        change("a")
        wait_until(lambda: key("a") in recorded.applied, "the first change")
        change("b")
        wait_until(lambda: key("b") in recorded.applied, "the second change")


@pytest.mark.django_db(transaction=True)
def test_follower_thread_on_sqlite_finds_a_change_that_was_not_announced(recorded: RecordedFollower) -> None:
    """The writer was killed after its commit."""
    with running(recorded):
        Change.objects.create(subject_kind="key", subject_id="a", at=now())
        wait_until(lambda: recorded.applied == [key("a")], "the change")


@on_every_database
def test_follower_thread_logs_an_outage_once_and_continues(
    recorded: RecordedFollower, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After any exception the thread polls again, and the log does not fill up."""
    polls = []

    def fail(above: int) -> ChangeBatch:
        polls.append(above)
        raise OperationalError("gone")

    caplog.set_level(logging.INFO, follower.__name__)
    with running(recorded):
        with monkeypatch.context() as outage:
            outage.setattr(follower, "poll_feed", fail)
            wait_until(lambda: len(polls) > 2, "several polls")
            confirmations = len(recorded.confirmed)
        wait_until(lambda: len(recorded.confirmed) > confirmations, "a successful poll")
    messages = [record.message for record in caplog.records if record.name == follower.__name__]
    assert messages == ["the change feed cannot be followed", "the change feed is followed again"]


@on_every_database
def test_follower_thread_of_a_rewound_feed_ends(recorded: RecordedFollower, caplog: pytest.LogCaptureFixture) -> None:
    with running(recorded):
        last = change("a")
        wait_until(lambda: recorded.applied == [key("a")], "the change")
        disable_triggers()
        Change.objects.filter(pk=last).delete()
        wait_until(lambda: "feed" not in [thread.name for thread in threading.enumerate()], "the end of the thread")
        assert follower.is_feed_followed() is False
    assert Verifier.objects.get().stopped_at is None, "it must count as expired, not as deregistered"
    assert [record.levelname for record in caplog.records if record.name == follower.__name__] == ["CRITICAL"]


@on_every_database
def test_follower_in_a_forked_child_is_not_running(recorded: RecordedFollower) -> None:
    """Granian forks its workers: a thread does not survive a fork, and the child must not claim that it has one."""
    fork = multiprocessing.get_context("fork")
    answers: multiprocessing.queues.Queue[tuple[bool, bool, bool]] = fork.Queue()
    with running(recorded):
        instance = recorded.follower
        child = fork.Process(
            target=lambda: answers.put((instance.is_following, instance.is_fresh, follower.is_feed_followed() is None))
        )
        child.start()
        assert answers.get(timeout=TIMEOUT_SECONDS) == (False, False, True)
        child.join(TIMEOUT_SECONDS)
        assert instance.is_following


# -------------------------------------------------------------------------------------------------------- readiness


def test_readiness_of_a_process_without_a_cache_omits_the_feed() -> None:
    assert follower.is_feed_followed() is None


@on_every_database
def test_readiness_of_a_stale_follower_is_failing(recorded: RecordedFollower, client: Client) -> None:
    """A load balancer must not route to a process that would reply 503 `verifier_stale` or read through."""
    have_peppers()
    with running(recorded):
        assert client.get("/readyz").json()["checks"]["change_feed"] == "ok"
        with override_settings(MAX_STALENESS_SECONDS=0):
            answer = client.get("/readyz")
    assert (answer.status_code, answer.json()["checks"]["change_feed"]) == (503, "failing")
    assert "change_feed" not in client.get("/readyz").json()["checks"]


# ------------------------------------------------------------------------------------------------------- retention


@pytest.mark.database
@pytest.mark.django_db
def test_follower_deletes_old_confirmations_and_verifiers() -> None:
    at = now()
    for name, days in (("gone", 8), ("here", 0)):
        seen_at = at - timedelta(days=days)
        Verifier.objects.create(
            verifier_id=name, entry_point="test", started_at=seen_at, seen_at=seen_at, staleness_ms=1
        )
        for sequence, age in ((1, 31), (2, 29)):
            Confirmation.objects.create(verifier_id=name, sequence=sequence, at=at - timedelta(days=age))
    follower.forget_old(at)
    assert list(Verifier.objects.values_list("pk", flat=True)) == ["here"]
    assert list(Confirmation.objects.values_list("verifier_id", "sequence")) == [("here", 2)]


@pytest.mark.database
@pytest.mark.django_db
def test_follower_deletes_a_verifier_with_many_confirmations_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keyvault.services.work.deletion.MAX_DELETED", 2)
    at = now()
    gone = Verifier.objects.create(
        verifier_id="gone", entry_point="test", started_at=at, seen_at=at - timedelta(days=8), staleness_ms=1
    )
    Confirmation.objects.bulk_create(Confirmation(verifier=gone, sequence=number, at=at) for number in range(5))
    remaining = []
    for _ in range(3):
        follower.forget_old(at)
        remaining.append((Verifier.objects.count(), Confirmation.objects.count()))
    assert remaining == [(1, 3), (1, 1), (0, 0)]


@on_every_database
def test_old_changes_are_deleted_below_what_every_live_verifier_has_confirmed(
    recorded: RecordedFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A follower never takes a deleted change for a feed that went back, however slow another one is."""
    monkeypatch.setattr(changes, "OVERLAP", 2)
    monkeypatch.setattr(follower, "OVERLAP", 2)
    long_after = now() + timedelta(days=settings.CHANGE_DAYS + 1)
    sequences = [change(number) for number in range(8)]
    recorded.follower.poll_once()
    slow = Verifier.objects.get()
    slow.pk, slow.confirmed_sequence = "slow", sequences[4]
    slow.save(force_insert=True)

    def kept() -> list[int]:
        recorded.follower.poll_once()
        return list(Change.objects.order_by("sequence").values_list("sequence", flat=True))

    follower.forget_old_changes(now() + timedelta(days=1))
    assert kept() == sequences
    with pytest.raises(DatabaseError, match="append-only"), transaction.atomic():
        Change.objects.filter(sequence=sequences[5]).delete()
    with monkeypatch.context() as small:
        small.setattr(follower, "MAX_DELETED", 2)
        follower.forget_old_changes(long_after)
    assert kept() == sequences[2:]
    follower.forget_old_changes(long_after)
    assert kept() == sequences[3:]
    Verifier.objects.filter(pk="slow").delete()
    for _ in range(3):
        follower.forget_old_changes(long_after)
        assert kept() == sequences[6:], "the newest changes are what followers check"
    last = change("later")
    assert kept() == [*sequences[6:], last]
    assert recorded.lost == 0
    with pytest.raises(DatabaseError, match="append-only"), transaction.atomic():
        Change.objects.filter(sequence=last).delete()


@on_every_database
def test_old_changes_without_a_live_verifier_are_deleted_except_the_newest() -> None:
    sequences = [change(number) for number in range(changes.OVERLAP + 3)]
    follower.forget_old_changes(now() + timedelta(days=settings.CHANGE_DAYS + 1))
    assert list(Change.objects.order_by("sequence").values_list("sequence", flat=True)) == sequences[3:]
