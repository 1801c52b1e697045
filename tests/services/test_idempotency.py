"""A request and its retries: one effect and one answer, whatever comes between, and no secret kept for longer."""

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from django.db import DatabaseError, OperationalError
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST
from keyvault.domain.canonical import JsonValue
from keyvault.domain.environments import Environment
from keyvault.domain.errors import ErrorCode, IdempotencyError, IntegrityError, RequestInvalidError, StateConflictError
from keyvault.domain.plaintext import Plaintext
from keyvault.models import AuditEntry, Merchant
from keyvault.models.idempotency import IdempotentRequest
from keyvault.models.usage import UseOutcome
from keyvault.services import idempotency
from keyvault.services.idempotency import (
    HOLD_SECONDS,
    KEEP,
    SEALED_FOR,
    Effect,
    IdempotentResult,
    StoredResponse,
    forget_expired,
    run_once,
    shred_due,
)
from keyvault.services.merchants.merchants import create_merchant
from keyvault.services.recording.audit_chain import verify_audit
from keyvault.services.usage.recorder import UsageLog
from tests.factories import account, grant, have_peppers, issue, make_merchant

from .racing import TIMEOUT_SECONDS, held_open, race, start, wait_until_blocked
from .rows import dump_tables

pytestmark = [pytest.mark.database, pytest.mark.django_db]

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
HOLD = timedelta(seconds=HOLD_SECONDS)
ROOT = Path(__file__).resolve().parents[2]

_numbers = count()


def make_something() -> StoredResponse:
    """An effect as the real ones are: rows, an audit entry, a number of its own in the answer."""
    name = f"m{os.getpid()}-{next(_numbers)}-{secrets.token_hex(4)}"
    create_merchant(grant(HOST, P.MERCHANTS_WRITE), merchant_id=name, name="made")
    return StoredResponse(201, {"merchant_id": name, "nested": {"b": [1, None, "\u2028\x00é"], "a": True}})


def fail() -> StoredResponse:
    """Too late, so that there is something to undo."""
    make_something()
    raise StateConflictError("not now")


def ask(
    at: datetime = NOON,
    *,
    effect: Effect = make_something,
    prepare: Callable[[], Effect] | None = None,
    **changed: Any,
) -> IdempotentResult:
    place: dict[str, Any] = {
        "holder": "crd_1",
        "endpoint": "orders.create",
        "environment": Environment.SANDBOX,
        "key": "k-1",
        "body": b"{}",
        **changed,
    }
    return run_once(now=at, prepare=prepare or (lambda: effect), **place)


def never() -> Effect:
    raise AssertionError("nothing is prepared when the answer is known")


def effects() -> int:
    return Merchant.objects.filter(name="made").count()


def refusal(call: Callable[[], object]) -> IdempotencyError:
    with pytest.raises(IdempotencyError) as caught:
        call()
    return caught.value


# ------------------------------------------------------------------------------------------------- the same again


def test_idempotency_first_request_is_done_and_its_retry_replayed() -> None:
    first = ask()
    again = ask(NOON + KEEP - SECOND, prepare=never)
    assert (first.is_replay, again.is_replay) == (False, True)
    assert (again.answer.status, again.answer.body) == (201, first.answer.body)
    assert json.dumps(again.answer.body) == json.dumps(first.answer.body), "byte for byte, order and all"
    assert first.is_secret_available
    assert again.is_secret_available
    assert effects() == 1
    assert AuditEntry.objects.filter(event="merchant.created").count() == 1


@pytest.mark.parametrize("changed", [{"holder": "crd_2"}, {"endpoint": "other.create"}, {"key": "k-2"}])
def test_idempotency_key_of_another_holder_or_endpoint_is_another(changed: dict[str, Any]) -> None:
    """What one caller stored is never answered to another, whatever key he guesses."""
    assert ask().answer.body != ask(body=b"other", **changed).answer.body
    assert effects() == 2


def test_idempotency_key_with_another_body_is_refused_and_does_nothing() -> None:
    ask()
    error = refusal(lambda: ask(body=b"{ }", prepare=never))
    assert error.code is ErrorCode.IDEMPOTENCY_BODY_MISMATCH
    assert effects() == 1


