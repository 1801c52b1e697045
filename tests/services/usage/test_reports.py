"""Reports of who uses a key, for operators and for the tripwire of a rotation."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db.models import QuerySet

from keyvault.domain.timestamps import format_timestamp
from keyvault.models import Key, KeySource
from keyvault.models.usage import SIGNS_OF_LIFE, UseOutcome
from keyvault.services.usage import reports
from keyvault.services.usage.recorder import UsageLog
from keyvault.services.usage.reports import (
    TRACES,
    UseAttempt,
    UseAttempts,
    describe_use,
    find_attempts,
    find_last,
    find_late_uses,
    find_sources,
    find_users,
    has_more_users,
    list_attempts,
    list_late_uses,
    list_latest,
    list_users,
    networks_of,
    read_users,
    versions_of,
)
from tests.clocks import Clock
from tests.factories import account, issue
from tests.services.rows import disable_triggers
from tests.services.usage.conftest import NOON

pytestmark = [pytest.mark.database, pytest.mark.django_db]

HOUR, DAY = timedelta(hours=1), timedelta(days=1)
ALLOWED, DENIED, REFUSED, PROBED = UseOutcome.ALLOWED, UseOutcome.DENIED, UseOutcome.REFUSED, UseOutcome.PROBED


def use(
    key: Key,
    source: str = "192.0.2.1",
    *,
    at: datetime = NOON,
    outcome: UseOutcome = ALLOWED,
    user_agent: str = "shop/1",
    endpoint: str = "orders.create",
    origin: str = "",
    times: int = 1,
) -> None:
    log = UsageLog(now=lambda: at)
    for _ in range(times):
        log.note(key.key_id, source=source, user_agent=user_agent, endpoint=endpoint, origin=origin, outcome=outcome)
    log.flush()


# ---------------------------------------------------------------------------------------------------------- users


def test_users_are_distinguished_by_client_and_endpoint(key: Key) -> None:
    use(key, times=2)
    use(key, at=NOON + HOUR)
    use(key, user_agent="shop/2", at=NOON + 2 * HOUR)
    use(key, endpoint="orders.retrieve", at=NOON + 3 * HOUR)
    use(key, origin="https://shop.example", at=NOON + 4 * HOUR)
    use(key, "192.0.2.9", at=NOON + 5 * HOUR)
    users = find_users(key.key_id)
    assert [user.last_at for user in users] == [NOON + hours * HOUR for hours in (5, 4, 3, 2, 1)], (
        "expected the latest first"
    )
    oldest = users[-1]
    assert (oldest.count, oldest.first_at, oldest.last_at) == (3, NOON, NOON + HOUR), (
        "expected the sum over all minutes"
    )
    assert (oldest.network, oldest.is_probe) == ("192.0.2.0/24", False)


def test_users_include_marked_probes_and_omit_exposures(key: Key) -> None:
    """Probes are shown, but must not be mistaken for the merchant's requests."""
    for outcome in UseOutcome:
        use(key, outcome=outcome)
    users = find_users(key.key_id)
    assert {user.outcome for user in users} == set(TRACES)
    assert [user.outcome for user in users if user.is_probe] == [PROBED]
    assert {user.outcome for user in find_users(key.key_id, outcomes=SIGNS_OF_LIFE)} == {ALLOWED, DENIED}


def test_users_are_limited_to_the_latest(key: Key) -> None:
    for number in range(4):
        use(key, f"192.0.2.{number}", at=NOON + number * HOUR)
    assert [user.source for user in find_users(key.key_id, limit=2)] == ["192.0.2.3", "192.0.2.2"]


