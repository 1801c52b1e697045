"""Usage: counted without loss, reported with a watermark that never promises too much."""

import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from random import Random
from typing import Any

import pytest
from django.db import DatabaseError, OperationalError, connection, transaction

from keyvault.models import Key, KeyUse, UsageReporter, UseBucket
from keyvault.models.usage import UseOutcome
from keyvault.services.usage import recorder
from keyvault.services.usage.recorder import (
    KEPT_FOR,
    LOST_AFTER,
    Observation,
    UsageLog,
    longest_gap_seconds,
    note_lost,
    observe,
)
from tests.domain.minting import mint
from tests.factories import account, issue, make_merchant
from tests.services.racing import TIMEOUT_SECONDS, held_open, race, start, wait_until_blocked

pytestmark = [pytest.mark.database, pytest.mark.django_db]

NOON = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
SECOND = timedelta(seconds=1)


def seen_at(now: datetime) -> Observation:
    """What a turn of the engine sees."""
    note_lost(now)
    return observe(now)


@dataclass
class Clock:
    """Stands still until it is told."""

    at: datetime = NOON
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self) -> datetime:
        return self.at

    def tick(self, seconds: float) -> datetime:
        self.at += timedelta(seconds=seconds)
        return self.at


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def key(db: None) -> Key:
    make_merchant("acme")
    return issue(account())[0]


@pytest.fixture
def log(clock: Clock) -> UsageLog:
    """A reporter without its thread, so that the test flushes."""
    log = UsageLog(now=clock)
    UsageReporter.objects.create(reporter_id=log.reporter_id, started_at=clock(), flushed_through_at=clock())
    return log


def use(log: UsageLog, key: Key, times: int = 1, source: str = "192.0.2.1", **more: Any) -> None:
    chosen = {"user_agent": "curl", "endpoint": "orders.create", "outcome": UseOutcome.ALLOWED, **more}
    for _ in range(times):
        log.note(key.key_id, source=source, **chosen)


def counted(key: Key) -> int:
    return sum(UseBucket.objects.filter(key=key).values_list("count", flat=True))


def watermark(log: UsageLog) -> datetime:
    return UsageReporter.objects.get(pk=log.reporter_id).flushed_through_at


