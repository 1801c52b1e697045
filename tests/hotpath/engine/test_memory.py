"""The engine's cache is bounded, evicts by subject, leaks nothing, and is used only while its data is fresh."""

import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from keyvault.access.customers import CustomerRecord
from keyvault.access.permissions import Permission
from keyvault.access.principals import Service
from keyvault.access.scopes import EVERYWHERE
from keyvault.access.verification import TokenRecord
from keyvault.domain.environments import Environment
from keyvault.domain.ids import Subject
from keyvault.domain.keys import KeyKind, KeyRecord, KeyState
from keyvault.hotpath.engine.freshness import Freshness
from keyvault.hotpath.engine.memory import Doorkeeper, Memory, NegativeCache

NOW = datetime(2026, 1, 1, tzinfo=UTC)
CAPACITY = 8

KEY = KeyRecord(
    "key", "credential", KeyKind.PRIVATE, Environment.SANDBOX, "acme", b"", 1, KeyState.ACTIVE, None, None, True, True
)
CUSTOMER = CustomerRecord("token", Environment.SANDBOX, "acme", "cust-1", b"", 1, NOW, None)
TOKEN = TokenRecord(
    Service("token", "gateway", "host", frozenset({Permission.KEYS_VERIFY}), EVERYWHERE),
    b"",
    1,
    NOW + timedelta(days=1),
    None,
)

numbers = st.integers(0, 19)


