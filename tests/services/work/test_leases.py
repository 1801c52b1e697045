"""Work leases: one worker at a time, a successor after expiry, and no record by an expired holder."""

from datetime import datetime, timedelta
from functools import partial
from typing import Any

import pytest
from django.db import transaction

from keyvault.domain.errors import StateConflictError
from keyvault.models import WorkLease
from keyvault.services.work import leases
from keyvault.services.work.leases import (
    LEASE,
    Lease,
    claim,
    claim_dispatched,
    enqueue,
    finish,
    forget_abandoned,
    hold,
    list_due,
    pause,
    postpone,
    release,
    release_queued,
    take_due,
    wake,
)
from tests.factories import now
from tests.services.racing import race

pytestmark = [pytest.mark.database, pytest.mark.django_db]

SECOND = timedelta(seconds=1)


@pytest.fixture
def at() -> datetime:
    return now()


def claim_lease(subject: str, at: datetime) -> Lease:
    lease = claim(subject, at)
    assert lease is not None
    return lease


def test_lease_claimed_is_not_available_until_it_expires(at: datetime) -> None:
    first = claim_lease("work", at)
    assert claim("work", at) is None
    assert claim("work", at + LEASE - timedelta(microseconds=1)) is None
    second = claim_lease("work", at + LEASE)
    assert (first.attempts, second.attempts) == (1, 2)
    assert first.token != second.token


def test_lease_of_one_subject_does_not_block_others(at: datetime) -> None:
    claim_lease("work", at)
    assert claim_lease("other work", at).attempts == 1


def test_lease_lost_to_another_worker_is_not_held(at: datetime) -> None:
    """Fencing: a worker whose lease went to another cannot record an outcome."""
    lost = claim_lease("work", at)
    kept = claim_lease("work", at + LEASE)
    with pytest.raises(StateConflictError, match="Another worker took this over"), transaction.atomic():
        hold(lost)
    hold(kept)


def test_lease_expired_but_not_taken_over_is_still_held(at: datetime) -> None:
    """A slow worker without a successor may finish: the token decides, not the clock."""
    hold(claim_lease("work", at - 2 * LEASE))


def test_lease_released_is_not_held(at: datetime) -> None:
    lease = claim_lease("work", at)
    release(lease)
    with pytest.raises(StateConflictError):
        hold(lease)


def test_lease_released_is_available_and_counts_from_one(at: datetime) -> None:
    release(claim_lease("work", at))
    assert claim_lease("work", at).attempts == 1


def test_lease_released_with_a_due_time_is_not_due_before(at: datetime) -> None:
    release(claim_lease("work", at), due_at=at + SECOND)
    assert claim("work", at + SECOND / 2) is None
    assert claim("work", at + SECOND) is not None


def test_lease_lost_can_neither_release_nor_postpone_the_new_one(at: datetime) -> None:
    lost = claim_lease("work", at)
    kept = claim_lease("work", at + LEASE)
    release(lost)
    postpone(lost, at + LEASE, "late")
    hold(kept)
    assert claim("work", at + LEASE + SECOND) is None
    assert WorkLease.objects.get(subject="work").last_error == ""


