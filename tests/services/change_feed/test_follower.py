"""Following the feed: what is applied when, what is confirmed, and what a process may vouch for."""

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
from django.db import OperationalError, connection, transaction
from django.test import Client, override_settings
from hypothesis import example, given
from hypothesis import strategies as st

from keyvault.models import Change, Confirmation, Verifier
from keyvault.models.recording import Subject
from keyvault.services.change_feed import follower
from keyvault.services.change_feed.follower import Follower
from keyvault.services.recording import changes
from keyvault.services.recording.changes import ChangeBatch, FeedRewoundError, Position, Row
from keyvault.services.usage.recorder import usage_log
from tests.factories import have_peppers, now
from tests.services.racing import PATIENCE_SECONDS, held_open, start
from tests.services.rows import lift_triggers


def on_every_database(test: Callable[..., None]) -> Callable[..., None]:
    marked: Callable[..., None] = pytest.mark.database(pytest.mark.django_db(transaction=True)(test))
    return marked


class Memory:
    """What a process was told, and a follower that tells it."""

    def __init__(self) -> None:
        self.applied: list[Subject] = []
        self.forgotten = 0
        self.confirmed: list[tuple[float, float]] = []
        self.taken_back = 0
        self.lost = 0
        self.follower = Follower(self.apply, self._confirm, self._lose, "test")

    def apply(self, subjects: Collection[Subject] | None) -> None:
        if subjects is None:
            self.forgotten += 1
        else:
            self.applied += subjects

    def _confirm(self, monotonic: float, wall: float) -> None:
        if monotonic == float("-inf"):
            self.taken_back += 1
        else:
            self.confirmed.append((monotonic, wall))

    def _lose(self) -> None:
        assert not self.taken_back, "the loss is known before anything else is said"
        self.lost += 1


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory()
    yield made
    made.follower.stop()
    follower._followers.discard(made.follower)


def key(number: int | str) -> Subject:
    return "key", str(number)


def change(*numbers: int | str) -> int:
    with transaction.atomic():
        sequence = changes.announce_changes({key(number): True for number in numbers}, now())
    assert sequence is not None
    return sequence


def await_that(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    pause = threading.Event()
    while not is_so():
        assert time.monotonic() < deadline, f"waited for nothing: {what}"
        pause.wait(0.01)


# ----------------------------------------------------------------------------------------------------- the position


def row(sequence: int, number: int | str, at: str = "at once") -> Row:
    return Row(sequence, key(number), at)


class World:
    """Transactions that take the lock, draw, become visible and let the lock go; looks that read three things."""

    def __init__(self, most_rows: int) -> None:
        self.most_rows = most_rows
        self.drawn = 0
        self.holders: dict[str, list[int]] = {}
        self.visible: set[int] = set()
        self.settled: set[int] = set()
        self.begun = 0

    def begin(self) -> None:
        self.begun += 1
        self.holders[f"t{self.begun}"] = []

    def draw(self, which: int) -> None:
        if undecided := self.undecided():
            self.drawn += 1
            self.holders[undecided[which % len(undecided)]].append(self.drawn)

    def end(self, which: int, *, by_commit: bool) -> None:
        if undecided := self.undecided():
            name = undecided[which % len(undecided)]
            if by_commit:
                self.visible |= set(self.holders[name])
            self.holders[f"{name} ended"] = self.holders.pop(name)

    def let_go(self) -> None:
        """PostgreSQL makes a commit visible first, and lets the locks go then."""
        for name in list(self.holders):
            if name.endswith("ended"):
                self.settled |= set(self.holders.pop(name)) & self.visible

    def undecided(self) -> list[str]:
        return [name for name in self.holders if not name.endswith("ended")]

    def lowest_undecided(self) -> int:
        return min((sequence for name in self.undecided() for sequence in self.holders[name]), default=self.drawn + 1)

    def names(self) -> frozenset[str]:
        return frozenset(name.removesuffix(" ended") for name in self.holders)

    def rows(self, above: int) -> list[Row]:
        rows = [row(sequence, sequence) for sequence in sorted(self.visible) if sequence > above]
        return rows[: self.most_rows + 1]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "draw", "draw", "commit", "rollback", "let_go", "look", "look"]), st.integers(0, 9)
    ),
    max_size=60,
)
LINGERER = [("begin", 0), ("draw", 0), ("begin", 0), *[("draw", 1)] * 5, ("commit", 1), ("let_go", 0)]
LOOK = [("look", 0)] * 3
TAKEOVER = [("begin", 0), ("draw", 0), *LOOK, ("begin", 0), ("draw", 1), ("commit", 0), ("let_go", 0), *LOOK]


