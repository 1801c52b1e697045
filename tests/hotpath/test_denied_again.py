"""Cached denials of a key in a final state.

Each is byte-identical to the first one and is noted. It is used only while the key's record, the caller and the rules
are unchanged.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import hypothesis.strategies as st
import pytest
from django.forms import model_to_dict
from hypothesis import given
from msgspec import structs

from keyvault.access.decision import Denial
from keyvault.access.judgement import Judgement
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER, KeyHolder
from keyvault.access.roles import Role
from keyvault.access.verification import judge_record
from keyvault.domain.digests import Peppers, PepperSet
from keyvault.domain.environments import Environment
from keyvault.domain.errors import ErrorCode, VerifierStaleError
from keyvault.domain.ids import Subject, is_merchant_id
from keyvault.domain.keys import DEAD_STATES, KeyKind, KeyState, RetirementReason
from keyvault.hotpath.adapters.stores import DatabaseStore
from keyvault.hotpath.engine.memory import Memory
from keyvault.hotpath.engine.ports import EngineVerdict
from keyvault.hotpath.messages import rendering
from keyvault.hotpath.messages.pending_requests import BATCH, KEY, VERIFY
from keyvault.models import Key, KeyUse, Refusal, ServiceToken, UseBucket
from keyvault.services.keys.lifecycle import discard_key, expire_key, report_compromise, stage_key, suspend_key
from keyvault.services.limits.limiter import Limiter
from keyvault.services.limits.stores import LocalStore
from keyvault.services.tokens.service_tokens import revoke_service_token
from keyvault.services.usage.recorder import UsageLog
from keyvault.services.verification.refusals import RefusalLog
from tests.entry_points.golden import forged
from tests.factories import account, grant, issue, make_merchant, make_token, now, the_operator
from tests.hotpath.engine.test_memory import a_key

from .conftest import Stage, revoke
from .priming import MachineClock, Primed, Still, decision, encode, masked, prime, prime_by

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("usage")]

REVOKED = (401, "key_revoked")


def _admin() -> Any:
    return the_operator("admin", Role.KEY_ADMINISTRATOR)


def _burn_staged(key: Key) -> None:
    discard_key(grant(_admin(), P.KEYS_REVOKE, account()), key)


@pytest.fixture
def ended(stage: Stage) -> Stage:
    """A stage whose key is revoked in the transaction of the test, before any engine reads it."""
    revoke(stage.key)
    return stage


def staged(stage: Stage) -> tuple[Key, str]:
    """Another key of the same credential, which is not active yet."""
    allowed = grant(WORKER, P.ROTATIONS_ADVANCE, account())
    key, text = stage_key(allowed, stage.key.credential, expires_in_days=None)
    return key, text.reveal()


def learn(primed: Primed, stage: Stage) -> None:
    """Repeat the request until the engine denies it from its cache."""
    assert decision(primed.ask(stage.token, stage.asked)) == REVOKED
    assert primed.from_memory == 0
    assert decision(primed.ask(stage.token, stage.asked)) == REVOKED
    assert primed.from_memory == 1, "this is memory, or nothing is shown"


def reread(primed: Primed, clock: MachineClock) -> None:
    primed.engine.freshness.confirm(clock.monotonic(), clock.wall())


# --- what is answered -------------------------------------------------------------------------------------

ENDS: dict[str, Callable[[Stage], tuple[Key, str]]] = {
    "revoked": lambda stage: _ended(stage.key, stage.text, revoke),
    "compromised": lambda stage: _ended(stage.key, stage.text, _report),
    "destroyed": lambda stage: _ended(*staged(stage), _burn_staged),
    "public": lambda stage: _ended(*_public(), revoke),
}


def _ended(key: Key, text: str, end: Callable[[Key], None]) -> tuple[Key, str]:
    end(key)
    return key, text


def _report(key: Key) -> None:
    report_compromise(grant(_admin(), P.KEYS_REPORT_COMPROMISE, account()), key)


def _public() -> tuple[Key, str]:
    key, text = issue(account(), kind=KeyKind.PUBLIC, label="public")
    return key, text.reveal()


@pytest.mark.parametrize("end", ENDS)
def test_repeated_denial_is_byte_identical(stage: Stage, end: str) -> None:
    """Guarantee: every denial of a final key equals the first one, apart from the request id.

    Each is noted like the first, and none spends a limit or counts as a use.
    """
    key, text = ENDS[end](stage)
    more = {"client_ip": "192.0.2.9", "user_agent": "shop/1 50% \u00e9", "cost": 3}
    if key.credential.kind == KeyKind.PUBLIC:
        more["origin"] = "https://shop.example/50%25"
    asked = {**stage.asked, "key": text, **more}
    noted: list[EngineVerdict] = []
    clock = MachineClock()
    primed = prime_by(clock, note_verdict=noted.append)
    expected = masked(prime(may_remember=False).ask(stage.token, asked))
    answers = [primed.ask(stage.token, asked)]
    assert (primed.from_memory, len(primed.engine.memory.denied)) == (0, 1)
    for times in (1, 2, 3):
        clock.pass_seconds(0.25)
        answers.append(primed.ask(stage.token, asked))
        assert primed.from_memory == times
        assert noted[-1].at == datetime.fromtimestamp(clock.wall(), UTC)
    for answer, verdict in zip(answers, noted, strict=True):
        assert masked(answer) == expected
        body = json.loads(answer.body)
        assert body["key_id"] == key.key_id
        assert body["request_id"] == body["problem"]["request_id"] == answer.request_id == verdict.request_id
        same = replace(verdict, request_id="", at=noted[0].at, is_from_memory=False)
        assert same == replace(noted[0], request_id="")
    assert [verdict.is_from_memory for verdict in noted] == [False, True, True, True]
    assert len({answer.request_id for answer in answers}) == 4
    uses, counts = primed.engine.take_uses()
    assert (list(uses), counts) == ([], (3, 3, 0))


def test_repeated_denial_is_logged_outside_the_lock(ended: Stage) -> None:
    """A slow log delays neither other requests nor the application of a change."""
    held: list[bool] = []
    primed: Primed = prime(note_verdict=lambda _: held.append(primed.engine.lock.locked()))
    learn(primed, ended)
    assert held == [False, False]


def test_repeated_denial_spends_nothing(ended: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    spent: list[str] = []
    monkeypatch.setattr(Limiter, "spend", noting(spent, "spend", Limiter.spend))
    make_spender = LocalStore.spender
    monkeypatch.setattr(LocalStore, "spender", lambda *given: noting(spent, "pay", make_spender(*given)))
    _, good = issue(account(), label="good")
    primed = prime()
    learn(primed, ended)
    assert not spent
    for _ in range(2):
        primed.ask(ended.token, {**ended.asked, "key": good.reveal()})
    assert spent == ["spend", "pay"], "this is what would have been seen"


def noting(names: list[str], name: str, act: Callable[..., Any]) -> Callable[..., Any]:
    def note_and_act(*given: Any, **named: Any) -> Any:
        names.append(name)
        return act(*given, **named)

    return note_and_act


def test_repeated_denial_is_recorded_like_any_denial(
    ended: Stage, usage: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each denial is kept under its request id for support, and is no use of the key."""
    refusals = RefusalLog()
    monkeypatch.setattr("keyvault.hotpath.adapters.assembly.refusal_log", refusals)
    primed = prime()
    ids = [primed.ask(ended.token, ended.asked).request_id for _ in range(4)]
    assert primed.from_memory == 3
    refusals.flush()
    usage.flush()
    kept = {row.request_id: row for row in Refusal.objects.all()}
    assert set(kept) == set(ids)
    first, *others = [model_to_dict(kept[request_id], exclude=["id", "request_id", "at"]) for request_id in ids]
    assert others == [first] * 3
    assert first["key_id"] == ended.key.key_id
    assert not UseBucket.objects.exists()
    assert not KeyUse.objects.exists()