def test_idempotency_answer_is_kept_for_a_day_and_not_longer() -> None:
    """After 24 hours the key is as good as new, with whatever body, whether or not the row was cleared away."""
    first = ask()
    later = ask(NOON + KEEP, body=b"other")
    assert not later.is_replay
    assert later.answer.body != first.answer.body
    assert ask(NOON + KEEP + SECOND, body=b"other").answer.body == later.answer.body
    forget_expired(NOON + 2 * KEEP - SECOND)
    assert IdempotentRequest.objects.count() == 1
    forget_expired(NOON + 2 * KEEP)
    assert not IdempotentRequest.objects.exists()


def test_idempotency_request_that_does_not_fit_stores_nothing() -> None:
    def refuse() -> Effect:
        raise RequestInvalidError("no")

    with pytest.raises(RequestInvalidError):
        ask(prepare=refuse)
    assert not IdempotentRequest.objects.exists()
    assert not ask(body=b"mended").is_replay


def test_idempotency_effect_that_fails_leaves_nothing_and_may_be_tried_again() -> None:
    """Errors are not stored: the row goes with everything that the effect did, and the next one is a first one."""
    with pytest.raises(StateConflictError):
        ask(effect=fail)
    assert (effects(), IdempotentRequest.objects.count()) == (0, 0)
    assert not ask(body=b"mended").is_replay
    assert effects() == 1


def test_idempotency_answer_that_cannot_be_stored_undoes_the_effect() -> None:
    def answer_badly() -> StoredResponse:
        return StoredResponse(201, {**make_something().body, "at": NOON})  # type: ignore[dict-item]  # the mistake to find

    with pytest.raises(TypeError):
        ask(effect=answer_badly)
    assert (effects(), IdempotentRequest.objects.count()) == (0, 0)


def test_idempotency_rows_hold_neither_key_nor_body() -> None:
    """Callers put what they like into both: only their digests are kept."""
    ask(key="key-of-a-customer", body=b"body-of-a-customer")
    assert "of-a-customer" not in repr(dump_tables())


@dataclass
class _Model:
    """The rule by itself: what is answered to (seconds, key, body), given what was before."""

    kept: dict[str, tuple[int, str, JsonValue]] = field(default_factory=dict)

    def expect(self, at: int, key: str, body: str) -> tuple[str, JsonValue]:
        begun, first_body, answer = self.kept.get(key, (-1_000_000, "", None))
        if at - begun >= KEEP.total_seconds():
            return "done", None
        return ("replayed", answer) if body == first_body else ("refused", None)


STEPS = st.tuples(st.integers(0, 50_000), st.sampled_from("ab"), st.sampled_from("xy"), st.booleans())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(st.lists(STEPS, max_size=12))
@example([(0, "a", "x", False), (86_399, "a", "x", False), (1, "a", "x", False)])
def test_idempotency_of_any_requests_in_a_row_is_what_the_rule_says(steps: list[tuple[int, str, str, bool]]) -> None:
    """Any keys, bodies, failures and pauses: done once, replayed for a day, refused with another body."""
    IdempotentRequest.objects.all().delete()
    model, at = _Model(), 0
    for pause, key, body, fails in steps:
        at += pause
        expected, answer = model.expect(at, key, body)

        def effect(fails: bool = fails) -> StoredResponse:
            if fails:
                raise StateConflictError("no")
            return StoredResponse(201, {"number": next(_numbers)})

        request = partial(ask, NOON + at * SECOND, key=key, body=body.encode(), effect=effect)
        if expected == "refused":
            assert refusal(request).code is ErrorCode.IDEMPOTENCY_BODY_MISMATCH
        elif expected == "replayed":
            outcome = request()
            assert (outcome.is_replay, outcome.answer.body) == (True, answer)
        elif fails:
            model.kept.pop(key, None)
            with pytest.raises(StateConflictError):
                request()
        else:
            outcome = request()
            assert not outcome.is_replay
            model.kept[key] = (at, body, outcome.answer.body)


# ------------------------------------------------------------------------------------------------ at the same time


