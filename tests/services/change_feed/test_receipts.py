"""Receipts: which verifiers have confirmed a change, which are awaited, and which have expired."""

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.db import DatabaseError
from django.db.models.functions import Now

from keyvault.access.limits import Limit
from keyvault.access.permissions import Permission as P
from keyvault.domain.revocation import RevocationReason
from keyvault.models import Account, Change, Confirmation, Verifier
from keyvault.services.change_feed import follower, receipts
from keyvault.services.change_feed.receipts import (
    MAX_SEQUENCE,
    MAX_WAIT_SECONDS,
    MAX_WAITERS,
    Receipt,
    VerifierProgress,
    find_account_of,
    find_receipt,
    list_unconfirmed,
    wait_for_receipt,
)
from keyvault.services.keys.lifecycle import revoke_key
from keyvault.services.limits.overrides import set_endpoint_limit
from tests.factories import SANDBOX, grant, issue, make_token
from tests.services.conftest import Scene
from tests.verifiers import STALENESS, confirm, database_now, fall_silent, make_verifier

pytestmark = [pytest.mark.database, pytest.mark.django_db]


@pytest.fixture
def sequence(scene: Scene) -> int:
    """The change sequence of a revocation."""
    key, _ = issue(scene.sandbox)
    record = revoke_key(grant(scene.responder, P.KEYS_REVOKE, scene.sandbox), key, RevocationReason.SUPERSEDED)
    assert record.sequence is not None
    return record.sequence


def receipt_of(sequence: int) -> Receipt:
    receipt = find_receipt(sequence)
    assert receipt is not None
    return receipt


def progress_of(sequence: int) -> dict[str, str]:
    return {verifier.verifier_id: verifier.progress.value for verifier in receipt_of(sequence).verifiers}


# --- progress ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [-1, 0, 2**40, MAX_SEQUENCE, MAX_SEQUENCE + 1, 10**19])
def test_receipt_of_an_unknown_sequence_is_none(sequence: int, number: int) -> None:
    assert find_receipt(number) is None


def test_receipt_without_verifiers_is_complete(sequence: int) -> None:
    """Without registered verifiers, every verdict reads the database."""
    assert (receipt_of(sequence).is_complete, receipt_of(sequence).verifiers) == (True, ())


def test_receipt_is_complete_once_every_live_verifier_has_confirmed(sequence: int) -> None:
    """One of two, or a confirmation of an earlier sequence, is not enough."""
    first, second = make_verifier("verifier-1"), make_verifier("verifier-2", entry_point="verifier")
    confirm(first, sequence)
    confirm(second, sequence - 1)
    assert not receipt_of(sequence).is_complete
    assert progress_of(sequence) == {"verifier-1": "confirmed", "verifier-2": "waiting"}
    assert list_unconfirmed(sequence) == ["verifier-2"]
    confirm(second, sequence + 7)
    assert receipt_of(sequence).is_complete
    assert list_unconfirmed(sequence) == []


def test_receipt_shows_when_a_verifier_first_confirmed(sequence: int) -> None:
    verifier = make_verifier()
    before = database_now()
    for step in (sequence - 1, sequence, sequence + 1):
        confirm(verifier, step)
    at = Confirmation.objects.get(sequence=sequence).at
    assert before <= at <= database_now()
    assert [row.confirmed_at for row in receipt_of(sequence).verifiers] == [at]


def test_receipt_of_a_skipped_sequence_has_the_time_of_the_next_confirmation(sequence: int) -> None:
    verifier = make_verifier()
    confirm(verifier, sequence + 3)
    confirm(verifier, sequence + 9)
    assert receipt_of(sequence).verifiers[0].confirmed_at == Confirmation.objects.get(sequence=sequence + 3).at


def test_receipt_without_kept_confirmations_is_still_complete(sequence: int) -> None:
    verifier = make_verifier()
    confirm(verifier, sequence)
    Confirmation.objects.all().delete()
    assert (receipt_of(sequence).is_complete, receipt_of(sequence).verifiers[0].confirmed_at) == (True, None)


