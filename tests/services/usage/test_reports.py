"""Reports of who uses a key, for operators and for the tripwire of a rotation."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db.models import QuerySet

from keyvault.domain.timestamps import format_timestamp
from keyvault.models import Key
from keyvault.models.usage import SIGNS_OF_LIFE, UseOutcome
from keyvault.services.usage import reports
from keyvault.services.usage.recorder import UsageLog
from keyvault.services.usage.reports import (
    TRACES,
    UseAttempts,
    describe_use,
    find_attempts,
    find_last,
    find_sources,
    find_users,
    has_more_users,
    list_attempts,
    list_networks,
    list_users,
    list_versions,
)
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
    assert [(each.sources, each.first_at) for each in list_networks(key.key_id)] == [(2, NOON)]
    assert [each.user_agent for each in list_versions(key.key_id)] == ["shop/2", "shop/0"]


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
    assert list(list_networks(key.key_id)) == []
    assert list_versions(key.key_id) == []


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
    first, second = list_networks(key.key_id)
    assert (first.network, first.sources, first.count) == ("192.0.2.0/24", 2, 3)
    assert (first.first_at, first.last_at) == (NOON, NOON + HOUR)
    assert second.network == "2001:db8::/64"
    assert list_networks(key.key_id, limit=1) == [first]


def test_versions_are_grouped_by_origin_and_user_agent(key: Key) -> None:
    shop = "https://shop.example"
    use(key, "192.0.2.1", origin=shop, user_agent="browser")
    use(key, "192.0.2.2", origin=shop, user_agent="browser", at=NOON + HOUR)
    use(key, user_agent="app/1.0", at=NOON - HOUR)
    use(key, user_agent="app/1.1", outcome=PROBED)
    found = list_versions(key.key_id)
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
    described = describe_use(key)
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
    use(key, "192.0.2.2", outcome=REFUSED, at=since, times=2)
    use(key, "192.0.2.3", outcome=REFUSED, at=NOON + HOUR)
    for outcome in (ALLOWED, DENIED, PROBED):
        use(key, "192.0.2.4", outcome=outcome, at=NOON + HOUR)
    found = list_attempts(key.key_id, since)
    assert [(each.source, each.count, each.last_at) for each in found] == [
        ("192.0.2.3", 1, NOON + HOUR),
        ("192.0.2.2", 2, since),
    ]


@pytest.mark.parametrize(("outcome", "is_known"), [(outcome, outcome in SIGNS_OF_LIFE) for outcome in UseOutcome])
def test_source_is_known_after_an_earlier_use(key: Key, outcome: UseOutcome, is_known: bool) -> None:
    """Neither a probe nor an unknown source's earlier attempt makes a source one that may reinstate a key."""
    use(key, "192.0.2.1", outcome=outcome, at=NOON)
    for source in ("192.0.2.1", "192.0.2.2"):
        use(key, source, outcome=REFUSED, at=NOON + HOUR)
    known = {each.source: each.is_known for each in list_attempts(key.key_id, NOON + HOUR)}
    assert known == {"192.0.2.1": is_known, "192.0.2.2": False}
    use(key, "192.0.2.3", outcome=outcome, at=NOON + 2 * HOUR)
    use(key, "192.0.2.3", outcome=REFUSED, at=NOON + 2 * HOUR)
    later = {each.source: each.is_known for each in list_attempts(key.key_id, NOON + 2 * HOUR)}
    assert later == {"192.0.2.3": False}, "a use at the same moment must not count"


def test_attempts_distinguish_known_from_unknown_sources(key: Key) -> None:
    since = NOON + HOUR
    assert find_attempts(key.key_id, since) == UseAttempts()
    use(key, "192.0.2.1", at=NOON)
    use(key, "192.0.2.1", outcome=REFUSED, at=since)
    use(key, "198.51.100.1", outcome=REFUSED, at=since + HOUR)
    use(key, "198.51.100.2", at=since, outcome=PROBED)
    assert find_attempts(key.key_id, since) == UseAttempts(last_at=since + HOUR, last_known_at=since)
    listed = [(each.source, each.is_known) for each in list_attempts(key.key_id, since)]
    assert listed == [("198.51.100.1", False), ("192.0.2.1", True)]


def test_attempts_by_unknown_sources_reinstate_nothing(key: Key) -> None:
    """A finder of the key can raise an alarm with it, but never reactivate it."""
    use(key, "192.0.2.1", at=NOON)
    use(key, "198.51.100.1", outcome=REFUSED, at=NOON + HOUR)
    found = find_attempts(key.key_id, NOON + HOUR)
    assert (found.last_at, found.last_known_at) == (NOON + HOUR, None)


def test_attempts_of_many_sources_take_a_fixed_number_of_queries(
    key: Key, django_assert_num_queries: Callable[[int], AbstractContextManager[None]]
) -> None:
    """Every shopper tries a retired public key."""
    for number in range(60):
        use(key, f"192.0.2.{number}", outcome=REFUSED, at=NOON + HOUR)
    with django_assert_num_queries(4):
        find_attempts(key.key_id, NOON)
    assert len(list_attempts(key.key_id, NOON)) == 50


def test_attempts_before_a_key_was_suspended_are_not_read(
    key: Key, django_assert_num_queries: Callable[[int], AbstractContextManager[Any]]
) -> None:
    """The cost of an engine run does not grow with refused requests from before."""
    for number in range(3):
        use(key, f"192.0.2.{number}", outcome=REFUSED, at=NOON)
    with django_assert_num_queries(1) as made:
        assert find_attempts(key.key_id, NOON + HOUR) == UseAttempts()
    assert "keyvault_keyattempt" in made.captured_queries[0]["sql"]


def test_attempts_of_waived_clients_beyond_the_bound_count(key: Key, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tripwire ignores no client that it has not read."""
    for number in range(3):
        use(key, f"192.0.2.{number}", at=NOON + number * HOUR, outcome=REFUSED)
    waived = ["192.0.2.0/24 shop"]
    assert find_attempts(key.key_id, NOON, waived) == UseAttempts()
    monkeypatch.setattr(reports, "_MAX_CLIENTS", 2)
    assert find_attempts(key.key_id, NOON, waived).last_at == NOON + 2 * HOUR
