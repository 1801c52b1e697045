"""Usage recorder: counts without loss, and a watermark that never covers unwritten uses."""

import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from random import Random
from typing import Any

import pytest
from django.db import DatabaseError, OperationalError, connection, transaction

from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind
from keyvault.models import Key, KeyUse, UsageReporter, UseBucket, UseContext
from keyvault.models.usage import UseOutcome
from keyvault.services.recording.signals import keys_refused
from keyvault.services.usage import recorder
from keyvault.services.usage.recorder import (
    LOST_AFTER,
    Observation,
    UsageLog,
    note_lost,
    observe,
    register_reporter,
)
from keyvault.services.usage.reports import find_sources
from tests.clocks import Clock
from tests.domain.minting import mint
from tests.factories import account, issue, make_merchant
from tests.services.racing import TIMEOUT_SECONDS, held_open, race, start, wait_until_blocked
from tests.services.usage.conftest import NOON, SECOND, make_key, make_reporter, use

pytestmark = [pytest.mark.database, pytest.mark.django_db]


def observe_at(now: datetime) -> Observation:
    """Observe as an engine run does."""
    note_lost(now)
    return observe(now, "acme", Environment.SANDBOX)


def count_of(key: Key) -> int:
    return sum(UseBucket.objects.filter(context__key=key).values_list("count", flat=True))


def watermark(log: UsageLog) -> datetime:
    return UsageReporter.objects.get(pk=log.reporter_id).flushed_through_at