def test_repeated_denial_needs_the_same_bytes_of_the_same_client(ended: Stage) -> None:
    """Guarantee: another client's request, or another request with the same key, is judged by itself."""
    primed = prime()
    learn(primed, ended)
    _, other = make_token(P.KEYS_VERIFY, name="another")
    make_merchant("globex")
    _, elsewhere = make_token(P.KEYS_VERIFY, name="of others", merchants=["globex"])
    assert decision(primed.ask(other.reveal(), ended.asked)) == REVOKED
    assert decision(primed.ask(elsewhere.reveal(), ended.asked)) == (401, "credential_invalid")
    assert decision(primed.ask(ended.token, {**ended.asked, "endpoint": "payouts.list"})) == REVOKED
    assert decision(primed.ask(ended.token, {**ended.asked, "key": forged(ended.text)})) == (401, "credential_invalid")
    spaced = primed.send("POST", VERIFY, {"authorization": f"Bearer {ended.token}"}, b" " + encode(ended.asked))
    assert decision(spaced) == REVOKED
    assert primed.from_memory == 1


# --- how long it is good for ------------------------------------------------------------------------------

SUBJECTS: dict[str, Callable[[Stage], list[Subject] | None]] = {
    "its key": lambda stage: [("key", stage.key.key_id)],
    "its credential": lambda stage: [("credential", stage.key.credential_id)],
    "its account": lambda _: [("account", "acme/sandbox")],
    "its merchant": lambda _: [("merchant", "acme")],
    "its caller's token": lambda _: [("service_token", ServiceToken.objects.get().token_id)],
    "a limit": lambda _: [("limit", "orders.create")],
    "an endpoint": lambda _: [("endpoint", "orders.create")],
    "something that this release does not know": lambda _: [("of a newer release", "x")],
    "everything": lambda _: None,
}


