"""When an engine answers from its cache, what it caches, and what it answers without fresh data."""

import asyncio
import gc
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest
from msgspec import Struct, structs

from keyvault.access.permissions import Permission as P
from keyvault.access.policy_snapshot import PolicySnapshot
from keyvault.access.roles import Role
from keyvault.domain.ids import Subject
from keyvault.domain.keystring import checksum
from keyvault.hotpath.adapters.stores import DatabaseStore
from keyvault.hotpath.engine.cached_verdicts import CacheMiss
from keyvault.hotpath.engine.ports import EngineVerdict
from keyvault.hotpath.frontends import asyncio_frontend
from keyvault.hotpath.frontends.asyncio_frontend import AsyncioFrontend, AsyncStore, KeysCallback
from keyvault.hotpath.frontends.threaded_frontend import StoreUnavailableError
from keyvault.hotpath.messages.callback_future import CallbackFuture
from keyvault.hotpath.messages.pending_requests import BATCH, KEY, RULES, TOKEN, VERIFY, Found, Headers, PendingRequest
from keyvault.hotpath.messages.responses import HttpResponse
from keyvault.services.catalog.endpoints import add_endpoint, withdraw_endpoint
from keyvault.services.keys.lifecycle import get_key, suspend_key
from keyvault.services.keys.records import find_keys
from keyvault.services.usage.recorder import UsageLog
from tests.api.integration import losing
from tests.entry_points.golden import forged
from tests.factories import account, grant, issue, make_merchant, make_token, the_operator
from tests.hotpath.conftest import Stage, revoke
from tests.hotpath.priming import (
    MachineClock,
    Primed,
    Still,
    decision,
    encode,
    masked,
    outside_the_loop,
    prime,
    prime_by,
)
from tests.services.recording.test_transaction import DRAFT

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("usage")]


ALLOWED = (200, "allowed")


def suspend(stage: Stage) -> None:
    """Suspend the key in the transaction of the test, which never commits, so that no engine is notified."""
    key = get_key(stage.key.key_id)
    assert key is not None
    suspend_key(grant(the_operator("admin", Role.KEY_ADMINISTRATOR), P.KEYS_SUSPEND, account()), key)


def remember(primed: Primed, clock: MachineClock, stage: Stage) -> None:
    """Repeat the request until the engine answers it from its cache."""
    primed.engine.freshness.confirm(clock.monotonic(), clock.wall())
    for _ in range(3):
        assert decision(primed.ask(stage.token, stage.asked)) == ALLOWED
    assert primed.from_memory


@pytest.mark.database
def test_engine_cache_distinguishes_the_header_from_the_body(stage: Stage) -> None:
    """Guarantee: a cached verdict belongs to the exact header and body, not to their concatenation."""
    primed, clock = prime(), MachineClock()
    remember(primed, clock, stage)
    header, body = f"Bearer {stage.token}", encode(stage.asked)
    assert primed.engine.memory.granted
    for taken in (1, 2, len(body)):
        moved = header + body[:taken].decode()
        assert primed.send("POST", VERIFY, {"authorization": moved}, body[taken:]).status != 200


def test_engine_cached_grants_stay_within_the_capacity(stage: Stage) -> None:
    primed = prime(capacity=2)
    for _ in range(3):
        for number in range(5):
            asked = {**stage.asked, "client_ip": f"192.0.2.{number}"}
            assert decision(primed.ask(stage.token, asked)) == ALLOWED
            assert len(primed.engine.memory.granted) <= 2
    assert primed.engine.memory.granted


class Exact:
    """A doorkeeper without false positives."""

    def __init__(self) -> None:
        self._come: set[bytes] = set()

    def was_seen(self, tag: bytes) -> bool:
        is_back = tag in self._come
        self._come.add(tag)
        return is_back


def test_engine_repeated_request_is_not_evicted_by_single_requests(stage: Stage) -> None:
    primed = prime(capacity=4)
    primed.engine.memory._grant_doorkeeper = Exact()  # type: ignore[assignment]  # it has what is asked of one
    for _ in range(3):
        assert decision(primed.ask(stage.token, stage.asked)) == ALLOWED
    kept = set(primed.engine.memory.granted)
    once = [{**stage.asked, "client_ip": f"192.0.2.{number}"} for number in range(20)]
    for asked in once:
        assert decision(primed.ask(stage.token, asked)) == ALLOWED
    assert kept < primed.engine.memory.granted.keys()
    full = set(primed.engine.memory.granted)
    primed.ask(stage.token, once[-1])
    assert primed.engine.memory.granted.keys() != full, "it has come again"
    assert len(full) == len(primed.engine.memory.granted) == 4


def test_engine_repeated_grant_is_counted_each_time(stage: Stage) -> None:
    primed = prime()
    primed.ask(stage.token, stage.asked)
    for asked in (4, 1, 7):
        primed.engine.take_uses()
        for _ in range(asked):
            primed.ask(stage.token, stage.asked)
        primed.ask(stage.token, {"requests": [stage.asked] * 3}, BATCH)
        uses, counts = primed.engine.take_uses()
        assert [times for *_, times, _, _ in uses] == [asked + 3]
        assert counts == (asked + 3, 0, 0)


# --- when the cache may be used ------------------------------------------------------------------


def test_engine_before_its_first_confirmation_reads_the_database_for_each_request(stage: Stage) -> None:
    primed = prime(may_remember=False)
    assert decision(primed.ask(stage.token, stage.asked)) == ALLOWED
    suspend(stage)
    assert decision(primed.ask(stage.token, stage.asked)) == (401, "key_not_active")
    assert not primed.from_memory
    assert not primed.engine.memory.keys.by_id