@pytest.fixture
def broken_database(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Make every flush fail until `undo()`."""

    def fail(*_: object) -> None:
        raise DatabaseError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(recorder, "_write", fail)
        yield patch


# ------------------------------------------------------------------------------------------------------- counting


@pytest.mark.postgres_once
@pytest.mark.parametrize("field", ["source", "user_agent", "endpoint", "origin"])
@pytest.mark.parametrize("before", ["", "x" * 20, "x" * 480])
def test_usage_with_a_key_string_in_a_client_field_is_redacted(
    key: Key, log: UsageLog, field: str, before: str
) -> None:
    """What a client sends about itself is shown to operators, so a key string in it is masked."""
    shown = mint(seed="shown by mistake")
    client_fields = {"source": "192.0.2.1", "user_agent": "curl", "endpoint": "orders.create"}
    client_fields[field] = f"{before}{shown}tail"
    log.note(key.key_id, **client_fields, outcome=UseOutcome.ALLOWED)
    log.flush()
    noted = getattr(UseContext.objects.get(), field)
    assert noted
    assert f"{before}{shown[:27]}***".startswith(noted)


def test_usage_is_summed_with_its_first_and_last_time(key: Key, log: UsageLog, clock: Clock) -> None:
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


def test_usage_buckets_are_per_minute_client_and_outcome(key: Key, log: UsageLog, clock: Clock) -> None:
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
    assert KeyUse.objects.get().count == 6, "denied, refused and probed requests are no uses"


@pytest.mark.parametrize("outcome", [outcome for outcome in UseOutcome if outcome is not UseOutcome.ALLOWED])
def test_usage_that_was_not_allowed_keeps_first_and_last_use(
    key: Key, log: UsageLog, clock: Clock, outcome: UseOutcome
) -> None:
    """Probes above all: a key that only probes have called was never used."""
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
    early, late = UsageLog(now=clock), UsageLog(now=clock)
    use(early, key)
    clock.tick(5)
    use(late, key)
    late.flush()
    early.flush()
    total = KeyUse.objects.get()
    assert (total.first_at, total.last_at, total.count) == (NOON, NOON + 5 * SECOND, 2)


def test_usage_of_too_many_sources_is_counted_in_one_bucket(
    key: Key, log: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is bounded and the request path does no I/O: excess sources lose their identity, never their count."""
    monkeypatch.setattr(recorder, "_MAX_BUCKETS", 10)
    for number in range(100):
        use(log, key, source=f"192.0.2.{number}")
    assert count_of(key) == 0
    log.flush()
    assert count_of(key) == 100
    assert UseBucket.objects.count() == 11


def test_usage_of_too_many_sources_without_the_database_fails_no_request(
    key: Key, log: UsageLog, monkeypatch: pytest.MonkeyPatch, broken_database: pytest.MonkeyPatch
) -> None:
    """Usage is not part of a verdict: the request that fills the memory succeeds, and no use is lost."""
    monkeypatch.setattr(recorder, "_MAX_BUCKETS", 2)
    for number in range(3):
        use(log, key, source=f"192.0.2.{number}")
    assert count_of(key) == 0
    broken_database.undo()
    log.flush()
    assert count_of(key) == 3


def test_usage_with_overlong_fields_is_truncated(key: Key, log: UsageLog) -> None:
    """No client can stop the counting by what it sends."""
    use(log, key, source="s" * 500, user_agent="u" * 500, endpoint="e" * 500, origin="o" * 500)
    log.flush()
    assert count_of(key) == 1


# -------------------------------------------------------------------------------------------------- sources


def test_usage_longest_gap_is_kept_for_each_source(key: Key, log: UsageLog, clock: Clock) -> None:
    """Each source has a longest gap of its own, in whatever reports its uses arrive."""
    for day in range(4):
        use(log, key)
        if day in {0, 3}:
            use(log, key, source="198.51.100.7", user_agent="month-end/3")
        if day < 2:
            log.flush()
        clock.tick(86_400)
    log.flush()
    found = find_sources(key.key_id)
    assert {name: use.longest_gap_seconds for name, use in found.items()} == {
        "192.0.2.0/24 curl": 86_400,
        "198.51.100.0/24 month-end": 3 * 86_400,
    }
    daily = found["192.0.2.0/24 curl"]
    assert (daily.first_at, daily.last_at, daily.denied_at) == (NOON, NOON + timedelta(days=3), None)


def test_usage_longest_gap_of_a_source_counts_allowed_uses_only(key: Key, log: UsageLog, clock: Clock) -> None:
    """The denials of one client are no evidence about another client that is allowed once a month."""
    use(log, key)
    for hours in (3, 20, 2):
        clock.tick(hours * 3600)
        use(log, key)
        log.flush()
    last_at = clock()
    for outcome in UseOutcome:
        clock.tick(3600)
        if outcome is not UseOutcome.ALLOWED:
            use(log, key, outcome=outcome)
            log.flush()
    (only,) = find_sources(key.key_id).values()
    assert (only.longest_gap_seconds, only.last_at) == (72_000, last_at)
    assert only.denied_at is not None
    assert only.seen_at == only.refused_at
    assert only.seen_at > only.denied_at > last_at


def test_usage_of_a_source_within_a_day_has_no_gap(key: Key, log: UsageLog, clock: Clock) -> None:
    """It says nothing about when the source comes again. A minute later the source has been seen on two days."""
    for seconds in (120, 86_280, 60):
        use(log, key, 100)
        log.flush()
        clock.tick(seconds)
    use(log, key, source="203.0.113.9", outcome=UseOutcome.DENIED)
    log.flush()
    denied, once = find_sources(key.key_id).values()
    assert (once.name, once.longest_gap_seconds) == ("192.0.2.0/24 curl", None)
    assert (denied.last_at, denied.longest_gap_seconds) == (None, 0)
    use(log, key)
    log.flush()
    assert find_sources(key.key_id)[once.name].longest_gap_seconds == 86_280


def test_usage_of_a_source_reported_out_of_order_keeps_its_longest_gap(key: Key, clock: Clock) -> None:
    early, late = UsageLog(now=clock), UsageLog(now=clock)
    use(early, key)
    clock.tick(60_000)
    use(late, key)
    late.flush()
    early.flush()
    clock.tick(30_000)
    use(late, key)
    late.flush()
    (only,) = find_sources(key.key_id).values()
    assert (only.first_at, only.last_at) == (NOON, clock())
    assert only.longest_gap_seconds == 30_000, "the report that came late closed no gap"


def test_usage_of_a_public_key_keeps_no_sources(key: Key, log: UsageLog) -> None:
    """Its sources are shoppers, and silence does not retire it."""
    public, _ = issue(account(), kind=KeyKind.PUBLIC)
    use(log, public)
    use(log, key)
    log.flush()
    assert (len(find_sources(public.key_id)), len(find_sources(key.key_id))) == (0, 1)


# ------------------------------------------------------------------------------------- counts of verifiers


def at(seconds: float) -> float:
    """Return a time as verifiers report it: noon plus these seconds, in seconds of the epoch."""
    return NOON.timestamp() + seconds


SeenUse = tuple[str, str, str, str, str, str]


def seen(key: Key, source: str = "192.0.2.1", user_agent: str = "curl", origin: str = "", **options: Any) -> SeenUse:
    outcome = "probed" if options.get("is_probe") else "allowed"
    return key.key_id, options.get("endpoint", "orders.create"), source, user_agent, origin, outcome


def add_reports(log: UsageLog, *found: dict[SeenUse, list[float]]) -> None:
    """Add verifiers that each report these uses once."""
    for each in found:
        log.add_counter(partial(_report_once, [as_rows(each)]))


def as_rows(found: dict[SeenUse, list[float]]) -> list[list[Any]]:
    return [[*use_of, *times] for use_of, times in found.items()]


def _report_once(pending: list[list[list[Any]]]) -> list[list[Any]]:
    return pending.pop() if pending else []


def buckets() -> list[tuple[Any, ...]]:
    columns = ["minute", *(f"context__{name}" for name in ("source", "user_agent", "origin", "outcome"))]
    rows = UseBucket.objects.order_by(*columns)
    return list(rows.values_list(*columns, "count", "first_at", "last_at"))


@pytest.fixture
def small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encode uses in portions of two."""
    monkeypatch.setattr(recorder, "_PORTION_SIZE", 2)


def test_usage_reported_by_several_verifiers_is_one_row(
    key: Key, log: UsageLog, clock: Clock, small_portions: None
) -> None:
    """Reports of two verifiers and of the request path are summed, with the first and last time of all."""
    clock.tick(2)
    use(log, key)
    add_reports(
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


@pytest.mark.parametrize("portion_size", [1, 7, 64, 1000])
def test_usage_in_portions_of_any_size_equals_a_plain_sum(
    key: Key, log: UsageLog, clock: Clock, monkeypatch: pytest.MonkeyPatch, portion_size: int
) -> None:
    """No use is omitted or counted twice, whatever portions its bucket spans."""
    monkeypatch.setattr(recorder, "_PORTION_SIZE", portion_size)
    keys = [key, *(issue(account())[0] for _ in range(2))]
    rng = Random(20261122)  # noqa: S311  generates examples, not secrets
    expected_uses: list[tuple[SeenUse, list[float]]] = []
    for _ in range(5):
        verifier: dict[SeenUse, list[float]] = {}
        for _ in range(40):
            use_of = seen(rng.choice(keys), f"192.0.2.{rng.randrange(20)}", is_probe=rng.random() < 0.2)
            first = rng.randrange(100)
            verifier[use_of] = [rng.randint(1, 9), at(first), at(first + rng.randrange(100))]
        add_reports(log, verifier)
        expected_uses += verifier.items()
    for number in range(20):
        clock.tick(7)
        use(log, key, source=f"192.0.2.{number}")
        expected_uses.append((seen(key, f"192.0.2.{number}"), [1, clock().timestamp(), clock().timestamp()]))
    log.flush()

    of_buckets, of_keys = defaultdict(list), defaultdict(list)
    for (key_id, _, source, _, _, outcome), times in expected_uses:
        of_buckets[key_id, source, outcome, _minute_of(times[2])].append(times)
        if outcome == "allowed":
            of_keys[key_id].append(times)
    columns = ("context__key_id", "context__source", "context__outcome", "minute", "count", "first_at", "last_at")
    found = UseBucket.objects.values_list(*columns)
    assert set(found) == {(*bucket, *_sum_of(times)) for bucket, times in of_buckets.items()}
    totals = KeyUse.objects.values_list("key_id", "count", "first_at", "last_at")
    assert set(totals) == {(key_id, *_sum_of(times)) for key_id, times in of_keys.items()}
    assert len(expected_uses) > 150
    assert len(of_buckets) < len(expected_uses)


def _minute_of(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds // 60 * 60, UTC)


def _sum_of(all_times: list[list[float]]) -> tuple[float, datetime, datetime]:
    times, firsts, lasts = zip(*all_times, strict=True)
    return sum(times), datetime.fromtimestamp(min(firsts), UTC), datetime.fromtimestamp(max(lasts), UTC)


def test_usage_reported_by_a_probe_only_is_no_use(key: Key, log: UsageLog) -> None:
    add_reports(log, {seen(key, is_probe=True): [7, at(0), at(9)]})
    log.flush()
    assert count_of(key) == 7
    assert not KeyUse.objects.exists()


def test_usage_reported_across_a_minute_counts_for_its_last_minute(key: Key, log: UsageLog) -> None:
    """The request path's uses of that minute share its bucket; the previous minute has another."""
    add_reports(log, {seen(key): [2, at(59.5), at(60)]}, {seen(key): [1, at(59.75), at(59.999999)]})
    log.flush()
    minute = NOON + timedelta(minutes=1)
    assert [(row[0], *row[5:]) for row in buckets()] == [
        (NOON, 1, NOON + 59.75 * SECOND, minute - timedelta(microseconds=1)),
        (minute, 2, NOON + 59.5 * SECOND, minute),
    ]


@pytest.mark.parametrize("microseconds", [1, 123_457, 499_999, 999_999])
def test_usage_times_are_kept_to_the_microsecond(key: Key, log: UsageLog, clock: Clock, microseconds: int) -> None:
    """A use at the moment of a watermark must not be found before it."""
    clock.now = NOON + timedelta(microseconds=microseconds)
    use(log, key)
    add_reports(log, {seen(key, source="192.0.2.2"): [1, clock.now.timestamp(), clock.now.timestamp()]})
    log.flush()
    assert set(UseBucket.objects.values_list("first_at", "last_at")) == {(clock.now, clock.now)}


@pytest.mark.parametrize(
    "text", ['"\\ \t\x7f{}[],%s%%', "\u2028 Ladenkasse 🛒 é 収納", "null", "<rows>", "O'Neill; --"]
)
def test_usage_keeps_client_fields_exactly(key: Key, log: UsageLog, text: str) -> None:
    use(log, key, user_agent=text)
    add_reports(
        log, {seen(key, user_agent=text): [1, at(0), at(0)], seen(key, "192.0.2.2", "", text): [1, at(0), at(0)]}
    )
    log.flush()
    assert [(row[1:4], row[5]) for row in buckets()] == [
        (("192.0.2.1", text, ""), 2),
        (("192.0.2.2", "", text), 1),
    ]


def test_usage_that_could_not_be_written_is_kept_and_bounded(
    key: Key, log: UsageLog, clock: Clock, monkeypatch: pytest.MonkeyPatch, broken_database: pytest.MonkeyPatch
) -> None:
    """Excess sources lose their identity, never their count or time."""
    monkeypatch.setattr(recorder, "_MAX_BUCKETS", 2)
    use(log, key, source="192.0.2.100")
    with pytest.raises(DatabaseError):
        log.flush()  # repeated unchanged later, because it may have been written
    add_reports(log, {seen(key, source=f"192.0.2.{number}"): [2, at(number), at(number)] for number in range(5)})
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


def test_usage_with_one_failing_verifier_keeps_the_other_s_report(key: Key, log: UsageLog) -> None:
    """Nothing is written until all reports are read, and reports read before the failure are kept."""
    add_reports(log, {seen(key): [2, at(0), at(1)]})
    errors = [ValueError("invalid")]

    def fail_once() -> list[Any]:
        if errors:
            raise errors.pop()
        return []

    log.add_counter(fail_once)
    with pytest.raises(ValueError, match="invalid"):
        log.flush()
    assert (count_of(key), watermark(log)) == (0, NOON)
    log.flush()
    assert count_of(key) == 2


# ----------------------------------------------------------------------------------------------------- watermarks


def test_usage_watermark_is_the_time_of_the_flush(key: Key, log: UsageLog, clock: Clock) -> None:
    """Everything noted before the watermark is in the tables."""
    use(log, key)
    clock.tick(2)
    log.flush()
    assert watermark(log) == NOON + 2 * SECOND
    assert observe_at(clock()).through == NOON + 2 * SECOND


def test_usage_flush_that_fails_keeps_counts_and_watermark(
    key: Key, log: UsageLog, clock: Clock, broken_database: pytest.MonkeyPatch
) -> None:
    """A database outage loses no use and does not count as silence."""
    use(log, key, 3)
    clock.tick(1)
    with pytest.raises(DatabaseError):
        log.flush()
    use(log, key, 2)
    assert (count_of(key), watermark(log)) == (0, NOON)
    broken_database.undo()
    clock.tick(1)
    log.flush()
    assert (count_of(key), watermark(log)) == (5, NOON + 2 * SECOND)
    bucket = UseBucket.objects.get()
    assert (bucket.first_at, bucket.last_at) == (NOON, NOON + SECOND)


@pytest.mark.django_db(transaction=True)
def test_usage_flush_is_atomic() -> None:
    """Counts and watermark share one transaction."""
    clock = Clock(NOON)
    key, log = make_key(), make_reporter(clock)
    use(log, key, 3)
    clock.tick(1)
    with failing_watermarks(), pytest.raises(DatabaseError):
        log.flush()
    assert (count_of(key), KeyUse.objects.count(), watermark(log)) == (0, 0, NOON)
    log.flush()
    assert (count_of(key), KeyUse.objects.get().count, watermark(log)) == (3, 3, NOON + SECOND)


def test_usage_report_with_a_lost_reply_is_written_once(
    key: Key, log: UsageLog, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database committed the report before the connection was lost; each use still counts once."""
    real, lost = recorder._write, [OperationalError("the answer was lost")] * 2

    def write(*report: Any) -> bool:
        is_known = real(*report)
        if lost:
            raise lost.pop()
        return is_known

    monkeypatch.setattr(recorder, "_write", write)
    add_reports(log, {seen(key): [3, at(0), at(0)]})
    for _ in range(2):
        use(log, key)
        clock.tick(1)
        with pytest.raises(OperationalError):
            log.flush()
    assert (count_of(key), watermark(log)) == (4, NOON + SECOND), "the retry must repeat only the first report"
    clock.tick(1)
    log.flush()
    assert (count_of(key), KeyUse.objects.get().count, watermark(log)) == (5, 5, NOON + 3 * SECOND)
    use(log, key)
    log.flush()
    assert count_of(key) == 6


def test_usage_shreds_used_secrets_after_its_reporter_was_deleted(
    key: Key, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the reporter cannot be registered again. Without uses, nothing is shredded."""
    shredded: list[set[str]] = []
    monkeypatch.setattr(recorder, "shred_used", lambda owners: shredded.append(set(owners)))
    log = UsageLog(now=clock)
    log.flush()
    assert shredded == []
    use(log, key)
    log.note_secret_use("cat_1")
    log._thread = threading.current_thread()

    def fail(*_: object, **__: object) -> None:
        raise DatabaseError("gone")

    monkeypatch.setattr(recorder, "register_reporter", fail)
    with pytest.raises(DatabaseError):
        log.flush()
    assert (count_of(key), shredded) == (1, [{key.key_id, "cat_1"}])
    with pytest.raises(DatabaseError):
        log.flush()
    assert count_of(key) == 1


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_usage_report_repeated_while_the_first_is_in_progress_waits_for_it() -> None:
    """After a lost connection the first statement may still run; the repeated one waits and adds nothing."""
    key, log = make_key(), make_reporter(Clock(NOON))
    use(log, key)
    log.flush()
    use(log, key)
    report = log._take(is_final=False)._replace(number=2)
    with held_open(lambda: list(UseBucket.objects.select_for_update())):
        under_way = start(partial(recorder._write, report, {}))
        wait_until_blocked(under_way)
        again = start(partial(recorder._write, report, {}))
        wait_until_blocked(again, connections=2)
    assert (under_way.result(TIMEOUT_SECONDS), again.result(TIMEOUT_SECONDS)) == (True, True)
    assert (count_of(key), KeyUse.objects.get().count) == (2, 2)


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_usage_is_written_buckets_before_keys() -> None:
    """PostgreSQL guarantees no order within one statement, and reporters with different lock orders could deadlock."""
    key, log = make_key(), make_reporter(Clock(NOON))
    use(log, key)
    log.flush()
    use(log, key)
    with held_open(lambda: list(UseBucket.objects.select_for_update())):
        flushed = start(log.flush)
        wait_until_blocked(flushed)
        with transaction.atomic():
            assert list(KeyUse.objects.select_for_update(nowait=True)), "no key may be locked while a bucket is awaited"
    flushed.result(TIMEOUT_SECONDS)
    use(log, key)
    with held_open(lambda: list(KeyUse.objects.select_for_update())):
        flushed = start(log.flush)
        wait_until_blocked(flushed)
        with pytest.raises(DatabaseError), transaction.atomic():
            list(UseBucket.objects.select_for_update(nowait=True))
    flushed.result(TIMEOUT_SECONDS)
    assert (count_of(key), KeyUse.objects.get().count) == (3, 3)


def test_usage_report_is_not_disturbed_by_a_receiver_that_fails(
    key: Key, log: UsageLog, caplog: pytest.LogCaptureFixture
) -> None:
    """The report is stored when receivers learn of refused keys: a failure repeats nothing and stops no report."""
    received = []

    def fail(key_ids: set[str], **_: Any) -> None:
        received.append(key_ids)
        raise DatabaseError("gone")

    use(log, key, outcome=UseOutcome.REFUSED)
    keys_refused.connect(fail)
    try:
        log.flush()
    finally:
        keys_refused.disconnect(fail)
    assert "receivers were not notified of refused keys" in caplog.messages
    use(log, key)
    log.flush()
    assert (received, count_of(key)) == ([{key.key_id}], 2)


@contextmanager
def failing_watermarks() -> Iterator[None]:
    """Make the database refuse every watermark."""
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
def test_usage_watermark_never_passes_a_flush_that_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two concurrent flushes the first fails: no watermark covers the first one's uses."""
    key, clock = make_key(), Clock(NOON)
    log = make_reporter(clock)
    use(log, key)
    clock.tick(1)
    writing, may_fail = threading.Event(), threading.Event()
    real = recorder._write

    def fail_late(*_: object) -> None:
        monkeypatch.setattr(recorder, "_write", real)
        writing.set()
        assert may_fail.wait(TIMEOUT_SECONDS)
        raise DatabaseError("gone")

    monkeypatch.setattr(recorder, "_write", fail_late)
    first = start(log.flush)
    assert writing.wait(TIMEOUT_SECONDS)
    clock.tick(1)
    second = start(log.flush)
    # An unblocked second flush would finish within this time.
    if not _is_done_within(second, 0.5):
        may_fail.set()
    with pytest.raises(DatabaseError):
        fail_and_wait(first, may_fail)
    second.result(TIMEOUT_SECONDS)
    assert watermark(log) > NOON + SECOND
    assert count_of(key) == 1


def _is_done_within(future: Any, seconds: float) -> bool:
    try:
        future.result(seconds)
    except TimeoutError:
        return False
    return True


def fail_and_wait(future: Any, may_fail: threading.Event) -> None:
    may_fail.set()
    future.result(TIMEOUT_SECONDS)


def test_usage_noted_while_a_report_is_taken_is_newer_than_its_watermark(key: Key, log: UsageLog, clock: Clock) -> None:
    """Guarantee: no watermark covers a use that its report lacks, or a key in use would count as silent."""

    def take() -> list[Any]:
        clock.tick(1)
        use(log, key)
        return []

    log.add_counter(take)
    log.flush()
    assert (count_of(key), watermark(log)) == (0, NOON)
    log.flush()
    assert (count_of(key), watermark(log)) == (1, NOON + SECOND)


@pytest.mark.django_db(transaction=True)
def test_usage_of_concurrent_reporters_sums_exactly(small_portions: None) -> None:
    """Processes that count the same keys concurrently lose nothing and do not deadlock."""
    make_merchant("acme")
    keys = [issue(account())[0] for _ in range(3)]
    sources = [f"192.0.2.{number}" for number in range(6)]

    def report(order: int) -> None:
        log = UsageLog(now=Clock(NOON))
        places = [
            (key, source) for key in keys[:: 1 if order % 2 else -1] for source in sources[:: 1 if order % 3 else -1]
        ]
        log.add_counter(lambda: as_rows({seen(key, source): [2, at(0), at(1)] for key, source in reversed(places)}))
        for _ in range(5):
            for key, source in places:
                use(log, key, source=source)
            log.flush()

    outcomes = race(*[partial(report, order) for order in range(6)])
    assert outcomes == [None] * 6
    for key in keys:
        assert KeyUse.objects.get(key=key).count == 3 * 6 * 5 * len(sources)
        assert count_of(key) == 3 * 6 * 5 * len(sources)
    assert UseBucket.objects.count() == len(keys) * len(sources)


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_reports_that_begin_to_use_a_context_do_not_deadlock() -> None:
    """A report adds a context that another one committed meanwhile; a third one refers to it and has its bucket."""
    key, clock = make_key(), Clock(NOON)
    earlier, stale, later = (make_reporter(clock) for _ in range(3))
    client: dict[str, Any] = {"user_agent": "shop", "endpoint": "orders.create"}
    use(earlier, key, source="token-b", **client)
    clock.tick(60)
    use(stale, key, source="token-a", **client)
    use(stale, key, source="token-b", **client)
    use(later, key, source="token-b", **client)
    added = (key.key_id, "orders.create", "token-a", "shop", "", "allowed")
    with ExitStack() as first:
        first.enter_context(held_open(lambda: recorder.lock_contexts({added})))
        reported = start(stale.flush)
        wait_until_blocked(reported)
        earlier.flush()
        with held_open(later.flush):
            first.close()
            wait_until_blocked(reported)
    reported.result(TIMEOUT_SECONDS)
    assert KeyUse.objects.get().count == 4


@pytest.mark.django_db(transaction=True)
def test_usage_noted_during_a_flush_is_not_lost() -> None:
    """Each use is written exactly once."""
    key, log = make_key(), UsageLog()
    done = threading.Event()

    def flush_repeatedly() -> None:
        while not done.is_set():
            log.flush()

    flusher = start(flush_repeatedly)
    try:
        race(*[lambda: use(log, key, 200)] * 4)
    finally:
        done.set()
    flusher.result(TIMEOUT_SECONDS)
    log.flush()
    assert KeyUse.objects.get(key=key).count == 800


# ------------------------------------------------------------------------------------------------------ reporters


def test_usage_silence_ends_at_the_slowest_live_reporter(clock: Clock) -> None:
    """Silence is observed: a reporter that lags holds the observation back for all."""
    fast, slow = make_reporter(clock), make_reporter(clock)
    clock.tick(3)
    fast.flush()
    assert observe_at(clock()).through == NOON
    slow.flush()
    assert observe_at(clock()).through == NOON + 3 * SECOND


def test_usage_without_reporters_is_no_silence() -> None:
    seen = observe_at(NOON)
    assert (seen.through, seen.lost_at) == (None, None)


def test_usage_reporter_without_deregistration_is_lost_and_delays_no_longer(log: UsageLog, clock: Clock) -> None:
    """It may have lost uses, so the time at which it was missed is recorded."""
    other = make_reporter(clock)
    clock.tick(LOST_AFTER.total_seconds())
    other.flush()
    assert observe_at(clock()).lost_at is None, "the reporter is late, but not lost yet"
    at = clock.tick(0.001)
    seen = observe_at(at)
    assert seen.lost_at == at
    assert seen.through == watermark(other)
    clock.tick(1)
    other.flush()
    assert observe_at(clock()).lost_at == at, "the loss must be recorded once"


def test_usage_reporter_that_returns_is_not_lost(key: Key, log: UsageLog, clock: Clock) -> None:
    """A slow reporter still has its counts and writes them."""
    use(log, key)
    clock.tick(LOST_AFTER.total_seconds() + 1)
    assert observe_at(clock()).lost_at is not None
    log.flush()
    assert observe_at(clock()).lost_at is None
    assert count_of(key) == 1


@pytest.mark.parametrize("skew", [-1, 1])
def test_usage_reporter_with_a_wrong_clock_counts_as_lost(log: UsageLog, clock: Clock, skew: int) -> None:
    """Silence waits until its clock is right."""
    engine_at = NOON - skew * (LOST_AFTER + SECOND)
    for _ in range(2):
        log.flush()
        seen = observe_at(engine_at)
        assert (seen.through, seen.lost_at) == (None, engine_at)
    clock.now = engine_at
    log.flush()
    assert observe_at(engine_at) == Observation(engine_at, None)


def test_usage_reporter_slightly_ahead_does_not_cover_the_future(log: UsageLog) -> None:
    """Silence never extends beyond the engine's own time."""
    engine_at = NOON - LOST_AFTER
    assert observe_at(engine_at) == Observation(engine_at, None)


def test_usage_reporter_ahead_that_died_is_found_lost(log: UsageLog, clock: Clock) -> None:
    """Its last watermark lies in the future, but covers its death only for as long as the clocks differ."""
    died_at = NOON - timedelta(seconds=5)
    assert observe_at(died_at).lost_at is None
    found_at = NOON + LOST_AFTER + SECOND
    assert observe_at(found_at) == Observation(None, found_at)


def test_usage_reporter_that_deregistered_is_never_lost(log: UsageLog, clock: Clock) -> None:
    log.flush(is_final=True)
    clock.tick(3600)
    seen = observe_at(clock())
    assert (seen.through, seen.lost_at) == (None, None)


@pytest.mark.django_db(transaction=True)
def test_usage_thread_reports_and_deregisters_when_stopped() -> None:
    """Started twice it is one reporter; when stopped it has written everything."""
    key, log = make_key(), UsageLog()
    log.start()
    log.start()
    try:
        assert UsageReporter.objects.count() == 1
        use(log, key)
        pause, waited = threading.Event(), 0.0
        while count_of(key) == 0 and waited < TIMEOUT_SECONDS:
            pause.wait(0.05)
            waited += 0.05
        assert count_of(key) == 1
        use(log, key)
    finally:
        log.stop()
    assert count_of(key) == 2
    assert UsageReporter.objects.get().stopped_at is not None


@pytest.mark.django_db(transaction=True)
def test_usage_thread_survives_a_failed_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    key, log = make_key(), UsageLog()
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
    assert count_of(key) == 3


@pytest.mark.django_db(transaction=True)
def test_usage_flush_without_the_database_logs_one_line(
    log: UsageLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """So does the last flush of a process that stops. An unexpected error is logged with its traceback."""
    errors: list[Exception] = [OperationalError("away"), ValueError("unexpected"), OperationalError("still away")]

    def fail(*_: object) -> bool:
        raise errors.pop(0)

    monkeypatch.setattr(recorder, "_write", fail)
    log._try_flush()
    log._try_flush()
    log._finish()
    unavailable, unexpected, last = caplog.records
    assert (unavailable.levelname, unavailable.exc_info, str(unavailable.__dict__["why"])) == ("WARNING", None, "away")
    assert (last.levelname, last.exc_info, str(last.__dict__["why"])) == ("WARNING", None, "still away")
    assert (unexpected.levelname, bool(unexpected.exc_info)) == ("ERROR", True)


def test_usage_of_a_forked_process_has_its_own_reporter() -> None:
    """With a shared reporter, one process's deregistration would cover the other's unwritten uses."""
    parent = recorder.usage_log.reporter_id
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writing, recorder.usage_log.reporter_id.encode())
        os._exit(0)
    os.close(writing)
    assert os.waitpid(pid, 0)[1] == 0
    with os.fdopen(reading) as pipe:
        child = pipe.read()
    assert child
    assert child != parent
    assert recorder.usage_log.reporter_id == parent


def test_usage_pending_at_a_fork_is_written_by_the_parent(key: Key, log: UsageLog) -> None:
    use(log, key)
    log.forget()
    log.flush()
    assert count_of(key) == 0, "the child must not write the parent's counts"


# ------------------------------------------------------------------------------------------------ environments


@pytest.mark.parametrize(
    ("served", "is_lost"),
    [(("sandbox", "production"), (True, True)), (("sandbox",), (True, False)), (("production",), (False, True))],
)
def test_usage_reporter_that_is_lost_restarts_silence_only_where_it_served(
    clock: Clock, settings: Any, db: None, served: tuple[str, ...], is_lost: tuple[bool, bool]
) -> None:
    """A process that never loads production's peppers cannot have lost a use of production's keys."""
    settings.ENVIRONMENTS = served
    log = UsageLog(now=clock)
    log.sink.register(log.reporter_id, clock(), 0)
    at = clock.tick(LOST_AFTER.total_seconds() + 1)
    note_lost(at)
    found = [observe(at, "acme", environment).lost_at for environment in (Environment.SANDBOX, Environment.PRODUCTION)]
    assert found == [at if lost else None for lost in is_lost]


@pytest.mark.parametrize(
    ("merchants", "is_lost"),
    [
        (None, [True, True]),
        (["acme"], [True, False]),
        (["globex", "acme"], [True, True]),
        (["acme-2", "my-acme"], [False, False]),
        ([], [False, False]),
    ],
)
def test_usage_reporter_that_is_lost_restarts_silence_of_its_merchants_only(
    clock: Clock, merchants: list[str] | None, is_lost: list[bool]
) -> None:
    register_reporter("reader", ["sandbox"], {}, clock(), merchants=merchants)
    at = clock.tick(LOST_AFTER.total_seconds() + 1)
    note_lost(at)
    found = [observe(at, merchant, Environment.SANDBOX).lost_at for merchant in ("acme", "globex")]
    assert found == [at if lost else None for lost in is_lost]


@pytest.mark.parametrize("served", ["", "production"])
def test_usage_silence_ends_at_the_slowest_reporter_of_its_environment(clock: Clock, served: str) -> None:
    for name, environment, seconds in (("slow", "sandbox", 1), ("fast", served, 3)):
        through = NOON + timedelta(seconds=seconds)
        UsageReporter.objects.create(
            reporter_id=name, started_at=NOON, flushed_through_at=through, environment=environment, peppers={}
        )
    at = clock.tick(5)
    assert observe(at, "acme", Environment.SANDBOX).through == NOON + SECOND
    assert observe(at, "acme", Environment.PRODUCTION).through == NOON + 3 * SECOND


@pytest.mark.django_db(transaction=True)
def test_usage_reporter_deleted_while_its_host_slept_registers_again() -> None:
    """Silence waits for it again."""
    log = UsageLog()
    log.start()
    try:
        UsageReporter.objects.all().delete()
        log.flush()
        assert UsageReporter.objects.get().reporter_id == log.reporter_id
    finally:
        log.stop()
    assert UsageReporter.objects.get().stopped_at is not None