@pytest.mark.parametrize("subject", SUBJECTS)
def test_denied_key_is_judged_again_after_a_change_of_its_dependencies(ended: Stage, subject: str) -> None:
    primed = prime()
    learn(primed, ended)
    primed.engine.evict(SUBJECTS[subject](ended))
    assert decision(primed.ask(ended.token, ended.asked)) == REVOKED
    assert primed.from_memory == 1
    assert decision(primed.ask(ended.token, ended.asked)) == REVOKED
    assert primed.from_memory == 2


def test_denied_key_stays_cached_after_an_unrelated_change(ended: Stage) -> None:
    primed = prime()
    learn(primed, ended)
    primed.engine.evict([("key", "another"), ("merchant", "globex"), ("service_token", "another")])
    primed.ask(ended.token, ended.asked)
    assert primed.from_memory == 2


def test_revoked_service_token_is_refused_for_a_cached_denial(ended: Stage) -> None:
    """Guarantee: a revoked service token gets no cached verdict about any key."""
    primed = prime()
    learn(primed, ended)
    row = ServiceToken.objects.get()
    revoke_service_token(grant(_admin(), P.TOKENS_WRITE), row)
    primed.ask(ended.token, ended.asked)
    assert primed.from_memory == 2, "no engine has heard of it yet"
    primed.engine.evict([("service_token", row.token_id)])
    answer = primed.ask(ended.token, ended.asked)
    assert (answer.status, json.loads(answer.body)["code"]) == (401, "service_token_invalid")


def test_expired_service_token_is_refused_for_a_cached_denial(ended: Stage) -> None:
    clock = MachineClock()
    primed = prime_by(clock)
    learn(primed, ended)
    clock.pass_seconds(ServiceToken.objects.get().expires_at.timestamp() - clock.wall() - 0.001)
    reread(primed, clock)
    assert decision(primed.ask(ended.token, ended.asked)) == REVOKED
    assert primed.from_memory == 2
    clock.pass_seconds(0.001)
    answer = primed.ask(ended.token, ended.asked)
    assert (answer.status, json.loads(answer.body)["code"]) == (401, "service_token_invalid")


@pytest.mark.parametrize("shelf", ["keys", "tokens"])
def test_denied_key_is_judged_again_after_the_eviction_of_its_dependencies(ended: Stage, shelf: str) -> None:
    _, other = issue(account(), label="another")
    _, token = make_token(P.KEYS_VERIFY, name="another")
    primed = prime(capacity=1)
    learn(primed, ended)
    for _ in range(2):  # a key is admitted at its second request
        if shelf == "keys":
            primed.ask(ended.token, {**ended.asked, "key": other.reveal()})
        else:
            primed.ask(token.reveal(), {**ended.asked, "key": None})
    assert len(primed.engine.memory.denied) == 1
    assert decision(primed.ask(ended.token, ended.asked)) == REVOKED
    assert primed.from_memory == 1