def test_users_beyond_the_maximum_are_the_oldest_and_the_newest(key: Key, monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder of the key cannot hide its steady users behind new clients."""
    for number in range(3):
        use(key, f"192.0.2.{number}", at=NOON + number * HOUR, user_agent=f"shop/{number}")
    assert not has_more_users(key.key_id)
    monkeypatch.setattr(reports, "MAX_READ", 2)
    assert has_more_users(key.key_id)
    assert [user.source for user in find_users(key.key_id)] == ["192.0.2.2", "192.0.2.0"]
    assert [(each.sources, each.first_at) for each in networks_of(read_users(key.key_id))] == [(2, NOON)]
    assert [each.user_agent for each in versions_of(read_users(key.key_id))] == ["shop/2", "shop/0"]


def test_users_that_are_refused_do_not_displace_real_ones(key: Key, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thief's refused attempts are later and more than the uses of the real client."""
    monkeypatch.setattr(reports, "MAX_READ", 2)
    for number in range(3):
        use(key, f"198.51.100.{number}", at=NOON - HOUR, outcome=REFUSED)
    use(key)
    for number in range(3, 6):
        use(key, f"198.51.100.{number}", at=NOON + HOUR, outcome=REFUSED)
    assert [user.source for user in find_users(key.key_id) if user.outcome is ALLOWED] == ["192.0.2.1"]
    assert [user.outcome for user in find_users(key.key_id, limit=1)] == [REFUSED, ALLOWED]
    assert has_more_users(key.key_id)
    assert not has_more_users(key.key_id, outcomes=SIGNS_OF_LIFE)


def test_users_of_another_key_are_omitted(key: Key) -> None:
    use(issue(account())[0])
    assert find_users(key.key_id) == []
    assert list(networks_of(read_users(key.key_id))) == []
    assert versions_of(read_users(key.key_id)) == []


def test_users_are_listed_with_every_field(key: Key) -> None:
    use(key, outcome=PROBED)
    (listed,) = list_users(key.key_id)
    assert listed == {
        "source": "192.0.2.1",
        "network": "192.0.2.0/24",
        "user_agent": "shop/1",
        "endpoint": "orders.create",
        "origin": "",
        "outcome": "probed",
        "is_probe": True,
        "count": 1,
        "first_at": format_timestamp(NOON),
        "last_at": format_timestamp(NOON),
    }


def test_networks_group_the_sources_that_use_the_key(key: Key) -> None:
    use(key, "192.0.2.1", times=2)
    use(key, "192.0.2.200", at=NOON + HOUR, outcome=DENIED)
    use(key, "2001:db8::1", at=NOON - HOUR)
    for outcome in (REFUSED, PROBED, UseOutcome.EXPOSED_IN_URL):
        use(key, "198.51.100.1", outcome=outcome)
    first, second = networks_of(read_users(key.key_id))
    assert (first.network, first.sources, first.count) == ("192.0.2.0/24", 2, 3)
    assert (first.first_at, first.last_at) == (NOON, NOON + HOUR)
    assert second.network == "2001:db8::/64"
    assert networks_of(read_users(key.key_id), limit=1) == [first]


def test_versions_are_grouped_by_origin_and_user_agent(key: Key) -> None:
    shop = "https://shop.example"
    use(key, "192.0.2.1", origin=shop, user_agent="browser")
    use(key, "192.0.2.2", origin=shop, user_agent="browser", at=NOON + HOUR)
    use(key, user_agent="app/1.0", at=NOON - HOUR)
    use(key, user_agent="app/1.1", outcome=PROBED)
    found = versions_of(read_users(key.key_id))
    assert [(each.origin, each.user_agent, each.sources, each.count) for each in found] == [
        (shop, "browser", 2, 2),
        ("", "app/1.0", 1, 1),
    ]


def test_describe_use_names_each_kind_of_request(key: Key) -> None:
    never = describe_use(key)
    assert (never.count, never.first_at, never.last_at, never.denied_at) == (0, None, None, None)
    use(key, times=2)
    for hours, outcome in enumerate((DENIED, REFUSED, PROBED), start=1):
        use(key, outcome=outcome, at=NOON + hours * HOUR)
    described = describe_use(Key.objects.get(pk=key.pk))
    assert (described.count, described.first_at, described.last_at) == (2, NOON, NOON)
    assert (described.denied_at, described.tried_at, described.probed_at) == (
        NOON + HOUR,
        NOON + 2 * HOUR,
        NOON + 3 * HOUR,
    )


# --------------------------------------------------------------------------------------- sources of earlier keys


@pytest.fixture
def replacement(key: Key) -> Key:
    """Return a key of the same credential that was issued 100 days later."""
    other, _ = issue(key.credential.account)
    disable_triggers()
    QuerySet(Key).filter(pk=other.pk).update(credential=key.credential, created_at=key.created_at + 100 * DAY)
    return Key.objects.get(pk=other.pk)


def gap_of(key: Key) -> int | None:
    (source,) = find_sources(key.key_id).values()
    return None if source.longest_gap_seconds is None else source.longest_gap_seconds // 86_400


def test_sources_keep_their_longest_gap_after_a_rotation(key: Key, replacement: Key) -> None:
    """A month-end job that was tried on two days with a new key still comes once a month."""
    for day in (0, 30, 60, 90):
        use(key, at=NOON + day * DAY)
    for day in (101, 103):
        use(replacement, at=NOON + day * DAY)
    assert gap_of(replacement) == 30


def test_sources_have_the_gap_between_two_keys(key: Key, replacement: Key) -> None:
    use(key, at=NOON)
    use(key, at=NOON + 2 * DAY)
    for day in (102, 104):
        use(replacement, at=NOON + day * DAY)
    assert gap_of(replacement) == 100


def test_sources_seen_once_with_the_newest_key_were_seen_once(key: Key, replacement: Key) -> None:
    """Such a source must use the other key or be waived, whatever it did with an earlier key."""
    for day in (0, 30):
        use(key, at=NOON + day * DAY)
    use(replacement, at=NOON + 105 * DAY)
    assert gap_of(replacement) is None


def test_sources_of_a_later_key_or_of_others_change_no_gap(key: Key, replacement: Key) -> None:
    """The habit with a key that is being retired does not depend on its replacement."""
    for day in (0, 3):
        use(key, at=NOON + day * DAY)
    for day in (40, 90):
        use(replacement, at=NOON + day * DAY)
        use(key, "198.51.100.1", at=NOON + day * DAY)
        use(issue(account())[0], at=NOON + day * DAY)
    assert find_sources(key.key_id)["192.0.2.0/24 shop"].longest_gap_seconds == 3 * 86_400


def test_refusal_of_a_source_is_a_use_that_ends_a_gap(key: Key) -> None:
    """Only a source that used the key before has one. A refusal before its last use changes nothing."""
    for day in (0, 2):
        use(key, at=NOON + day * DAY)
    use(key, outcome=REFUSED, at=NOON + DAY)
    (before,) = find_sources(key.key_id).values()
    assert (before.seen_at, before.longest_gap_seconds) == (NOON + 2 * DAY, 2 * 86_400)
    for source in ("192.0.2.1", "198.51.100.1"):
        use(key, source, outcome=REFUSED, at=NOON + 5 * DAY)
    (after,) = find_sources(key.key_id).values()
    assert (after.seen_at, after.longest_gap_seconds) == (NOON + 5 * DAY, 3 * 86_400)


# ------------------------------------------------------------------------------------------------- signs of life


def test_last_sign_of_life_is_the_latest_allowed_or_denied_request(key: Key) -> None:
    """A holder refused for another reason still has the key; a probe is no sign of life."""
    assert find_last(key.key_id) is None
    use(key, at=NOON)
    for outcome in (REFUSED, PROBED, UseOutcome.EXPOSED_IN_URL, UseOutcome.EXPOSED_IN_BROWSER):
        use(key, outcome=outcome, at=NOON + HOUR)
    assert find_last(key.key_id) == NOON
    use(key, outcome=DENIED, at=NOON + timedelta(seconds=7))
    use(key, "192.0.2.2", outcome=DENIED, at=NOON + timedelta(seconds=5))
    assert find_last(key.key_id) == NOON + timedelta(seconds=7), "expected the latest time of the latest minute"
    assert find_last(key.key_id, [ALLOWED]) == NOON


# -------------------------------------------------------------------------------------------------------- attempts


def test_attempts_are_uses_of_a_suspended_key_since_a_time(key: Key) -> None:
    """Earlier uses do not trip, not even in the same minute; a probe never does."""
    since = NOON + timedelta(seconds=30)
    use(key, "192.0.2.1", outcome=REFUSED, at=NOON + timedelta(seconds=29))
    use(key, "192.0.3.1", outcome=REFUSED, at=since, times=2)
    use(key, "192.0.4.1", outcome=REFUSED, at=NOON + HOUR)
    for outcome in (ALLOWED, DENIED, PROBED):
        use(key, "192.0.5.1", outcome=outcome, at=NOON + HOUR)
    assert list_attempts(key.key_id, since) == [
        UseAttempt("192.0.4.0/24 shop", NOON + HOUR, is_known=False),
        UseAttempt("192.0.3.0/24 shop", since, is_known=False),
    ]


def test_attempt_of_a_known_source_before_a_key_was_suspended_does_not_trip(key: Key) -> None:
    use(key, at=NOON)
    use(key, outcome=REFUSED, at=NOON + HOUR)
    use(key, "198.51.100.1", outcome=REFUSED, at=NOON + 3 * HOUR)
    since = NOON + 2 * HOUR
    assert find_attempts(key.key_id, since) == UseAttempts(last_at=NOON + 3 * HOUR, last_known_at=None)
    assert [each.source for each in list_attempts(key.key_id, since)] == ["198.51.100.0/24 shop"]


@pytest.mark.parametrize(("outcome", "is_known"), [(outcome, outcome in SIGNS_OF_LIFE) for outcome in UseOutcome])
def test_source_is_known_after_an_earlier_use(key: Key, outcome: UseOutcome, is_known: bool) -> None:
    """Neither a probe nor an unknown source's earlier attempt makes a source one that may reinstate a key."""
    use(key, "192.0.2.1", outcome=outcome, at=NOON)
    for source in ("192.0.2.1", "198.51.100.1"):
        use(key, source, outcome=REFUSED, at=NOON + HOUR)
    known = {each.source: each.is_known for each in list_attempts(key.key_id, NOON + HOUR)}
    assert known == {"192.0.2.0/24 shop": is_known, "198.51.100.0/24 shop": False}
    assert find_attempts(key.key_id, NOON + HOUR).last_known_at == (NOON + HOUR if is_known else None)
    use(key, "203.0.113.1", outcome=outcome, at=NOON + 2 * HOUR)
    use(key, "203.0.113.1", outcome=REFUSED, at=NOON + 2 * HOUR)
    later = {each.source: each.is_known for each in list_attempts(key.key_id, NOON + 2 * HOUR)}
    assert later == {"203.0.113.0/24 shop": False}, "a use at the same moment must not count"
    assert find_attempts(key.key_id, NOON + 2 * HOUR) == UseAttempts(NOON + 2 * HOUR, None)


@pytest.mark.parametrize("outcome", SIGNS_OF_LIFE)
def test_source_that_was_used_before_and_after_a_time_is_known(key: Key, outcome: UseOutcome) -> None:
    """A verifier may accept the key for seconds after its suspension."""
    since = NOON + HOUR
    use(key, at=NOON)
    use(key, at=since, outcome=outcome)
    use(key, at=since, outcome=REFUSED)
    assert find_attempts(key.key_id, since) == UseAttempts(since, since)


def test_late_use_is_one_after_the_last_that_was_known(key: Key) -> None:
    """A source is known if it used the key before the suspension."""
    known_at, suspended_at = NOON + HOUR, NOON + 2 * HOUR
    for at in (NOON, known_at):
        use(key, at=at)
    assert find_late_uses(key.key_id, known_at, suspended_at) == UseAttempts()
    assert list_late_uses(key.key_id, known_at, suspended_at) == []
    use(key, "198.51.100.1", at=suspended_at)
    assert find_late_uses(key.key_id, known_at, suspended_at) == UseAttempts(suspended_at, None)
    before = suspended_at - timedelta(seconds=1)
    use(key, "203.0.113.1", outcome=DENIED, at=before)
    assert find_late_uses(key.key_id, known_at, suspended_at) == UseAttempts(suspended_at, before)
    assert find_late_uses(key.key_id, known_at, suspended_at, ["203.0.113.0/24 shop"]).last_known_at is None
    unknown = UseAttempt("198.51.100.0/24 shop", suspended_at, is_known=False)
    known = UseAttempt("203.0.113.0/24 shop", before, is_known=True)
    assert list_late_uses(key.key_id, known_at, suspended_at) == [unknown, known]
    assert list_late_uses(key.key_id, known_at, suspended_at, ["203.0.113.0/24 shop"]) == [unknown]


def test_latest_attempts_are_one_of_each_source_and_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither many known sources nor many unknown ones displace the others."""
    monkeypatch.setattr(reports, "_MAX_ATTEMPTS", 2)
    known = [UseAttempt(f"192.0.{number}.0/24 shop", NOON + number * HOUR, is_known=True) for number in range(4)]
    unknown = UseAttempt("198.51.100.0/24 curl", NOON, is_known=False)
    earlier = UseAttempt(known[3].source, NOON, is_known=False)
    assert list_latest([unknown, *known, earlier]) == [known[3], known[2], unknown]


def test_source_is_a_network_with_a_product(key: Key) -> None:
    """Another address of the network and another release are the known source; another product is not."""
    use(key, "192.0.2.1", user_agent="shop/1", at=NOON)
    use(key, "192.0.2.9", user_agent="shop/2", outcome=REFUSED, at=NOON + HOUR)
    assert find_attempts(key.key_id, NOON + HOUR) == UseAttempts(NOON + HOUR, NOON + HOUR)
    use(key, "192.0.2.1", user_agent="curl/8", outcome=REFUSED, at=NOON + 2 * HOUR)
    assert find_attempts(key.key_id, NOON + HOUR) == UseAttempts(NOON + 2 * HOUR, NOON + HOUR)
    assert list_attempts(key.key_id, NOON + HOUR) == [
        UseAttempt("192.0.2.0/24 curl", NOON + 2 * HOUR, is_known=False),
        UseAttempt("192.0.2.0/24 shop", NOON + HOUR, is_known=True),
    ]


def test_clients_that_are_not_distinguished_are_never_known(key: Key) -> None:
    """Beyond the limit of a reporter any client is one of the others, so that a flood cannot reinstate a key."""
    use(key, "", user_agent="", at=NOON)
    use(key, "", user_agent="", outcome=REFUSED, at=NOON + HOUR)
    assert find_attempts(key.key_id, NOON + HOUR) == UseAttempts(NOON + HOUR, None)
    assert list_attempts(key.key_id, NOON + HOUR) == [UseAttempt("others", NOON + HOUR, is_known=False)]
    assert find_attempts(key.key_id, NOON + HOUR, ["others"]) == UseAttempts()


def test_attempts_distinguish_known_from_unknown_sources(key: Key) -> None:
    since = NOON + HOUR
    assert find_attempts(key.key_id, since) == UseAttempts()
    use(key, "192.0.2.1", at=NOON)
    use(key, "192.0.2.1", outcome=REFUSED, at=since)
    use(key, "198.51.100.1", outcome=REFUSED, at=since + HOUR)
    use(key, "198.51.100.2", at=since, outcome=PROBED)
    assert find_attempts(key.key_id, since) == UseAttempts(last_at=since + HOUR, last_known_at=since)
    listed = [(each.source, each.is_known) for each in list_attempts(key.key_id, since)]
    assert listed == [("198.51.100.0/24 shop", False), ("192.0.2.0/24 shop", True)]


def test_first_use_and_attempt_of_one_report_are_of_one_source(key: Key) -> None:
    """The report adds the source and its attempt together."""
    clock = Clock(NOON)
    log = UsageLog(now=clock)
    for outcome in (ALLOWED, REFUSED):
        log.note(key.key_id, source="192.0.2.1", user_agent="shop", endpoint="orders.create", outcome=outcome)
        clock.tick(3_600)
    log.flush()
    assert find_attempts(key.key_id, NOON + HOUR) == UseAttempts(NOON + HOUR, NOON + HOUR)


def test_attempts_reported_out_of_order_keep_the_latest(key: Key) -> None:
    use(key, at=NOON)
    for hours in (2, 1):
        use(key, outcome=REFUSED, at=NOON + hours * HOUR)
        use(key, "198.51.100.1", outcome=REFUSED, at=NOON + (hours + 2) * HOUR)
    assert find_attempts(key.key_id, NOON + HOUR) == UseAttempts(NOON + 4 * HOUR, NOON + 2 * HOUR)


def test_attempts_by_unknown_sources_reinstate_nothing(key: Key) -> None:
    """A finder of the key can raise an alarm with it, but never reactivate it."""
    use(key, "192.0.2.1", at=NOON)
    use(key, "198.51.100.1", outcome=REFUSED, at=NOON + HOUR)
    found = find_attempts(key.key_id, NOON + HOUR)
    assert (found.last_at, found.last_known_at) == (NOON + HOUR, None)


def test_attempts_by_many_unknown_sources_add_no_source(
    key: Key, django_assert_num_queries: Callable[[int], AbstractContextManager[Any]]
) -> None:
    """A flood of a suspended key neither grows the rows that the tripwire reads, nor changes the key's sources."""
    use(key, at=NOON)
    before = find_sources(key.key_id)
    for number in range(60):
        use(key, f"198.51.{number}.1", outcome=REFUSED, at=NOON + HOUR + number * timedelta(minutes=1))
    assert KeySource.objects.count() == 1
    assert find_sources(key.key_id) == before
    with django_assert_num_queries(1):
        assert find_attempts(key.key_id, NOON).last_known_at is None
    listed = list_attempts(key.key_id, NOON)
    assert [each.source for each in listed] == [f"198.51.{number}.0/24 shop" for number in range(59, 9, -1)]


def test_attempts_by_many_sources_of_one_kind_do_not_hide_the_other(key: Key, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither does a fleet hide the finder of a key, nor the reverse."""
    monkeypatch.setattr(reports, "_MAX_ATTEMPTS", 2)
    for number in range(3):
        use(key, f"192.0.{number}.1", at=NOON)
    for number in range(3):
        use(key, f"198.51.{number}.1", outcome=REFUSED, at=NOON + HOUR + timedelta(minutes=number))
        use(key, f"192.0.{number}.1", outcome=REFUSED, at=NOON + 2 * HOUR + timedelta(minutes=number))
    listed = [(each.source.split()[0], each.is_known) for each in list_attempts(key.key_id, NOON + HOUR)]
    assert listed == [
        ("192.0.2.0/24", True),
        ("192.0.1.0/24", True),
        ("198.51.2.0/24", False),
        ("198.51.1.0/24", False),
    ]


def test_attempts_are_the_latest_and_those_of_clients_that_are_not_distinguished(
    key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: the cost does not grow with the sources of a key, and a fleet does not hide the others' attempts."""
    monkeypatch.setattr(reports, "MAX_SOURCES", 2)
    use(key, "", user_agent="", at=NOON)
    use(key, "", user_agent="", outcome=REFUSED, at=NOON + HOUR)
    for number in range(3):
        use(key, f"192.0.{number}.1", at=NOON)
        use(key, f"192.0.{number}.1", outcome=REFUSED, at=NOON + 2 * HOUR + timedelta(minutes=number))
    assert list_attempts(key.key_id, NOON + HOUR) == [
        UseAttempt("192.0.2.0/24 shop", NOON + 2 * HOUR + timedelta(minutes=2), is_known=True),
        UseAttempt("192.0.1.0/24 shop", NOON + 2 * HOUR + timedelta(minutes=1), is_known=True),
        UseAttempt("others", NOON + HOUR, is_known=False),
    ]


def test_unknown_source_is_found_behind_many_newer_clients_of_known_ones(
    key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name may be missing, but never the fact that the key is exposed."""
    use(key, at=NOON)
    use(key, "198.51.100.1", outcome=REFUSED, at=NOON + HOUR)
    for number in range(3):
        use(key, f"192.0.2.{number}", outcome=REFUSED, at=NOON + 2 * HOUR)
    monkeypatch.setattr(reports, "MAX_READ", 2)
    assert list_attempts(key.key_id, NOON + HOUR) == [
        UseAttempt("192.0.2.0/24 shop", NOON + 2 * HOUR, is_known=True),
        UseAttempt("others", NOON + HOUR, is_known=False),
    ]


def test_attempts_before_a_key_was_suspended_are_not_read(
    key: Key, django_assert_num_queries: Callable[[int], AbstractContextManager[Any]]
) -> None:
    """The cost of an engine run does not grow with refused requests from before."""
    for number in range(3):
        use(key, f"192.0.2.{number}", outcome=REFUSED, at=NOON)
    with django_assert_num_queries(1) as made:
        assert find_attempts(key.key_id, NOON + HOUR) == UseAttempts()
    assert "keyvault_keyattempt" in made.captured_queries[0]["sql"]


def test_attempts_of_waived_sources_do_not_count(key: Key) -> None:
    for number in (2, 3):
        use(key, f"192.0.{number}.1", at=NOON)
        use(key, f"192.0.{number}.1", at=NOON + number * HOUR, outcome=REFUSED)
    waived = ["192.0.3.0/24 shop"]
    assert find_attempts(key.key_id, NOON + HOUR, waived) == UseAttempts(NOON + 2 * HOUR, NOON + 2 * HOUR)
    assert find_attempts(key.key_id, NOON + HOUR, [*waived, "192.0.2.0/24 shop"]) == UseAttempts()
    use(key, "192.0.3.1", at=NOON + 4 * HOUR, user_agent="curl", outcome=REFUSED)
    assert find_attempts(key.key_id, NOON + HOUR, waived).last_at == NOON + 4 * HOUR