def test_lease_postponed_repeatedly_waits_longer_up_to_a_minute(at: datetime) -> None:
    """A step that keeps failing is retried at least about once a minute."""
    pauses = []
    for _ in range(9):
        postpone(claim_lease("work", at), at, "it failed")
        due_at = WorkLease.objects.get(subject="work").due_at
        assert due_at is not None
        pauses.append((due_at - at).total_seconds())
        assert claim("work", due_at - timedelta(microseconds=1)) is None
        at = due_at
    doubled = [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert all(least <= pause < least * 1.25 for pause, least in zip(pauses, doubled, strict=True)), pauses
    assert claim_lease("work", at).attempts == 10


def test_lease_postponed_keeps_its_error_until_released(at: datetime) -> None:
    postpone(claim_lease("work", at), at, "x" * 500)
    assert WorkLease.objects.get(subject="work").last_error == "x" * 300
    release(claim_lease("work", at + LEASE))
    assert not WorkLease.objects.exists()


@pytest.mark.parametrize(("asked", "least", "most"), [(0, 5, 6.25), (30, 30, 37.5), (3_600, 58, 58)])
def test_lease_paused_waits_as_the_server_asks_within_a_minute(
    at: datetime, asked: int, least: float, most: float
) -> None:
    """An outage uses up no attempt, and its end is noticed within a minute, whatever the server's Retry-After."""
    pause(claim_lease("work", at), at, "the server is sealed", seconds=asked)
    due_at = WorkLease.objects.get(subject="work").due_at
    assert due_at is not None
    assert least <= (due_at - at).total_seconds() <= most
    assert claim_lease("work", due_at).attempts == 1


def test_lease_woken_is_due_immediately(at: datetime) -> None:
    release(claim_lease("work", at), due_at=at + LEASE)
    wake(["work"], at)
    assert claim("work", at) is not None


def test_lease_woken_while_held_stays_held_and_is_due_once_released(at: datetime) -> None:
    lease = claim_lease("work", at)
    wake(["work"], at)
    assert claim("work", at) is None
    hold(lease)
    release_queued(lease, at, at + LEASE)
    assert claim("work", at) is not None


def test_lease_woken_after_a_failure_waits_for_its_pause(at: datetime) -> None:
    postpone(claim_lease("work", at), at, "it failed")
    wake(["work"], at)
    assert claim("work", at) is None
    assert claim("work", at + 2 * SECOND) is not None


def test_lease_that_fails_after_a_wake_up_is_not_dispatched_before_its_pause_ends(at: datetime) -> None:
    """A message that is still in the queue claims nothing."""
    enqueue("work", "queue", at)
    take_due("queue", at, 1, is_urgent=False)
    lease = claim_dispatched("work", ["queue"], at)
    assert lease is not None
    wake(["work"], at)
    postpone(lease, at, "it failed")
    assert claim_dispatched("work", ["queue"], at) is None
    assert take_due("queue", at + 2 * SECOND, 1, is_urgent=False) == ["work"]


def test_finished_work_is_deleted_only_by_its_holder(at: datetime) -> None:
    lost = claim_lease("work", at)
    kept = claim_lease("work", at + LEASE)
    with pytest.raises(StateConflictError), transaction.atomic():
        finish(lost)
    finish(kept)
    assert not WorkLease.objects.exists()


def test_lease_abandoned_is_deleted_after_its_retention_and_work_in_a_queue_stays(at: datetime, settings: Any) -> None:
    settings.LEASE_DAYS = 2
    for subject in ("old", "due later"):
        lease = claim(subject, at)
        assert lease is not None
        release(lease, due_at=at if subject == "old" else at + timedelta(days=1))
    enqueue("queued", "queue", at)
    forget_abandoned(at + timedelta(days=2))
    assert WorkLease.objects.count() == 3
    forget_abandoned(at + timedelta(days=2) + SECOND)
    assert set(WorkLease.objects.values_list("subject", flat=True)) == {"due later", "queued"}


def test_lease_due_lists_available_subjects_in_the_given_order(at: datetime) -> None:
    claim_lease("taken", at)
    release(claim_lease("later", at), due_at=at + LEASE)
    release(claim_lease("released", at))
    subjects = ["never tried", "taken", "later", "released"]
    assert list_due(subjects, at) == ["never tried", "released"]
    assert list_due(subjects, at + LEASE) == subjects


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.django_db(transaction=True)
def test_lease_claimed_by_eight_workers_concurrently_goes_to_one(is_known: bool) -> None:
    """On the first claim of a subject too."""
    at = now()
    for number in range(5):
        subject = f"work {number}"
        if is_known:
            release(claim_lease(subject, at), due_at=at)
        outcomes = race(*[partial(claim, subject, at)] * 8)
        assert [type(outcome) for outcome in outcomes if outcome is not None] == [Lease]
        assert WorkLease.objects.get(subject=subject).attempts == 1


def test_lease_duration_outlasts_a_backend_call() -> None:
    """Longer than a side effect takes, and short enough for a successor to take over soon."""
    assert timedelta(seconds=10) <= leases.LEASE <= timedelta(seconds=60)
