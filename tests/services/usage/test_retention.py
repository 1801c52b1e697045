"""Retention of usage: coarser buckets, the same totals, and a bounded number of rows in each step."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from random import Random
from typing import Any

import pytest
from django.db import DatabaseError, IntegrityError, OperationalError, connection
from django.db.models import Sum
from django.test.utils import CaptureQueriesContext

from keyvault.domain.environments import Environment
from keyvault.domain.sources import name_source
from keyvault.models import Key, KeyUse, UsageReporter, UseBucket, UseContext
from keyvault.models.usage import EXPOSURES, UseOutcome, UseSpan
from keyvault.services.usage import recorder, retention
from keyvault.services.usage.recorder import UsageLog, observe
from keyvault.services.usage.reports import (
    describe_use,
    find_attempts,
    find_last,
    find_sources,
    find_users,
    list_attempts,
    networks_of,
    read_users,
)
from tests.clocks import Clock
from tests.services.racing import (
    TIMEOUT_SECONDS,
    held_open,
    race,
    start,
    wait_until_blocked,
    wait_until_settled,
)
from tests.services.usage.conftest import NOON, SECOND, make_key, make_reporter, use

pytestmark = [pytest.mark.database, pytest.mark.django_db]

DAY = timedelta(days=1)
KEPT_FOR = timedelta(days=400)


def use_at_random(key: Key, log: UsageLog, clock: Clock, random: Random, times: int = 60) -> None:
    """Use the key from several clients, in bursts and after pauses of up to some days."""
    for _ in range(times):
        client = {"source": f"192.0.{random.choice((2, 3))}.{random.choice((1, 2))}"}
        client["user_agent"] = random.choice(("curl/8.1", "curl/8.2", "shop"))
        endpoint = random.choice(("orders.create", "orders.retrieve"))
        use(log, key, random.choice((1, 3)), outcome=random.choice(list(UseOutcome)), endpoint=endpoint, **client)
        clock.tick(random.choice((1, 40, 61, 3_000, 86_000, 300_000)))
        log.flush()


def totals(key: Key, since: Sequence[datetime]) -> dict[str, Any]:
    """Everything that is read of a key's use, except exact addresses and user agents."""
    sums: dict[tuple[str, ...], list[Any]] = {}
    for user in find_users(key.key_id, outcomes=tuple(UseOutcome), limit=10_000):
        use_of = (name_source(user.source, user.user_agent), user.endpoint, user.origin, user.outcome)
        known = sums.setdefault(use_of, [0, user.first_at, user.last_at])
        known[:] = known[0] + user.count, min(known[1], user.first_at), max(known[2], user.last_at)
    return {
        "uses": sums,
        "total": describe_use(Key.objects.get(pk=key.pk)),
        "last": {outcome: find_last(key.key_id, [outcome]) for outcome in UseOutcome},
        "minutes": KeyUse.objects.filter(key=key).values_list("minutes", flat=True).first(),
        "networks": [
            (each.network, each.count, each.first_at, each.last_at) for each in networks_of(read_users(key.key_id))
        ],
        "sources": find_sources(key.key_id),
        "attempts": [find_attempts(key.key_id, at).last_at for at in since],
        "waived": [find_attempts(key.key_id, at, ["192.0.2.0/24 curl"]).last_at for at in since],
    }


