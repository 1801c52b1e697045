"""Decisions from memory.

**Guarantee.** The memory authorizes a request only if the service would, and never by data older than a confirmed
change: it is used only while the change feed is current, and the reader confirms a change after the memory has it.

The memory knows a key string after the service has verified it. It then has HMAC-SHA256(random key of the process,
string) and the key id; neither digests nor peppers leave the service. It only authorizes. The service decides
everything else: whatever it may deny, customer access tokens, private keys with an Origin, and unknown keys and paths.
"""

import hmac
import secrets
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from threading import Lock
from typing import Any

from keyvault.access.catalog import Endpoint
from keyvault.access.decision import Grant, decide
from keyvault.access.principals import KeyHolder
from keyvault.access.rules import EndpointRequest, EndpointRule
from keyvault.access.verification import find_exposed, judge_record
from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind, KeyRecord
from keyvault_client.decisions import (
    Decision,
    Identity,
    Question,
    are_contexts_acceptable,
    are_headers_acceptable,
    canonical_address,
    is_path_acceptable,
)
from keyvault_client.keystrings import as_plaintext
from keyvault_client.local.leases import LeaseKey, LocalLeases
from keyvault_client.local.records import Rules, parse_record
from keyvault_client.local.uses import LocalReport, LocalUses

MAX_KEY_STRINGS = 50_000
"""Maximum key strings that are known. Beyond it the oldest is dropped."""

MAX_PATHS = 10_000
"""Maximum methods with paths whose endpoint is known. Beyond it all are dropped."""

_MAX_GRANTS = 1_000
"""Maximum grants that are kept for one key. Beyond it all are dropped."""

# The time that a suspended machine sleeps counts. Not every system has such a clock.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def clock() -> float:
    """Return a monotonic time, in seconds."""
    return time.clock_gettime(_CLOCK)


# Parsing takes longer than a decision.
_parse_address = lru_cache(maxsize=4096)(canonical_address)

_CLOCK_TOLERANCE = 5.0
"""Maximum difference to the service's time that is not corrected, in seconds.

The service accepts reports that are 10 seconds ahead.
"""

_GrantKey = tuple[str, bool, str | None, str | None, str | None, str | None]
"""Endpoint, whether there is an Origin, path, client address, merchant and store: None where they do not matter."""


@dataclass(frozen=True, slots=True)
class _GrantedUse:
    """An authorization. `lease`: pays for it with a token; None: it costs none. `rules`: the rules it follows."""

    decision: Decision
    lease: LeaseKey | None
    rules: Rules


@dataclass(slots=True, eq=False)
class _LocalKey:
    """A key that the feed keeps up to date. `grants`: by what they depend on. `expires_at`: Unix time, in seconds."""

    record: KeyRecord
    expires_at: float
    grants: dict[_GrantKey, _GrantedUse]


@dataclass(frozen=True, slots=True)
class LocalMiss:
    """The service must decide. `cost`: tokens to ask for. `lease`: where the unused ones belong."""

    digest: bytes | None
    cost: int = 1
    lease: LeaseKey | None = None