@pytest.mark.parametrize("step", ["the bound", "forwards", "backwards"])
def test_engine_without_a_recent_confirmation_reads_through(stage: Stage, step: str) -> None:
    """Guarantee: a cache older than the bound, or of unknown age after a step of the clock, is not used."""
    clock = MachineClock()
    primed = prime_by(clock)
    remember(primed, clock, stage)
    suspend(stage)
    clock.pass_seconds(1.9)
    assert decision(primed.ask(stage.token, stage.asked)) == ALLOWED, (
        "the answer must come from the cache for this test to prove anything"
    )
    if step == "the bound":
        clock.pass_seconds(0.1)
    else:
        clock.wall_now += 5 if step == "forwards" else -5
    for _ in range(2):
        assert decision(primed.ask(stage.token, stage.asked)) == (401, "key_not_active")
        (found,) = json.loads(primed.ask(stage.token, {"requests": [stage.asked]}, BATCH).body)["decisions"]
        assert found["code"] == "key_not_active"


@pytest.mark.parametrize("lost", [KEY, TOKEN, RULES])
def test_engine_that_is_stale_and_cannot_read_allows_nothing(stage: Stage, lost: str) -> None:
    """Guarantee: fails closed. A cached grant is denied once its data is stale and cannot be read."""
    clock = MachineClock()
    primed = prime_by(clock)
    remember(primed, clock, stage)
    clock.pass_seconds(2.0)
    gateway = {"x-service-token": stage.token, "x-api-key": stage.text, "x-original-method": "POST"}
    gateway |= {"x-original-uri": "/sandbox/merchants/orders", "x-original-host": "127.0.0.1"}
    with losing(lost):
        for answer in (
            primed.ask(stage.token, stage.asked),
            primed.ask(stage.token, {"requests": [stage.asked] * 3}, BATCH),
            primed.send("GET", "/v1/authorize/nginx", gateway),
        ):
            assert b'"allowed":true' not in answer.body
            assert b"503" in answer.body
            assert answer.status != 200 or lost == KEY
        if lost == KEY:
            assert decision(primed.ask(stage.token, stage.asked)) == (503, "verifier_stale")
    assert decision(primed.ask(stage.token, stage.asked)) == ALLOWED


def test_engine_whose_feed_went_back_allows_nothing_until_a_restart(stage: Stage) -> None:
    """Guarantee: after the loss of revocations that it has received, an engine trusts the database no longer.

    No key that such a database restores is allowed until a restart, even after later confirmations.
    """
    clock = MachineClock()
    primed = prime_by(clock)
    remember(primed, clock, stage)
    before = primed.from_memory
    primed.engine.freshness.mark_lost()
    gateway = {"x-service-token": stage.token, "x-api-key": stage.text, "x-original-method": "POST"}
    gateway |= {"x-original-uri": "/sandbox/merchants/orders", "x-original-host": "127.0.0.1"}
    for _ in range(2):
        for answer in (
            primed.ask(stage.token, stage.asked),
            primed.ask(stage.token, {"requests": [stage.asked] * 3}, BATCH),
            primed.send("GET", "/v1/authorize/nginx", gateway),
        ):
            assert decision(answer) == (503, "verifier_stale")
        primed.engine.freshness.confirm(clock.monotonic(), clock.wall())
    assert primed.from_memory == before