@pytest.mark.parametrize("step", ["the bound", "forwards", "backwards"])
def test_denied_key_is_read_again_without_a_recent_confirmation(
    ended: Stage, step: str, looked: list[tuple[str, str]]
) -> None:
    clock = MachineClock()
    primed = prime_by(clock)
    learn(primed, ended)
    clock.pass_seconds(1.9)
    primed.ask(ended.token, ended.asked)
    assert primed.from_memory == 2
    if step == "the bound":
        clock.pass_seconds(0.1)
    else:
        clock.wall_now += 5 if step == "forwards" else -5
    looked.clear()
    for _ in range(2):
        assert decision(primed.ask(ended.token, ended.asked)) == REVOKED
    assert looked.count((KEY, ended.key.key_id)) == 2
    assert primed.from_memory == 2
    reread(primed, clock)
    primed.ask(ended.token, ended.asked)
    assert primed.from_memory == 3


def test_denied_key_gets_a_503_after_the_feed_went_back(ended: Stage) -> None:
    primed = prime()
    learn(primed, ended)
    primed.engine.freshness.mark_lost()
    for _ in range(2):
        assert decision(primed.ask(ended.token, ended.asked)) == (503, "verifier_stale")
    assert primed.from_memory == 1


class Moving(Still):
    """The generation counter of a host whose changes the test reports."""

    subjects: Iterable[Subject] | None = ()
    is_readable = True

    def move(self, subjects: Iterable[Subject] | None) -> None:
        self.memory[0] += 1
        self.subjects = subjects

    def since(self, seen: int) -> tuple[int, Iterable[Subject] | None]:
        if not self.is_readable:
            raise OSError("too many open files")
        return self.memory[0], self.subjects


@pytest.mark.parametrize("subject", SUBJECTS)
def test_denied_key_is_judged_again_after_a_change_on_its_host(ended: Stage, subject: str) -> None:
    """Guarantee: once a change is confirmed to its author, no denial on that host uses the old record."""
    host = Moving()
    primed = prime(generation=host)
    learn(primed, ended)
    host.move(SUBJECTS[subject](ended))
    assert decision(primed.ask(ended.token, ended.asked)) == REVOKED
    assert primed.from_memory == 1
    host.move([("key", "another")])
    assert decision(primed.ask(ended.token, ended.asked)) == REVOKED
    assert primed.from_memory == 2


def test_denied_key_is_evicted_when_the_host_generation_is_unreadable(ended: Stage) -> None:
    host = Moving()
    primed = prime(generation=host)
    learn(primed, ended)
    host.is_readable = False
    host.move([("key", "another")])
    for _ in range(3):
        assert decision(primed.ask(ended.token, ended.asked)) == REVOKED
    assert primed.from_memory == 1
    assert not primed.engine.memory.denied


def test_denied_key_past_its_expiry_is_still_reported_as_revoked(stage: Stage) -> None:
    key, text = issue(account(), label="short-lived", expires_in_days=1)
    assert key.expires_at is not None
    revoke(key)
    asked = {**stage.asked, "key": text.reveal()}
    clock = MachineClock()
    quick, whole = prime_by(clock), prime(may_remember=False, monotonic=clock.monotonic, wall=clock.wall)
    for _ in range(2):
        assert masked(quick.ask(stage.token, asked)) == masked(whole.ask(stage.token, asked))
    clock.pass_seconds(key.expires_at.timestamp() - clock.wall())
    reread(quick, clock)
    for _ in range(3):
        answer = quick.ask(stage.token, asked)
        assert decision(answer) == REVOKED
        assert masked(answer) == masked(whole.ask(stage.token, asked))


# --- what is not remembered -------------------------------------------------------------------------------


