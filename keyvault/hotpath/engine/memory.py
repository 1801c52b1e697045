"""Bounded in-memory cache: records by id, and by a tag of the full string that proved them.

A tag is the SHA-256 of a random key of this process, which is stored nowhere, and the string. Tags in a memory dump
reveal no string, and no string is used as a dictionary key. HMAC would only protect tags that an attacker knows against
extension, and no tag leaves the process.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Final, Generic, TypeVar

from keyvault.access.customers import CustomerRecord
from keyvault.access.verification import TokenRecord
from keyvault.domain.ids import Subject
from keyvault.domain.keys import DEAD_STATES, KeyRecord

TAG_KEY_BYTES: Final = 64
"""Length of a tag's key: one block of SHA-256, which is hashed once and not for each tag."""

_NEVER = float("inf")
_EVICTED = float("-inf")
"""Deadline of an evicted entry, so that code which still references the entry finds it expired."""

R = TypeVar("R", KeyRecord, CustomerRecord, TokenRecord)


class CacheEntry(Generic[R]):
    """A cached record.

    `deadline` is its expiry in epoch seconds, checked on each read. `tag` belongs to the string that proved it.
    `derived` holds what the engine derived from it: an `EligibleKey`, or a `Caller`. `account` is set for a cached key.
    """

    __slots__ = ("account", "deadline", "derived", "identity", "is_referenced", "record", "tag")

    def __init__(self, identity: str, record: R, deadline: float) -> None:
        self.identity = identity
        self.account = ""
        self.record: R = record
        self.deadline = deadline
        self.tag: bytes | None = None
        self.is_referenced = False
        self.derived: Any = None


def key_entry(record: KeyRecord) -> CacheEntry[KeyRecord]:
    """Return the entry of a key. A terminated key never expires: its denial is final."""
    is_terminated = record.state in DEAD_STATES
    expires_at = None if is_terminated else record.expires_at
    deadline = _NEVER if expires_at is None else expires_at.timestamp()
    return CacheEntry(record.key_id, record, deadline)


class Doorkeeper:
    """Admission filter, as in TinyLFU (Einziger, Friedman, Manes: ACM Transactions on Storage 13, 4, 2017).

    It reports whether an id was seen recently: among at least the last `most` ids, and at most twice as many. False
    positives are possible: several ids share one byte. The byte holds the number of the period in which one of them was
    last seen. A period ends after `most` new ids. Period numbers repeat after _PERIODS periods, so that an old byte can
    be mistaken for a recent one.
    """

    __slots__ = ("_before", "_mask", "_now", "_period_length", "_remaining", "_slots")

    def __init__(self, most: int) -> None:
        self._period_length = self._remaining = max(most, _MIN_IDS)
        self._mask = max(_MIN_SLOTS, 1 << (_SLOTS_PER_ID * most - 1).bit_length()) - 1
        self._slots = bytearray()
        """Allocated on first use: a cache that never fills does not need these megabytes."""
        self._before, self._now = _PERIODS, 1

    def was_seen(self, identity: str | bytes) -> bool:
        """Record the id and return whether it was seen before."""
        if not self._slots:
            self._slots = bytearray(self._mask + 1)
        slot = hash(identity) & self._mask  # str and bytes hashes are randomized per process
        last, now = self._slots[slot], self._now
        if last == now:
            return True
        self._slots[slot] = now
        is_repeated = last == self._before
        self._remaining -= 1
        if not self._remaining:
            self._before, self._now, self._remaining = now, now % _PERIODS + 1, self._period_length
        return is_repeated