@given(STEPS, st.sampled_from([2, 1000]), st.booleans())
@example([*LINGERER, *LOOK, *LOOK, ("commit", 0), ("let_go", 0), *LOOK], 1000, True)
@example([*LOOK, *LINGERER, *LOOK, *LOOK, ("commit", 0), ("let_go", 0), *LOOK], 1000, True)
@example([*LOOK, *LINGERER, *LOOK, *LOOK, ("rollback", 0), ("let_go", 0)], 1000, False)
@example(TAKEOVER, 1000, False)
def test_position_whatever_the_order_applies_every_row_and_confirms_none_too_early(
    steps: list[tuple[str, int]], most_rows: int, is_placed_late: bool
) -> None:
    """Any transactions, any order of drawing, committing and rolling back, and a look that reads its three things with
    any of that in between: what is committed is applied, once; what is confirmed is decided and applied.
    """
    with mock.patch.object(changes, "MAX_ROWS", most_rows), mock.patch.object(changes, "_OVERLAP", 2):
        world, position, covered, told = World(most_rows), Position(), set[int](), list[int]()

        def finish(drawn: int, names: frozenset[str], due: set[int]) -> None:
            look = ChangeBatch(drawn, names, world.rows(position.floor))
            new = position.find_new(look)
            if new is None:
                covered.update(world.visible)
            else:
                told.extend(int(subject[1]) for subject in new)
                covered.update(told)
            position.advance(look)
            assert due <= covered, "a settled row was not applied at once"
            assert position.confirmed < world.lowest_undecided(), "confirmed past an undecided sequence"
            assert {sequence for sequence in world.visible if sequence <= position.confirmed} <= covered

        def run() -> Iterator[None]:
            while True:
                drawn = world.drawn
                yield
                names, due = world.names(), set(world.settled)
                yield
                finish(drawn, names, due)
                yield

        looks = run()
        if not is_placed_late:
            finish(0, frozenset(), set())
        for name, which in steps:
            if name == "look":
                next(looks)
            elif name in ("commit", "rollback"):
                world.end(which, by_commit=name == "commit")
            elif name == "draw":
                world.draw(which)
            else:
                getattr(world, name)()
        while world.undecided():
            world.end(0, by_commit=True)
        world.let_go()
        for _ in range(9):
            next(looks)
        assert world.visible <= covered
        assert position.confirmed == world.drawn
        if most_rows > len(world.visible):
            assert len(told) == len(set(told)), "a row was applied twice"


def test_position_a_row_gone_is_a_feed_that_went_back() -> None:
    """A standby that took over without the last change: whoever applied it knows more than the database."""
    position = Position()
    for look in (ChangeBatch(0, frozenset(), []), ChangeBatch(2, frozenset(), [row(1, 1), row(2, 2)])):
        position.find_new(look)
        position.advance(look)
    with pytest.raises(FeedRewoundError):
        position.find_new(ChangeBatch(40, frozenset(), [row(1, 1)]))
    with pytest.raises(FeedRewoundError):
        position.find_new(ChangeBatch(1, frozenset(), [row(1, 1), row(2, 2)]))