@pytest.mark.django_db(transaction=True)
def test_idempotency_of_twenty_retries_at_once_has_one_effect() -> None:
    """Whoever is not first either waits (409) or gets the first one's answer; there is one effect and one entry."""
    have_peppers()
    outcomes = race(*[ask] * 20)
    answers = [outcome for outcome in outcomes if isinstance(outcome, IdempotentResult)]
    refusals = [outcome for outcome in outcomes if isinstance(outcome, IdempotencyError)]
    assert len(answers) + len(refusals) == 20, outcomes
    assert [answer.is_replay for answer in answers].count(False) == 1
    assert len({json.dumps(answer.answer.body) for answer in answers}) == 1
    assert {error.code for error in refusals} <= {ErrorCode.IDEMPOTENCY_IN_PROGRESS}
    assert all(error.retry_after_seconds for error in refusals)
    assert effects() == 1
    assert ask(prepare=never).answer.body == answers[0].answer.body
    assert verify_audit().first_broken is None


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("left", ["an attempt that died", "an answer that has expired"])
def test_idempotency_of_twenty_retries_over_an_old_row_has_one_effect(left: str) -> None:
    """A row that no longer counts is taken over by exactly one of those who want it."""
    have_peppers()
    if left == "an attempt that died":
        _leave_a_claim()
        at, before = NOON + HOLD, 0
    else:
        ask()
        at, before = NOON + KEEP, 1
    outcomes = race(*[partial(ask, at)] * 20)
    answers = {json.dumps(outcome.answer.body) for outcome in outcomes if isinstance(outcome, IdempotentResult)}
    assert len(answers) == 1
    assert {type(outcome) for outcome in outcomes} <= {IdempotentResult, IdempotencyError}
    assert effects() == before + 1


@pytest.mark.django_db(transaction=True)
def test_idempotency_retry_while_the_first_is_at_work_says_how_long_to_wait() -> None:
    """The retry is refused at once, by another connection, before the first one's effect is to be seen."""
    have_peppers()
    seen: list[Any] = []

    def effect() -> StoredResponse:
        for at, body in ((NOON, b"{}"), (NOON + HOLD - SECOND / 2, b"{}"), (NOON, b"other")):
            retry = partial(ask, at, prepare=never, body=body)
            seen.append(start(partial(refusal, retry)).result(TIMEOUT_SECONDS))
        return make_something()

    assert not ask(effect=effect).is_replay
    progress = ErrorCode.IDEMPOTENCY_IN_PROGRESS
    assert [(error.code, error.retry_after_seconds) for error in seen] == [
        (progress, 1),
        (progress, 1),
        (ErrorCode.IDEMPOTENCY_BODY_MISMATCH, None),
    ]
    assert effects() == 1


def _leave_a_claim(at: datetime = NOON) -> None:
    """As an attempt leaves it that is killed before its effect, or merely sleeps there."""

    class KilledError(BaseException):
        pass

    def die(*_: object) -> None:
        raise KilledError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(idempotency, "_execute", die)
        patch.setattr(idempotency, "suppress", die)
        with pytest.raises(KilledError):
            ask(at)
    assert IdempotentRequest.objects.get().status is None


def test_idempotency_claim_of_a_dead_attempt_is_taken_over_when_its_hold_is_over() -> None:
    _leave_a_claim()
    error = refusal(lambda: ask(NOON + HOLD - SECOND / 1000, prepare=never))
    assert (error.code, error.retry_after_seconds) == (ErrorCode.IDEMPOTENCY_IN_PROGRESS, 1)
    error = refusal(lambda: ask(NOON + HOLD, body=b"other", prepare=never))
    assert error.code is ErrorCode.IDEMPOTENCY_BODY_MISMATCH
    assert not ask(NOON + HOLD).is_replay
    assert effects() == 1


@pytest.mark.parametrize("before", ["nothing", "a dead attempt", "an expired answer"])
@pytest.mark.parametrize("other", ["done", "at work", "failed"])
def test_idempotency_key_claimed_by_somebody_faster_is_left_to_him(before: str, other: str) -> None:
    """What was found free and is taken a moment later is taken once, whatever row was found."""
    have_peppers()
    at = NOON + KEEP
    if before == "a dead attempt":
        _leave_a_claim(at - HOLD)
    elif before == "an expired answer":
        ask()
    made, others = effects(), []

    def meanwhile() -> Effect:
        if other == "at work":
            _leave_a_claim(at)
        elif other == "done":
            others.append(ask(at))
        else:
            with pytest.raises(StateConflictError):
                ask(at, effect=fail)
        return make_something

    if other == "done":
        assert ask(at, prepare=meanwhile).answer.body == others[0].answer.body
        assert effects() == made + 1
    elif other == "at work" or before != "nothing":
        assert refusal(lambda: ask(at, prepare=meanwhile)).code is ErrorCode.IDEMPOTENCY_IN_PROGRESS
        assert effects() == made
    else:
        assert not ask(at, prepare=meanwhile).is_replay