class RecordCache(Generic[R]):
    """At most `capacity` entries of one kind, with an admission filter and second-chance eviction.

    A full cache admits only ids seen before, so that ids requested once do not evict popular ones. It evicts the oldest
    entry whose `is_referenced` is not set; readers of `by_id` and `by_tag` set that flag.
    """

    __slots__ = ("_capacity", "_doorkeeper", "_on_drop", "by_id", "by_tag")

    def __init__(self, capacity: int, on_drop: Callable[[CacheEntry[R]], None] | None = None) -> None:
        self._capacity = capacity
        self._doorkeeper = Doorkeeper(capacity)
        self._on_drop: Callable[[CacheEntry[R]], None] | None = on_drop
        self.by_id: OrderedDict[str, CacheEntry[R]] = OrderedDict()
        self.by_tag: dict[bytes, CacheEntry[R]] = {}

    def put(self, entry: CacheEntry[R]) -> bool:
        """Cache the entry and return whether it was admitted."""
        by_id = self.by_id
        if entry.identity in by_id:
            self.drop(entry.identity)
        elif len(by_id) >= self._capacity and not self._doorkeeper.was_seen(entry.identity):
            return False
        chances = _SECOND_CHANCES
        while len(by_id) >= self._capacity:
            # `next(iter(...))` of a dict would scan all deleted slots.
            _, oldest = by_id.popitem(last=False)
            if oldest.is_referenced and chances:
                chances -= 1
                oldest.is_referenced = False
                by_id[oldest.identity] = oldest
            else:
                self._forget(oldest)
        by_id[entry.identity] = entry
        return True

    def bind(self, entry: CacheEntry[R], tag: bytes) -> None:
        """Associate a cached entry with the tag of the string that proves it. Without effect on an evicted entry."""
        if self.by_id.get(entry.identity) is not entry:
            return
        if entry.tag is not None:
            self.by_tag.pop(entry.tag, None)
        entry.tag = tag
        self.by_tag[tag] = entry

    def drop(self, identity: str) -> None:
        entry = self.by_id.pop(identity, None)
        if entry is not None:
            self._forget(entry)

    def clear(self) -> None:
        for entry in self.by_id.values():
            entry.deadline = _EVICTED
        self.by_id.clear()
        self.by_tag.clear()

    def _forget(self, entry: CacheEntry[R]) -> None:
        entry.deadline = _EVICTED
        if entry.tag is not None:
            self.by_tag.pop(entry.tag, None)
        if self._on_drop is not None:
            self._on_drop(entry)


class NegativeCache:
    """Ids that were looked up and do not exist, for a short time. Bounded; the oldest entry is evicted first."""

    __slots__ = ("_capacity", "_seconds", "until")

    def __init__(self, capacity: int, seconds: float) -> None:
        self._capacity = capacity
        self._seconds = seconds
        self.until: OrderedDict[tuple[str, str], float] = OrderedDict()

    def __len__(self) -> int:
        return len(self.until)

    def put(self, kind: str, identity: str, now: float) -> None:
        """Record that an id does not exist. `now` is in monotonic seconds."""
        self.until.pop((kind, identity), None)
        if len(self.until) >= self._capacity:
            self.until.popitem(last=False)
        self.until[kind, identity] = now + self._seconds

    def has(self, kind: str, identity: str, now: float) -> bool:
        return self.until.get((kind, identity), 0.0) > now

    def drop(self, subject: Subject) -> None:
        self.until.pop(subject, None)

    def clear(self) -> None:
        self.until.clear()