class LocalMemory:
    """The keys, rules and leases that one process knows. Threads may share it."""

    def __init__(self, environment: str) -> None:
        self._environment = Environment(environment)
        self._process_key = secrets.token_bytes(32)
        self._lock = Lock()
        self._key_ids: dict[bytes, str] = {}
        self._held: dict[str, _LocalKey] = {}
        self._groups: dict[tuple[str, str], set[str]] = defaultdict(set)
        self._wanted: set[str] = set()
        self._changed_while_fetching: set[str] | None = None
        self._rules: Rules | None = None
        self._rules_version = 0
        self._endpoints: dict[tuple[str, str], Endpoint] = {}
        self._leases = LocalLeases()
        self._current_until = 0.0
        self._closed = False
        # Unix time minus `clock()`, in seconds.
        self._epoch = time.time() - clock()
        self._uses = LocalUses(self._unix_time())

    # --- deciding ---------------------------------------------------------------------------------------------

    @property
    def is_current(self) -> bool:
        """Whether the change feed is current, so that the memory may be used now."""
        return clock() < self._current_until

    def decide(self, question: Question) -> Decision | LocalMiss:
        """Authorize from memory and count the use, or return what the service must decide."""
        if question.key is None or question.customer_token is not None or question.cost not in {None, 1}:
            return LocalMiss(None)
        client_ip = "" if question.client_ip is None else _parse_address(question.client_ip)
        user_agent, origin = question.user_agent or "", question.origin or ""
        if client_ip is None or not are_headers_acceptable(user_agent, origin):
            return LocalMiss(None)
        text = as_plaintext(question.key).reveal().encode(errors="surrogatepass")
        digest = hmac.digest(self._process_key, text, "sha256")
        now = clock()
        held = self._held.get(self._key_ids.get(digest, ""))
        rules = self._rules
        if held is None or rules is None or now >= self._current_until:
            return LocalMiss(digest)
        endpoint = self._find_endpoint(question, rules)
        at = now + self._epoch
        if endpoint is None or at >= held.expires_at:
            return LocalMiss(digest)
        granted = _grant(held, rules, endpoint, question, at)
        if granted is None:
            return LocalMiss(digest)
        use = (held.record.key_id, endpoint.name, client_ip, user_agent, origin)
        with self._lock:
            # The record or the rules may have changed, or the memory been closed, before the lock was taken.
            if self._held.get(held.record.key_id) is not held or self._rules is not rules:
                return LocalMiss(digest)
            if now >= self._current_until or not self._uses.has_room:
                return LocalMiss(digest)
            if granted.lease is not None and not self._leases.take(granted.lease, now):
                smallest = rules.smallest_count(held.record, endpoint)
                return LocalMiss(digest, self._leases.next_batch(granted.lease, smallest, now), granted.lease)
            # Take the time within the lock: a report may say that it has every use until its own time.
            self._uses.count(use, self._unix_time())
        return granted.decision

    def learn(self, miss: LocalMiss, decision: Decision) -> None:
        """Keep what an authorization by the service proves: that a string is a key's, and that tokens were spent."""
        if decision.identity is None:
            return
        key_id = decision.identity.key_id
        with self._lock:
            if miss.lease is not None:
                self._leases.add(miss.lease, miss.cost - 1, clock())
            if miss.digest is None:
                return
            if miss.digest not in self._key_ids and len(self._key_ids) >= MAX_KEY_STRINGS:
                self._drop(self._key_ids.pop(next(iter(self._key_ids))))
            self._key_ids[miss.digest] = key_id
            if key_id not in self._held:
                self._wanted.add(key_id)

    def _unix_time(self) -> float:
        """Return the service's time, as far as it is known: keys expire by it, and uses are reported in it."""
        return clock() + self._epoch

    def _find_endpoint(self, question: Question, rules: Rules) -> Endpoint | None:
        """Return the endpoint, or None for an unknown one, and for a URL that is not valid or may contain a key."""
        if question.endpoint is not None:
            if question.method is not None or question.path is not None:
                return None
            found = rules.catalog.find(question.endpoint)
            return found if isinstance(found, Endpoint) else None
        if question.method is None or question.path is None:
            return None
        line = (question.method, question.path)
        known = self._endpoints.get(line)
        if known is not None:
            return known
        if not is_path_acceptable(question.path) or find_exposed(question.path) is not None:
            return None
        endpoint = rules.catalog.match(question.method, question.path, f"/{self._environment}")
        if not isinstance(endpoint, Endpoint):
            return None
        with self._lock:
            if self._rules is rules:
                if len(self._endpoints) >= MAX_PATHS:
                    self._endpoints.clear()
                self._endpoints[line] = endpoint
        return endpoint

    # --- reporting uses ---------------------------------------------------------------------------------------

    def begin_report(self) -> None:
        """Take the uses that were counted until now."""
        with self._lock:
            self._uses.begin_report(self._unix_time())

    def next_report(self) -> LocalReport:
        with self._lock:
            return self._uses.next_report()

    def note_stored(self, report: LocalReport) -> bool:
        """Note that the service has stored a report. Returns whether there is another one to send."""
        with self._lock:
            return self._uses.note_stored(report)

    def drop_uses(self, numbers: set[int]) -> None:
        """Drop rows of the next report, which the service has refused. The others are kept."""
        with self._lock:
            self._uses.drop(numbers)

    # --- following the feed -----------------------------------------------------------------------------------

    def set_service_time(self, earliest: float, latest: float) -> None:
        """Use the service's clock, which may differ from that of this host. It shows a Unix time between these two."""
        with self._lock:
            now = self._unix_time()
            error = min(max(now, earliest), latest) - now
            if abs(error) > _CLOCK_TOLERANCE:
                self._epoch += error
                self._uses.shift(error)

    def set_current_until(self, until: float) -> None:
        """Let the memory be used until a time of `clock()`, unless it is closed."""
        with self._lock:
            if not self._closed:
                self._current_until = until

    def close(self) -> None:
        """Authorize nothing from now on. Every use that was authorized is in the next report."""
        with self._lock:
            self._closed = True
            self._current_until = 0.0

    def forget(self) -> None:
        """Drop everything but the known key strings, and authorize nothing until the feed is current again."""
        with self._lock:
            self._current_until = 0.0
            self._note_change("*")
            self._forget_records()
            self._forget_rules()

    def apply(self, changes: Iterable[Mapping[str, Any]]) -> None:
        """Apply changes of the feed, in order. Raises ValueError, KeyError or TypeError for an unreadable change."""
        with self._lock:
            for change in changes:
                self._apply(change["kind"], change["id"], change.get("record"))

    def begin_fetch(self, most: int) -> list[str]:
        """Return key ids whose records are to be read. `end_fetch` must follow."""
        with self._lock:
            self._changed_while_fetching = set()
            return [self._wanted.pop() for _ in range(min(most, len(self._wanted)))]

    def end_fetch(self, wanted: Collection[str], records: Iterable[Mapping[str, Any]]) -> None:
        """Keep the records, except those of keys that changed meanwhile: their records are to be read again."""
        parsed = [parse_record(members) for members in records]
        with self._lock:
            changed = self._changed_while_fetching or set()
            self._changed_while_fetching = None
            for record in parsed:
                if record.key_id not in wanted:
                    continue
                if {record.key_id, *map("/".join, _groups_of(record)), "*"} & changed:
                    self._wanted.add(record.key_id)
                else:
                    self._hold(record)

    def begin_rules(self) -> int | None:
        """Return the version to give to `end_rules`, or None when the rules are known."""
        with self._lock:
            return self._rules_version if self._rules is None else None

    def end_rules(self, version: int, members: Mapping[str, Any]) -> None:
        """Keep the rules, unless they changed while they were read."""
        rules = Rules(members, self._environment)
        with self._lock:
            if version == self._rules_version:
                self._rules = rules

    @property
    def needs_reading(self) -> bool:
        return bool(self._wanted) or self._rules is None

    def _apply(self, kind: str, identity: str, record: Mapping[str, Any] | None) -> None:
        if kind == "key":
            self._note_change(identity)
            if identity in self._held:
                self._drop(identity)
                if record is not None:
                    self._hold(parse_record(record))
        elif kind in {"credential", "account", "merchant"}:
            self._note_change(f"{kind}/{identity}")
            for key_id in list(self._groups.get((kind, identity), ())):
                self._drop(key_id)
                self._wanted.add(key_id)
            self._leases.clear()
        elif kind in {"limit", "endpoint"}:
            self._forget_rules()
        elif kind not in {"customer_token", "service_token"}:
            self._note_change("*")
            self._forget_records()
            self._forget_rules()

    def _note_change(self, subject: str) -> None:
        if self._changed_while_fetching is not None:
            self._changed_while_fetching.add(subject)

    def _hold(self, record: KeyRecord) -> None:
        if record.environment is not self._environment:
            return
        self._drop(record.key_id)
        expires_at = float("inf") if record.expires_at is None else record.expires_at.timestamp()
        self._held[record.key_id] = _LocalKey(record, expires_at, {})
        for group in _groups_of(record):
            self._groups[group].add(record.key_id)

    def _drop(self, key_id: str) -> None:
        held = self._held.pop(key_id, None)
        if held is not None:
            for group in _groups_of(held.record):
                self._groups[group].discard(key_id)
                if not self._groups[group]:
                    del self._groups[group]

    def _forget_records(self) -> None:
        self._wanted.update(self._held)
        self._held.clear()
        self._groups.clear()

    def _forget_rules(self) -> None:
        self._rules = None
        self._rules_version += 1
        self._endpoints.clear()
        self._leases.clear()