def test_denied_key_that_may_become_active_is_judged_each_time(stage: Stage) -> None:
    """Only the denial of a key in a final state is cached: other reasons can pass."""
    late, late_text = issue(account(), label="late", expires_in_days=1)
    assert late.expires_at is not None
    _, not_yet = staged(stage)
    suspend_key(grant(_admin(), P.KEYS_SUSPEND, account()), stage.key)
    primed = prime_by(MachineClock(wall_now=late.expires_at.timestamp() + 60))
    denied = {stage.text: "key_not_active", not_yet: "key_not_active", late_text.reveal(): "key_expired"}
    for text, code in denied.items():
        for _ in range(3):
            assert decision(primed.ask(stage.token, {**stage.asked, "key": text})) == (401, code)
    assert len(primed.engine.memory.keys.by_id) == 3
    assert (primed.from_memory, len(primed.engine.memory.denied)) == (0, 0)


def test_denied_key_past_its_expiry_is_reported_as_expired_before_and_after_the_sweep(stage: Stage) -> None:
    """This holds for every repetition, on both paths."""
    key, text = issue(account(), label="late", expires_in_days=1)
    assert key.expires_at is not None
    asked = {**stage.asked, "key": text.reveal()}
    clock = MachineClock(wall_now=key.expires_at.timestamp() + 60)
    quick, whole = prime_by(clock), prime(may_remember=False, monotonic=clock.monotonic, wall=clock.wall)
    expected = masked(whole.ask(stage.token, asked))
    assert b"key_expired" in expected[2]
    expire_key(grant(WORKER, P.ISSUANCE_EXECUTE, account(), at=key.expires_at), key)
    for _ in range(3):
        assert masked(quick.ask(stage.token, asked)) == expected
    assert quick.from_memory == 2, "what was swept is over"


MARKED = "kv_prv_sbx_and the rest of a key"

UNLEARNED: dict[str, dict[str, Any]] = {
    "a dry run": {"dry_run": True},
    "a user agent with what may be a key": {"user_agent": f"shop/1 {MARKED}"},
    "an origin with what may be a key": {"origin": f"https://shop.example/{MARKED}"},
    "no key": {"key": None},
    "a key that is none": {"key": "nonsense"},
}


@pytest.mark.parametrize("case", UNLEARNED)
def test_denied_uncacheable_request_is_judged_each_time(ended: Stage, case: str) -> None:
    primed = prime()
    first, *others = [primed.ask(ended.token, {**ended.asked, **UNLEARNED[case]}) for _ in range(3)]
    assert first.status == 200
    assert b'"allowed":false' in first.body
    assert [masked(answer) for answer in others] == [masked(first)] * 2
    assert (primed.from_memory, len(primed.engine.memory.denied)) == (0, 0)
    learn(primed, ended)
    assert len(primed.engine.memory.denied) == 1


def test_denied_request_without_proof_is_judged_each_time(ended: Stage) -> None:
    """Guarantee: no denial is cached for a client without proof of possession or without access to the key."""
    primed = prime()
    make_merchant("globex")
    _, others = make_token(P.KEYS_VERIFY, name="of others", merchants=["globex"])
    _, everywhere = make_token(P.KEYS_VERIFY, name="of both")
    by_line = {"key": ended.text, "environment": "sandbox", "method": "GET", "path": f"/sandbox/x?key={ended.text}"}
    learn(primed, ended)
    questions = [
        (ended.token, {**ended.asked, "key": forged(ended.text)}, "credential_invalid"),
        (ended.token, {**ended.asked, "key": f"{ended.text},{ended.text}"}, "credential_ambiguous"),
        (ended.token, by_line, "credential_in_url"),
        (others.reveal(), ended.asked, "credential_invalid"),
        (everywhere.reveal(), {**ended.asked, "environment": "production"}, "environment_mismatch"),
    ]
    for token, asked, code in questions:
        for _ in range(3):
            assert decision(primed.ask(token, asked))[1] == code
    assert (primed.from_memory, len(primed.engine.memory.denied)) == (1, 1)