@pytest.mark.parametrize("drawn_again", [row(2, "another"), row(2, 2, "later")])
@pytest.mark.parametrize("is_just_placed", [False, True])
def test_position_a_sequence_drawn_again_is_a_feed_that_went_back(drawn_again: Row, is_just_placed: bool) -> None:
    """A restored database draws its sequences again: none of the rows may be taken for applied."""
    position = Position()
    seen = ChangeBatch(2, frozenset(), [row(1, 1), row(2, 2)])
    for look in [seen] if is_just_placed else [ChangeBatch(0, frozenset(), []), seen]:
        position.find_new(look)
        position.advance(look)
    assert position.find_new(ChangeBatch(3, frozenset(), [row(1, 1), row(2, 2), row(3, 3)])) == [key(3)]
    with pytest.raises(FeedRewoundError):
        position.find_new(ChangeBatch(3, frozenset(), [row(1, 1), drawn_again, row(3, 3)]))


# ------------------------------------------------------------------------------------------------------- one look


@on_every_database
def test_follower_begins_by_forgetting_everything_and_introduces_itself(memory: Memory) -> None:
    """What was read before the first look may have been changed before it."""
    sequence = change("old")
    memory.follower.poll_once()
    assert (memory.forgotten, memory.applied) == (1, [])
    row = Verifier.objects.get()
    assert (row.verifier_id, row.door, row.stopped_at) == (usage_log.reporter_id, "test", None)
    assert row.confirmed_sequence == sequence
    assert row.staleness_ms >= settings.MAX_STALENESS_SECONDS * 1000
    assert list(Confirmation.objects.values_list("sequence", flat=True)) == [sequence]


@on_every_database
def test_follower_applies_a_change_once_and_confirms_it(memory: Memory) -> None:
    memory.follower.poll_once()
    Confirmation.objects.all().delete()
    first, second = change("a", "b"), change("a")
    for _ in range(3):
        memory.follower.poll_once()
    assert memory.applied == [key("a"), key("b")]
    assert Verifier.objects.get().confirmed_sequence == second
    assert list(Confirmation.objects.values_list("sequence", flat=True)) == [second]
    assert first < second
    third = change("c")
    memory.follower.poll_once()
    assert memory.applied == [key("a"), key("b"), key("c")]
    assert list(Confirmation.objects.order_by("id").values_list("sequence", flat=True)) == [second, third]
    assert memory.forgotten == 1


@on_every_database
def test_follower_without_news_reports_now_and_then_only(memory: Memory) -> None:
    """A write at each look would be a burden; none at all would be silence."""
    memory.follower.poll_once()
    steps = Confirmation.objects.count()
    seen_at = Verifier.objects.get().seen_at
    memory.follower.poll_once()
    assert Verifier.objects.get().seen_at == seen_at
    assert memory.follower._reported_at is not None
    memory.follower._reported_at -= settings.MAX_STALENESS_SECONDS / 4
    memory.follower.poll_once()
    assert Verifier.objects.get().seen_at > seen_at
    assert Confirmation.objects.count() == steps