def _groups_of(record: KeyRecord) -> tuple[tuple[str, str], ...]:
    return (
        ("credential", record.credential_id),
        ("account", f"{record.merchant_id}/{record.environment}"),
        ("merchant", record.merchant_id),
    )


def _grant(held: _LocalKey, rules: Rules, endpoint: Endpoint, question: Question, at: float) -> _GrantedUse | None:
    has_origin = question.origin is not None
    # The path matters only where it names a context, the address only where networks restrict the credential.
    path = question.path if endpoint.merchant_from or endpoint.store_from else None
    address = question.client_ip if held.record.networks else None
    key = (endpoint.name, has_origin, path, address, question.merchant, question.store)
    granted = held.grants.get(key)
    if granted is not None and granted.rules is rules:
        return granted
    # The service records private keys with an Origin as exposed.
    if has_origin and held.record.kind is KeyKind.PRIVATE:
        return None
    if not are_contexts_acceptable(question.merchant, question.store):
        return None
    identity = _decide(held.record, endpoint, question, datetime.fromtimestamp(at, UTC))
    if identity is None:
        return None
    lease = (identity.merchant_id, endpoint.name) if endpoint.spends else None
    granted = _GrantedUse(Decision(identity, 200), lease, rules)
    if len(held.grants) >= _MAX_GRANTS:
        held.grants.clear()
    held.grants[key] = granted
    return granted


def _decide(record: KeyRecord, endpoint: Endpoint, question: Question, now: datetime) -> Identity | None:
    """Apply the service's own rules to a verified key. Returns None unless they all allow the request."""
    holder = judge_record(record, now)
    if not isinstance(holder, KeyHolder):
        return None
    merchant, store = endpoint.read_contexts(question.path, {}, question.merchant, question.store)
    request = EndpointRequest(
        named_merchant=question.merchant,
        has_origin=question.origin is not None,
        client_address=question.client_ip,
        merchant_context=merchant,
        store_context=store,
    )
    if not isinstance(decide(EndpointRule(endpoint), holder, request, now), Grant):
        return None
    return Identity(
        holder.key_id, holder.credential_id, str(holder.kind), holder.merchant_id, str(holder.environment), None
    )


def with_cost(question: Question, cost: int) -> Question:
    """Return the question that also spends the tokens of a batch."""
    return replace(question, cost=cost) if cost > 1 else question