def a_key(number: int) -> KeyRecord:
    """Return a key record: two keys per credential, four per merchant, alternating between the environments."""
    return msgspec.structs.replace(
        KEY,
        key_id=f"key-{number}",
        credential_id=f"credential-{number // 2}",
        merchant_id=f"merchant-{number // 4}",
        environment=list(Environment)[number // 2 % 2],
    )


def about(kind: str, record: KeyRecord) -> str:
    return {
        "key": record.key_id,
        "credential": record.credential_id,
        "account": f"{record.merchant_id}/{record.environment}",
        "merchant": record.merchant_id,
    }[kind]


class Remembering(RuleBasedStateMachine):
    """The cache against a model of what must be evicted and what no index may contain."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory(b"k" * 32, CAPACITY)
        self.gone: set[str] = set()

    @rule(number=numbers)
    def admit(self, number: int) -> None:
        """Admit the key twice, since a full memory admits none at its first request."""
        for _ in range(2):
            self.memory.admit_key(a_key(number))
        assert f"key-{number}" in self.memory.keys.by_id
        self.gone.discard(f"key-{number}")

    @rule(number=numbers)
    def admit_once(self, number: int) -> None:
        known = self.memory.admit_key(a_key(number))
        self.gone.discard(f"key-{number}")
        is_there = self.memory.keys.by_id.get(f"key-{number}") is known
        assert is_there or len(self.memory.keys.by_id) == CAPACITY

    @rule(number=numbers, text=st.binary(max_size=4))
    def prove(self, number: int, text: bytes) -> None:
        known = self.memory.keys.by_id.get(f"key-{number}")
        if known is not None:
            self.memory.keys.bind(known, self.memory.tag(text + b"%d" % number))
            known.is_referenced = True

    @rule(number=numbers, text=st.binary(max_size=4))
    def prove_one_that_was_dropped(self, number: int, text: bytes) -> None:
        known = self.memory.admit_key(a_key(number))
        self.memory.evict([("key", known.identity)])
        self.memory.keys.bind(known, self.memory.tag(text))
        self.gone.add(known.identity)

    @rule(number=numbers, kind=st.sampled_from(["key", "credential", "account", "merchant"]))
    def evict(self, number: int, kind: str) -> None:
        subject = about(kind, a_key(number))
        self.memory.evict([(kind, subject)])
        self.gone |= {a_key(each).key_id for each in range(20) if about(kind, a_key(each)) == subject}

    @rule(kind=st.sampled_from(["endpoint", "limit"]))
    def evict_what_no_record_is_made_of(self, kind: str) -> None:
        before = dict(self.memory.keys.by_id)
        self.memory.evict([(kind, "key-1")])
        assert self.memory.keys.by_id == before

    @rule()
    def evict_of_an_unknown_kind(self) -> None:
        self.memory.evict([("of a newer release", "x")])
        assert not self.memory.keys.by_id

    @rule()
    def clear(self) -> None:
        self.memory.clear()

    @invariant()
    def what_was_evicted_is_in_no_tier(self) -> None:
        keys = self.memory.keys
        assert self.gone.isdisjoint(keys.by_id)
        assert self.gone.isdisjoint(known.identity for known in keys.by_tag.values())

    @invariant()
    def tags_lead_to_what_is_there_and_to_nothing_else(self) -> None:
        keys = self.memory.keys
        assert len(keys.by_id) <= CAPACITY
        for tag, known in keys.by_tag.items():
            assert keys.by_id[known.identity] is known
            assert known.tag == tag

    @invariant()
    def indexes_name_what_is_there_and_nothing_else(self) -> None:
        for index, kind in ((self.memory._by_credential, "credential"), (self.memory._by_account, "account")):
            expected: dict[str, set[str]] = {}
            for known in self.memory.keys.by_id.values():
                expected.setdefault(about(kind, known.record), set()).add(known.identity)
            assert {name: set(identities) for name, identities in index.items()} == expected
            assert all(len(set(identities)) == len(identities) for identities in index.values())


TestMemory = Remembering.TestCase


def test_memory_flooded_with_other_kinds_stays_bounded() -> None:
    memory = Memory(b"k" * 32, CAPACITY)
    for number in range(50 * CAPACITY):
        memory.admit_key(a_key(number))
        memory.admit_customer(replace(CUSTOMER, token_id=f"token-{number}"))
        service = replace(TOKEN.service, token_id=f"token-{number}")
        memory.tokens.bind(memory.admit_token(replace(TOKEN, service=service)), memory.tag(b"%d" % number))
    for shelf in (memory.keys, memory.customers, memory.tokens):
        assert len(shelf.by_id) == CAPACITY
        assert len(shelf.by_tag) <= CAPACITY


def full(capacity: int = CAPACITY) -> Memory:
    memory = Memory(b"k" * 32, capacity)
    for number in range(capacity):
        memory.admit_key(a_key(number))
    return memory


def test_full_memory_admits_repeated_keys_and_evicts_unused_ones() -> None:
    """Guarantee: a flood with one client's keys evicts only keys that are not in use."""
    memory = full()
    for number in range(CAPACITY, 4 * CAPACITY):
        memory.keys.by_id["key-3"].is_referenced = True
        for _ in range(2):
            known = memory.admit_key(a_key(number))
        assert memory.keys.by_id[f"key-{number}"] is known
    assert "key-3" in memory.keys.by_id
    assert "key-2" not in memory.keys.by_id


def test_memory_that_is_full_answers_a_single_request_without_caching_it() -> None:
    memory = full()
    before = set(memory.keys.by_id)
    known = memory.admit_key(a_key(CAPACITY))
    memory.keys.bind(known, memory.tag(b"text"))
    assert known.record == a_key(CAPACITY)
    assert known.deadline == float("inf")  # good for the question that it was read for
    assert set(memory.keys.by_id) == before
    assert not memory.keys.by_tag
    assert f"credential-{CAPACITY // 2}" not in memory._by_credential


def test_memory_that_is_full_updates_a_cached_record() -> None:
    memory = full()
    record = msgspec.structs.replace(a_key(3), pepper_version=2)
    assert memory.admit_key(record).record == record
    assert memory.keys.by_id["key-3"].record == record
    assert len(memory.keys.by_id) == CAPACITY


def test_memory_that_is_full_keeps_most_keys_during_a_scan() -> None:
    """A scan of ten times the capacity evicts some keys, by false positives of the doorkeeper, but not all."""
    memory = full(10_000)
    before = set(memory.keys.by_id)
    for number in range(10_000, 110_000):
        memory.admit_key(a_key(number))
    assert len(before & memory.keys.by_id.keys()) >= 5_000


def test_doorkeeper_recognizes_recent_entries_and_hardly_any_other() -> None:
    """Guarantee: it recognizes each of the last 1,000 entries, and none permanently."""
    doorkeeper = Doorkeeper(1_000)
    false_positives = sum(doorkeeper.was_seen(str(number)) for number in range(50_000))
    assert false_positives < 50_000 // 10
    for number in range(49_001, 50_000):
        assert doorkeeper.was_seen(str(number))
    assert sum(doorkeeper.was_seen(str(number)) for number in range(10_000)) < 1_000


@given(st.integers(1, 400), st.lists(st.integers(0, 500), max_size=800))
def test_doorkeeper_recognizes_as_many_recent_entries_as_fit(most: int, comers: list[int]) -> None:
    doorkeeper = Doorkeeper(most)
    lately: list[int] = []
    for comer in comers:
        assert doorkeeper.was_seen(str(comer)) or comer not in lately
        lately = [*lately, comer][-max(most, 256) :]


def test_doorkeeper_continues_after_its_counter_wraps_around() -> None:
    doorkeeper = Doorkeeper(1)
    for number in range(3 * 256 * 256):
        doorkeeper.was_seen(str(number))
        if number % 5_000 == 0:
            assert doorkeeper.was_seen(str(number))


@pytest.mark.parametrize("most", [1, 100_000, 1_000_000])
def test_doorkeeper_takes_little_memory(most: int) -> None:
    doorkeeper = Doorkeeper(most)
    assert not doorkeeper._slots
    doorkeeper.was_seen("an entry")
    assert len(doorkeeper._slots) <= max(65_536, 64 * most)


def test_memory_unknown_ids_are_bounded_and_short_lived() -> None:
    absent = NegativeCache(CAPACITY, 1.0)
    for number in range(5 * CAPACITY):
        absent.put("key", str(number), 10.0)
    assert len(absent) == CAPACITY
    last = str(5 * CAPACITY - 1)
    assert absent.has("key", last, 10.9)
    assert not absent.has("key", last, 11.0)
    assert not absent.has("service_token", last, 10.0)
    absent.drop(("key", last))
    assert not absent.has("key", last, 10.0)


@pytest.mark.parametrize("subject", [("key", "1"), ("customer_token", "1"), ("service_token", "1")])
def test_memory_absence_is_evicted_with_its_subject(subject: Subject) -> None:
    memory = Memory(b"k" * 32, CAPACITY)
    memory.absent.put(*subject, 0.0)
    memory.evict([subject])
    assert len(memory.absent) == 0


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_memory_tag_is_of_the_whole_string_and_of_this_process_alone(one: bytes, other: bytes) -> None:
    """Guarantee: a tag is not the string, and a leaked tag finds nothing in another process."""
    mine, theirs = Memory(b"m" * 32, 1), Memory(b"t" * 32, 1)
    assert (mine.tag(one) == mine.tag(other)) == (one == other)
    assert mine.tag(one) != theirs.tag(one)
    assert mine.tag(one) != one
    assert len(mine.tag(one)) == 32


def test_memory_takes_no_more_than_a_kilobyte_for_a_key() -> None:
    """Measured with everything that one more key adds: record, tag, and its places in the indexes."""
    import tracemalloc

    memory = Memory(b"k" * 32, 10_000)
    records = [a_key(number) for number in range(2_000)]
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number, record in enumerate(records):
            memory.keys.bind(memory.admit_key(msgspec.structs.replace(record)), memory.tag(b"%d" % number))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / len(records) < 1024
    assert sys.getsizeof(memory.keys) < 1024


# --- freshness --------------------------------------------------------------------------------------------


def fresh(at: float = 100.0, wall: float = 1_000.0) -> Freshness:
    freshness = Freshness(2.0)
    freshness.confirm(at, wall)
    return freshness


def test_freshness_before_the_first_confirmation_is_false() -> None:
    assert not Freshness(2.0).is_fresh(0.0, 0.0)
    assert Freshness(2.0).age_seconds(5.0) == float("inf")


def test_freshness_lasts_up_to_its_bound_of_monotonic_time() -> None:
    freshness = fresh()
    assert freshness.is_fresh(101.99, 1_001.99)
    assert not freshness.is_fresh(102.0, 1_002.0)
    assert freshness.age_seconds(101.5) == 1.5


@pytest.mark.parametrize("step", [-3600.0, -0.6, 0.6, 3600.0])
def test_freshness_a_step_of_the_wall_clock_counts_as_unconfirmed_until_confirmed_again(step: float) -> None:
    """Guarantee: after a step of the clock or a sleep of the machine, cached data is not used until confirmed."""
    freshness = fresh()
    assert not freshness.is_fresh(100.1, 1_000.1 + step)
    freshness.confirm(100.2, 1_000.2 + step)
    assert freshness.is_fresh(100.3, 1_000.3 + step)


def test_freshness_a_slewed_clock_is_no_step() -> None:
    assert fresh().is_fresh(101.0, 1_001.3)


def test_freshness_confirmation_at_minus_infinity_revokes_every_earlier_one() -> None:
    freshness = fresh()
    freshness.confirm(float("-inf"), 1_000.0)
    assert not freshness.is_fresh(100.1, 1_000.1)