def test_engine_whose_feed_goes_back_between_reading_and_judging_denies(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: a record that was read before the detection of the loss is not used for a verdict."""
    primed = prime(may_remember=False)
    find = DatabaseStore.find

    def find_and_lose(store: DatabaseStore, of: str, ids: frozenset[str], address: str | None) -> Mapping[str, Found]:
        found = find(store, of, ids, address)
        if of == KEY:
            primed.engine.freshness.mark_lost()
        return found

    monkeypatch.setattr(DatabaseStore, "find", find_and_lose)
    assert decision(primed.ask(stage.token, stage.asked)) == (503, "verifier_stale")


def test_engine_that_cannot_read_its_hosts_changes_clears_its_cache_and_reads_through(stage: Stage) -> None:
    """Guarantee: without a free file descriptor an engine answers from the database, without old data or an error."""
    clock, host = MachineClock(), Unreadable()
    primed = prime(may_remember=False, monotonic=clock.monotonic, wall=clock.wall, generation=host)
    remember(primed, clock, stage)
    suspend(stage)
    assert decision(primed.ask(stage.token, stage.asked)) == ALLOWED, (
        "the answer must come from the cache for this test to prove anything"
    )
    before = primed.from_memory
    host.memory[0], host.is_out = 1, True
    for _ in range(2):
        assert decision(primed.ask(stage.token, stage.asked)) == (401, "key_not_active")
        (found,) = json.loads(primed.ask(stage.token, {"requests": [stage.asked]}, BATCH).body)["decisions"]
        assert found["code"] == "key_not_active"
    assert primed.from_memory == before
    assert not primed.engine.memory.keys.by_id
    host.is_out = False
    assert decision(primed.ask(stage.token, stage.asked)) == (401, "key_not_active")
    assert primed.engine.memory.keys.by_id


class Unreadable(Still):
    """The generation counter of a host that can run out of file descriptors."""

    is_out = False

    def since(self, seen: int) -> tuple[int, Iterable[Subject] | None]:
        if self.is_out:
            raise OSError("too many open files")
        return self.memory[0], []


class Revoking(Still):
    """The generation counter of a host on which one key is revoked."""

    def __init__(self, key_id: str) -> None:
        super().__init__()
        self.key_id = key_id

    def since(self, seen: int) -> tuple[int, Iterable[Subject] | None]:
        return self.memory[0], [("key", self.key_id)]


def test_engine_key_revoked_on_its_host_is_refused_at_the_next_request(stage: Stage) -> None:
    """Guarantee: once a revocation has returned, its host grants nothing by the old record."""
    clock, host = MachineClock(), Revoking(stage.key.key_id)
    primed = prime(may_remember=False, monotonic=clock.monotonic, wall=clock.wall, generation=host)
    remember(primed, clock, stage)
    revoke(stage.key)
    assert decision(primed.ask(stage.token, stage.asked)) == ALLOWED, (
        "the answer must come from the cache for this test to prove anything"
    )
    host.memory[0] = 1
    assert decision(primed.ask(stage.token, stage.asked)) == (401, "key_revoked")
    (found,) = json.loads(primed.ask(stage.token, {"requests": [stage.asked]}, BATCH).body)["decisions"]
    assert found["code"] == "key_revoked"


def test_engine_judges_deadlines_at_each_request(stage: Stage) -> None:
    """Guarantee: a cached key is denied from the moment of its expiry, without any change of its record."""
    key, text = issue(account(), label="short-lived", expires_in_days=1)
    assert key.expires_at is not None
    asked = {**stage.asked, "key": text.reveal()}
    clock = MachineClock()
    primed = prime_by(clock)
    for _ in range(3):
        assert decision(primed.ask(stage.token, asked)) == ALLOWED
    clock.pass_seconds(key.expires_at.timestamp() - clock.wall_now - 0.001)
    primed.engine.freshness.confirm(clock.monotonic(), clock.wall())
    before = primed.from_memory
    assert decision(primed.ask(stage.token, asked)) == ALLOWED
    assert primed.from_memory == before + 1
    clock.pass_seconds(0.001)
    assert decision(primed.ask(stage.token, asked)) == (401, "key_expired")


def test_engine_service_token_that_expires_in_the_cache_is_refused(stage: Stage) -> None:
    row, token = make_token(P.KEYS_VERIFY, name="short-lived", lifetime_days=1)
    clock = MachineClock()
    primed = prime_by(clock)
    for _ in range(3):
        primed.engine.freshness.confirm(clock.monotonic(), clock.wall())
        assert decision(primed.ask(token.reveal(), stage.asked)) == ALLOWED
    clock.pass_seconds(row.expires_at.timestamp() - clock.wall_now)
    primed.engine.freshness.confirm(clock.monotonic(), clock.wall())
    assert primed.ask(token.reveal(), stage.asked).status == 401


def batched(primed: Primed, token: str, asked: Mapping[str, Any]) -> tuple[int, str]:
    """Return the status and code of a batch of this one request."""
    (found,) = json.loads(primed.ask(token, {"requests": [asked]}, BATCH).body)["decisions"]
    return found["status"], found["code"] or "allowed"


def test_engine_batch_of_cached_grants_judges_deadlines(stage: Stage) -> None:
    key, text = issue(account(), label="short-lived", expires_in_days=1)
    row, token = make_token(P.KEYS_VERIFY, name="short-lived", lifetime_days=2)
    assert key.expires_at is not None
    asked, lasting = {**stage.asked, "key": text.reveal()}, stage.asked
    clock = MachineClock()
    primed = prime_by(clock)
    for _ in range(3):
        assert batched(primed, token.reveal(), asked) == batched(primed, token.reveal(), lasting) == ALLOWED
    assert len(primed.engine.memory.granted) == 2
    clock.pass_seconds(key.expires_at.timestamp() - clock.wall_now)
    primed.engine.freshness.confirm(clock.monotonic(), clock.wall())
    assert batched(primed, token.reveal(), asked) == (401, "key_expired")
    assert batched(primed, token.reveal(), lasting) == ALLOWED
    clock.pass_seconds(row.expires_at.timestamp() - clock.wall_now)
    primed.engine.freshness.confirm(clock.monotonic(), clock.wall())
    assert primed.ask(token.reveal(), {"requests": [lasting]}, BATCH).status == 401


@pytest.mark.parametrize("forget", [True, False])
def test_engine_cached_grant_is_unusable_without_its_cached_key(stage: Stage, *, forget: bool) -> None:
    """Guarantee: no grant follows a denial, whether the key was evicted or displaced, alone and in a batch."""
    primed = prime(capacity=3)
    for _ in range(3):
        assert decision(primed.ask(stage.token, stage.asked)) == ALLOWED
        assert batched(primed, stage.token, stage.asked) == ALLOWED
    suspend(stage)
    if forget:
        primed.engine.evict([("key", stage.key.key_id)])
    else:
        memory = primed.engine.memory
        record = memory.keys.by_id[stage.key.key_id].record
        for number in range(6):
            for _ in range(2):  # a key is admitted at its second request
                memory.admit_key(structs.replace(record, key_id=f"another {number}"))
    assert stage.key.key_id not in primed.engine.memory.keys.by_id
    assert len(primed.engine.memory.granted) == 1
    assert batched(primed, stage.token, stage.asked) == (401, "key_not_active")
    assert decision(primed.ask(stage.token, {**stage.asked, "client_ip": "192.0.2.9"})) == (401, "key_not_active")
    assert decision(primed.ask(stage.token, stage.asked)) == (401, "key_not_active")


def test_engine_requested_key_is_not_displaced_by_keys_requested_once(stage: Stage) -> None:
    """A flood of keys that are requested once does not displace a key in constant use."""
    primed = prime(capacity=4)
    for _ in range(3):
        primed.ask(stage.token, stage.asked)
    memory = primed.engine.memory
    record = memory.keys.by_id[stage.key.key_id].record
    for number in range(12):
        for _ in range(2):
            memory.admit_key(structs.replace(record, key_id=f"another {number}"))
        assert stage.key.key_id in memory.keys.by_id
        before = primed.from_memory
        primed.ask(stage.token, stage.asked)
        assert primed.from_memory == before + 1


def test_engine_key_requested_once_is_evicted_before_a_repeated_one(stage: Stage) -> None:
    primed = prime(capacity=3)
    others = [issue(account(), label=f"number {number}") for number in range(3)]
    for _ in range(3):
        primed.ask(stage.token, stage.asked)
    kept = primed.engine.memory.keys.by_id.keys()
    for _, text in others:
        assert decision(primed.ask(stage.token, {**stage.asked, "key": text.reveal()})) == ALLOWED
    assert kept == {stage.key.key_id, *(key.key_id for key, _ in others[:2])}
    assert decision(primed.ask(stage.token, {**stage.asked, "key": others[2][1].reveal()})) == ALLOWED
    assert kept == {stage.key.key_id, *(key.key_id for key, _ in others[1:])}


# --- what is remembered -----------------------------------------------------------------------------------


@pytest.mark.database
@pytest.mark.parametrize("kind", [KEY, TOKEN, RULES])
def test_engine_reading_with_a_concurrent_change_is_not_cached(
    stage: Stage, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: a reading with a concurrent change answers its own request and is not cached."""
    primed = prime()
    find, read_rules = DatabaseStore.find, DatabaseStore.read_rules

    def find_late(store: DatabaseStore, of: str, ids: frozenset[str], address: str | None) -> Mapping[str, Found]:
        found = find(store, of, ids, address)
        if of == kind:
            primed.engine.evict([("key", "another key's id")])
        return found

    def read_late(store: DatabaseStore, known: PolicySnapshot | None) -> PolicySnapshot:
        rules = read_rules(store, known)
        if kind == RULES:
            primed.engine.evict([("key", "another key's id")])
        return rules

    monkeypatch.setattr(DatabaseStore, "find", find_late)
    monkeypatch.setattr(DatabaseStore, "read_rules", read_late)
    for _ in range(3):
        assert decision(primed.ask(stage.token, stage.asked)) == ALLOWED
    memory = primed.engine.memory
    remembered = {
        KEY: memory.keys.by_id,
        TOKEN: memory.tokens.by_id,
        RULES: primed.engine.rules,
    }
    assert not remembered.pop(kind)
    assert all(remembered.values())


@pytest.mark.database
@pytest.mark.parametrize("is_read_anew", [False, True])
def test_engine_judgement_with_a_concurrent_change_of_the_rules_is_not_cached(stage: Stage, is_read_anew: bool) -> None:
    """Guarantee: after an endpoint is withdrawn during a judgement, no later request for it is granted.

    The request itself spends and is noted exactly once, under the rules that judged it.
    """
    allowed = grant(the_operator("admin", Role.KEY_ADMINISTRATOR), P.CATALOG_WRITE)
    row = add_endpoint(allowed, DRAFT)
    asked = {**stage.asked, "endpoint": DRAFT.name}
    noted: list[EngineVerdict] = []

    def note(verdict: EngineVerdict) -> None:
        noted.append(verdict)
        if verdict.endpoint == DRAFT.name and len(noted) == 2:
            withdraw_endpoint(allowed, row)
            primed.engine.evict([("endpoint", DRAFT.name)])
            if is_read_anew:
                primed.engine.rules = DatabaseStore().read_rules(None)

    primed, whole = prime(full=False, note_verdict=note), prime(full=False, may_remember=False)
    for each in (primed, whole):
        assert decision(each.ask(stage.token, stage.asked)) == ALLOWED
    expected = masked(whole.ask(stage.token, asked))
    answer = primed.ask(stage.token, asked)
    assert decision(answer) == ALLOWED, "it was asked before"
    assert masked(answer) == expected
    assert len(noted) == 2
    assert decision(primed.ask(stage.token, asked)) == (404, "endpoint_unknown")


def test_engine_flooded_with_unknown_ids_stays_bounded_and_reads_each_once(
    stage: Stage, looked: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    primed = prime()
    monkeypatch.setattr(primed.engine.memory.absent, "_capacity", 5)
    head, tail = stage.text[:11], stage.text[27:]
    assert stage.text[11:27] == stage.key.key_id
    unknown = [f"{head}{number:016d}{tail[:-6]}" for number in range(50)]
    for text in unknown:
        asked = {**stage.asked, "key": text + checksum(text)}
        for _ in range(2):
            assert decision(primed.ask(stage.token, asked)) == (401, "credential_invalid")
        assert len(primed.engine.memory.absent) <= 5
    assert len(looked) == len(set(looked)) == 51, "one look-up for each, and one for the service token"


def test_engine_with_room_for_few_keys_answers_for_many(stage: Stage) -> None:
    primed = prime(capacity=2)
    texts = [stage.text] + [issue(account(), label=f"number {number}")[1].reveal() for number in range(4)]
    for text in texts * 3:
        assert decision(primed.ask(stage.token, {**stage.asked, "key": text})) == ALLOWED
        assert len(primed.engine.memory.keys.by_id) <= 2
        assert len(primed.engine.memory.keys.by_tag) <= 2


def test_engine_repeated_changes_of_limits_leak_no_memory(stage: Stage) -> None:
    """No cached key keeps replaced rules alive."""
    primed = prime()
    remember_rules(primed, stage)
    for _ in range(20):
        primed.engine.evict([("limit", "any")])
        remember_rules(primed, stage)
    gc.collect()
    books = [each for each in gc.get_objects() if isinstance(each, PolicySnapshot)]
    assert len(books) <= 2


def remember_rules(primed: Primed, stage: Stage) -> None:
    for _ in range(3):
        assert decision(primed.ask(stage.token, stage.asked)) == ALLOWED
    assert primed.engine.rules is not None


# --- whom a question waits with ---------------------------------------------------------------------------


class HeldStore(AsyncStore):
    """A store that reads immediately, and returns the result after its release."""

    def __init__(self) -> None:
        self.readings: list[tuple[str, frozenset[str], asyncio.Event]] = []
        self._store = DatabaseStore()
        self.holds = False

    async def find(self, kind: str, ids: frozenset[str]) -> Mapping[str, Found]:
        found = outside_the_loop(lambda: self._store.find(kind, ids, None))
        if kind == KEY and self.holds:
            released = asyncio.Event()
            self.readings.append((kind, ids, released))
            await released.wait()
        return found

    async def read_rules(self, known: PolicySnapshot | None) -> PolicySnapshot:
        return outside_the_loop(lambda: self._store.read_rules(known))


async def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline, "it never was"
        await asyncio.sleep(0)


def sent(stage: Stage, key: str, **more: object) -> tuple[list[tuple[bytes, bytes]], bytes]:
    headers = [(b"Authorization", f"Bearer {stage.token}".encode()), (b"Content-Type", b"application/json")]
    return headers, encode({**stage.asked, "key": key, **more})


async def answered(found: HttpResponse | Awaitable[HttpResponse]) -> HttpResponse:
    return found if isinstance(found, HttpResponse) else await found


def asks(frontend: AsyncioFrontend, stage: Stage, key: str | None = None, **more: object) -> CallbackFuture:
    found = frontend.answer(b"POST", VERIFY.encode(), *sent(stage, key or stage.text, **more))
    assert isinstance(found, CallbackFuture)
    return found


def at_work(stage: Stage) -> tuple[Primed, HeldStore, AsyncioFrontend]:
    """Return an engine that has cached everything but keys, with no pending uses."""
    primed, store = prime(), HeldStore()
    for _ in range(3):
        outside_the_loop(lambda: primed.ask(stage.token, stage.asked))
    primed.engine.take_uses()
    return primed, store, AsyncioFrontend(primed.engine, store, primed.engine.ports.budgets, lambda address: False)  # type: ignore[arg-type]  # local ones have both


def test_engine_request_joins_no_reading_in_progress(stage: Stage) -> None:
    """Guarantee: a request after a change is not answered by a reading that began before it."""

    async def run() -> None:
        primed, store = prime(may_remember=False), HeldStore()
        frontend = AsyncioFrontend(primed.engine, store, primed.engine.ports.budgets, lambda address: False)  # type: ignore[arg-type]  # local ones have both
        await asks(frontend, stage)
        store.holds = True
        first = asks(frontend, stage)
        await until(lambda: len(store.readings) == 1)
        outside_the_loop(lambda: suspend(stage))
        second = asks(frontend, stage)
        await until(lambda: len(store.readings) == 2)
        store.readings[1][2].set()
        assert decision(await second) == (401, "key_not_active")
        store.readings[0][2].set()
        assert decision(await first) == ALLOWED, "it was asked before"

    asyncio.run(run())


@pytest.mark.database
def test_engine_concurrent_requests_share_one_reading(stage: Stage) -> None:
    texts = [stage.text] + [issue(account(), label=f"number {number}")[1].reveal() for number in range(3)]

    async def run() -> None:
        primed, store = prime(may_remember=False), HeldStore()
        frontend = AsyncioFrontend(primed.engine, store, primed.engine.ports.budgets, lambda address: False)  # type: ignore[arg-type]  # local ones have both
        store.holds = True
        asked = [asks(frontend, stage, text) for text in texts * 5]
        await until(lambda: len(store.readings) == 1)
        (_, ids, released), *_ = store.readings
        assert len(ids) == len(texts)
        released.set()
        assert [decision(answer) for answer in await asyncio.gather(*asked)] == [ALLOWED] * 20
        assert len(store.readings) == 1

    asyncio.run(run())


def test_engine_requests_during_a_reading_share_the_next_one(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """One reading costs as much for many keys as for one, so requests wait for a full batch or the previous reading."""
    monkeypatch.setattr(asyncio_frontend, "MAX_BATCH_DELAY_SECONDS", 3600.0)
    texts = [
        issue(account(), label=f"number {number}")[1].reveal()
        for number in range(asyncio_frontend.MAX_ANSWERS_PER_TURN + 2)
    ]

    async def run() -> None:
        primed, store = prime(may_remember=False), HeldStore()
        frontend = AsyncioFrontend(primed.engine, store, primed.engine.ports.budgets, lambda address: False)  # type: ignore[arg-type]  # local ones have both
        await asks(frontend, stage)
        store.holds = True
        asked = [asks(frontend, stage)]
        await until(lambda: len(store.readings) == 1)
        for text in texts[:2]:
            asked.append(asks(frontend, stage, text))
            for _ in range(100):
                await asyncio.sleep(0)
        assert len(store.readings) == 1
        asked += [asks(frontend, stage, text) for text in texts[2:]]
        await until(lambda: len(store.readings) == 2)
        assert len(store.readings[1][1]) == len(texts), "as many as are answered in one turn do not wait"
        for _, _, released in store.readings:
            released.set()
        assert [decision(answer) for answer in await asyncio.gather(*asked)] == [ALLOWED] * len(asked)

    asyncio.run(run())


MEANWHILE: dict[str, Callable[[Primed, Stage], None]] = {
    "another key": lambda primed, _: primed.engine.evict([("key", "another")]),
    "the key itself": lambda primed, stage: primed.engine.evict([("key", stage.key.key_id)]),
    "the rules": lambda primed, _: primed.engine.evict([("limit", "any")]),
    "everything": lambda primed, _: primed.engine.evict(None),
    "too long ago": lambda primed, _: primed.engine.freshness.confirm(float("-inf"), 0.0),
}


@pytest.mark.database
@pytest.mark.parametrize("change", MEANWHILE)
def test_engine_miss_with_a_concurrent_change_uses_its_own_reading_and_is_not_cached(stage: Stage, change: str) -> None:
    """Guarantee: each request has one reading of its key, which began after the request came and serves no other."""
    (_, known), (gone, gone_text), (_, other) = (issue(account(), label=f"number {number}") for number in range(3))
    revoke(gone)
    expected = {
        stage.text: ALLOWED,
        gone_text.reveal(): (401, "key_revoked"),
        _unissued(stage): (401, "credential_invalid"),
        forged(other.reveal()): (401, "credential_invalid"),
    }

    async def run() -> None:
        clock, store = MachineClock(), HeldStore()
        primed = prime_by(clock)
        frontend = AsyncioFrontend(primed.engine, store, primed.engine.ports.budgets, lambda address: False)  # type: ignore[arg-type]  # local ones have both
        for text, verdict in expected.items():
            store.holds = False
            primed.engine.freshness.confirm(clock.monotonic(), clock.wall())
            await answered(frontend.answer(b"POST", VERIFY.encode(), *sent(stage, known.reveal())))
            store.holds = True
            store.readings.clear()
            question = asks(frontend, stage, text)
            assert len(frontend._misses) == 1, "it lacks the key alone, or this is about something else"
            await until(lambda: bool(store.readings))
            MEANWHILE[change](primed, stage)
            store.readings[0][2].set()
            assert decision(await question) == verdict
            assert [(kind, len(ids)) for kind, ids, _ in store.readings] == [(KEY, 1)]
            memory = primed.engine.memory
            assert text[11:27] not in memory.keys.by_id
            assert (len(memory.absent), len(memory.denied)) == (0, 0)

    asyncio.run(run())


def _unissued(stage: Stage) -> str:
    """Return a well-formed key string with an id that was never issued."""
    text = f"{stage.text[:11]}{7:016d}{stage.text[27:-6]}"
    return text + checksum(text)


@pytest.mark.database
@pytest.mark.parametrize("is_revoked", [False, True])
def test_engine_miss_without_a_concurrent_change_is_cached(stage: Stage, is_revoked: bool) -> None:
    """The record that was read is cached, or the denial of a revoked key, and is not read again."""
    known = issue(account(), label="known before")[1].reveal()
    if is_revoked:
        revoke(stage.key)

    async def run() -> None:
        primed, store = prime_by(MachineClock()), HeldStore()
        frontend = AsyncioFrontend(primed.engine, store, primed.engine.ports.budgets, lambda address: False)  # type: ignore[arg-type]  # local ones have both
        await answered(frontend.answer(b"POST", VERIFY.encode(), *sent(stage, known)))
        store.holds = True
        question = asks(frontend, stage)
        await until(lambda: len(store.readings) == 1)
        store.readings[0][2].set()
        expected = masked(await question)
        before = primed.from_memory
        again = frontend.answer(b"POST", VERIFY.encode(), *sent(stage, stage.text))
        assert isinstance(again, HttpResponse)
        assert decision(again) == ((401, "key_revoked") if is_revoked else ALLOWED)
        assert masked(again) == expected
        assert primed.from_memory == before + 1
        assert len(store.readings) == 1

    asyncio.run(run())


@pytest.mark.parametrize("error", [ZeroDivisionError("ours"), StoreUnavailableError("gone")])
def test_engine_failed_reading_answers_every_request_that_waited_for_it(
    stage: Stage, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later requests are read for as usual."""

    async def run() -> None:
        primed, store = prime(may_remember=False), HeldStore()
        frontend = AsyncioFrontend(primed.engine, store, primed.engine.ports.budgets, lambda address: False)  # type: ignore[arg-type]  # local ones have both
        with monkeypatch.context() as patch:

            async def fail(kind: str, ids: frozenset[str]) -> Mapping[str, Found]:
                raise error

            patch.setattr(store, "find", fail)
            for answer in await asyncio.gather(asks(frontend, stage), asks(frontend, stage)):
                assert answer.status == (500 if isinstance(error, ZeroDivisionError) else 503)
        assert decision(await asks(frontend, stage)) == ALLOWED

    asyncio.run(run())


def test_engine_abandoned_request_for_a_missed_key_spends_and_notes_nothing(stage: Stage) -> None:
    """Guarantee: an abandoned request that misses only its key spends nothing and is no use."""
    other = issue(account(), label="read for an abandoned request")[1].reveal()

    async def run() -> None:
        primed, store, frontend = at_work(stage)
        store.holds = True
        late, waiting = asks(frontend, stage, other), asks(frontend, stage, issued)
        await until(lambda: len(store.readings) == 1)
        late.cancel()
        ((_, ids, released),) = store.readings
        released.set()
        assert decision(await waiting) == ALLOWED
        assert len(ids) == 2
        (use,), _ = primed.engine.take_uses()
        assert use[0] == issued.split("_")[-1][:16]
        assert frontend._engine.memory.keys.by_id.keys() == {stage.key.key_id, use[0]}

    issued = issue(account(), label="read for a waiting request")[1].reveal()
    asyncio.run(run())


def test_engine_request_abandoned_while_its_batch_is_answered_spends_nothing(
    stage: Stage,
) -> None:
    keys = [issue(account(), label=f"number {number}") for number in range(asyncio_frontend.MAX_ANSWERS_PER_TURN + 2)]

    async def run() -> None:
        primed, store, frontend = at_work(stage)
        store.holds = True
        *asked, last = [asks(frontend, stage, text.reveal()) for _, text in keys]
        asked[0].add_done_callback(lambda _: last.cancel())
        await until(lambda: len(store.readings) == 1)
        store.readings[0][2].set()
        assert [decision(answer) for answer in await asyncio.gather(*asked)] == [ALLOWED] * len(asked)
        uses, _ = primed.engine.take_uses()
        assert {use[0] for use in uses} == {key.key_id for key, _ in keys[:-1]}
        assert (len(store.readings), frontend._reads, last.cancelled()) == (1, 0, True)

    asyncio.run(run())


def test_engine_runs_at_most_one_reading_above_the_concurrency_limit(stage: Stage) -> None:
    """Requests that miss only a key, and requests that need more data, begin together."""
    texts = [
        issue(account(), label=f"number {number}")[1].reveal()
        for number in range(3 * asyncio_frontend.MAX_ANSWERS_PER_TURN)
    ]

    async def run() -> None:
        _, store, frontend = at_work(stage)
        store.holds = True
        asked = [asks(frontend, stage, texts[0])]
        await until(lambda: len(store.readings) == 1)
        for number, text in enumerate(texts[1:]):
            asked.append(asks(frontend, stage, text, dry_run=bool(number % 2)))
            await asyncio.sleep(0)
        await until(lambda: len(store.readings) == asyncio_frontend.MAX_CONCURRENT_READS + 1)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(store.readings) == frontend._reads == asyncio_frontend.MAX_CONCURRENT_READS + 1
        store.holds = False
        for _, _, released in store.readings:
            released.set()
        assert [decision(answer) for answer in await asyncio.gather(*asked)] == [ALLOWED] * len(asked)
        assert not frontend._reads

    asyncio.run(run())


def test_engine_abandoned_request_is_not_read_for(stage: Stage) -> None:
    """Guarantee: a client that has received a timeout has nothing spent or noted for it."""
    noted: list[EngineVerdict] = []
    other = issue(account(), label="never read for")[1].reveal()

    async def run() -> None:
        primed, store = prime(may_remember=False, note_verdict=noted.append), HeldStore()
        frontend = AsyncioFrontend(primed.engine, store, primed.engine.ports.budgets, lambda address: False)  # type: ignore[arg-type]  # local ones have both
        store.holds = True
        late, never = asks(frontend, stage), asks(frontend, stage, other)
        never.cancel()
        await until(lambda: len(store.readings) == 1)
        late.cancel()
        ((_, ids, released),) = store.readings
        released.set()
        await until(lambda: not frontend._reads)
        assert (len(ids), len(store.readings), noted) == (1, 1, [])

    asyncio.run(run())


class BrokenStore(HeldStore):
    """A store with a bug: it fails when it is called (`asked`) or when it reads (`reading`)."""

    breaks = ""

    def find_keys(self, ids: frozenset[str], callback: KeysCallback) -> None:
        if self.breaks == "asked":
            raise ZeroDivisionError
        super().find_keys(ids, callback)

    async def find(self, kind: str, ids: frozenset[str]) -> Mapping[str, Found]:
        if self.breaks == "reading" and kind == KEY:
            raise ZeroDivisionError
        return await super().find(kind, ids)


@pytest.mark.parametrize("breaks", ["asked", "reading"])
def test_engine_store_with_a_bug_gives_every_waiting_request_a_500_and_reads_again(
    stage: Stage, breaks: str, caplog: pytest.LogCaptureFixture
) -> None:
    texts = [
        issue(account(), label=f"number {number}")[1].reveal()
        for number in range(asyncio_frontend.MAX_ANSWERS_PER_TURN + 2)
    ]

    async def run() -> None:
        primed, store = prime(), BrokenStore()
        frontend = AsyncioFrontend(primed.engine, store, primed.engine.ports.budgets, lambda address: False)  # type: ignore[arg-type]  # local ones have both
        for _ in range(3):
            outside_the_loop(lambda: primed.ask(stage.token, stage.asked))
        store.breaks = breaks
        asked = [asks(frontend, stage, text) for text in texts]
        async with asyncio.timeout(10):
            assert {answer.status for answer in await asyncio.gather(*asked)} == {500}
        store.breaks = ""
        async with asyncio.timeout(10):
            assert decision(await asks(frontend, stage, texts[0])) == ALLOWED
        assert not frontend._reads

    asyncio.run(run())


def test_engine_request_behind_abandoned_ones_is_read_for(stage: Stage) -> None:
    async def run() -> None:
        primed, store = prime(may_remember=False), HeldStore()
        frontend = AsyncioFrontend(primed.engine, store, primed.engine.ports.budgets, lambda address: True)  # type: ignore[arg-type]  # local ones have both
        *given_up, last = [asks(frontend, stage) for _ in range(2 * asyncio_frontend.MAX_THROTTLED_PER_READ + 1)]
        for each in given_up:
            each.cancel()
        async with asyncio.timeout(10):
            assert decision(await last) == ALLOWED

    asyncio.run(run())


# --- secrets ----------------------------------------------------------------------------------------------


def reachable(root: object) -> Iterator[object]:
    """Yield every object that the root keeps alive, apart from code."""
    seen: set[int] = set()
    pending = [root]
    while pending:
        each = pending.pop()
        if id(each) in seen or isinstance(each, type) or callable(each):
            continue
        seen.add(id(each))
        yield each
        pending += gc.get_referents(each)
        if isinstance(each, Struct):  # the collector does not track some of them
            pending += [getattr(each, name) for name in each.__struct_fields__]


def test_engine_keeps_no_presented_string(stage: Stage) -> None:
    """Guarantee: an engine keeps records, digests and tags, and never a presented secret or a part of one."""
    primed = prime()
    agent = f"shop/1 {stage.text}"
    gone, gone_text = issue(account(), label="revoked")
    revoke(gone)
    refused = {**stage.asked, "key": gone_text.reveal()}
    for _ in range(3):
        primed.ask(stage.token, refused)
        primed.ask(stage.token, {**refused, "user_agent": f"shop/1 {gone_text.reveal()}"})
        primed.ask(stage.token, {**refused, "user_agent": gone_text.reveal().replace("_", "%5F")})
        primed.ask(stage.token, {**refused, "origin": f"https://shop.example/{gone_text.reveal()}"})
        primed.ask(stage.token, stage.asked)
        primed.ask(stage.token, {**stage.asked, "user_agent": agent})
        primed.ask(stage.token, {**stage.asked, "key": forged(stage.text)})
        primed.ask(stage.token, {"requests": [stage.asked]}, BATCH)
    assert primed.from_memory
    assert primed.engine.memory.denied
    secrets = [text[27:60] for text in (stage.text, stage.token, forged(stage.text), gone_text.reveal())]
    held = [each.encode() if isinstance(each, str) else each for each in reachable(_state(primed))]
    texts = [each for each in held if isinstance(each, bytes)]
    assert len(texts) > 20
    for secret in secrets:
        assert not [each for each in texts if secret.encode() in each]


def _state(primed: Primed) -> list[object]:
    """Return the engine's own state, without its ports, which hold the process's peppers and settings."""
    engine = primed.engine
    names = [name for name in vars(engine) if name not in {"ports", "lock"} and not callable(getattr(engine, name))]
    return [getattr(engine, name) for name in names]


def test_engine_shows_no_secret_in_any_of_its_reprs(stage: Stage, usage: UsageLog) -> None:
    primed = prime()
    for _ in range(3):
        primed.ask(stage.token, stage.asked)
    known = next(iter(primed.engine.memory.keys.by_id.values()))
    question = PendingRequest("POST", VERIFY, Headers(authorization=stage.token), b"", lambda n: b"x" * n)
    primed.engine.evict([("key", stage.key.key_id)])
    missed = primed.engine.verify_known(f"Bearer {stage.token}".encode(), encode(stage.asked))
    assert isinstance(missed, CacheMiss)
    for each in (primed.engine, known, known.derived, known.record, question, missed, primed.engine.ports.budgets):
        assert stage.text[27:60] not in repr(each)
        assert stage.token[27:60] not in repr(each)


def test_engine_with_capacity_for_few_accounts_serves_many_and_evicts_no_key(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keyvault.hotpath.engine.engine._MAX_ACCOUNTS", 1)
    make_merchant("globex")
    other, text = issue(account("globex"))
    primed = prime()
    for _ in range(4):
        assert decision(primed.ask(stage.token, stage.asked)) == ALLOWED
        assert decision(primed.ask(stage.token, {**stage.asked, "key": text.reveal()})) == ALLOWED
    engine = primed.engine
    assert engine.memory.keys.by_id.keys() == {stage.key.key_id, other.key_id}
    assert engine.memory.tokens.by_id
    assert (len(engine._spend_plans), len(engine._all_spend_plans)) == (1, 2)
    engine.evict([("limit", "any")])
    assert not [each for each in engine._all_spend_plans if each.by_template or each.by_name], (
        "a spend plan keeps the old rules"
    )
    engine.evict(None)
    gc.collect()
    assert not engine._all_spend_plans


def test_engine_repeated_grant_templates_take_no_more_memory(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Budgets that are spent elsewhere send every request through the slow path, which records its template."""
    primed = prime()
    monkeypatch.setattr(primed.engine.ports.budgets, "spender", lambda buckets: lambda cost: None)
    asked = {**stage.asked, "store": "shop-1"}
    for _ in range(20):
        assert decision(primed.ask(stage.token, asked)) == ALLOWED
    (plans,) = primed.engine._all_spend_plans
    assert len(plans.by_template) == len(primed.engine._grant_templates) == 1


@pytest.mark.database
def test_engine_key_of_concurrent_requests_is_cached_once(stage: Stage) -> None:
    primed = prime()
    remember_rules(primed, stage)
    engine = primed.engine
    engine.evict([("key", stage.key.key_id)])
    bodies = [encode({**stage.asked, "client_ip": f"192.0.2.{number}"}) for number in range(3)]
    missed = [engine.verify_known(f"Bearer {stage.token}".encode(), body) for body in bodies]
    found = find_keys({stage.key.key_id})
    before = None
    for each in missed:
        assert isinstance(each, CacheMiss)
        (answer,) = engine.verify_missed([each], found)
        assert answer is not None
        known = engine.memory.keys.by_id[stage.key.key_id]
        assert before in (None, known)
        before = known
    assert len(engine.memory.keys.by_tag) == 1