class Memory:
    """All caches of a process, and the index from subjects of changes to records."""

    def __init__(self, tag_key: bytes, capacity: int) -> None:
        self.new_tag = hashlib.sha256(tag_key).copy
        """For hot loops: `update` the new hash with the text and take its digest."""
        self._by_credential: dict[str, tuple[str, ...]] = {}
        """Usually one key id; two during a rotation."""
        self._by_account: dict[str, set[str]] = {}
        self.keys: RecordCache[KeyRecord] = RecordCache(capacity, self._unindex)
        self.customers: RecordCache[CustomerRecord] = RecordCache(capacity)
        self.tokens: RecordCache[TokenRecord] = RecordCache(capacity)
        self.granted: OrderedDict[bytes, Any] = OrderedDict()
        """Cached grants of the engine, by the tag of the whole request."""
        self.denied: OrderedDict[bytes, Any] = OrderedDict()
        """Cached denials of terminated keys, by the tag of the whole request."""
        self._max_granted = min(capacity, _MAX_GRANTED)
        self._grant_doorkeeper = Doorkeeper(self._max_granted)
        self._max_denied = min(capacity, _MAX_DENIED)
        self.absent = NegativeCache(_MAX_ABSENT, _ABSENT_SECONDS)

    def tag(self, text: bytes) -> bytes:
        mac = self.new_tag()
        mac.update(text)
        return mac.digest()

    def admit_key(self, record: KeyRecord) -> CacheEntry[KeyRecord]:
        """Cache a key and return its entry. The entry serves this request even if a full cache does not admit it."""
        entry = key_entry(record)
        if not self.keys.put(entry):
            return entry
        entry.account = f"{record.merchant_id}/{record.environment}"
        key_id, credential_id = record.key_id, record.credential_id
        held = self._by_credential.get(credential_id)
        self._by_credential[credential_id] = (key_id,) if held is None else (*held, key_id)
        listed = self._by_account.get(entry.account)
        if listed is None:
            self._by_account[entry.account] = {key_id}
        else:
            listed.add(key_id)
        return entry

    def admit_customer(self, record: CustomerRecord) -> CacheEntry[CustomerRecord]:
        entry = CacheEntry(record.token_id, record, record.expires_at.timestamp())
        self.customers.put(entry)
        return entry

    def admit_token(self, record: TokenRecord) -> CacheEntry[TokenRecord]:
        entry = CacheEntry(record.service.token_id, record, record.expires_at.timestamp())
        self.tokens.put(entry)
        return entry

    def has_room_for(self, tag: bytes) -> bool:
        """Return whether a grant for this tag should be cached. A full cache admits only repeated requests."""
        is_there = tag in self.granted or len(self.granted) < self._max_granted
        return is_there or self._grant_doorkeeper.was_seen(tag)

    def cache_grant(self, tag: bytes, cached: Any) -> None:
        """Cache a grant. The oldest one is evicted first; deciding it again costs microseconds."""
        _put(self.granted, tag, cached, self._max_granted)

    def cache_denial(self, tag: bytes, denied: Any) -> None:
        """Cache a denial of a terminated key. The oldest one is evicted first."""
        _put(self.denied, tag, denied, self._max_denied)

    def evict(self, subjects: Iterable[Subject]) -> None:
        """Evict every entry that depends on these subjects."""
        for subject in subjects:
            kind, identity = subject
            self.absent.drop(subject)
            match kind:
                case "key":
                    self.keys.drop(identity)
                case "customer_token":
                    self.customers.drop(identity)
                case "service_token":
                    self.tokens.drop(identity)
                case "credential":
                    self._drop_all(self._by_credential.get(identity))
                case "account":
                    self._drop_all(self._by_account.get(identity))
                case "merchant":
                    for account in [name for name in self._by_account if name.partition("/")[0] == identity]:
                        self._drop_all(self._by_account.get(account))
                case _:
                    # Subjects in RULES affect no record. A newer release may send an unknown kind, which may affect
                    # any.
                    if kind not in RULES:
                        self.clear()

    def clear(self) -> None:
        for cache in (self.keys, self.customers, self.tokens):
            cache.clear()
        self.granted.clear()
        self.denied.clear()
        self.absent.clear()
        self._by_credential.clear()
        self._by_account.clear()

    def _drop_all(self, identities: Iterable[str] | None) -> None:
        for identity in list(identities or ()):
            self.keys.drop(identity)

    def _unindex(self, entry: CacheEntry[KeyRecord]) -> None:
        record = entry.record
        key_id, credential_id, account = record.key_id, record.credential_id, entry.account
        held = self._by_credential.pop(credential_id, ())
        if held != (key_id,) and (others := tuple([other for other in held if other != key_id])):
            self._by_credential[credential_id] = others
        listed = self._by_account.get(account)
        if listed is not None:
            listed.discard(key_id)
            if not listed:
                del self._by_account[account]


def _put(entries: OrderedDict[bytes, Any], tag: bytes, value: Any, most: int) -> None:
    if len(entries) >= most and tag not in entries:
        entries.popitem(last=False)
    entries[tag] = value


RULES: Final = frozenset({"endpoint", "limit"})
"""Kinds of subjects that change the policy snapshot and no record."""

_SECOND_CHANCES: Final = 64
"""Maximum number of second chances in one `put`, which blocks other threads."""

_MIN_IDS: Final = 256
_MIN_SLOTS: Final = 65_536
_SLOTS_PER_ID: Final = 32
"""Size of a doorkeeper, in bytes per expected id. A larger table has fewer collisions."""
_PERIODS: Final = 255

_MAX_GRANTED: Final = 65_536
_MAX_DENIED: Final = 4_096
_MAX_ABSENT: Final = 10_000
_ABSENT_SECONDS: Final = 1.0