@pytest.fixture
def broken_database(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """No flush gets through until `undo()`."""

    def fail(*_: object) -> None:
        raise DatabaseError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(recorder, "_write", fail)
        yield patch


# ------------------------------------------------------------------------------------------------------- counting


@pytest.mark.parametrize("field", ["source", "user_agent", "endpoint", "origin"])
@pytest.mark.parametrize("before", ["", "x" * 20, "x" * 480])
def test_usage_of_a_client_that_shows_its_key_keeps_no_secret(key: Key, log: UsageLog, field: str, before: str) -> None:
    """What a client says about itself is shown to those who rotate its key: a key string in it is masked."""
    shown = mint(seed="shown by mistake")
    told = {"source": "192.0.2.1", "user_agent": "curl", "endpoint": "orders.create"}
    told[field] = f"{before}{shown}tail"
    log.note(key.key_id, **told, outcome=UseOutcome.ALLOWED)
    log.flush()
    noted = getattr(UseBucket.objects.get(), field)
    assert noted
    assert f"{before}{shown[:27]}***".startswith(noted)


def test_usage_is_added_up_with_its_first_and_last_time(key: Key, log: UsageLog, clock: Clock) -> None:
    use(log, key)
    clock.tick(1.5)
    use(log, key, 2)
    log.flush()
    clock.tick(0.25)
    use(log, key)
    log.flush()
    bucket, total = UseBucket.objects.get(), KeyUse.objects.get()
    last = NOON + timedelta(seconds=1.75)
    assert (bucket.count, bucket.first_at, bucket.last_at) == (4, NOON, last)
    assert (total.count, total.first_at, total.last_at) == (4, NOON, last)


def test_usage_buckets_are_by_minute_place_and_outcome(key: Key, log: UsageLog, clock: Clock) -> None:
    use(log, key)
    use(log, key, origin="https://shop.example")
    use(log, key, outcome=UseOutcome.DENIED)
    use(log, key, outcome=UseOutcome.PROBED)
    use(log, key, source="192.0.2.2")
    use(log, key, user_agent="other")
    use(log, key, endpoint="other")
    use(log, key, outcome=UseOutcome.REFUSED)
    clock.tick(60)
    use(log, key)
    log.flush()
    assert UseBucket.objects.count() == 9
    assert KeyUse.objects.get().count == 6, "what was denied, refused or probed is no use"


@pytest.mark.parametrize("outcome", [outcome for outcome in UseOutcome if outcome is not UseOutcome.ALLOWED])
def test_usage_that_was_not_allowed_leaves_first_and_last_use_alone(
    key: Key, log: UsageLog, clock: Clock, outcome: UseOutcome
) -> None:
    """Probes of our own above all: a key that only we have called was never used."""
    use(log, key, outcome=outcome)
    log.flush()
    assert not KeyUse.objects.exists()
    clock.tick(1)
    use(log, key)
    clock.tick(1)
    use(log, key, outcome=outcome)
    log.flush()
    total = KeyUse.objects.get()
    assert (total.count, total.first_at, total.last_at) == (1, NOON + SECOND, NOON + SECOND)


def test_usage_reported_out_of_order_keeps_the_earliest_and_the_latest(key: Key, clock: Clock) -> None:
    """Late and early reporters agree, whichever of them writes first."""
    early, late = UsageLog(now=clock), UsageLog(now=clock)
    use(early, key)
    clock.tick(5)
    use(late, key)
    late.flush()
    early.flush()
    total = KeyUse.objects.get()
    assert (total.first_at, total.last_at, total.count) == (NOON, NOON + 5 * SECOND, 2)


def test_usage_of_a_flood_of_sources_is_counted_without_telling_the_last_ones_apart(
    key: Key, log: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is bounded, and the request path does no I/O: what is lost of a flood is who it was, never how many."""
    monkeypatch.setattr(recorder, "_MAX_BUCKETS", 10)
    for number in range(100):
        use(log, key, source=f"192.0.2.{number}")
    assert counted(key) == 0
    log.flush()
    assert counted(key) == 100
    assert UseBucket.objects.count() == 11


def test_usage_of_a_flood_with_the_database_away_costs_no_client_its_answer(
    key: Key, log: UsageLog, monkeypatch: pytest.MonkeyPatch, broken_database: pytest.MonkeyPatch
) -> None:
    """Evidence is no part of a verdict: the request that fills the memory is answered, and no use is forgotten."""
    monkeypatch.setattr(recorder, "_MAX_BUCKETS", 2)
    for number in range(3):
        use(log, key, source=f"192.0.2.{number}")
    assert counted(key) == 0
    broken_database.undo()
    log.flush()
    assert counted(key) == 3


def test_usage_of_overlong_words_is_cut_rather_than_refused(key: Key, log: UsageLog) -> None:
    """No client can stop the counting by what it sends."""
    use(log, key, source="s" * 500, user_agent="u" * 500, endpoint="e" * 500, origin="o" * 500)
    log.flush()
    assert counted(key) == 1


def test_usage_longest_gap_is_between_minutes_of_real_use(key: Key, log: UsageLog, clock: Clock) -> None:
    assert longest_gap_seconds(key.key_id) == 0
    use(log, key)
    for minutes in (3, 10, 1):
        clock.tick(minutes * 60)
        use(log, key)
    for outcome in UseOutcome:
        clock.tick(60)
        use(log, key, outcome=outcome)
        clock.tick(3600)
    log.flush()
    assert longest_gap_seconds(key.key_id) == 600


# ------------------------------------------------------------------------------------- what verifiers count themselves


def at(seconds: float) -> float:
    """As verifiers count time: from noon on, in seconds of the epoch."""
    return NOON.timestamp() + seconds


SeenUse = tuple[str, str, str, str, str, str]


def seen(key: Key, source: str = "192.0.2.1", user_agent: str = "curl", origin: str = "", **more: Any) -> SeenUse:
    outcome = "probed" if more.get("is_probe") else "allowed"
    return key.key_id, more.get("endpoint", "orders.create"), source, user_agent, origin, outcome


def have_seen(log: UsageLog, *found: dict[SeenUse, list[float]]) -> None:
    """Verifiers that hand this over once, one after the other."""
    for each in found:
        log.add_source(partial(_hand_over, [told(each)]))


def told(found: dict[SeenUse, list[float]]) -> list[list[Any]]:
    return [[*use_of, *times] for use_of, times in found.items()]


def _hand_over(left: list[list[list[Any]]]) -> list[list[Any]]:
    return left.pop() if left else []


def buckets() -> list[tuple[Any, ...]]:
    rows = UseBucket.objects.order_by("minute", "source", "user_agent", "origin", "outcome")
    return list(rows.values_list("minute", "source", "user_agent", "origin", "outcome", "count", "first_at", "last_at"))


@pytest.fixture
def two_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if two uses were already too many to be encoded in one go."""
    monkeypatch.setattr(recorder, "_PORTION_SIZE", 2)


def test_usage_seen_twice_before_a_report_is_one_row(key: Key, log: UsageLog, clock: Clock, two_at_once: None) -> None:
    """By two verifiers of a process and by its request path: added up with the first and the last time of them all."""
    clock.tick(2)
    use(log, key)
    have_seen(
        log,
        {seen(key): [3, at(1.25), at(2.5)], seen(key, source="192.0.2.2"): [1, at(4), at(4)]},
        {seen(key): [2, at(0.5), at(1.5)], seen(key, is_probe=True): [7, at(0), at(9)]},
    )
    log.flush()
    log.flush()
    last, second = NOON + 2.5 * SECOND, NOON + 4 * SECOND
    assert buckets() == [
        (NOON, "192.0.2.1", "curl", "", "allowed", 6, NOON + 0.5 * SECOND, last),
        (NOON, "192.0.2.1", "curl", "", "probed", 7, NOON, NOON + 9 * SECOND),
        (NOON, "192.0.2.2", "curl", "", "allowed", 1, second, second),
    ]
    total = KeyUse.objects.get()
    assert (total.count, total.first_at, total.last_at) == (7, NOON + 0.5 * SECOND, second)


@pytest.mark.parametrize("at_once", [1, 7, 64, 1000])
def test_usage_in_however_many_portions_adds_up_to_a_plain_sum(
    key: Key, log: UsageLog, clock: Clock, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """Whichever portions the uses of one bucket are in: none is left out and none is told twice."""
    monkeypatch.setattr(recorder, "_PORTION_SIZE", at_once)
    keys = [key, *(issue(account())[0] for _ in range(2))]
    chosen = Random(20261122)  # noqa: S311  examples, no secret
    all_told: list[tuple[SeenUse, list[float]]] = []
    for _ in range(5):
        verifier: dict[SeenUse, list[float]] = {}
        for _ in range(40):
            use_of = seen(chosen.choice(keys), f"192.0.2.{chosen.randrange(20)}", is_probe=chosen.random() < 0.2)
            first = chosen.randrange(100)
            verifier[use_of] = [chosen.randint(1, 9), at(first), at(first + chosen.randrange(100))]
        have_seen(log, verifier)
        all_told += verifier.items()
    for number in range(20):
        clock.tick(7)
        use(log, key, source=f"192.0.2.{number}")
        all_told.append((seen(key, f"192.0.2.{number}"), [1, clock().timestamp(), clock().timestamp()]))
    log.flush()

    of_buckets, of_keys = defaultdict(list), defaultdict(list)
    for (key_id, _, source, _, _, outcome), times in all_told:
        of_buckets[key_id, source, outcome, _minute_of(times[2])].append(times)
        if outcome == "allowed":
            of_keys[key_id].append(times)
    found = UseBucket.objects.values_list("key_id", "source", "outcome", "minute", "count", "first_at", "last_at")
    assert set(found) == {(*bucket, *_sum_of(times)) for bucket, times in of_buckets.items()}
    totals = KeyUse.objects.values_list("key_id", "count", "first_at", "last_at")
    assert set(totals) == {(key_id, *_sum_of(times)) for key_id, times in of_keys.items()}
    assert len(all_told) > 150
    assert len(of_buckets) < len(all_told)


def _minute_of(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds // 60 * 60, UTC)


def _sum_of(all_times: list[list[float]]) -> tuple[float, datetime, datetime]:
    times, firsts, lasts = zip(*all_times, strict=True)
    return sum(times), datetime.fromtimestamp(min(firsts), UTC), datetime.fromtimestamp(max(lasts), UTC)


def test_usage_seen_by_a_probe_alone_is_no_use(key: Key, log: UsageLog) -> None:
    have_seen(log, {seen(key, is_probe=True): [7, at(0), at(9)]})
    log.flush()
    assert counted(key) == 7
    assert not KeyUse.objects.exists()


def test_usage_seen_across_a_minute_is_of_the_minute_of_its_last(key: Key, log: UsageLog) -> None:
    """The same bucket gets what the request path notes in that minute; the bucket of the minute before is another."""
    have_seen(log, {seen(key): [2, at(59.5), at(60)]}, {seen(key): [1, at(59.75), at(59.999999)]})
    log.flush()
    minute = NOON + timedelta(minutes=1)
    assert [(row[0], *row[5:]) for row in buckets()] == [
        (NOON, 1, NOON + 59.75 * SECOND, minute - timedelta(microseconds=1)),
        (minute, 2, NOON + 59.5 * SECOND, minute),
    ]


@pytest.mark.parametrize("microseconds", [1, 123_457, 499_999, 999_999])
def test_usage_times_are_kept_to_the_microsecond(key: Key, log: UsageLog, clock: Clock, microseconds: int) -> None:
    """A use that was noted at the moment of a watermark must not be found before it."""
    clock.at = NOON + timedelta(microseconds=microseconds)
    use(log, key)
    have_seen(log, {seen(key, source="192.0.2.2"): [1, clock.at.timestamp(), clock.at.timestamp()]})
    log.flush()
    assert set(UseBucket.objects.values_list("first_at", "last_at")) == {(clock.at, clock.at)}


@pytest.mark.parametrize(
    "text", ['"\\ \t\x7f{}[],%s%%', "\u2028 Ladenkasse 🛒 é 収納", "null", "<rows>", "O'Neill; --"]
)
def test_usage_keeps_what_a_client_says_to_the_letter(key: Key, log: UsageLog, text: str) -> None:
    use(log, key, user_agent=text)
    have_seen(log, {seen(key, user_agent=text): [1, at(0), at(0)], seen(key, "192.0.2.2", "", text): [1, at(0), at(0)]})
    log.flush()
    assert [(row[1:4], row[5]) for row in buckets()] == [
        (("192.0.2.1", text, ""), 2),
        (("192.0.2.2", "", text), 1),
    ]


def test_usage_seen_that_could_not_be_written_is_kept_and_bounded(
    key: Key, log: UsageLog, clock: Clock, monkeypatch: pytest.MonkeyPatch, broken_database: pytest.MonkeyPatch
) -> None:
    """What is lost of a flood that cannot be written is who it was, never how many nor when."""
    monkeypatch.setattr(recorder, "_MAX_BUCKETS", 2)
    use(log, key, source="192.0.2.100")
    with pytest.raises(DatabaseError):
        log.flush()  # which is told again as it is, for it may have been written
    have_seen(log, {seen(key, source=f"192.0.2.{number}"): [2, at(number), at(number)] for number in range(5)})
    for _ in range(2):
        with pytest.raises(DatabaseError):
            log.flush()
    clock.tick(30)
    use(log, key, source="192.0.2.9")
    use(log, key, source="192.0.2.1")
    broken_database.undo()
    log.flush()
    assert [(row[1], row[2], row[5], row[6], row[7]) for row in buckets()] == [
        ("", "", 7, NOON + 2 * SECOND, NOON + 30 * SECOND),
        ("192.0.2.0", "curl", 2, NOON, NOON),
        ("192.0.2.1", "curl", 3, NOON + SECOND, NOON + 30 * SECOND),
        ("192.0.2.100", "curl", 1, NOON, NOON),
    ]
    total = KeyUse.objects.get()
    assert (total.count, total.first_at, total.last_at) == (13, NOON, NOON + 30 * SECOND)


def test_usage_that_one_verifier_could_not_tell_loses_none_of_the_other_s(key: Key, log: UsageLog) -> None:
    """Nothing is written without all of it, and what one has handed over already is kept."""
    have_seen(log, {seen(key): [2, at(0), at(1)]})
    faults = [ValueError("confused")]

    def fail_once() -> list[Any]:
        if faults:
            raise faults.pop()
        return []

    log.add_source(fail_once)
    with pytest.raises(ValueError, match="confused"):
        log.flush()
    assert (counted(key), watermark(log)) == (0, NOON)
    log.flush()
    assert counted(key) == 2


# ----------------------------------------------------------------------------------------------------- watermarks


def test_usage_watermark_is_the_time_of_the_flush(key: Key, log: UsageLog, clock: Clock) -> None:
    """What was noted before the watermark is in the tables."""
    use(log, key)
    clock.tick(2)
    log.flush()
    assert watermark(log) == NOON + 2 * SECOND
    assert seen_at(clock()).through == NOON + 2 * SECOND


def test_usage_flush_that_fails_keeps_counts_and_watermark(
    key: Key, log: UsageLog, clock: Clock, broken_database: pytest.MonkeyPatch
) -> None:
    """A database that is away loses no use and is not told as silence: nothing moves until all of it is written."""
    use(log, key, 3)
    clock.tick(1)
    with pytest.raises(DatabaseError):
        log.flush()
    use(log, key, 2)
    assert (counted(key), watermark(log)) == (0, NOON)
    broken_database.undo()
    clock.tick(1)
    log.flush()
    assert (counted(key), watermark(log)) == (5, NOON + 2 * SECOND)
    bucket = UseBucket.objects.get()
    assert (bucket.first_at, bucket.last_at) == (NOON, NOON + SECOND)


@pytest.mark.django_db(transaction=True)
def test_usage_flush_is_all_or_nothing() -> None:
    """Counts and watermark are one transaction: a fault between them leaves neither, and nothing is counted twice."""
    clock = Clock()
    key, log = _reporting_key(clock)
    use(log, key, 3)
    clock.tick(1)
    with _watermarks_that_cannot_be_written(), pytest.raises(DatabaseError):
        log.flush()
    assert (counted(key), KeyUse.objects.count(), watermark(log)) == (0, 0, NOON)
    log.flush()
    assert (counted(key), KeyUse.objects.get().count, watermark(log)) == (3, 3, NOON + SECOND)


def test_usage_report_whose_answer_was_lost_is_written_once(
    key: Key, log: UsageLog, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: a use is counted once, though the database was lost after it wrote and before it said so. What proves
    a rotation is told by how many there were."""
    real, lost = recorder._write, [OperationalError("the answer was lost")] * 2

    def write(report: Any) -> bool:
        is_known = real(report)
        if lost:
            raise lost.pop()
        return is_known

    monkeypatch.setattr(recorder, "_write", write)
    have_seen(log, {seen(key): [3, at(0), at(0)]})
    for _ in range(2):
        use(log, key)
        clock.tick(1)
        with pytest.raises(OperationalError):
            log.flush()
    assert (counted(key), watermark(log)) == (4, NOON + SECOND), "the second says the first again, and nothing more"
    clock.tick(1)
    log.flush()
    assert (counted(key), KeyUse.objects.get().count, watermark(log)) == (5, 5, NOON + 3 * SECOND)
    use(log, key)
    log.flush()
    assert counted(key) == 6


def test_usage_shreds_what_was_used_though_its_reporter_was_forgotten(
    key: Key, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And cannot be introduced again just now. Where nothing was used, nothing is asked."""
    shredded: list[set[str]] = []
    monkeypatch.setattr(recorder, "shred_used", lambda owners: shredded.append(set(owners)))
    log = UsageLog(now=clock)
    log.flush()
    assert shredded == []
    use(log, key)
    log.note_secret_use("cat_1")
    log._thread = threading.current_thread()

    def fail(*_: object) -> None:
        raise DatabaseError("gone")

    monkeypatch.setattr(UsageLog, "_register", fail)
    with pytest.raises(DatabaseError):
        log.flush()
    assert (counted(key), shredded) == (1, [{key.key_id, "cat_1"}])
    with pytest.raises(DatabaseError):
        log.flush()
    assert counted(key) == 1


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_usage_report_that_is_told_again_waits_for_itself() -> None:
    """A connection was lost, and what it asked for is still under way at the server: told again by another one, the
    report finds that it was written, and adds nothing."""
    key, log = _reporting_key(Clock())
    use(log, key)
    log.flush()
    use(log, key)
    report = log._take(is_final=False)._replace(number=2)
    with held_open(lambda: list(UseBucket.objects.select_for_update())):
        under_way = start(partial(recorder._write, report))
        wait_until_blocked(under_way)
        again = start(partial(recorder._write, report))
        wait_until_blocked(again, connections=2)
    assert (under_way.result(TIMEOUT_SECONDS), again.result(TIMEOUT_SECONDS)) == (True, True)
    assert (counted(key), KeyUse.objects.get().count) == (2, 2)


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_usage_is_written_all_buckets_before_all_keys() -> None:
    """In one statement, of whose parts PostgreSQL promises no order: reporters that take rows in different orders wait
    for each other in a ring."""
    key, log = _reporting_key(Clock())
    use(log, key)
    log.flush()
    use(log, key)
    with held_open(lambda: list(UseBucket.objects.select_for_update())):
        flushed = start(log.flush)
        wait_until_blocked(flushed)
        with transaction.atomic():
            assert list(KeyUse.objects.select_for_update(nowait=True)), "while it waits for a bucket no key is taken"
    flushed.result(TIMEOUT_SECONDS)
    use(log, key)
    with held_open(lambda: list(KeyUse.objects.select_for_update())):
        flushed = start(log.flush)
        wait_until_blocked(flushed)
        with pytest.raises(DatabaseError), transaction.atomic():
            list(UseBucket.objects.select_for_update(nowait=True))
    flushed.result(TIMEOUT_SECONDS)
    assert (counted(key), KeyUse.objects.get().count) == (3, 3)


def _reporting_key(clock: Clock) -> tuple[Key, UsageLog]:
    make_merchant("acme")
    key, log = issue(account())[0], UsageLog(now=clock)
    UsageReporter.objects.create(reporter_id=log.reporter_id, started_at=NOON, flushed_through_at=NOON)
    return key, log


@contextmanager
def _watermarks_that_cannot_be_written() -> Iterator[None]:
    """The database itself refuses them."""
    begin = """
        CREATE TRIGGER broken BEFORE UPDATE ON keyvault_usagereporter BEGIN SELECT RAISE(ABORT, 'broken'); END
    """
    end = "DROP TRIGGER broken"
    if connection.vendor == "postgresql":
        begin = "ALTER TABLE keyvault_usagereporter ADD CONSTRAINT broken CHECK (false) NOT VALID"
        end = "ALTER TABLE keyvault_usagereporter DROP CONSTRAINT broken"
    with connection.cursor() as cursor:
        cursor.execute(begin)
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            cursor.execute(end)


@pytest.mark.django_db(transaction=True)
def test_usage_watermark_never_vouches_for_a_flush_that_still_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two flushes of one process meet and the first fails: no watermark passes what that one had in hand."""
    make_merchant("acme")
    key, clock = issue(account())[0], Clock()
    log = UsageLog(now=clock)
    UsageReporter.objects.create(reporter_id=log.reporter_id, started_at=NOON, flushed_through_at=NOON)
    use(log, key)
    clock.tick(1)
    in_the_middle, may_fail = threading.Event(), threading.Event()
    real = recorder._write

    def fail_late(*_: object) -> None:
        monkeypatch.setattr(recorder, "_write", real)
        in_the_middle.set()
        assert may_fail.wait(TIMEOUT_SECONDS)
        raise DatabaseError("gone")

    monkeypatch.setattr(recorder, "_write", fail_late)
    first = start(log.flush)
    assert in_the_middle.wait(TIMEOUT_SECONDS)
    clock.tick(1)
    second = start(log.flush)
    # Were the second free to go, it would be done in a moment; it is not, and this is all the time it gets.
    if not _is_done_within(second, 0.5):
        may_fail.set()
    with pytest.raises(DatabaseError):
        _let_fail(first, may_fail)
    second.result(TIMEOUT_SECONDS)
    assert watermark(log) > NOON + SECOND
    assert counted(key) == 1


def _is_done_within(future: Any, seconds: float) -> bool:
    try:
        future.result(seconds)
    except TimeoutError:
        return False
    return True


def _let_fail(future: Any, may_fail: threading.Event) -> None:
    may_fail.set()
    future.result(TIMEOUT_SECONDS)


@pytest.mark.django_db(transaction=True)
def test_usage_of_concurrent_reporters_adds_up_exactly(two_at_once: None) -> None:
    """Any number of processes that count the same keys at once lose nothing and wait for none in a ring."""
    make_merchant("acme")
    keys = [issue(account())[0] for _ in range(3)]
    sources = [f"192.0.2.{number}" for number in range(6)]

    def report(order: int) -> None:
        log = UsageLog(now=Clock())
        places = [
            (key, source) for key in keys[:: 1 if order % 2 else -1] for source in sources[:: 1 if order % 3 else -1]
        ]
        log.add_source(lambda: told({seen(key, source): [2, at(0), at(1)] for key, source in reversed(places)}))
        for _ in range(5):
            for key, source in places:
                use(log, key, source=source)
            log.flush()

    outcomes = race(*[partial(report, order) for order in range(6)])
    assert outcomes == [None] * 6
    for key in keys:
        assert KeyUse.objects.get(key=key).count == 3 * 6 * 5 * len(sources)
        assert counted(key) == 3 * 6 * 5 * len(sources)
    assert UseBucket.objects.count() == len(keys) * len(sources)


@pytest.mark.django_db(transaction=True)
def test_usage_noted_while_it_is_flushed_is_not_lost() -> None:
    """The request path and the reporting thread share the counts: each use is written exactly once."""
    make_merchant("acme")
    key, log = issue(account())[0], UsageLog()
    done = threading.Event()

    def flush_on() -> None:
        while not done.is_set():
            log.flush()

    flusher = start(flush_on)
    try:
        race(*[lambda: use(log, key, 200)] * 4)
    finally:
        done.set()
    flusher.result(TIMEOUT_SECONDS)
    log.flush()
    assert KeyUse.objects.get(key=key).count == 800


# ------------------------------------------------------------------------------------------------------ reporters


def test_usage_silence_goes_as_far_as_the_slowest_live_reporter(clock: Clock) -> None:
    """Silence is observed, not assumed: one reporter that is behind holds the observation back for all."""
    fast, slow = UsageLog(now=clock), UsageLog(now=clock)
    for log in (fast, slow):
        UsageReporter.objects.create(reporter_id=log.reporter_id, started_at=NOON, flushed_through_at=NOON)
    clock.tick(3)
    fast.flush()
    assert seen_at(clock()).through == NOON
    slow.flush()
    assert seen_at(clock()).through == NOON + 3 * SECOND


def test_usage_without_any_reporter_is_no_silence() -> None:
    """Nobody who looks means nothing that was seen."""
    seen = seen_at(NOON)
    assert (seen.through, seen.lost_at) == (None, None)


def test_usage_reporter_that_died_is_lost_and_holds_up_no_longer(log: UsageLog, clock: Clock) -> None:
    """A reporter that goes without a farewell may have taken uses with it: the moment that it is missed is kept."""
    other = UsageLog(now=clock)
    UsageReporter.objects.create(reporter_id=other.reporter_id, started_at=NOON, flushed_through_at=NOON)
    clock.tick(LOST_AFTER.total_seconds())
    other.flush()
    assert seen_at(clock()).lost_at is None, "late, but not yet lost"
    at = clock.tick(0.001)
    seen = seen_at(at)
    assert seen.lost_at == at
    assert seen.through == watermark(other)
    clock.tick(1)
    other.flush()
    assert seen_at(clock()).lost_at == at, "being missed once is noted once"


def test_usage_reporter_that_comes_back_was_not_lost(key: Key, log: UsageLog, clock: Clock) -> None:
    """A reporter that was only slow has its counts still, and says so by writing them."""
    use(log, key)
    clock.tick(LOST_AFTER.total_seconds() + 1)
    assert seen_at(clock()).lost_at is not None
    log.flush()
    assert seen_at(clock()).lost_at is None
    assert counted(key) == 1


@pytest.mark.parametrize("skew", [-1, 1])
def test_usage_reporter_whose_clock_is_off_vouches_for_nothing(log: UsageLog, clock: Clock, skew: int) -> None:
    """Whatever it says is not of now: it is as good as lost, and silence waits until its clock is right."""
    engine_at = NOON - skew * (LOST_AFTER + SECOND)
    for _ in range(2):
        log.flush()
        seen = seen_at(engine_at)
        assert (seen.through, seen.lost_at) == (None, engine_at)
    clock.at = engine_at
    log.flush()
    assert seen_at(engine_at) == Observation(engine_at, None)


def test_usage_reporter_whose_clock_is_a_little_ahead_does_not_vouch_for_the_future(log: UsageLog) -> None:
    """What it says of the time to come nobody can know: no silence ends before the engine's own now."""
    engine_at = NOON - LOST_AFTER
    assert seen_at(engine_at) == Observation(engine_at, None)


def test_usage_reporter_ahead_that_died_is_found_lost(log: UsageLog, clock: Clock) -> None:
    """Its last word is of the future, and still does not cover its death for longer than the clocks differ."""
    died_at = NOON - timedelta(seconds=5)
    assert seen_at(died_at).lost_at is None
    found_at = NOON + LOST_AFTER + SECOND
    assert seen_at(found_at) == Observation(None, found_at)


def test_usage_reporter_that_said_farewell_is_never_lost(log: UsageLog, clock: Clock) -> None:
    log.flush(is_final=True)
    clock.tick(3600)
    seen = seen_at(clock())
    assert (seen.through, seen.lost_at) == (None, None)


@pytest.mark.django_db(transaction=True)
def test_usage_thread_reports_by_itself_and_stops_with_a_farewell() -> None:
    """Started twice it is one reporter; stopped, it leaves nothing behind unwritten."""
    make_merchant("acme")
    key, log = issue(account())[0], UsageLog()
    log.start()
    log.start()
    try:
        assert UsageReporter.objects.count() == 1
        use(log, key)
        started, pause, waited = watermark(log), threading.Event(), 0.0
        while watermark(log) == started and waited < TIMEOUT_SECONDS:
            pause.wait(0.05)
            waited += 0.05
        assert counted(key) == 1
        use(log, key)
    finally:
        log.stop()
    assert counted(key) == 2
    assert UsageReporter.objects.get().stopped_at is not None


@pytest.mark.django_db(transaction=True)
def test_usage_thread_survives_a_database_that_was_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed flush is tried again; the thread does not end with it."""
    make_merchant("acme")
    key, log = issue(account())[0], UsageLog()
    failed, real = threading.Event(), recorder._write

    def fail_once(*_: object) -> None:
        monkeypatch.setattr(recorder, "_write", real)
        failed.set()
        raise DatabaseError("gone")

    monkeypatch.setattr(recorder, "_write", fail_once)
    log.start()
    try:
        use(log, key, 3)
        assert failed.wait(TIMEOUT_SECONDS)
    finally:
        log.stop()
    assert counted(key) == 3


@pytest.mark.django_db(transaction=True)
def test_usage_says_in_a_line_that_the_database_is_away(
    log: UsageLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each second of it; what is our own fault comes with its traceback."""
    faults: list[Exception] = [OperationalError("away"), ValueError("confused")]

    def fail(*_: object) -> bool:
        raise faults.pop(0)

    monkeypatch.setattr(recorder, "_write", fail)
    log._try_flush()
    log._try_flush()
    away, confused = caplog.records
    assert (away.levelname, away.exc_info, str(away.__dict__["why"])) == ("WARNING", None, "away")
    assert (confused.levelname, bool(confused.exc_info)) == ("ERROR", True)


def test_usage_of_a_forked_process_is_reported_by_itself() -> None:
    """Two processes never share a reporter: the farewell of one would vouch for what the other has in hand."""
    parent = recorder.usage_log.reporter_id
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writing, recorder.usage_log.reporter_id.encode())
        os._exit(0)
    os.close(writing)
    assert os.waitpid(pid, 0)[1] == 0
    with os.fdopen(reading) as told:
        child = told.read()
    assert child
    assert child != parent
    assert recorder.usage_log.reporter_id == parent


def test_usage_that_was_pending_at_a_fork_is_written_once(key: Key, log: UsageLog) -> None:
    use(log, key)
    log.forget()
    log.flush()
    assert counted(key) == 0, "it is the parent's to write"


# ----------------------------------------------------------------------------------------------------- forgetting


def test_usage_of_more_than_a_year_ago_is_forgotten_but_for_its_total(key: Key, log: UsageLog, clock: Clock) -> None:
    """Minutes go after 400 days; how much a key was used and since when is kept, and every suspected exposure."""
    for outcome in UseOutcome:
        use(log, key, outcome=outcome)
    clock.tick(3600)
    use(log, key)
    log.flush()
    recorder.forget_old(NOON + KEPT_FOR)
    assert UseBucket.objects.count() == len(UseOutcome) + 1
    recorder.forget_old(NOON + KEPT_FOR + SECOND)
    left = UseBucket.objects.order_by("outcome").values_list("outcome", flat=True)
    assert list(left) == ["allowed", "exposed_in_browser", "exposed_in_url"]
    total = KeyUse.objects.get()
    assert (total.count, total.first_at) == (2, NOON)


def test_usage_that_is_old_is_forgotten_some_thousands_at_a_time(
    key: Key, log: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep that finds years of it holds nobody up."""
    monkeypatch.setattr(recorder, "_MAX_DELETED", 2)
    for number in range(3):
        use(log, key, source=f"192.0.2.{number}")
    log.flush()
    long_after = NOON + 2 * KEPT_FOR
    recorder.forget_old(long_after)
    assert UseBucket.objects.count() == 1
    recorder.forget_old(long_after)
    assert UseBucket.objects.count() == 0


def test_usage_reporters_long_gone_are_forgotten_but_not_when_one_was_last_lost() -> None:
    """The restart of a silence must not be undone by tidying up."""

    def reporter(name: str, **end: datetime) -> None:
        UsageReporter.objects.create(reporter_id=name, started_at=NOON, flushed_through_at=NOON, **end)

    week = timedelta(days=7)
    reporter("live")
    reporter("stopped", stopped_at=NOON)
    reporter("stopped lately", stopped_at=NOON + week)
    recorder.forget_old(NOON + week + SECOND)
    assert set(UsageReporter.objects.values_list("pk", flat=True)) == {"live", "stopped lately"}
    reporter("lost first", lost_at=NOON - SECOND)
    reporter("lost last", lost_at=NOON)
    recorder.forget_old(NOON + week + SECOND)
    assert set(UsageReporter.objects.values_list("pk", flat=True)) == {"live", "stopped lately", "lost last"}
    assert observe(NOON).lost_at == NOON


@pytest.mark.django_db(transaction=True)
def test_usage_reporter_that_was_forgotten_while_it_slept_reports_again() -> None:
    """A host that wakes up after weeks is a verifier like before: silence waits for it again."""
    log = UsageLog()
    log.start()
    try:
        UsageReporter.objects.all().delete()
        log.flush()
        assert UsageReporter.objects.get().reporter_id == log.reporter_id
    finally:
        log.stop()
    assert UsageReporter.objects.get().stopped_at is not None