def test_denied_requests_of_a_batch_are_judged_each_time(ended: Stage) -> None:
    """This holds after single requests too; each decision has its own number."""
    noted: list[EngineVerdict] = []
    primed = prime(note_verdict=noted.append)
    together = {"requests": [ended.asked, ended.asked]}
    for _ in range(3):
        primed.ask(ended.token, together, BATCH)
    assert (primed.from_memory, len(primed.engine.memory.denied)) == (0, 0)
    learn(primed, ended)
    noted.clear()
    answer = primed.ask(ended.token, together, BATCH)
    ids = [f"{answer.request_id}-{number}" for number in range(2)]
    assert [verdict.request_id for verdict in noted] == ids
    assert [each["request_id"] for each in json.loads(answer.body)["decisions"]] == ids
    assert primed.from_memory == 1


def test_denied_request_of_a_gateway_is_judged_each_time(ended: Stage) -> None:
    primed = prime()
    gateway = {"x-service-token": ended.token, "x-api-key": ended.text, "x-original-method": "POST"}
    gateway |= {"x-original-uri": "/sandbox/merchants/orders", "x-original-host": "127.0.0.1"}
    for _ in range(3):
        assert json.loads(primed.send("GET", "/v1/authorize/nginx", gateway).body)["code"] == "key_revoked"
    assert (primed.from_memory, len(primed.engine.memory.denied)) == (0, 0)


def test_denied_request_is_not_cached_by_an_engine_without_a_confirmed_feed(ended: Stage) -> None:
    primed = prime(may_remember=False)
    for _ in range(3):
        assert decision(primed.ask(ended.token, ended.asked)) == REVOKED
    assert not primed.engine.memory.denied


def _token(primed: Primed) -> Any:
    (known,) = primed.engine.memory.tokens.by_id.values()
    return known.record


def _read_key_anew(primed: Primed, stage: Stage) -> None:
    record = primed.engine.memory.keys.by_id[stage.key.key_id].record
    primed.engine.evict([("key", stage.key.key_id)])
    primed.engine.memory.admit_key(structs.replace(record))


def _make_room(primed: Primed, stage: Stage) -> None:
    """Evict them by other keys, which are evicted again."""
    record = primed.engine.memory.keys.by_id[stage.key.key_id].record
    for number in (0, 0, 1, 1):  # a key is admitted at its second request
        primed.engine.memory.admit_key(structs.replace(record, key_id=f"another {number}"))
    primed.engine.memory.evict([("key", f"another {number}") for number in range(2)])


def _read_token_anew(primed: Primed, stage: Stage) -> None:
    record = _token(primed)
    primed.engine.evict([("service_token", record.service.token_id)])
    primed.engine.memory.admit_token(replace(record))


def _read_rules_anew(primed: Primed, stage: Stage) -> None:
    primed.engine.evict([("limit", "any")])
    primed.engine.rules = DatabaseStore().read_rules(None)


MEANWHILE: dict[str, Callable[[Primed, Stage], None]] = {
    "its key is forgotten": lambda primed, stage: primed.engine.evict([("key", stage.key.key_id)]),
    "its key is read anew": _read_key_anew,
    "its key makes room for others": _make_room,
    "its token is forgotten": lambda primed, _: primed.engine.evict(
        [("service_token", _token(primed).service.token_id)]
    ),
    "its token is read anew": _read_token_anew,
    "the rules are read anew": _read_rules_anew,
    "everything is forgotten": lambda primed, _: primed.engine.evict(None),
}


@pytest.mark.parametrize("case", MEANWHILE)
def test_denied_request_is_not_cached_when_its_record_was_replaced(ended: Stage, case: str) -> None:
    """Guarantee: a verdict on a record that was replaced during the judgement is not cached.

    No later change would evict that record.
    """
    noted: list[EngineVerdict] = []
    acts = [MEANWHILE[case]]

    def note(verdict: EngineVerdict) -> None:
        noted.append(verdict)
        if acts:
            acts.pop()(primed, ended)

    primed = prime(capacity=2, note_verdict=note)
    primed.ask(ended.token, {**ended.asked, "key": None, "dry_run": True})
    assert primed.engine.rules is not None
    assert decision(primed.ask(ended.token, ended.asked)) == REVOKED
    assert not primed.engine.memory.denied
    assert not acts
    assert len(noted) == 1
    learn(primed, ended)