@pytest.mark.parametrize("fate", ["finishes", "fails"])
@pytest.mark.parametrize("other", ["done", "at work"])
@pytest.mark.parametrize("fence", [1, 2])
def test_idempotency_zombie_writes_nothing_and_takes_nothing_away(
    fate: str, other: str, fence: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt that wakes up after another took its place is undone, and the other's claim or answer stays."""
    have_peppers()
    begun = NOON
    if fence == 2:
        _leave_a_claim()
        begun += HOLD
    claim, others = idempotency._claim, []

    def claim_and_sleep(*place: Any) -> Any:
        monkeypatch.setattr(idempotency, "_claim", claim)
        claimed = claim(*place)
        if other == "done":
            others.append(ask(begun + HOLD))
        else:
            _leave_a_claim(begun + HOLD)
        return claimed

    monkeypatch.setattr(idempotency, "_claim", claim_and_sleep)
    with pytest.raises(StateConflictError if fate == "fails" else IdempotencyError):
        ask(begun, effect=fail if fate == "fails" else make_something)
    assert effects() == len(others)
    row = IdempotentRequest.objects.get()
    assert (row.fence, row.status) == (fence + 1, 201 if others else None)
    for done in others:
        assert ask(begun + HOLD, prepare=never).answer.body == done.answer.body
    assert verify_audit().first_broken is None


def test_idempotency_sleeper_that_nobody_replaced_is_not_undone_by_one_who_comes_late() -> None:
    """It finishes after its hold and just before it would be taken over: its answer counts, and is replayed."""
    have_peppers()
    slept: list[Callable[[], StoredResponse]] = []

    def sleep(*arguments: Any) -> StoredResponse:
        slept.append(partial(act, *arguments))
        # The database is away when the claim would be given back.
        patch.setattr("django.db.models.query.QuerySet.delete", _fail)
        raise OperationalError("asleep")

    def meanwhile() -> Effect:
        slept[0]()
        return make_something

    act = idempotency._execute
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(idempotency, "_execute", sleep)
        with pytest.raises(OperationalError, match="asleep"):
            ask()
    late = ask(NOON + HOLD, prepare=meanwhile)
    assert late.is_replay
    assert effects() == 1


def test_idempotency_commit_that_was_made_but_not_heard_of_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is lost right after the commit: the caller is told to try again, and gets the one answer."""
    act = idempotency._execute

    def act_and_be_cut_off(*arguments: Any) -> StoredResponse:
        act(*arguments)
        raise OperationalError("server closed the connection unexpectedly")

    with monkeypatch.context() as patch:
        patch.setattr(idempotency, "_execute", act_and_be_cut_off)
        with pytest.raises(OperationalError):
            ask()
    assert ask(NOON + SECOND, prepare=never).is_replay
    assert effects() == 1


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_idempotency_zombie_in_the_middle_of_its_transaction_is_undone() -> None:
    """Taken over while its effect is written and not committed: it commits nothing of it."""
    have_peppers()
    others: list[IdempotentResult] = []

    def effect() -> StoredResponse:
        others.append(start(partial(ask, NOON + HOLD)).result(TIMEOUT_SECONDS))
        return make_something()

    error = refusal(lambda: ask(effect=effect))
    assert error.code is ErrorCode.IDEMPOTENCY_IN_PROGRESS
    assert effects() == 1
    assert ask(NOON + HOLD, prepare=never).answer.body == others[0].answer.body


@pytest.mark.django_db(transaction=True)
@pytest.mark.timeout(300)
def test_idempotency_killed_at_every_point_has_one_effect_after_the_retry() -> None:
    """kill -9 around every statement and every commit: never an effect without its answer, nor two effects."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.retry_matrix"],
        cwd=ROOT,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "keyvault.project.settings", "KEYVAULT_LOG_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["violations"] == []
    assert report["audit_intact"]
    # Fewer would mean that the bombs were not planted where the work is.
    assert report["crash_points"] >= 30
    assert report["found"] == {"nothing": True, "claimed": True, "done": True}


# --------------------------------------------------------------------------------------------- show-once secrets

SECRET = "kv_cat_sbx_" + "s" * 60


def show_once(owner: str = "0000000000000001") -> StoredResponse:
    return StoredResponse(201, {"token_id": owner, "token": None, "last": 1}, "token", Plaintext(SECRET), owner)


def shown(outcome: IdempotentResult) -> str | None:
    assert outcome.answer.body["token"] is None
    return None if outcome.answer.secret is None else outcome.answer.secret.reveal()


@pytest.fixture
def peppers(db: None) -> None:
    have_peppers()


@pytest.fixture
def log() -> UsageLog:
    return UsageLog(now=lambda: NOON)


