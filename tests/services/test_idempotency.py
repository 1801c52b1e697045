"""Idempotent requests: one effect and one response for a request and its retries, and no secret stored for longer."""

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
from tests.killing import KilledError

from .racing import TIMEOUT_SECONDS, held_open, race, start, wait_until_blocked
from .rows import dump_tables

pytestmark = [pytest.mark.database, pytest.mark.django_db]

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
HOLD = timedelta(seconds=HOLD_SECONDS)
ROOT = Path(__file__).resolve().parents[2]

_numbers = count()


def make_effect() -> StoredResponse:
    """Write rows and an audit entry, and return a response with a unique number."""
    name = f"m{os.getpid()}-{next(_numbers)}-{secrets.token_hex(4)}"
    create_merchant(grant(HOST, P.MERCHANTS_WRITE), merchant_id=name, name="made")
    return StoredResponse(201, {"merchant_id": name, "nested": {"b": [1, None, "\u2028\x00é"], "a": True}})


def fail() -> StoredResponse:
    """Fail after an effect that must be undone."""
    make_effect()
    raise StateConflictError("not now")


def send(
    at: datetime = NOON,
    *,
    effect: Effect = make_effect,
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


def fail_to_prepare() -> Effect:
    raise AssertionError("a known response must not be prepared again")


def count_effects() -> int:
    return Merchant.objects.filter(name="made").count()


def refusal(call: Callable[[], object]) -> IdempotencyError:
    with pytest.raises(IdempotencyError) as caught:
        call()
    return caught.value


# ------------------------------------------------------------------------------------------------- sequential


def test_idempotency_retry_is_replayed_without_a_second_effect() -> None:
    first = send()
    again = send(NOON + KEEP - SECOND, prepare=fail_to_prepare)
    assert (first.is_replay, again.is_replay) == (False, True)
    assert (again.answer.status, again.answer.body) == (201, first.answer.body)
    assert json.dumps(again.answer.body) == json.dumps(first.answer.body), "the replay must be byte-identical"
    assert first.is_secret_available
    assert again.is_secret_available
    assert count_effects() == 1
    assert AuditEntry.objects.filter(event="merchant.created").count() == 1


@pytest.mark.parametrize("changed", [{"holder": "crd_2"}, {"endpoint": "other.create"}, {"key": "k-2"}])
def test_idempotency_key_of_another_holder_or_endpoint_is_separate(changed: dict[str, Any]) -> None:
    """One caller's stored response is never returned to another, whatever key that caller guesses."""
    assert send().answer.body != send(body=b"other", **changed).answer.body
    assert count_effects() == 2


def test_idempotency_key_with_another_body_is_refused_without_effect() -> None:
    send()
    error = refusal(lambda: send(body=b"{ }", prepare=fail_to_prepare))
    assert error.code is ErrorCode.IDEMPOTENCY_BODY_MISMATCH
    assert count_effects() == 1


def test_idempotency_response_expires_after_a_day() -> None:
    """After 24 hours the key is unused again, with any body, even if its row still exists."""
    first = send()
    later = send(NOON + KEEP, body=b"other")
    assert not later.is_replay
    assert later.answer.body != first.answer.body
    assert send(NOON + KEEP + SECOND, body=b"other").answer.body == later.answer.body
    forget_expired(NOON + 2 * KEEP - SECOND)
    assert IdempotentRequest.objects.count() == 1
    forget_expired(NOON + 2 * KEEP)
    assert not IdempotentRequest.objects.exists()


def test_idempotency_deletes_a_limited_number_of_expired_responses_oldest_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A backlog is worked off in short steps."""
    monkeypatch.setattr("keyvault.services.work.deletion.MAX_DELETED", 2)
    for hours in (1, 3, 2, 0):
        send(NOON - timedelta(hours=hours), key=f"k-{hours}")
    left = []
    for _ in range(2):
        forget_expired(NOON + KEEP - SECOND)
        left.append([NOON + KEEP - row.expires_at for row in IdempotentRequest.objects.order_by("expires_at")])
    assert left == [[timedelta(hours=1), timedelta(0)], [timedelta(0)]]


def test_idempotency_invalid_request_stores_nothing() -> None:
    def refuse() -> Effect:
        raise RequestInvalidError("no")

    with pytest.raises(RequestInvalidError):
        send(prepare=refuse)
    assert not IdempotentRequest.objects.exists()
    assert not send(body=b"fixed").is_replay


def test_idempotency_failed_effect_leaves_nothing_and_may_be_retried() -> None:
    """Errors are not stored; the row is rolled back with the effect."""
    with pytest.raises(StateConflictError):
        send(effect=fail)
    assert (count_effects(), IdempotentRequest.objects.count()) == (0, 0)
    assert not send(body=b"fixed").is_replay
    assert count_effects() == 1


def test_idempotency_response_that_cannot_be_stored_undoes_the_effect() -> None:
    def return_invalid_body() -> StoredResponse:
        return StoredResponse(201, {**make_effect().body, "at": NOON})  # type: ignore[dict-item]  # the error under test

    with pytest.raises(TypeError):
        send(effect=return_invalid_body)
    assert (count_effects(), IdempotentRequest.objects.count()) == (0, 0)


def test_idempotency_rows_contain_neither_key_nor_body() -> None:
    """Callers may put anything into both, so only digests are stored."""
    send(key="key-of-a-customer", body=b"body-of-a-customer")
    assert "of-a-customer" not in repr(dump_tables())


@dataclass
class _Model:
    """Model of the rule: the outcome of a request at a time, in seconds, with a key and a body."""

    kept: dict[str, tuple[int, str, JsonValue]] = field(default_factory=dict)

    def expect(self, at: int, key: str, body: str) -> tuple[str, JsonValue]:
        begun_at, first_body, answer = self.kept.get(key, (-1_000_000, "", None))
        if at - begun_at >= KEEP.total_seconds():
            return "done", None
        return ("replayed", answer) if body == first_body else ("refused", None)


STEPS = st.tuples(st.integers(0, 50_000), st.sampled_from("ab"), st.sampled_from("xy"), st.booleans())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(st.lists(STEPS, max_size=12))
@example([(0, "a", "x", False), (86_399, "a", "x", False), (1, "a", "x", False)])
def test_idempotency_of_any_sequence_follows_the_rule(steps: list[tuple[int, str, str, bool]]) -> None:
    """Done once, replayed for a day, refused with another body; failures store nothing."""
    IdempotentRequest.objects.all().delete()
    model, at = _Model(), 0
    for pause, key, body, fails in steps:
        at += pause
        expected, answer = model.expect(at, key, body)

        def effect(fails: bool = fails) -> StoredResponse:
            if fails:
                raise StateConflictError("no")
            return StoredResponse(201, {"number": next(_numbers)})

        request = partial(send, NOON + at * SECOND, key=key, body=body.encode(), effect=effect)
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


# ------------------------------------------------------------------------------------------------- concurrent


@pytest.mark.django_db(transaction=True)
def test_idempotency_of_twenty_concurrent_requests_has_one_effect() -> None:
    """Every other request gets a 409 or the first one's response; the effect and its audit entry exist once."""
    have_peppers()
    outcomes = race(*[send] * 20)
    answers = [outcome for outcome in outcomes if isinstance(outcome, IdempotentResult)]
    refusals = [outcome for outcome in outcomes if isinstance(outcome, IdempotencyError)]
    assert len(answers) + len(refusals) == 20, outcomes
    assert [answer.is_replay for answer in answers].count(False) == 1
    assert len({json.dumps(answer.answer.body) for answer in answers}) == 1
    assert {error.code for error in refusals} <= {ErrorCode.IDEMPOTENCY_IN_PROGRESS}
    assert all(error.retry_after_seconds for error in refusals)
    assert count_effects() == 1
    assert send(prepare=fail_to_prepare).answer.body == answers[0].answer.body
    assert verify_audit().first_broken is None


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("old_row", ["killed attempt", "expired response"])
def test_idempotency_of_twenty_concurrent_requests_over_an_old_row_has_one_effect(old_row: str) -> None:
    """Exactly one request takes the old row over."""
    have_peppers()
    if old_row == "killed attempt":
        leave_claim()
        at, before = NOON + HOLD, 0
    else:
        send()
        at, before = NOON + KEEP, 1
    outcomes = race(*[partial(send, at)] * 20)
    answers = {json.dumps(outcome.answer.body) for outcome in outcomes if isinstance(outcome, IdempotentResult)}
    assert len(answers) == 1
    assert {type(outcome) for outcome in outcomes} <= {IdempotentResult, IdempotencyError}
    assert count_effects() == before + 1


@pytest.mark.django_db(transaction=True)
def test_idempotency_retry_during_the_first_request_gets_a_retry_after() -> None:
    """Another connection refuses the retry immediately, before the first effect is visible."""
    have_peppers()
    seen: list[Any] = []

    def effect() -> StoredResponse:
        for at, body in ((NOON, b"{}"), (NOON + HOLD - SECOND / 2, b"{}"), (NOON, b"other")):
            retry = partial(send, at, prepare=fail_to_prepare, body=body)
            seen.append(start(partial(refusal, retry)).result(TIMEOUT_SECONDS))
        return make_effect()

    assert not send(effect=effect).is_replay
    progress = ErrorCode.IDEMPOTENCY_IN_PROGRESS
    assert [(error.code, error.retry_after_seconds) for error in seen] == [
        (progress, 1),
        (progress, 1),
        (ErrorCode.IDEMPOTENCY_BODY_MISMATCH, None),
    ]
    assert count_effects() == 1


def leave_claim(at: datetime = NOON) -> None:
    """Leave the claim of an attempt that is killed, or hangs, before its effect."""

    def die(*_: object) -> None:
        raise KilledError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(idempotency, "_execute", die)
        patch.setattr(idempotency, "suppress", die)
        with pytest.raises(KilledError):
            send(at)
    assert IdempotentRequest.objects.get().status is None


def test_idempotency_claim_of_a_killed_attempt_is_taken_over_after_its_hold() -> None:
    leave_claim()
    error = refusal(lambda: send(NOON + HOLD - SECOND / 1000, prepare=fail_to_prepare))
    assert (error.code, error.retry_after_seconds) == (ErrorCode.IDEMPOTENCY_IN_PROGRESS, 1)
    error = refusal(lambda: send(NOON + HOLD, body=b"other", prepare=fail_to_prepare))
    assert error.code is ErrorCode.IDEMPOTENCY_BODY_MISMATCH
    assert not send(NOON + HOLD).is_replay
    assert count_effects() == 1


@pytest.mark.parametrize("before", ["nothing", "killed attempt", "expired response"])
@pytest.mark.parametrize("other", ["done", "in progress", "failed"])
def test_idempotency_key_claimed_by_a_concurrent_request_is_not_claimed_again(before: str, other: str) -> None:
    """A key that was free on the first read and is claimed before the write is claimed only once."""
    have_peppers()
    at = NOON + KEEP
    if before == "killed attempt":
        leave_claim(at - HOLD)
    elif before == "expired response":
        send()
    effects_before, others = count_effects(), []

    def claim_concurrently() -> Effect:
        if other == "in progress":
            leave_claim(at)
        elif other == "done":
            others.append(send(at))
        else:
            with pytest.raises(StateConflictError):
                send(at, effect=fail)
        return make_effect

    if other == "done":
        assert send(at, prepare=claim_concurrently).answer.body == others[0].answer.body
        assert count_effects() == effects_before + 1
    elif other == "in progress" or before != "nothing":
        assert refusal(lambda: send(at, prepare=claim_concurrently)).code is ErrorCode.IDEMPOTENCY_IN_PROGRESS
        assert count_effects() == effects_before
    else:
        assert not send(at, prepare=claim_concurrently).is_replay


@pytest.mark.parametrize("outcome", ["finishes", "fails"])
@pytest.mark.parametrize("other", ["done", "in progress"])
@pytest.mark.parametrize("fence", [1, 2])
def test_idempotency_stale_attempt_writes_and_deletes_nothing(
    outcome: str, other: str, fence: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt that continues after another replaced it is rolled back; the other's claim or response stays."""
    have_peppers()
    begun_at = NOON
    if fence == 2:
        leave_claim()
        begun_at += HOLD
    claim, others = idempotency._claim, []

    def claim_and_hang(*place: Any) -> Any:
        monkeypatch.setattr(idempotency, "_claim", claim)
        claimed = claim(*place)
        if other == "done":
            others.append(send(begun_at + HOLD))
        else:
            leave_claim(begun_at + HOLD)
        return claimed

    monkeypatch.setattr(idempotency, "_claim", claim_and_hang)
    with pytest.raises(StateConflictError if outcome == "fails" else IdempotencyError):
        send(begun_at, effect=fail if outcome == "fails" else make_effect)
    assert count_effects() == len(others)
    row = IdempotentRequest.objects.get()
    assert (row.fence, row.status) == (fence + 1, 201 if others else None)
    for done in others:
        assert send(begun_at + HOLD, prepare=fail_to_prepare).answer.body == done.answer.body
    assert verify_audit().first_broken is None


def test_idempotency_slow_attempt_that_was_not_replaced_is_replayed() -> None:
    """It finishes after its hold and just before a take-over, so its response counts."""
    have_peppers()
    suspended: list[Callable[[], StoredResponse]] = []

    def hang(*arguments: Any) -> StoredResponse:
        suspended.append(partial(execute, *arguments))
        # The database is unavailable when the claim would be released.
        patch.setattr("django.db.models.query.QuerySet.delete", _fail)
        raise OperationalError("hanging")

    def finish_first() -> Effect:
        suspended[0]()
        return make_effect

    execute = idempotency._execute
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(idempotency, "_execute", hang)
        with pytest.raises(OperationalError, match="hanging"):
            send()
    late = send(NOON + HOLD, prepare=finish_first)
    assert late.is_replay
    assert count_effects() == 1


def test_idempotency_commit_whose_reply_was_lost_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is lost after the commit: the caller gets an error, and the retry gets the response."""
    execute = idempotency._execute

    def execute_and_disconnect(*arguments: Any) -> StoredResponse:
        execute(*arguments)
        raise OperationalError("server closed the connection unexpectedly")

    with monkeypatch.context() as patch:
        patch.setattr(idempotency, "_execute", execute_and_disconnect)
        with pytest.raises(OperationalError):
            send()
    assert send(NOON + SECOND, prepare=fail_to_prepare).is_replay
    assert count_effects() == 1


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_idempotency_attempt_replaced_within_its_transaction_is_rolled_back() -> None:
    """The attempt is replaced after its effect is written and before its commit."""
    have_peppers()
    others: list[IdempotentResult] = []

    def effect() -> StoredResponse:
        others.append(start(partial(send, NOON + HOLD)).result(TIMEOUT_SECONDS))
        return make_effect()

    error = refusal(lambda: send(effect=effect))
    assert error.code is ErrorCode.IDEMPOTENCY_IN_PROGRESS
    assert count_effects() == 1
    assert send(NOON + HOLD, prepare=fail_to_prepare).answer.body == others[0].answer.body


@pytest.mark.long
@pytest.mark.django_db(transaction=True)
@pytest.mark.timeout(300)
def test_idempotency_killed_at_every_point_has_one_effect_after_the_retry() -> None:
    """SIGKILL around every statement and commit: no effect without its response, and no second effect."""
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
    # Fewer points would mean that the kills miss the code under test.
    assert report["crash_points"] >= 30
    assert report["found"] == {"nothing": True, "claimed": True, "done": True}


# --------------------------------------------------------------------------------------------- show-once secrets

SECRET = "kv_cat_sbx_" + "s" * 60


def show_once(owner: str = "0000000000000001") -> StoredResponse:
    return StoredResponse(201, {"token_id": owner, "token": None, "last": 1}, "token", Plaintext(SECRET), owner)


def secret_of(outcome: IdempotentResult) -> str | None:
    assert outcome.answer.body["token"] is None
    return None if outcome.answer.secret is None else outcome.answer.secret.reveal()


@pytest.fixture
def peppers(db: None) -> None:
    have_peppers()


@pytest.fixture
def log() -> UsageLog:
    return UsageLog(now=lambda: NOON)


def test_secret_is_replayed_for_fifteen_minutes(peppers: None) -> None:
    """Afterwards it is withheld, even if it was not shredded yet."""
    first = send(effect=show_once)
    again = send(NOON + SEALED_FOR - SECOND, prepare=fail_to_prepare)
    assert secret_of(first) == secret_of(again) == SECRET
    assert first.answer.body == again.answer.body
    assert "secret_available" not in again.answer.body
    late = send(NOON + SEALED_FOR, prepare=fail_to_prepare)
    assert (secret_of(late), late.is_secret_available) == (None, False)
    assert late.answer.body == {**first.answer.body, "secret_available": False}


def test_secret_is_stored_in_no_column_in_plaintext(peppers: None) -> None:
    """A stolen database contains no secret, and without the pepper the sealed one cannot be opened."""
    send(effect=show_once)
    found = repr(dump_tables())
    assert "0000000000000001" in found, "the dump lacks the row"
    assert SECRET not in found
    assert SECRET.encode().hex() not in found
    assert "s" * 20 not in found


def test_secret_moved_to_another_row_cannot_be_opened(peppers: None) -> None:
    """An attacker with write access cannot have a secret replayed to another caller."""
    send(effect=show_once)
    send(effect=partial(show_once, "0000000000000002"), holder="crd_2")
    foreign = IdempotentRequest.objects.get(holder="crd_1").sealed
    IdempotentRequest.objects.filter(holder="crd_2").update(sealed=foreign)
    with pytest.raises(IntegrityError):
        send(holder="crd_2", prepare=fail_to_prepare)


def sealed_owners() -> set[str]:
    return set(IdempotentRequest.objects.filter(sealed__isnull=False).values_list("secret_of", flat=True))


def test_secret_is_shredded_after_its_lifetime(peppers: None) -> None:
    send(effect=show_once)
    shred_due(NOON + SEALED_FOR - SECOND)
    assert sealed_owners() == {"0000000000000001"}
    shred_due(NOON + SEALED_FOR)
    assert sealed_owners() == set()
    assert send(NOON + SEALED_FOR, prepare=fail_to_prepare).answer.body["secret_available"] is False


def test_secret_of_a_customer_token_is_shredded_at_its_first_use(peppers: None, log: UsageLog) -> None:
    """The first use proves that the secret arrived; other secrets stay."""
    for number in ("1", "2"):
        send(effect=partial(show_once, number.zfill(16)), key=number)
    log.note_secret_use("0000000000000001")
    log.flush()
    assert sealed_owners() == {"0000000000000002"}
    used, other = send(key="1", prepare=fail_to_prepare), send(key="2", prepare=fail_to_prepare)
    assert (secret_of(used), secret_of(other)) == (None, SECRET)
    assert used.answer.body["secret_available"] is False


def test_secrets_beyond_the_bound_are_shredded_when_they_expire(
    peppers: None, log: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest are compared with the uses of each second, however many are sealed."""
    monkeypatch.setattr(idempotency, "_MAX_SEALED", 1)
    for number in ("1", "2"):
        send(NOON + int(number) * SECOND, effect=partial(show_once, number.zfill(16)), key=number)
        log.note_secret_use(number.zfill(16))
    log.flush()
    assert sealed_owners() == {"0000000000000001"}
    shred_due(NOON + 2 * SECOND + SEALED_FOR)
    assert sealed_owners() == set()


@pytest.mark.parametrize(("outcome", "is_kept"), [(UseOutcome.ALLOWED, False), (UseOutcome.REFUSED, True)])
def test_secret_of_a_key_is_shredded_by_an_allowed_use(log: UsageLog, outcome: UseOutcome, is_kept: bool) -> None:
    make_merchant("acme")
    key, _ = issue(account())
    send(effect=partial(show_once, key.key_id))
    log.note(key.key_id, source="192.0.2.1", user_agent="", endpoint="orders.create", outcome=outcome)
    log.flush()
    assert (key.key_id in sealed_owners()) is is_kept


def test_secret_use_survives_a_failed_flush(peppers: None, log: UsageLog, monkeypatch: pytest.MonkeyPatch) -> None:
    send(effect=show_once)
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
def test_secret_shredded_concurrently_fails_for_nobody(log: UsageLog) -> None:
    """Maintenance and a first use lock the same rows: the second waits for the first, and both succeed."""
    have_peppers()
    for number in range(5):
        send(effect=partial(show_once, f"{number:016}"), key=str(number))
        log.note_secret_use(f"{number:016}")
    with held_open(partial(shred_due, NOON + SEALED_FOR)):
        flushing = start(log.flush)
        wait_until_blocked(flushing)
    flushing.result(TIMEOUT_SECONDS)
    assert sealed_owners() == set()
