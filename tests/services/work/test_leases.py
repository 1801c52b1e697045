"""Leases: one worker at a time, the next one when that one is gone, and no word from the dead."""

from datetime import datetime, timedelta
from functools import partial

import pytest
from django.db import transaction

from keyvault.domain.errors import StateConflictError
from keyvault.models import WorkLease
from keyvault.services.work import leases
from keyvault.services.work.leases import LEASE, Lease, claim, hold, list_due, postpone, release, wake
from tests.factories import now
from tests.services.racing import race

pytestmark = [pytest.mark.database, pytest.mark.django_db]

SECOND = timedelta(seconds=1)


@pytest.fixture
def at() -> datetime:
    return now()


def claimed(subject: str, at: datetime) -> Lease:
    lease = claim(subject, at)
    assert lease is not None
    return lease


def test_failed_work_is_listed_in_batches_each_once(at: datetime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what has the prefix, and only what failed last."""
    monkeypatch.setattr(leases, "_FAILED_BATCH", 2)
    for number in range(5):
        leases.record_failure(f"a:{number}", at, "failed")
    leases.record_failure("b:1", at, "failed")
    claimed("a:claimed", at)
    batches = [[row.subject for row in batch] for batch in leases.list_failed("a:")]
    assert batches == [["a:0", "a:1"], ["a:2", "a:3"], ["a:4"]]
    assert list(leases.list_failed("c:")) == []


def test_lease_claimed_is_not_to_be_had_until_it_ends(at: datetime) -> None:
    """One worker at a time: a claimed piece of work is nobody else's until the lease runs out."""
    first = claimed("work", at)
    assert claim("work", at) is None
    assert claim("work", at + LEASE - timedelta(microseconds=1)) is None
    second = claimed("work", at + LEASE)
    assert (first.attempts, second.attempts) == (1, 2)
    assert first.token != second.token


def test_lease_of_one_subject_leaves_the_others_free(at: datetime) -> None:
    claimed("work", at)
    assert claimed("other work", at).attempts == 1


def test_lease_lost_is_not_held(at: datetime) -> None:
    """Fencing: whoever's lease went to another cannot record an outcome, however late it wakes."""
    lost = claimed("work", at)
    kept = claimed("work", at + LEASE)
    with pytest.raises(StateConflictError, match="Another worker took this over"), transaction.atomic():
        hold(lost)
    hold(kept)


def test_lease_run_out_but_not_taken_over_is_still_held(at: datetime) -> None:
    """A slow worker whom nobody followed may finish: the token decides, not the clock."""
    hold(claimed("work", at - 2 * LEASE))


def test_lease_given_back_is_not_held(at: datetime) -> None:
    lease = claimed("work", at)
    release(lease)
    with pytest.raises(StateConflictError):
        hold(lease)


def test_lease_released_is_free_at_once_and_counts_anew(at: datetime) -> None:
    release(claimed("work", at))
    assert claimed("work", at).attempts == 1


def test_lease_released_until_later_is_not_due_before(at: datetime) -> None:
    release(claimed("work", at), due_at=at + SECOND)
    assert claim("work", at + SECOND / 2) is None
    assert claim("work", at + SECOND) is not None


def test_lease_lost_neither_releases_nor_postpones_the_new_holder_s(at: datetime) -> None:
    """The dead do not give away what is no longer theirs."""
    lost = claimed("work", at)
    kept = claimed("work", at + LEASE)
    release(lost)
    postpone(lost, at + LEASE, "late")
    hold(kept)
    assert claim("work", at + LEASE + SECOND) is None
    assert WorkLease.objects.get(subject="work").last_error == ""


def test_lease_postponed_waits_longer_after_each_failure_up_to_a_minute(at: datetime) -> None:
    """A step that keeps failing is tried less and less often, and never less than about once a minute."""
    pauses = []
    for _ in range(9):
        postpone(claimed("work", at), at, "it failed")
        due_at = WorkLease.objects.get(subject="work").due_at
        assert due_at is not None
        pauses.append((due_at - at).total_seconds())
        assert claim("work", due_at - timedelta(microseconds=1)) is None
        at = due_at
    doubled = [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert all(least <= pause < least * 1.25 for pause, least in zip(pauses, doubled, strict=True)), pauses
    assert claimed("work", at).attempts == 10


def test_lease_postponed_keeps_why_and_release_forgets_it(at: datetime) -> None:
    postpone(claimed("work", at), at, "x" * 500)
    assert WorkLease.objects.get(subject="work").last_error == "x" * 300
    release(claimed("work", at + LEASE))
    assert WorkLease.objects.get(subject="work").last_error == ""


def test_lease_work_woken_is_due_at_once(at: datetime) -> None:
    release(claimed("work", at), due_at=at + LEASE)
    wake("work")
    assert claim("work", at) is not None


def test_lease_work_woken_while_somebody_is_at_it_stays_theirs(at: datetime) -> None:
    """A wake-up is a hint; it takes no lease away."""
    lease = claimed("work", at)
    wake("work")
    assert claim("work", at) is None
    hold(lease)


def test_lease_due_lists_what_is_free_in_the_order_given(at: datetime) -> None:
    claimed("taken", at)
    release(claimed("later", at), due_at=at + LEASE)
    release(claimed("given back", at))
    wanted = ["never tried", "taken", "later", "given back"]
    assert list_due(wanted, at) == ["never tried", "given back"]
    assert list_due(wanted, at + LEASE) == wanted


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.django_db(transaction=True)
def test_lease_claimed_by_eight_at_once_goes_to_exactly_one(is_known: bool) -> None:
    """Of any number of workers that meet, one works; on the first try of a subject too."""
    at = now()
    for number in range(5):
        subject = f"work {number}"
        if is_known:
            release(claimed(subject, at))
        outcomes = race(*[partial(claim, subject, at)] * 8)
        assert [type(outcome) for outcome in outcomes if outcome is not None] == [Lease]
        assert WorkLease.objects.get(subject=subject).attempts == 1


def test_lease_outlives_a_call_to_the_backend() -> None:
    """Longer than a side effect takes, shorter than anybody wants to wait for a dead worker's work."""
    assert timedelta(seconds=10) <= leases.LEASE <= timedelta(seconds=60)