@pytest.mark.parametrize(("days", "is_shown"), [(29, True), (31, False)])
def test_receipt_of_an_old_change_shows_no_time_of_a_later_confirmation(days: int, is_shown: bool) -> None:
    """Guarantee: the time that a receipt shows is that of the first confirmation, or none."""
    at = database_now() - timedelta(days=days)
    change = Change.objects.create(subject_kind="key", subject_id="0" * 16, at=at)
    verifier = make_verifier(started_at=at, confirmed_sequence=change.sequence + 1)
    for step, confirmed_at in enumerate((at + timedelta(seconds=1), at + timedelta(days=5))):
        Confirmation.objects.create(verifier=verifier, sequence=change.sequence + step, at=confirmed_at)
    follower.forget_old(database_now())
    (found,) = receipt_of(change.sequence).verifiers
    assert found.progress is VerifierProgress.CONFIRMED
    assert found.confirmed_at == (at + timedelta(seconds=1) if is_shown else None)


def test_receipt_shows_no_later_time_while_confirmations_are_deleted(
    sequence: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: the batches that delete the confirmations of a verifier that is gone delete the last ones first."""
    monkeypatch.setattr("keyvault.services.work.deletion.MAX_DELETED", 1)
    verifier = make_verifier(confirmed_sequence=sequence + 1)
    first = database_now()
    for step in range(2):
        at = first + timedelta(seconds=step)
        Confirmation.objects.create(verifier=verifier, sequence=sequence + step, at=at)
    fall_silent(verifier, timedelta(days=8))
    shown = []
    for _ in range(2):
        shown.append(receipt_of(sequence).verifiers[0].confirmed_at)
        follower.forget_old(database_now())
    assert shown == [first, first]


def test_receipt_does_not_wait_for_a_verifier_past_its_staleness_bound(sequence: int) -> None:
    """Past its bound the verifier no longer uses its cache; the receipt lists it as expired."""
    verifier = make_verifier()
    fall_silent(verifier)
    assert receipt_of(sequence).is_complete
    assert progress_of(sequence) == {"verifier-1": "expired"}
    confirm(verifier, sequence)
    assert progress_of(sequence) == {"verifier-1": "confirmed"}


def test_receipt_waits_for_a_silent_verifier_until_its_bound(sequence: int) -> None:
    """Until the bound, to the microsecond, the verifier may still answer from its cache."""
    verifier = make_verifier()
    bound = verifier.seen_at + STALENESS
    for now, progress in (
        (bound, VerifierProgress.WAITING),
        (bound + timedelta(microseconds=1), VerifierProgress.EXPIRED),
    ):
        assert receipts._progress(verifier, sequence, now) is progress


def test_receipt_compares_by_the_database_clock(sequence: int) -> None:
    """The caller's clock does not matter."""
    verifier = make_verifier(staleness_ms=1000)
    fall_silent(verifier, timedelta(seconds=1, milliseconds=5))
    assert progress_of(sequence) == {"verifier-1": "expired"}
    Verifier.objects.update(seen_at=Now())
    Verifier.objects.update(staleness_ms=60_000)
    assert progress_of(sequence) == {"verifier-1": "waiting"}


def test_receipt_omits_a_verifier_that_was_gone_long_before(sequence: int) -> None:
    fall_silent(make_verifier("verifier-1"), timedelta(hours=2))
    make_verifier("verifier-2", stopped_at=Now())
    assert (receipt_of(sequence).is_complete, progress_of(sequence)) == (True, {})


def test_receipt_lists_a_verifier_that_confirmed_and_stopped(sequence: int) -> None:
    verifier = make_verifier()
    confirm(verifier, sequence)
    Verifier.objects.update(stopped_at=Now())
    fall_silent(verifier)
    assert progress_of(sequence) == {"verifier-1": "confirmed"}


def test_receipt_reads_the_latest_verifiers_that_stopped(sequence: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: no number of restarts makes a receipt larger than the running verifiers and the latest others."""
    monkeypatch.setattr(receipts, "MAX_STOPPED", 2)
    for number in range(4):
        stopped_at = database_now() - timedelta(minutes=number)
        make_verifier(f"stopped-{number}", confirmed_sequence=sequence, stopped_at=stopped_at)
    make_verifier("running-1", confirmed_sequence=sequence)
    make_verifier("running-2")
    listed = {"stopped-0": "confirmed", "stopped-1": "confirmed", "running-1": "confirmed", "running-2": "waiting"}
    assert progress_of(sequence) == listed
    assert [each.verifier_id for each in receipt_of(sequence).verifiers] == [*listed]


def test_receipt_waits_for_a_verifier_that_has_just_registered(sequence: int) -> None:
    """It may hold what it read before the change until it confirms."""
    make_verifier(started_at=database_now() + timedelta(seconds=1))
    assert progress_of(sequence) == {"verifier-1": "waiting"}


# --- waiting ----------------------------------------------------------------------------------------------


class SleepingClock:
    """A clock that only `sleep` advances. `then` runs during each sleep."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.slept = 1000.0, 0.0
        self.then: Callable[[], None] = lambda: None
        monkeypatch.setattr(receipts, "monotonic", lambda: self.now)
        monkeypatch.setattr(receipts, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds
        self.then()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SleepingClock:
    return SleepingClock(monkeypatch)


def test_wait_ends_with_the_last_confirmation(sequence: int, clock: SleepingClock) -> None:
    verifier = make_verifier()
    clock.then = lambda: confirm(verifier, sequence)
    receipt, allowed = wait_for_receipt(sequence, 5)
    assert (receipt.is_complete, allowed) == (True, 5)
    assert clock.slept < 0.1


@pytest.mark.postgres_once
@pytest.mark.parametrize(("requested", "waited"), [(0, 0), (1, 1), (5, 5), (6, 5), (999_999_999, 5)])
def test_wait_without_confirmation_lasts_as_requested_up_to_the_maximum(
    sequence: int, clock: SleepingClock, requested: int, waited: int
) -> None:
    make_verifier()
    receipt, allowed = wait_for_receipt(sequence, requested)
    assert not receipt.is_complete
    assert allowed == waited <= MAX_WAIT_SECONDS
    assert clock.slept == pytest.approx(waited)


def test_wait_for_a_complete_receipt_does_not_sleep(sequence: int, clock: SleepingClock) -> None:
    confirm(make_verifier(), sequence)
    assert wait_for_receipt(sequence, 5)[0].is_complete
    assert clock.slept == 0


def test_wait_with_too_many_waiters_returns_immediately(sequence: int, clock: SleepingClock) -> None:
    """Waits never occupy all of a server's threads; a wait that ends frees its place."""
    make_verifier()
    for _ in range(MAX_WAITERS):
        assert receipts._waiters.acquire(blocking=False)
    try:
        receipt, allowed = wait_for_receipt(sequence, 5)
    finally:
        receipts._waiters.release(MAX_WAITERS)
    assert (receipt.is_complete, allowed, clock.slept) == (False, 0, 0)
    assert wait_for_receipt(sequence, 5)[1] == 5
    assert wait_for_receipt(sequence, 5)[1] == 5


def test_wait_with_a_failing_database_returns_an_incomplete_receipt(
    sequence: int, clock: SleepingClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The revocation is committed; a failure of the receipt must not turn it into an error."""

    def fail(sequence: int) -> Receipt:
        raise DatabaseError("gone")

    monkeypatch.setattr(receipts, "_receipt", fail)
    assert wait_for_receipt(sequence, 5) == (Receipt(sequence, is_complete=False), 5)


# --- accounts ---------------------------------------------------------------------------------------------


def account_of_last() -> Account | None:
    change = Change.objects.latest("sequence")
    return find_account_of((change.subject_kind, change.subject_id))


def test_account_of_a_change_is_that_of_its_subject(scene: Scene) -> None:
    """Covers a key, a credential, an account, and one endpoint's limit there."""
    key, _ = issue(scene.production)
    for subject in (key.alters(), key.credential.alters(), scene.production.alters()):
        assert find_account_of(subject) == scene.production
    limiting = grant(scene.admin, P.LIMITS_WRITE, scene.sandbox)
    set_endpoint_limit(limiting, SANDBOX, "orders.create", Limit(5, 1), scene.sandbox)
    assert account_of_last() == scene.sandbox


def test_account_of_a_change_for_all_accounts_is_none(scene: Scene) -> None:
    make_token()
    assert account_of_last() is None
    for subject in (scene.merchant.alters(), ("endpoint", "orders.create"), ("limit", "sandbox orders.create"), None):
        assert find_account_of(subject) is None
    assert find_account_of(("account", "unknown/sandbox")) is None
