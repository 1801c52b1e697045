"""When an engine answers from memory, what it remembers, and what it says when it can vouch for nothing."""

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
from keyvault.domain.keystring import checksum
from keyvault.hotpath.adapters.stores import DatabaseStore
from keyvault.hotpath.engine.cached_verdicts import CacheMiss
from keyvault.hotpath.engine.memory import Subject
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
from tests.hotpath.priming import Clock, Primed, Still, decision, encode, masked, outside_the_loop, prime, prime_by
from tests.services.recording.test_transaction import DRAFT

pytestmark = [pytest.mark.database, pytest.mark.django_db, pytest.mark.usefixtures("usage")]


ALLOWED = (200, "allowed")


def suspend(stage: Stage) -> None:
    """In a transaction that no engine hears of: it is the test's own, and never commits."""
    key = get_key(stage.key.key_id)
    assert key is not None
    suspend_key(grant(the_operator("admin", Role.KEY_ADMINISTRATOR), P.KEYS_SUSPEND, account()), key)


def remember(primed: Primed, clock: Clock, stage: Stage) -> None:
    """Until the question is answered from memory."""
    primed.engine.freshness.confirm(clock.monotonic(), clock.wall())
    for _ in range(3):
        assert decision(primed.ask(stage.token, stage.asked)) == ALLOWED
    assert primed.from_memory


def test_engine_bytes_divided_otherwise_between_header_and_body_are_another_question(stage: Stage) -> None:
    """What is known of a question is of header and body as they came, not of the two in a row."""
    primed, clock = prime(), Clock()
    remember(primed, clock, stage)
    header, body = f"Bearer {stage.token}", encode(stage.asked)
    assert primed.engine.memory.granted
    for taken in (1, 2, len(body)):
        moved = header + body[:taken].decode()
        assert primed.send("POST", VERIFY, {"authorization": moved}, body[taken:]).status != 200


def test_engine_questions_that_were_granted_are_remembered_in_bounds(stage: Stage) -> None:
    primed = prime(capacity=2)
    for _ in range(3):
        for number in range(5):
            asked = {**stage.asked, "client_ip": f"192.0.2.{number}"}
            assert decision(primed.ask(stage.token, asked)) == ALLOWED
            assert len(primed.engine.memory.granted) <= 2
    assert primed.engine.memory.granted


class Exact:
    """A doorkeeper that takes nobody for another."""

    def __init__(self) -> None:
        self._come: set[bytes] = set()

    def was_seen(self, tag: bytes) -> bool:
        is_back = tag in self._come
        self._come.add(tag)
        return is_back


def test_engine_question_that_comes_again_and_again_is_not_driven_out_by_others_that_come_once(stage: Stage) -> None:
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


def test_engine_question_granted_again_is_counted_each_time(stage: Stage) -> None:
    primed = prime()
    primed.ask(stage.token, stage.asked)
    for asked in (4, 1, 7):
        primed.engine.take_uses()
        for _ in range(asked):
            primed.ask(stage.token, stage.asked)
        primed.ask(stage.token, {"requests": [stage.asked] * 3}, BATCH)
        uses, from_memory = primed.engine.take_uses()
        assert [times for *_, times, _, _ in uses] == [asked + 3]
        assert from_memory == asked + 3


# --- whether memory may be answered from ------------------------------------------------------------------


def test_engine_not_yet_confirmed_reads_the_database_for_each_question(stage: Stage) -> None:
    primed = prime(may_remember=False)
    assert decision(primed.ask(stage.token, stage.asked)) == ALLOWED
    suspend(stage)
    assert decision(primed.ask(stage.token, stage.asked)) == (401, "key_not_active")
    assert not primed.from_memory
    assert not primed.engine.memory.keys.by_id


@pytest.mark.parametrize("step", ["the bound", "forwards", "backwards"])
def test_engine_that_was_not_confirmed_lately_reads_through(stage: Stage, step: str) -> None:
    """Guarantee: memory that is older than the bound, or whose age a step of the clock makes unknown, is not used."""
    clock = Clock()
    primed = prime_by(clock)
    remember(primed, clock, stage)
    suspend(stage)
    clock.pass_seconds(1.9)
    assert decision(primed.ask(stage.token, stage.asked)) == ALLOWED, "this is memory, or nothing is shown"
    if step == "the bound":
        clock.pass_seconds(0.1)
    else:
        clock.wall_now += 5 if step == "forwards" else -5
    for _ in range(2):
        assert decision(primed.ask(stage.token, stage.asked)) == (401, "key_not_active")
        (found,) = json.loads(primed.ask(stage.token, {"requests": [stage.asked]}, BATCH).body)["decisions"]
        assert found["code"] == "key_not_active"