# --------------------------------------------------------------------------------------------------- rolling up


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 4))])
def test_usage_totals_are_the_same_after_any_rollup(key: Key, log: UsageLog, clock: Clock, seed: int) -> None:
    """Whatever was rolled up when, in batches of any size: no use is lost, counted twice or given another time."""
    random = Random(seed)  # noqa: S311  a test's own choices
    use_at_random(key, log, clock, random)
    since = [NOON + (clock() - NOON) * part / 4 for part in range(4)]
    before = totals(key, since)
    for _ in range(8):
        clock.tick(random.choice((3_600, 86_400, 20 * 86_400)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(retention, "_MAX_ROLLED_UP", random.choice((1, 3, 50)))
            patch.setattr(retention, "_ROLL_UP_SECONDS", random.choice((0, 60)))
            retention.roll_up(clock())
        assert totals(key, since) == before
    clock.tick(36 * 86_400)
    retention.roll_up(clock())
    assert totals(key, since) == before
    assert set(UseBucket.objects.values_list("span", flat=True)) == {UseSpan.DAY}
    assert retention.roll_up(clock()) == 0


def test_usage_by_minute_becomes_usage_by_hour_and_by_day(key: Key, log: UsageLog, clock: Clock) -> None:
    """Whole hours after 2 days, whole days after 35, and a late report of an old minute is added to them."""
    for _ in range(3):
        use(log, key)
        clock.tick(1_500)
        log.flush()

    def spans(at: datetime) -> list[tuple[int, datetime, int]]:
        retention.roll_up(at)
        return sorted(UseBucket.objects.values_list("span", "minute", "count"))

    hour, midnight = timedelta(hours=1), NOON - 12 * timedelta(hours=1)
    assert [span for span, *_ in spans(NOON + 2 * DAY + hour - SECOND)] == [1, 1, 1]
    assert spans(NOON + 2 * DAY + hour) == [(60, NOON, 3)]
    clock.now = NOON + timedelta(minutes=59)
    use(log, key)
    log.flush()
    assert spans(NOON + 2 * DAY + hour) == [(60, NOON, 4)]
    assert spans(midnight + 36 * DAY - SECOND) == [(60, NOON, 4)]
    assert spans(midnight + 36 * DAY) == [(1_440, midnight, 4)]


def test_usage_loses_addresses_and_user_agents_after_its_hours(key: Key, log: UsageLog, clock: Clock) -> None:
    """Older buckets name a network and a product. The sources, which are evidence, keep their names."""
    for outcome in (UseOutcome.ALLOWED, *EXPOSURES):
        for number in (1, 2):
            use(log, key, source=f"192.0.2.{number}", user_agent=f"curl/8.{number} (Ada's laptop)", outcome=outcome)
    log.flush()
    sources = find_sources(key.key_id)
    retention.roll_up(NOON + 35 * DAY)
    assert UseBucket.objects.filter(context__source__startswith="192.0.2.1").count() == 3
    retention.roll_up(NOON + 36 * DAY)
    rows = UseBucket.objects.values_list("context__source", "context__user_agent", "count")
    assert list(rows) == [("192.0.2.0/24", "curl", 2)] * 3
    assert set(UseContext.objects.values_list("source", "user_agent")) == {("192.0.2.0/24", "curl")}
    assert find_sources(key.key_id) == sources


def test_attempt_by_a_source_that_used_the_key_long_ago_is_known(key: Key, log: UsageLog, clock: Clock) -> None:
    """A month-end job that tries the old key in quarantine is a known source, although its address is erased."""
    use(log, key)
    log.flush()
    since = clock.tick(60 * 86_400)
    retention.roll_up(since)
    assert not UseContext.objects.filter(source="192.0.2.1").exists()
    for source in ("192.0.2.1", "198.51.100.1"):
        clock.tick(60)
        use(log, key, source=source, outcome=UseOutcome.REFUSED)
    log.flush()
    assert find_attempts(key.key_id, since).last_known_at == since + timedelta(minutes=1)
    assert {each.source: each.is_known for each in list_attempts(key.key_id, since)} == {
        "192.0.2.0/24 curl": True,
        "198.51.100.0/24 curl": False,
    }


def test_source_that_still_tries_a_suspended_key_is_kept(key: Key, log: UsageLog, clock: Clock) -> None:
    """An attempt is a use of its source, too: the source goes with its last bucket, and is known until then."""
    use(log, key)
    use(log, key, source="198.51.100.1")
    log.flush()
    clock.tick(86_400)
    use(log, key, outcome=UseOutcome.REFUSED)
    log.flush()
    retention.forget_old(NOON + KEPT_FOR + SECOND)
    assert set(find_sources(key.key_id)) == {"192.0.2.0/24 curl"}
    assert find_attempts(key.key_id, NOON + DAY).last_known_at == NOON + DAY
    retention.forget_old(NOON + KEPT_FOR + DAY + SECOND)
    assert find_sources(key.key_id) == {}


def test_rollup_that_is_killed_between_its_statements_changes_nothing(
    key: Key, log: UsageLog, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_at_random(key, log, clock, Random(1), 10)  # noqa: S311  a test's own choices
    clock.tick(40 * 86_400)
    before, rows = totals(key, [NOON]), list(UseBucket.objects.order_by("pk").values())

    def add_and_die(*args: Any, **options: Any) -> None:
        recorder.add_to_buckets(*args, **options)
        raise DatabaseError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(retention, "add_to_buckets", add_and_die)
        with pytest.raises(DatabaseError):
            retention.roll_up(clock())
    assert list(UseBucket.objects.order_by("pk").values()) == rows
    retention.roll_up(clock())
    assert totals(key, [NOON]) == before


@pytest.mark.django_db(transaction=True)
def test_rollup_by_several_workers_beside_a_reporter_keeps_every_use(key: Key, log: UsageLog, clock: Clock) -> None:
    for minute in range(300):
        use(log, key, source=f"192.0.2.{minute % 7}")
        clock.tick(60)
    log.flush()
    late = UsageLog(now=Clock(NOON))

    def roll_up() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(retention, "_MAX_ROLLED_UP", 20)
            retention.roll_up(NOON + 3 * DAY)

    def report() -> None:
        for _ in range(20):
            use(late, key)
            late.flush()

    assert race(roll_up, roll_up, roll_up, report) == [None] * 4
    retention.roll_up(NOON + 3 * DAY)
    assert UseBucket.objects.aggregate(total=Sum("count")) == {"total": 320}
    assert set(UseBucket.objects.values_list("span", flat=True)) == {UseSpan.HOUR}

    def roll_up_later() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(retention, "_MAX_ROLLED_UP", 3)
            retention.roll_up(NOON + 40 * DAY)

    assert race(roll_up_later, roll_up_later, roll_up_later) == [None] * 3
    retention.roll_up(NOON + 40 * DAY)
    assert UseBucket.objects.aggregate(total=Sum("count")) == {"total": 320}
    assert set(UseContext.objects.values_list("source", "user_agent")) == {("192.0.2.0/24", "curl")}


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_retention_of_a_context_that_a_reporter_begins_to_use_loses_no_use(
    key: Key, log: UsageLog, clock: Clock
) -> None:
    """The report fails with the context that it refers to, and is repeated with a new one."""
    use(log, key)
    log.flush()
    UseBucket.objects.all().delete()
    clock.tick(60)
    use(log, key)
    with held_open(lambda: retention._delete_unused(list(UseContext.objects.values_list("pk", flat=True)))):
        flushed = start(log.flush)
        wait_until_blocked(flushed)
    with pytest.raises(IntegrityError):
        flushed.result(TIMEOUT_SECONDS)
    log.flush()
    assert UseBucket.objects.get().count == 1


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("days", [3, 40])
def test_rollup_and_a_report_of_the_same_contexts_do_not_deadlock(days: int) -> None:
    """A report refers to contexts by their ids, and the rollup locks them by their names, which sort the other way."""
    key, clock = make_key(), Clock(NOON)
    log = make_reporter(clock)
    for source in ("token-b", "token-a"):
        use(log, key, source=source, user_agent="shop")
        log.flush()
    if days > 35:
        retention.roll_up(NOON + 3 * DAY)
    clock.tick(days * 86_400)
    for source in ("token-b", "token-a"):
        use(log, key, source=source, user_agent="shop")
    first = UseContext.objects.earliest("pk")
    with held_open(lambda: list(UseContext.objects.filter(pk=first.pk).select_for_update(no_key=True))):
        rolled_up = start(lambda: retention.roll_up(clock()))
        wait_until_settled(rolled_up)
        reported = start(log.flush)
        wait_until_settled(rolled_up, reported)
    assert (rolled_up.result(TIMEOUT_SECONDS), reported.result(TIMEOUT_SECONDS)) == (2, None)
    assert UseBucket.objects.aggregate(total=Sum("count")) == {"total": 4}


# ----------------------------------------------------------------------------------------------------- deleting


def test_usage_of_a_source_is_forgotten_with_its_last_minute(key: Key, log: UsageLog, clock: Clock) -> None:
    use(log, key)
    use(log, key, source="198.51.100.7")
    clock.tick(3600)
    use(log, key)
    log.flush()
    retention.forget_old(NOON + KEPT_FOR)
    assert len(find_sources(key.key_id)) == 2
    retention.forget_old(NOON + KEPT_FOR + SECOND)
    assert list(find_sources(key.key_id)) == ["192.0.2.0/24 curl"]
    retention.forget_old(clock() + KEPT_FOR + SECOND)
    assert not find_sources(key.key_id)


@pytest.mark.django_db(transaction=True)
def test_usage_of_a_source_is_forgotten_after_a_run_that_failed(key: Key, log: UsageLog) -> None:
    """Sources, buckets and contexts are deleted in one transaction, so that the next run finds them all."""
    use(log, key)
    log.flush()

    def fail(execute: Any, sql: str, *rest: Any) -> Any:
        if sql.startswith("DELETE") and "keyvault_keysource" in sql:
            raise OperationalError("killed")
        return execute(sql, *rest)

    long_after = NOON + 2 * KEPT_FOR
    with connection.execute_wrapper(fail), pytest.raises(OperationalError):
        retention.forget_old(long_after)
    retention.forget_old(long_after)
    assert not find_sources(key.key_id)


def test_usage_older_than_its_retention_is_deleted_except_totals_and_exposures(
    key: Key, log: UsageLog, clock: Clock
) -> None:
    """Minutes are deleted after 400 days; a key's total, its first use and every suspected exposure are kept."""
    for outcome in UseOutcome:
        use(log, key, outcome=outcome)
    clock.tick(3600)
    use(log, key)
    log.flush()
    retention.forget_old(NOON + KEPT_FOR)
    assert UseBucket.objects.count() == len(UseOutcome) + 1
    retention.forget_old(NOON + KEPT_FOR + SECOND)
    pending = UseContext.objects.order_by("outcome").values_list("outcome", flat=True)
    assert list(pending) == ["allowed", "exposed_in_browser", "exposed_in_url"]
    assert UseBucket.objects.count() == 3
    total = KeyUse.objects.get()
    assert (total.count, total.first_at) == (2, NOON)


def test_usage_that_is_old_is_deleted_in_batches(key: Key, log: UsageLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "MAX_DELETED", 2)
    for number in range(3):
        use(log, key, source=f"192.0.2.{number}")
    log.flush()
    long_after = NOON + 2 * KEPT_FOR
    retention.forget_old(long_after)
    assert UseBucket.objects.count() == 1
    retention.forget_old(long_after)
    assert (UseBucket.objects.count(), UseContext.objects.count()) == (0, 0)


def test_usage_reporters_that_stopped_are_deleted_except_the_last_lost() -> None:
    """Deleting the last lost reporter would undo the restart of a silence."""

    def reporter(name: str, **end: datetime) -> None:
        UsageReporter.objects.create(reporter_id=name, started_at=NOON, flushed_through_at=NOON, **end, peppers={})

    week = timedelta(days=7)
    reporter("live")
    reporter("stopped", stopped_at=NOON)
    reporter("stopped lately", stopped_at=NOON + week)
    retention.forget_old(NOON + week + SECOND)
    assert set(UsageReporter.objects.values_list("pk", flat=True)) == {"live", "stopped lately"}
    reporter("lost first", lost_at=NOON - SECOND)
    reporter("lost last", lost_at=NOON)
    retention.forget_old(NOON + week + SECOND)
    assert set(UsageReporter.objects.values_list("pk", flat=True)) == {"live", "stopped lately", "lost last"}
    assert observe(NOON, "acme", Environment.SANDBOX).lost_at == NOON


def test_usage_reporters_of_each_scope_keep_their_last_lost(clock: Clock) -> None:
    """The last loss of one environment, or of one merchant, does not concern another."""
    losses = {("sandbox", ""): (1, 2), ("production", ""): (3, 4), ("", ""): (5, 6), ("sandbox", ",acme,"): (7, 8)}
    for (environment, merchants), days in losses.items():
        for day in days:
            at = NOON + timedelta(days=day)
            row = {"started_at": NOON, "flushed_through_at": NOON, "lost_at": at}
            scope = {"environment": environment, "merchants": merchants}
            UsageReporter.objects.create(reporter_id=str(day), **row, **scope, peppers={})
    retention.forget_old(NOON + timedelta(days=30))
    assert set(UsageReporter.objects.values_list("pk", flat=True)) == {"2", "4", "6", "8"}


@pytest.mark.parametrize("end", ["stopped_at", "lost_at"])
def test_usage_reporters_of_many_scopes_are_deleted_in_batches(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: after an outage of many processes, a run takes a bounded number of statements and of rows."""
    monkeypatch.setattr("keyvault.services.work.deletion.MAX_DELETED", 3)
    for number in range(5):
        for day in range(2):
            at = NOON + timedelta(days=day)
            row = {"started_at": NOON, "flushed_through_at": NOON, end: at, "merchants": f",{number},"}
            UsageReporter.objects.create(reporter_id=f"{number} {day}", **row, peppers={})
    left = []
    for _ in range(4):
        with CaptureQueriesContext(connection) as made:
            retention.forget_old(NOON + timedelta(days=30))
        deletes = [each for each in made.captured_queries if each["sql"].startswith("DELETE")]
        left.append((UsageReporter.objects.count(), len(deletes)))
    if end == "lost_at":
        assert left == [(7, 1), (5, 1), (5, 0), (5, 0)]
        assert set(UsageReporter.objects.values_list("pk", flat=True)) == {f"{number} 1" for number in range(5)}
    else:
        assert left == [(7, 1), (4, 1), (1, 1), (0, 1)]