@on_every_database
def test_follower_whose_report_was_written_and_not_answered_makes_it_again(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection was lost after the commit: saying the same again is no fault, and one step is one row."""
    memory.follower.poll_once()
    Confirmation.objects.all().delete()
    sequence, vouched, write = change("a"), len(memory.confirmed), Follower._write_report

    def write_without_an_answer(written_by: Follower) -> None:
        write(written_by)
        raise OperationalError("gone")

    with monkeypatch.context() as outage:
        outage.setattr(Follower, "_write_report", write_without_an_answer)
        memory.follower._try_poll()
    assert Verifier.objects.get().confirmed_sequence == sequence
    before = Verifier.objects.get().seen_at
    for _ in range(2):
        memory.follower.poll_once()
        assert list(Confirmation.objects.values_list("sequence", flat=True)) == [sequence]
    row = Verifier.objects.get()
    assert row.seen_at >= before
    assert (row.confirmed_sequence, row.stopped_at) == (sequence, None)
    assert memory.applied == [key("a")]
    assert len(memory.confirmed) > vouched + 1


@on_every_database
def test_follower_vouches_from_before_its_look_began(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that was made while it looked may have been missed: both clocks are taken before."""
    began: list[tuple[float, float]] = []

    def look(above: int) -> ChangeBatch:
        began.append((time.monotonic(), time.time()))
        return changes.poll_feed(above)

    monkeypatch.setattr(follower, "poll_feed", look)
    memory.follower.poll_once()
    ((monotonic, wall),) = memory.confirmed
    assert began[-2][0] < monotonic <= began[-1][0]
    assert began[-2][1] < wall <= began[-1][1]
    assert memory.follower.is_fresh


@on_every_database
@pytest.mark.parametrize("was", ["not there", "expired", "reported in time"])
def test_follower_that_receipts_did_not_wait_for_looks_again_before_it_vouches(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, was: str
) -> None:
    """Until its row was written a revocation counted as received everywhere, and it may have read before that."""
    if was != "not there":
        memory.follower.poll_once()
        assert memory.follower._reported_at is not None
        memory.follower._reported_at -= settings.MAX_STALENESS_SECONDS * (2 if was == "expired" else 1)
    seen: list[tuple[float, bool]] = []

    def look(above: int) -> ChangeBatch:
        reported = Verifier.objects.filter(seen_at__gt=long_ago).exists()
        seen.append((time.monotonic(), reported))
        return changes.poll_feed(above)

    long_ago = now() - timedelta(hours=1)
    Verifier.objects.update(seen_at=long_ago)
    monkeypatch.setattr(follower, "poll_feed", look)
    memory.follower.poll_once()
    assert [reported for _, reported in seen] == ([False] if was == "reported in time" else [False, True])
    assert memory.confirmed[-1][0] <= seen[-1][0]
    assert len(memory.confirmed) == (1 if was == "not there" else 2)
    if len(seen) == 2:
        assert memory.confirmed[-1][0] > seen[0][0]


@on_every_database
def test_follower_whose_memory_could_not_be_told_vouches_for_nothing_and_tells_it_again(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.follower.poll_once()
    change("a")
    before = Verifier.objects.get().confirmed_sequence, len(memory.confirmed)

    def fail(subjects: object) -> None:
        raise RuntimeError("a bug")

    with monkeypatch.context() as broken:
        broken.setattr(memory.follower, "apply", fail)
        with pytest.raises(RuntimeError):
            memory.follower.poll_once()
    assert (Verifier.objects.get().confirmed_sequence, len(memory.confirmed)) == before
    memory.follower.poll_once()
    assert memory.applied == [key("a")]


@on_every_database
def test_follower_too_far_behind_forgets_everything(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an outage in which others changed more than can be read at once."""
    monkeypatch.setattr(changes, "MAX_ROWS", 3)
    monkeypatch.setattr(changes, "_OVERLAP", 0)
    memory.follower.poll_once()
    change("a", "b", "c", "d", "e")
    memory.follower.poll_once()
    assert (memory.forgotten, memory.applied) == (2, [])
    last = change("f")
    memory.follower.poll_once()
    assert (memory.forgotten, memory.applied) == (2, [key("f")])
    assert Verifier.objects.get().confirmed_sequence == last


@on_every_database
def test_follower_of_a_feed_that_went_back_never_vouches_again(memory: Memory) -> None:
    """A restored backup lacks revocations that this process was told of: no yes from memory, nor from that database,
    until a restart."""
    memory.follower.poll_once()
    change("a")
    last = change("b")
    memory.follower.poll_once()
    vouched = len(memory.confirmed)
    lift_triggers()
    Change.objects.filter(pk=last).delete()
    with pytest.raises(FeedRewoundError):
        memory.follower.poll_once()
    assert (memory.lost, memory.taken_back) == (1, 1)
    assert not memory.follower.is_fresh
    Change.objects.create(sequence=last, subject_kind="key", subject_id="b", at=now())
    with pytest.raises(FeedRewoundError):
        memory.follower.poll_once()
    assert len(memory.confirmed) == vouched


@on_every_database
def test_follower_of_a_feed_whose_sequence_was_drawn_again_never_vouches_again(memory: Memory) -> None:
    """Restored, and written to before the next look: a revocation with a sequence that was another's is not skipped."""
    memory.follower.poll_once()
    last = change("a")
    memory.follower.poll_once()
    vouched = len(memory.confirmed)
    lift_triggers()
    Change.objects.filter(pk=last).delete()
    Change.objects.create(sequence=last, subject_kind="key", subject_id="b", at=now())
    with pytest.raises(FeedRewoundError):
        memory.follower.poll_once()
    assert (memory.lost, len(memory.confirmed)) == (1, vouched)


@on_every_database
def test_follower_in_a_child_of_a_process_that_lost_the_feed_has_lost_it_too(memory: Memory) -> None:
    memory.follower.poll_once()
    last = change("a")
    memory.follower.poll_once()
    lift_triggers()
    Change.objects.filter(pk=last).delete()
    with pytest.raises(FeedRewoundError):
        memory.follower.poll_once()
    memory.follower.forget()
    with pytest.raises(FeedRewoundError):
        memory.follower.poll_once()


@on_every_database
def test_follower_of_a_host_whose_word_cannot_be_opened_reports_and_vouches_for_nothing(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It cannot know what this host has announced. The outage is told once, however often it looks."""

    def fail() -> None:
        raise OSError("too many open files")

    caplog.set_level(logging.INFO, follower.__name__)
    monkeypatch.setattr(follower, "_report_seconds", lambda: 0.0)
    memory.follower.poll_once()
    before = Verifier.objects.get().seen_at, len(memory.confirmed)
    with monkeypatch.context() as outage:
        outage.setattr(changes.generation(), "remap", fail)
        change("a")
        for _ in range(4):
            memory.follower._try_poll()
    assert (Verifier.objects.get().seen_at, len(memory.confirmed)) == before
    assert memory.applied == [key("a")]
    memory.follower._try_poll()
    assert len(memory.confirmed) > before[1]
    messages = [record.message for record in caplog.records if record.name == follower.__name__]
    assert messages == ["the change feed cannot be followed", "the change feed is followed again"]


@on_every_database
def test_follower_restores_a_shared_word_that_somebody_deleted(memory: Memory) -> None:
    """Half a second later the processes of the host share one again."""
    path = settings.DATA_DIR / "generation"
    words = changes.generation().words
    seen = words[0]
    path.unlink()
    memory.follower.poll_once()
    assert path.exists()
    assert words[0] != seen


@pytest.mark.django_db(transaction=True)
def test_follower_on_sqlite_vouches_although_another_writes_for_long(memory: Memory) -> None:
    """SQLite has one lock for writers. What a look finds is applied and vouched for; the report is made later."""
    impatient = Memory()
    impatient.follower.poll_once()
    change("a")

    def poll() -> None:
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA busy_timeout = 10")
        impatient.follower.poll_once()

    before = Verifier.objects.get().confirmed_sequence
    with held_open(lambda: Change.objects.create(subject_kind="key", subject_id="b", at=now())):
        start(poll).result(PATIENCE_SECONDS)
        assert impatient.applied == [key("a")]
        assert len(impatient.confirmed) == 2
        assert Verifier.objects.get().confirmed_sequence == before
    start(poll).result(PATIENCE_SECONDS)
    assert impatient.applied == [key("a"), key("b")]
    assert Verifier.objects.get().confirmed_sequence == Change.objects.latest("sequence").pk
    follower._followers.discard(impatient.follower)


# ------------------------------------------------------------------------------------------------------ the thread


@contextmanager
def following(memory: Memory) -> Iterator[None]:
    memory.follower.start()
    try:
        await_that(lambda: bool(memory.confirmed), "the first look")
        yield
    finally:
        memory.follower.stop()


@on_every_database
def test_follower_thread_applies_what_others_commit_and_says_farewell(memory: Memory) -> None:
    with following(memory):
        memory.follower.start()  # repeatable
        assert [thread.name for thread in threading.enumerate()].count("feed") == 1
        sequence = change("a")
        await_that(lambda: memory.applied == [key("a")], "the change")
        await_that(lambda: Verifier.objects.get().confirmed_sequence == sequence, "the receipt")
        assert Verifier.objects.get().stopped_at is None
    assert Verifier.objects.get().stopped_at is not None
    assert (memory.taken_back, memory.follower.is_fresh) == (1, False), "nobody waits for it: it says no more yes"
    assert "feed" not in [thread.name for thread in threading.enumerate()]
    change("b")
    with following(memory):
        await_that(lambda: key("b") in memory.applied, "what happened meanwhile")
        await_that(lambda: Verifier.objects.get().stopped_at is None, "its return")


@on_every_database
def test_follower_thread_tells_of_an_outage_once_and_goes_on(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever a look raises, the next one is made; the log is not filled."""
    looks = []

    def fail(above: int) -> ChangeBatch:
        looks.append(above)
        raise OperationalError("gone")

    caplog.set_level(logging.INFO, follower.__name__)
    with following(memory):
        with monkeypatch.context() as outage:
            outage.setattr(follower, "poll_feed", fail)
            await_that(lambda: len(looks) > 2, "several looks")
            vouched = len(memory.confirmed)
        await_that(lambda: len(memory.confirmed) > vouched, "a look that does better")
    messages = [record.message for record in caplog.records if record.name == follower.__name__]
    assert messages == ["the change feed cannot be followed", "the change feed is followed again"]


@on_every_database
def test_follower_thread_ends_when_the_feed_went_back(memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    with following(memory):
        last = change("a")
        await_that(lambda: memory.applied == [key("a")], "the change")
        lift_triggers()
        Change.objects.filter(pk=last).delete()
        await_that(lambda: "feed" not in [thread.name for thread in threading.enumerate()], "the end of the thread")
        assert follower.is_feed_followed() is False
    assert Verifier.objects.get().stopped_at is None, "it counts as expired, not as gone in order"
    assert [record.levelname for record in caplog.records if record.name == follower.__name__] == ["CRITICAL"]


@on_every_database
def test_follower_in_a_forked_child_is_not_following(memory: Memory) -> None:
    """Granian forks its workers: a thread does not come along, and the child must not believe that it has one."""
    fork = multiprocessing.get_context("fork")
    answers: multiprocessing.queues.Queue[tuple[bool, bool, bool]] = fork.Queue()
    with following(memory):
        made = memory.follower
        child = fork.Process(
            target=lambda: answers.put((made.is_following, made.is_fresh, follower.is_feed_followed() is None))
        )
        child.start()
        assert answers.get(timeout=PATIENCE_SECONDS) == (False, False, True)
        child.join(PATIENCE_SECONDS)
        assert made.is_following


# -------------------------------------------------------------------------------------------------------- readiness


def test_readiness_of_a_process_that_keeps_nothing_in_memory_says_nothing_of_the_feed() -> None:
    assert follower.is_feed_followed() is None


@on_every_database
def test_readiness_of_a_follower_that_is_behind_is_failing(memory: Memory, client: Client) -> None:
    """A load balancer sends nothing to a process that would answer 503 `verifier_stale`, or read through."""
    have_peppers()
    with following(memory):
        assert client.get("/readyz").json()["checks"]["change_feed"] == "ok"
        with override_settings(MAX_STALENESS_SECONDS=0):
            answer = client.get("/readyz")
    assert (answer.status_code, answer.json()["checks"]["change_feed"]) == (503, "failing")
    assert "change_feed" not in client.get("/readyz").json()["checks"]


# ------------------------------------------------------------------------------------------------------- forgetting


@pytest.mark.database
@pytest.mark.django_db
def test_follower_forgets_old_confirmations_and_verifiers_long_gone() -> None:
    at = now()
    for name, days in (("gone", 8), ("here", 0)):
        seen_at = at - timedelta(days=days)
        Verifier.objects.create(verifier_id=name, door="test", started_at=seen_at, seen_at=seen_at, staleness_ms=1)
        for sequence, age in ((1, 31), (2, 29)):
            Confirmation.objects.create(verifier_id=name, sequence=sequence, at=at - timedelta(days=age))
    follower.forget_old(at)
    assert list(Verifier.objects.values_list("pk", flat=True)) == ["here"]
    assert list(Confirmation.objects.values_list("verifier_id", "sequence")) == [("here", 2)]