@pytest.mark.parametrize("lost", [KEY, TOKEN, RULES])
def test_engine_that_is_stale_and_cannot_read_says_yes_to_nothing(stage: Stage, lost: str) -> None:
    """Guarantee: what was a yes a moment ago is none without somebody to vouch for it."""
    clock = Clock()
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


def test_engine_whose_feed_went_back_says_yes_to_nothing_for_ever(stage: Stage) -> None:
    """Guarantee: a database that lacks revocations which this process was told of is read through by nobody: a key that
    it brought back to life is as good as unknown until a restart, whatever is confirmed meanwhile."""
    clock = Clock()
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


def test_engine_whose_feed_goes_back_between_reading_and_judging_says_no(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read a moment before the loss was found out is not judged by any more."""
    primed = prime(may_remember=False)
    find = DatabaseStore.find

    def find_and_lose(store: DatabaseStore, of: str, ids: frozenset[str], address: str | None) -> Mapping[str, Found]:
        found = find(store, of, ids, address)
        if of == KEY:
            primed.engine.freshness.mark_lost()
        return found

    monkeypatch.setattr(DatabaseStore, "find", find_and_lose)
    assert decision(primed.ask(stage.token, stage.asked)) == (503, "verifier_stale")


def test_engine_that_cannot_read_what_its_host_changed_forgets_everything_and_reads_through(stage: Stage) -> None:
    """Guarantee: a host without a file descriptor to spare answers by its database, and neither by what was, nor with a
    fault."""
    clock, host = Clock(), Unreadable()
    primed = prime(may_remember=False, monotonic=clock.monotonic, wall=clock.wall, generation=host)
    remember(primed, clock, stage)
    suspend(stage)
    assert decision(primed.ask(stage.token, stage.asked)) == ALLOWED, "this is memory, or nothing is shown"
    before = primed.from_memory
    host.words[0], host.is_out = 1, True
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
    """The generation of a host that has run out of file descriptors, from time to time."""

    is_out = False

    def since(self, seen: int) -> tuple[int, Iterable[Subject] | None]:
        if self.is_out:
            raise OSError("too many open files")
        return self.words[0], []


def test_engine_judges_deadlines_when_it_reads_them(stage: Stage) -> None:
    """Guarantee: an expired key is no good at its very second, though nothing was changed and all is in memory."""
    key, text = issue(account(), label="short-lived", expires_in_days=1)
    assert key.expires_at is not None
    asked = {**stage.asked, "key": text.reveal()}
    clock = Clock()
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


def test_engine_service_token_that_expires_in_memory_is_none(stage: Stage) -> None:
    row, token = make_token(P.KEYS_VERIFY, name="short-lived", lifetime_days=1)
    clock = Clock()
    primed = prime_by(clock)
    for _ in range(3):
        primed.engine.freshness.confirm(clock.monotonic(), clock.wall())
        assert decision(primed.ask(token.reveal(), stage.asked)) == ALLOWED
    clock.pass_seconds(row.expires_at.timestamp() - clock.wall_now)
    primed.engine.freshness.confirm(clock.monotonic(), clock.wall())
    assert primed.ask(token.reveal(), stage.asked).status == 401


def batched(primed: Primed, token: str, asked: Mapping[str, Any]) -> tuple[int, str]:
    """Of a batch of this one question."""
    (found,) = json.loads(primed.ask(token, {"requests": [asked]}, BATCH).body)["decisions"]
    return found["status"], found["code"] or "allowed"


def test_engine_batch_of_what_was_granted_judges_deadlines_too(stage: Stage) -> None:
    key, text = issue(account(), label="short-lived", expires_in_days=1)
    row, token = make_token(P.KEYS_VERIFY, name="short-lived", lifetime_days=2)
    assert key.expires_at is not None
    asked, lasting = {**stage.asked, "key": text.reveal()}, stage.asked
    clock = Clock()
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
def test_engine_question_of_a_key_that_is_not_remembered_grants_nothing_any_more(stage: Stage, *, forget: bool) -> None:
    """Guarantee: no yes after a no, whether the key was evicted or only made room for others; alone and in a batch."""
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
            for _ in range(2):  # who comes once is not let in
                memory.admit_key(structs.replace(record, key_id=f"another {number}"))
    assert stage.key.key_id not in primed.engine.memory.keys.by_id
    assert len(primed.engine.memory.granted) == 1
    assert batched(primed, stage.token, stage.asked) == (401, "key_not_active")
    assert decision(primed.ask(stage.token, {**stage.asked, "client_ip": "192.0.2.9"})) == (401, "key_not_active")
    assert decision(primed.ask(stage.token, stage.asked)) == (401, "key_not_active")


def test_engine_key_that_is_asked_for_again_and_again_makes_no_room(stage: Stage) -> None:
    """A flood of others, which nobody asks for again, does not drive out what everybody asks for."""
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


def test_engine_key_that_was_asked_for_once_makes_room_before_one_that_was_again(stage: Stage) -> None:
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


@pytest.mark.parametrize("kind", [KEY, TOKEN, RULES])
def test_engine_reading_that_a_change_came_across_is_not_remembered(
    stage: Stage, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: what was read before a change, and came after it, answers its own question and no other."""
    primed = prime()
    find, read_rules = DatabaseStore.find, DatabaseStore.read_rules

    def find_late(store: DatabaseStore, of: str, ids: frozenset[str], address: str | None) -> Mapping[str, Found]:
        found = find(store, of, ids, address)
        if of == kind:
            primed.engine.evict([("key", "somebody else's")])
        return found

    def read_late(store: DatabaseStore, known: PolicySnapshot | None) -> PolicySnapshot:
        rules = read_rules(store, known)
        if kind == RULES:
            primed.engine.evict([("key", "somebody else's")])
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


@pytest.mark.parametrize("is_read_anew", [False, True])
def test_engine_judgement_that_a_change_of_the_rules_came_across_is_not_remembered(
    stage: Stage, is_read_anew: bool
) -> None:
    """Guarantee: an endpoint that is withdrawn while a question about it is judged is granted to nobody afterwards;
    and that question is spent for and noted once, whatever has become of the rules that it was judged by."""
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


def test_engine_flooded_with_ids_that_are_nobodys_stays_bounded_and_asks_once_for_each(
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


def test_engine_limits_that_change_for_ever_leave_nothing_behind(stage: Stage) -> None:
    """Rules that were replaced are held by nobody, however long a key is remembered."""
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
    """Reads at once, and hands over when it is told to."""

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


def asks(door: AsyncioFrontend, stage: Stage, key: str | None = None, **more: object) -> CallbackFuture:
    found = door.answer(b"POST", VERIFY.encode(), *sent(stage, key or stage.text, **more))
    assert isinstance(found, CallbackFuture)
    return found


def at_work(stage: Stage) -> tuple[Primed, HeldStore, AsyncioFrontend]:
    """An engine that lacks nothing for its answers but keys, and whose uses so far were taken."""
    primed, store = prime(), HeldStore()
    for _ in range(3):
        outside_the_loop(lambda: primed.ask(stage.token, stage.asked))
    primed.engine.take_uses()
    return primed, store, AsyncioFrontend(primed.engine, store, primed.engine.ports.budgets, lambda address: False)  # type: ignore[arg-type]  # local ones have both


def test_engine_question_joins_no_reading_that_is_under_way(stage: Stage) -> None:
    """Guarantee: a question that is asked after a change is not answered by a reading from before it."""

    async def run() -> None:
        primed, store = prime(may_remember=False), HeldStore()
        door = AsyncioFrontend(primed.engine, store, primed.engine.ports.budgets, lambda address: False)  # type: ignore[arg-type]  # local ones have both
        await asks(door, stage)
        store.holds = True
        first = asks(door, stage)
        await until(lambda: len(store.readings) == 1)
        outside_the_loop(lambda: suspend(stage))
        second = asks(door, stage)
        await until(lambda: len(store.readings) == 2)
        store.readings[1][2].set()
        assert decision(await second) == (401, "key_not_active")
        store.readings[0][2].set()
        assert decision(await first) == ALLOWED, "it was asked before"

    asyncio.run(run())


def test_engine_questions_of_one_moment_are_read_for_at_once(stage: Stage) -> None:
    texts = [stage.text] + [issue(account(), label=f"number {number}")[1].reveal() for number in range(3)]

    async def run() -> None:
        primed, store = prime(may_remember=False), HeldStore()
        door = AsyncioFrontend(primed.engine, store, primed.engine.ports.budgets, lambda address: False)  # type: ignore[arg-type]  # local ones have both
        store.holds = True
        asked = [asks(door, stage, text) for text in texts * 5]
        await until(lambda: len(store.readings) == 1)
        (_, ids, released), *_ = store.readings
        assert len(ids) == len(texts)
        released.set()
        assert [decision(answer) for answer in await asyncio.gather(*asked)] == [ALLOWED] * 20
        assert len(store.readings) == 1

    asyncio.run(run())


def test_engine_few_that_come_while_a_reading_is_under_way_are_read_for_together(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reading for one costs as much as for many: they wait for company or the end of the one before, not for ever."""
    monkeypatch.setattr(asyncio_frontend, "MAX_BATCH_DELAY_SECONDS", 3600.0)
    texts = [
        issue(account(), label=f"number {number}")[1].reveal()
        for number in range(asyncio_frontend.MAX_ANSWERS_PER_TURN + 2)
    ]

    async def run() -> None:
        primed, store = prime(may_remember=False), HeldStore()
        door = AsyncioFrontend(primed.engine, store, primed.engine.ports.budgets, lambda address: False)  # type: ignore[arg-type]  # local ones have both
        await asks(door, stage)
        store.holds = True
        asked = [asks(door, stage)]
        await until(lambda: len(store.readings) == 1)
        for text in texts[:2]:
            asked.append(asks(door, stage, text))
            for _ in range(100):
                await asyncio.sleep(0)
        assert len(store.readings) == 1
        asked += [asks(door, stage, text) for text in texts[2:]]
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


@pytest.mark.parametrize("change", MEANWHILE)
def test_engine_miss_that_a_change_came_across_is_answered_by_what_was_read_for_it_and_not_remembered(
    stage: Stage, change: str
) -> None:
    """Guarantee: a key is read for once, and that reading, which began after the question came, serves it; and no other
    question."""
    (_, known), (gone, gone_text), (_, other) = (issue(account(), label=f"number {number}") for number in range(3))
    revoke(gone)
    expected = {
        stage.text: ALLOWED,
        gone_text.reveal(): (401, "key_revoked"),
        _nobodys(stage): (401, "credential_invalid"),
        forged(other.reveal()): (401, "credential_invalid"),
    }

    async def run() -> None:
        clock, store = Clock(), HeldStore()
        primed = prime_by(clock)
        door = AsyncioFrontend(primed.engine, store, primed.engine.ports.budgets, lambda address: False)  # type: ignore[arg-type]  # local ones have both
        for text, told in expected.items():
            store.holds = False
            primed.engine.freshness.confirm(clock.monotonic(), clock.wall())
            await answered(door.answer(b"POST", VERIFY.encode(), *sent(stage, known.reveal())))
            store.holds = True
            store.readings.clear()
            question = asks(door, stage, text)
            assert len(door._misses) == 1, "it lacks the key alone, or this is about something else"
            await until(lambda: bool(store.readings))
            MEANWHILE[change](primed, stage)
            store.readings[0][2].set()
            assert decision(await question) == told
            assert [(kind, len(ids)) for kind, ids, _ in store.readings] == [(KEY, 1)]
            memory = primed.engine.memory
            assert text[11:27] not in memory.keys.by_id
            assert (len(memory.absent), len(memory.denied)) == (0, 0)

    asyncio.run(run())


def _nobodys(stage: Stage) -> str:
    """A well-formed key whose id is nobody's."""
    text = f"{stage.text[:11]}{7:016d}{stage.text[27:-6]}"
    return text + checksum(text)


@pytest.mark.parametrize("is_revoked", [False, True])
def test_engine_miss_that_no_change_came_across_is_remembered(stage: Stage, is_revoked: bool) -> None:
    """Of one that has ended so is its denial: what was read is what is remembered, and is read for once."""
    known = issue(account(), label="known before")[1].reveal()
    if is_revoked:
        revoke(stage.key)

    async def run() -> None:
        primed, store = prime_by(Clock()), HeldStore()
        door = AsyncioFrontend(primed.engine, store, primed.engine.ports.budgets, lambda address: False)  # type: ignore[arg-type]  # local ones have both
        await answered(door.answer(b"POST", VERIFY.encode(), *sent(stage, known)))
        store.holds = True
        question = asks(door, stage)
        await until(lambda: len(store.readings) == 1)
        store.readings[0][2].set()
        expected = masked(await question)
        before = primed.from_memory
        again = door.answer(b"POST", VERIFY.encode(), *sent(stage, stage.text))
        assert isinstance(again, HttpResponse)
        assert decision(again) == ((401, "key_revoked") if is_revoked else ALLOWED)
        assert masked(again) == expected
        assert primed.from_memory == before + 1
        assert len(store.readings) == 1

    asyncio.run(run())


@pytest.mark.parametrize("error", [ZeroDivisionError("ours"), StoreUnavailableError("gone")])
def test_engine_reading_that_fails_is_an_answer_to_all_that_waited_for_it(
    stage: Stage, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next ones are read for as ever."""

    async def run() -> None:
        primed, store = prime(may_remember=False), HeldStore()
        door = AsyncioFrontend(primed.engine, store, primed.engine.ports.budgets, lambda address: False)  # type: ignore[arg-type]  # local ones have both
        with monkeypatch.context() as patch:

            async def fail(kind: str, ids: frozenset[str]) -> Mapping[str, Found]:
                raise error

            patch.setattr(store, "find", fail)
            for answer in await asyncio.gather(asks(door, stage), asks(door, stage)):
                assert answer.status == (500 if isinstance(error, ZeroDivisionError) else 503)
        assert decision(await asks(door, stage)) == ALLOWED

    asyncio.run(run())


def test_engine_missed_key_whose_asker_has_given_up_is_neither_spent_nor_noted_for(stage: Stage) -> None:
    """Guarantee: the same for a question that lacks nothing but its key."""
    other = issue(account(), label="read for nobody")[1].reveal()

    async def run() -> None:
        primed, store, door = at_work(stage)
        store.holds = True
        late, patient = asks(door, stage, other), asks(door, stage, issued)
        await until(lambda: len(store.readings) == 1)
        late.cancel()
        ((_, ids, released),) = store.readings
        released.set()
        assert decision(await patient) == ALLOWED
        assert len(ids) == 2
        (use,), _ = primed.engine.take_uses()
        assert use[0] == issued.split("_")[-1][:16]
        assert door._engine.memory.keys.by_id.keys() == {stage.key.key_id, use[0]}

    issued = issue(account(), label="read for somebody")[1].reveal()
    asyncio.run(run())


def test_engine_missed_key_that_is_given_up_while_others_of_its_reading_are_answered_is_not_spent_for(
    stage: Stage,
) -> None:
    keys = [issue(account(), label=f"number {number}") for number in range(asyncio_frontend.MAX_ANSWERS_PER_TURN + 2)]

    async def run() -> None:
        primed, store, door = at_work(stage)
        store.holds = True
        *asked, last = [asks(door, stage, text.reveal()) for _, text in keys]
        asked[0].add_done_callback(lambda _: last.cancel())
        await until(lambda: len(store.readings) == 1)
        store.readings[0][2].set()
        assert [decision(answer) for answer in await asyncio.gather(*asked)] == [ALLOWED] * len(asked)
        uses, _ = primed.engine.take_uses()
        assert {use[0] for use in uses} == {key.key_id for key, _ in keys[:-1]}
        assert (len(store.readings), door._reads, last.cancelled()) == (1, 0, True)

    asyncio.run(run())


def test_engine_has_one_reading_more_than_lanes_at_most(stage: Stage) -> None:
    """Where keys alone, and questions that lack more or want more than a verdict, begin together."""
    texts = [
        issue(account(), label=f"number {number}")[1].reveal()
        for number in range(3 * asyncio_frontend.MAX_ANSWERS_PER_TURN)
    ]

    async def run() -> None:
        _, store, door = at_work(stage)
        store.holds = True
        asked = [asks(door, stage, texts[0])]
        await until(lambda: len(store.readings) == 1)
        for number, text in enumerate(texts[1:]):
            asked.append(asks(door, stage, text, dry_run=bool(number % 2)))
            await asyncio.sleep(0)
        await until(lambda: len(store.readings) == asyncio_frontend.MAX_CONCURRENT_READS + 1)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(store.readings) == door._reads == asyncio_frontend.MAX_CONCURRENT_READS + 1
        store.holds = False
        for _, _, released in store.readings:
            released.set()
        assert [decision(answer) for answer in await asyncio.gather(*asked)] == [ALLOWED] * len(asked)
        assert not door._reads

    asyncio.run(run())


def test_engine_question_that_was_given_up_is_not_read_for(stage: Stage) -> None:
    """Guarantee: whoever was told already that there is no answer has nothing spent or noted for him."""
    noted: list[EngineVerdict] = []
    other = issue(account(), label="never read for")[1].reveal()

    async def run() -> None:
        primed, store = prime(may_remember=False, note_verdict=noted.append), HeldStore()
        door = AsyncioFrontend(primed.engine, store, primed.engine.ports.budgets, lambda address: False)  # type: ignore[arg-type]  # local ones have both
        store.holds = True
        late, never = asks(door, stage), asks(door, stage, other)
        never.cancel()
        await until(lambda: len(store.readings) == 1)
        late.cancel()
        ((_, ids, released),) = store.readings
        released.set()
        await until(lambda: not door._reads)
        assert (len(ids), len(store.readings), noted) == (1, 1, [])

    asyncio.run(run())


class BrokenStore(HeldStore):
    """Fails by a bug where it is told to: when it is asked, or when it reads."""

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
def test_engine_store_that_fails_by_a_bug_is_told_to_whoever_waits_and_the_next_reading_is_made(
    stage: Stage, breaks: str, caplog: pytest.LogCaptureFixture
) -> None:
    texts = [
        issue(account(), label=f"number {number}")[1].reveal()
        for number in range(asyncio_frontend.MAX_ANSWERS_PER_TURN + 2)
    ]

    async def run() -> None:
        primed, store = prime(), BrokenStore()
        door = AsyncioFrontend(primed.engine, store, primed.engine.ports.budgets, lambda address: False)  # type: ignore[arg-type]  # local ones have both
        for _ in range(3):
            outside_the_loop(lambda: primed.ask(stage.token, stage.asked))
        store.breaks = breaks
        asked = [asks(door, stage, text) for text in texts]
        async with asyncio.timeout(10):
            assert {answer.status for answer in await asyncio.gather(*asked)} == {500}
        store.breaks = ""
        async with asyncio.timeout(10):
            assert decision(await asks(door, stage, texts[0])) == ALLOWED
        assert not door._reads

    asyncio.run(run())


def test_engine_question_behind_others_that_were_given_up_is_read_for(stage: Stage) -> None:
    async def run() -> None:
        primed, store = prime(may_remember=False), HeldStore()
        door = AsyncioFrontend(primed.engine, store, primed.engine.ports.budgets, lambda address: True)  # type: ignore[arg-type]  # local ones have both
        *given_up, last = [asks(door, stage) for _ in range(2 * asyncio_frontend.MAX_THROTTLED_PER_READ + 1)]
        for each in given_up:
            each.cancel()
        async with asyncio.timeout(10):
            assert decision(await last) == ALLOWED

    asyncio.run(run())


# --- secrets ----------------------------------------------------------------------------------------------


def reachable(root: object) -> Iterator[object]:
    """Everything that is held by it, but for code."""
    seen: set[int] = set()
    asyncio_frontend = [root]
    while asyncio_frontend:
        each = asyncio_frontend.pop()
        if id(each) in seen or isinstance(each, type) or callable(each):
            continue
        seen.add(id(each))
        yield each
        asyncio_frontend += gc.get_referents(each)
        if isinstance(each, Struct):  # some are unknown to the collector
            asyncio_frontend += [getattr(each, name) for name in each.__struct_fields__]


def test_engine_holds_no_string_that_was_shown_to_it(stage: Stage) -> None:
    """Guarantee: whoever reads the memory of an engine that has answered for keys finds records, digests and tags; and
    no string, nor the secret part of one, as a name or as a value."""
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
    """What the engine keeps; not its ports, which are the process's: peppers and settings."""
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


def test_engine_with_room_for_few_accounts_answers_for_many_and_forgets_no_key_for_it(
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
        "nobody keeps the old rules"
    )
    engine.evict(None)
    gc.collect()
    assert not engine._all_spend_plans


def test_engine_ways_that_are_learned_again_and_again_take_no_more_room(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Budgets that are spent elsewhere send every question the whole way, which learns from each."""
    primed = prime()
    monkeypatch.setattr(primed.engine.ports.budgets, "spender", lambda buckets: lambda cost: None)
    asked = {**stage.asked, "store": "shop-1"}
    for _ in range(20):
        assert decision(primed.ask(stage.token, asked)) == ALLOWED
    (plans,) = primed.engine._all_spend_plans
    assert len(plans.by_template) == len(primed.engine._grant_templates) == 1


def test_engine_key_that_many_have_asked_for_at_once_is_remembered_once(stage: Stage) -> None:
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