def test_secret_is_replayed_for_a_quarter_of_an_hour_and_then_gone(peppers: None) -> None:
    """Within 15 minutes the retry gets it again; after that nobody does, whether or not it was shredded yet."""
    first = ask(effect=show_once)
    again = ask(NOON + SEALED_FOR - SECOND, prepare=never)
    assert shown(first) == shown(again) == SECRET
    assert first.answer.body == again.answer.body
    assert "secret_available" not in again.answer.body
    late = ask(NOON + SEALED_FOR, prepare=never)
    assert (shown(late), late.is_secret_available) == (None, False)
    assert late.answer.body == {**first.answer.body, "secret_available": False}


def test_secret_is_in_no_column_in_clear(peppers: None) -> None:
    """A stolen database holds no secret of a stored answer, and without the pepper cannot open it."""
    ask(effect=show_once)
    found = repr(dump_tables())
    assert "0000000000000001" in found, "the row is there, so the dump is the right one"
    assert SECRET not in found
    assert SECRET.encode().hex() not in found
    assert "s" * 20 not in found


def test_secret_moved_to_another_row_does_not_open(peppers: None) -> None:
    """Whoever may write to the database cannot have a secret replayed to somebody else."""
    ask(effect=show_once)
    ask(effect=partial(show_once, "0000000000000002"), holder="crd_2")
    theirs = IdempotentRequest.objects.get(holder="crd_1").sealed
    IdempotentRequest.objects.filter(holder="crd_2").update(sealed=theirs)
    with pytest.raises(IntegrityError):
        ask(holder="crd_2", prepare=never)


def sealed_owners() -> set[str]:
    return set(IdempotentRequest.objects.filter(sealed__isnull=False).values_list("secret_of", flat=True))


def test_secret_is_shredded_when_its_time_is_over_and_not_before(peppers: None) -> None:
    ask(effect=show_once)
    shred_due(NOON + SEALED_FOR - SECOND)
    assert sealed_owners() == {"0000000000000001"}
    shred_due(NOON + SEALED_FOR)
    assert sealed_owners() == set()
    assert ask(NOON + SEALED_FOR, prepare=never).answer.body["secret_available"] is False


def test_secret_of_a_customer_token_is_shredded_at_its_first_use(peppers: None, log: UsageLog) -> None:
    """Used means arrived: what acknowledges a secret is its use, and only that one's."""
    for number in ("1", "2"):
        ask(effect=partial(show_once, number.zfill(16)), key=number)
    log.note_secret_use("0000000000000001")
    log.flush()
    assert sealed_owners() == {"0000000000000002"}
    used, other = ask(key="1", prepare=never), ask(key="2", prepare=never)
    assert (shown(used), shown(other)) == (None, SECRET)
    assert used.answer.body["secret_available"] is False


@pytest.mark.parametrize(("outcome", "is_kept"), [(UseOutcome.ALLOWED, False), (UseOutcome.REFUSED, True)])
def test_secret_of_a_key_is_shredded_by_a_use_that_was_allowed(
    log: UsageLog, outcome: UseOutcome, is_kept: bool
) -> None:
    make_merchant("acme")
    key, _ = issue(account())
    ask(effect=partial(show_once, key.key_id))
    log.note(key.key_id, source="192.0.2.1", user_agent="", endpoint="orders.create", outcome=outcome)
    log.flush()
    assert (key.key_id in sealed_owners()) is is_kept


def test_secret_use_is_not_forgotten_by_a_flush_that_fails(
    peppers: None, log: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(effect=show_once)
    log.note_secret_use("0000000000000001")
    with monkeypatch.context() as patch:
        patch.setattr("keyvault.services.usage.recorder._write", _fail)
        with pytest.raises(DatabaseError):
            log.flush()
    assert sealed_owners() == {"0000000000000001"}
    log.flush()
    assert sealed_owners() == set()


def _fail(*_: object) -> None:
    raise DatabaseError("gone")


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_secret_shredded_by_two_at_once_makes_nobody_fail(log: UsageLog) -> None:
    """Upkeep and a first use meet at the same rows: the second waits for the first, and both are content."""
    have_peppers()
    for number in range(5):
        ask(effect=partial(show_once, f"{number:016}"), key=str(number))
        log.note_secret_use(f"{number:016}")
    with held_open(partial(shred_due, NOON + SEALED_FOR)):
        flushing = start(log.flush)
        wait_until_blocked(flushing)
    flushing.result(TIMEOUT_SECONDS)
    assert sealed_owners() == set()