# --- bounds -----------------------------------------------------------------------------------------------


def _stale(pepper_set: PepperSet) -> Peppers:
    raise VerifierStaleError(f"the {pepper_set} peppers are not loaded yet")


@pytest.mark.parametrize("loaded", [lambda which: Peppers(which, {99: bytes(32)}), _stale], ids=["retired", "away"])
def test_denied_key_is_judged_again_without_its_pepper(ended: Stage, loaded: Callable[[PepperSet], Peppers]) -> None:
    """Guarantee: a final key under a retired pepper is reported as unknown, without its state."""
    primed = prime()
    learn(primed, ended)
    before = primed.from_memory
    primed.engine.ports = replace(primed.engine.ports, loaded_peppers=loaded)
    primed.ask(ended.token, ended.asked)
    assert primed.from_memory == before


@pytest.mark.parametrize("kind", ["denial", "question"])
def test_denied_request_that_is_cached_again_displaces_no_other(kind: str) -> None:
    memory = Memory(bytes(32), 2)
    remember, kept = {
        "denial": (memory.cache_denial, memory.denied),
        "question": (memory.cache_grant, memory.granted),
    }[kind]
    for tag, what in ((b"a", 1), (b"b", 2), (b"b", 3)):
        remember(tag, what)
    assert dict(kept) == {b"a": 1, b"b": 3}


def test_denied_requests_are_cached_in_bounds_and_the_oldest_is_evicted(ended: Stage) -> None:
    primed = prime(capacity=2)
    questions = [{**ended.asked, "client_ip": f"192.0.2.{number}"} for number in range(5)]
    for asked in questions:
        assert decision(primed.ask(ended.token, asked)) == REVOKED
        assert len(primed.engine.memory.denied) <= 2
    assert primed.from_memory == 0
    for asked in questions[3:]:
        primed.ask(ended.token, asked)
    assert primed.from_memory == 2
    primed.ask(ended.token, questions[2])
    assert primed.from_memory == 2
    assert len(primed.engine.memory.denied) == 2


@pytest.mark.parametrize(("capacity", "most"), [(8, 8), (4_096, 4_096), (100_000, 4_096)])
def test_denied_requests_are_bounded_by_the_capacity_and_a_maximum(capacity: int, most: int) -> None:
    memory = Memory(b"k" * 32, capacity)
    for number in range(5_000):
        memory.cache_denial(b"%d" % number, number)
    assert list(memory.denied.values()) == list(range(5_000 - most, 5_000))
    memory.clear()
    assert not memory.denied


# --- what is in the answer --------------------------------------------------------------------------------


def judgement(merchant_id: str, detail: str) -> Judgement:
    holder = KeyHolder("K" * 16, "crd_x", KeyKind.PRIVATE, Environment.SANDBOX, merchant_id)
    return Judgement(Denial(ErrorCode.KEY_REVOKED, detail, holder=holder), holder)


@given(merchant=st.text('%bds(){}\\"<\u00e9', max_size=12), detail=st.text("%bds<>\n\u00e9", max_size=12))
def test_denial_template_renders_exactly_the_answer_for_any_text(merchant: str, detail: str) -> None:
    found = judgement(merchant, detail)
    filled = rendering.denial_template(found) % (b"id-%b", b"id-%b")
    assert filled == rendering.encode(rendering.decision(found, "id-%b"))


@pytest.mark.parametrize("state", sorted(DEAD_STATES))
@pytest.mark.parametrize("retirement", RetirementReason)
def test_denial_template_has_two_placeholders_for_any_record(state: KeyState, retirement: RetirementReason) -> None:
    """Its texts are ids, enum values and fixed sentences, none of which can contain a placeholder."""
    assert not is_merchant_id(f"a{rendering._REQUEST_ID}b")
    record = structs.replace(a_key(1), state=state, retirement=retirement)
    denial = judge_record(record, now())
    assert isinstance(denial, Denial)
    text = rendering.denial_template(Judgement(denial, denial.holder, record))
    assert text.replace(b"%b", b"").count(b"%") == 0
    assert text.count(b"%b") == 2
