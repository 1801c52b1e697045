"""Standing approvals: a second person approves a production schedule once, for a limited time and as it is."""

import json
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.conf import settings
from django.db import DatabaseError
from django.db.models import QuerySet
from django.test import override_settings

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import Channel, OperatorPrincipal
from keyvault.access.roles import Role
from keyvault.domain.canonical import JsonValue
from keyvault.domain.environments import Environment
from keyvault.domain.errors import RequestInvalidError, StateConflictError
from keyvault.domain.notifications import NoticeKind
from keyvault.models import Account, AuditEntry, BreakGlass, Notice
from keyvault.services.recording.authorization import authorize
from keyvault.services.recording.notifications import announce
from rotation.domain.events import RotationState as S
from rotation.domain.policy import APPROVAL_LIFETIME
from rotation.models import Rotation, RotationSchedule, StandingApproval, StandingApprovalState
from rotation.services.schedules import expiries
from rotation.services.schedules.candidates import Candidate, find_candidates
from rotation.services.schedules.expiries import announce_expiries
from rotation.services.schedules.schedules import disable_schedule, enable_schedule, place_of
from rotation.services.schedules.standing_approvals import (
    MAX_DAYS,
    approve_standing_approval,
    get_standing_approval,
    reject_standing_approval,
    request_standing_approval,
    withdraw_standing_approval,
)
from rotation.services.schedules.starting import begin, begin_due
from tests.clocks import Clock
from tests.factories import make_operator, on_host
from tests.rotation import scene
from tests.rotation.services.schedules.test_schedules import calendar, save
from tests.services.racing import TIMEOUT_SECONDS, held_open, start, wait_until_blocked

pytestmark = pytest.mark.django_db

A = StandingApprovalState
PRODUCTION = Environment.PRODUCTION
DAY = timedelta(days=1)


def schedule(clock: Clock, **terms: Any) -> RotationSchedule:
    """Return the production schedule of one account, which has one key due in 30 days."""
    place = scene.account(environment=PRODUCTION)
    scene.issue(place, clock())
    return save(place, clock(), **{"cryptoperiod_days": 30, **terms})


def ask(row: RotationSchedule, clock: Clock, days: int = 90, by: OperatorPrincipal | None = None) -> StandingApproval:
    fresh = RotationSchedule.objects.select_related("account", "credential", "calendar").get(pk=row.pk)
    grant = authorize(by or scene.tam(), P.SCHEDULES_WRITE, place_of(fresh), now=clock())
    return request_standing_approval(grant, fresh, days)


def approve(row: StandingApproval, clock: Clock, by: OperatorPrincipal | None = None) -> StandingApproval:
    row = get_standing_approval(row.pk)
    place = place_of(row.schedule)
    person = row.requester_person
    grant = authorize(by or scene.approver(), P.ROTATIONS_APPROVE, place, now=clock(), requester_person=person)
    return approve_standing_approval(grant, row, row.plan_digest)


def details_of(prefix: str) -> list[dict[str, Any]]:
    entries = AuditEntry.objects.filter(event__startswith=prefix).order_by("pk")
    return [json.loads(bytes(entry.body))["details"] for entry in entries]


def state_of_next(clock: Clock) -> str:
    """Return the state in which the account's rotation begins when it is due."""
    clock.tick(30 * 86_400)
    (rotation_id,) = begin_due(clock())
    return str(Rotation.objects.get(pk=rotation_id).state)


@pytest.mark.database
def test_rotation_under_a_standing_approval_needs_no_other_and_cites_it(clock: Clock) -> None:
    row = approve(ask(schedule(clock), clock), clock)
    assert row.state == A.APPROVED
    assert state_of_next(clock) == S.SCHEDULED
    rotation = Rotation.objects.get()
    assert rotation.standing_approval == row
    approval = rotation.approvals.get()
    assert (approval.person, approval.plan_digest) == (scene.approver().person, rotation.plan_digest)
    (begun,) = details_of("rotation.requested")
    assert begun["standing_approval_id"] == row.pk
    (requested,) = details_of("standing_approval.requested")
    assert requested["terms"]["cryptoperiod_days"] == 30
    (approved,) = details_of("standing_approval.approved")
    assert approved["plan_digest"] == requested["plan_digest"] == row.plan_digest


def test_rotation_without_a_complete_standing_approval_awaits_its_own(clock: Clock) -> None:
    ask(schedule(clock), clock)
    assert state_of_next(clock) == S.AWAITING_APPROVAL
    assert Rotation.objects.get().standing_approval is None


def test_rotation_after_more_approvals_are_required_awaits_its_own(clock: Clock) -> None:
    """The schedule goes on, with approvals for each rotation, instead of being refused every time."""
    approve(ask(schedule(clock), clock), clock)
    with override_settings(APPROVALS_NEEDED={Environment.SANDBOX: 0, PRODUCTION: 2}):
        assert state_of_next(clock) == S.AWAITING_APPROVAL


def test_standing_approval_by_its_requester_is_refused(clock: Clock) -> None:
    """Guarantee: four eyes, whatever the login."""
    row = ask(schedule(clock), clock)
    twin = make_operator("tams-other-login", Role.APPROVER, person=scene.tam().person)
    with pytest.raises(StateConflictError):
        approve(row, clock, by=twin)
    assert get_standing_approval(row.pk).state == A.AWAITING_APPROVAL


def test_standing_approval_requested_by_another_than_the_author_is_refused(clock: Clock) -> None:
    """Guarantee: the author, who requests the rotations, cannot be the person who approves them."""
    row = schedule(clock)
    with pytest.raises(StateConflictError, match="author"):
        ask(row, clock, by=scene.admin())
    assert not StandingApproval.objects.exists()


def test_standing_approval_that_makes_no_sense_is_refused(clock: Clock) -> None:
    row = schedule(clock)
    for days in (0, MAX_DAYS + 1):
        with pytest.raises(RequestInvalidError):
            ask(row, clock, days)
    with pytest.raises(StateConflictError, match="need no approval"):
        ask(save(scene.account(), clock()), clock)
    disable_schedule(authorize(scene.tam(), P.SCHEDULES_WRITE, place_of(row), now=clock()), row)
    with pytest.raises(StateConflictError, match="disabled"):
        ask(row, clock)


def _save(row: RotationSchedule, clock: Clock) -> None:
    save(scene.account(environment=PRODUCTION), clock(), cryptoperiod_days=30, lead_days=1)
    save(scene.account(environment=PRODUCTION), clock(), cryptoperiod_days=30)


def _toggle(row: RotationSchedule, clock: Clock) -> None:
    row = RotationSchedule.objects.select_related("account", "credential", "calendar").get(pk=row.pk)
    grant = authorize(scene.tam(), P.SCHEDULES_WRITE, place_of(row), now=clock())
    disable_schedule(grant, row)
    enable_schedule(grant, row)


def _freeze(row: RotationSchedule, clock: Clock) -> None:
    calendar("freeze", clock(), (clock() + DAY, clock() + 2 * DAY))


@pytest.mark.parametrize("change", [_save, _toggle, _freeze])
@pytest.mark.parametrize("is_approved", [True, False], ids=["approved", "undecided"])
def test_change_of_schedule_or_calendar_voids_the_standing_approval(
    clock: Clock, change: Callable[[RotationSchedule, Clock], None], is_approved: bool
) -> None:
    """Guarantee: an approval covers only what was shown, even after the change is undone."""
    row = schedule(clock, calendar=calendar("freeze", clock()))
    standing = ask(row, clock)
    if is_approved:
        approve(standing, clock)
    change(row, clock)
    standing = get_standing_approval(standing.pk)
    assert (standing.state, standing.closed_at) == (A.VOID, clock())
    changes = [*details_of("schedule."), *details_of("calendar.")]
    assert [each["voided_standing_approvals"] for each in changes if "voided_standing_approvals" in each] == [
        [standing.pk]
    ]
    with pytest.raises(StateConflictError):
        approve(standing, clock)
    assert state_of_next(clock) == S.AWAITING_APPROVAL


@pytest.mark.parametrize("end", ["expired", "withdrawn"])
def test_rotation_after_the_standing_approval_has_ended_awaits_its_own(clock: Clock, end: str) -> None:
    row = approve(ask(schedule(clock), clock, days=30), clock)
    if end == "withdrawn":
        grant = authorize(scene.tam(), P.SCHEDULES_WRITE, place_of(row.schedule), now=clock())
        withdraw_standing_approval(grant, row, "no longer wanted")
        with pytest.raises(StateConflictError):
            withdraw_standing_approval(grant, row, "again")
    assert state_of_next(clock) == S.AWAITING_APPROVAL


def test_standing_approval_rejected_or_too_old_cannot_be_approved(clock: Clock) -> None:
    row = schedule(clock)
    standing = get_standing_approval(ask(row, clock).pk)
    grant = authorize(
        scene.approver(), P.ROTATIONS_APPROVE, place_of(row), now=clock(), requester_person=standing.requester_person
    )
    reject_standing_approval(grant, standing, "not for this account")
    with pytest.raises(StateConflictError):
        approve(standing, clock)
    standing = ask(row, clock)
    clock.tick(APPROVAL_LIFETIME.total_seconds())
    with pytest.raises(StateConflictError, match="too old"):
        approve(standing, clock)


def test_standing_approval_renewed_takes_the_place_of_the_first_once_approved(clock: Clock) -> None:
    row = schedule(clock)
    first = approve(ask(row, clock), clock)
    second = ask(row, clock)
    assert get_standing_approval(first.pk).state == A.APPROVED
    third = ask(row, clock)
    assert get_standing_approval(second.pk).state == A.VOID
    approve(third, clock)
    states = {each.pk: each.state for each in StandingApproval.objects.all()}
    assert states == {first.pk: A.VOID, second.pk: A.VOID, third.pk: A.APPROVED}
    assert state_of_next(clock) == S.SCHEDULED


@pytest.mark.parametrize("altered", [{"cryptoperiod_days": 29}, {"overrides": {"quiet_seconds": 7_200}}])
def test_schedule_altered_beside_the_services_is_not_covered(clock: Clock, altered: dict[str, Any]) -> None:
    """Guarantee: each rotation compares the schedule with the approved digest."""
    row = schedule(clock)
    approve(ask(row, clock), clock)
    rows: QuerySet[RotationSchedule] = QuerySet(RotationSchedule)
    rows.filter(pk=row.pk).update(**altered)
    assert state_of_next(clock) == S.AWAITING_APPROVAL


def test_standing_approval_given_on_a_command_line_requires_a_review(clock: Clock) -> None:
    row = ask(schedule(clock), clock)
    by = make_operator("remote", Role.APPROVER, channel=Channel.COMMAND_LINE, host_user="root")
    approve(row, clock, by=by)
    act = BreakGlass.objects.get()
    assert (act.event, act.subject, act.requester_person) == (
        "standing_approval.approved",
        row.pk,
        scene.tam().person,
    )


def test_standing_approval_requested_on_a_command_line_requires_a_review(clock: Clock) -> None:
    """The approver may have named the author of the schedule there."""
    row = ask(schedule(clock), clock, by=on_host(scene.tam()))
    approve(row, clock)
    act = BreakGlass.objects.get()
    assert (act.subject, act.is_claimed) == (row.pk, False)
    assert act.excluded_persons.split() == [scene.tam().person, scene.approver().person]


# --- races with the worker that begins rotations --------------------------------------------------------------


def _withdraw(row: StandingApproval, clock: Clock) -> None:
    withdraw_standing_approval(authorize(scene.tam(), P.SCHEDULES_WRITE, place_of(row.schedule), now=clock()), row, "")


def _disable(row: StandingApproval, clock: Clock) -> None:
    disable_schedule(authorize(scene.tam(), P.SCHEDULES_WRITE, place_of(row.schedule), now=clock()), row.schedule)


def covered(clock: Clock) -> tuple[StandingApproval, Candidate]:
    """Return an approved standing approval of an environment, and a due credential as a worker has read it."""
    key, _ = scene.issue(scene.account(environment=PRODUCTION), clock())
    standing = approve(ask(save(PRODUCTION, clock(), cryptoperiod_days=30), clock), clock)
    clock.tick(30 * 86_400)
    return get_standing_approval(standing.pk), find_candidates([key.credential_id])[key.credential_id]


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("end", [_withdraw, _disable])
def test_end_of_a_standing_approval_waits_for_a_rotation_that_begins_under_it(
    clock: Clock, end: Callable[[StandingApproval, Clock], None]
) -> None:
    """Guarantee: no rotation is committed under a standing approval that has ended."""
    standing, candidate = covered(clock)
    with held_open(partial(begin, candidate, clock())):
        ending = start(partial(end, standing, clock))
        wait_until_blocked(ending)
    ending.result(TIMEOUT_SECONDS)
    assert Rotation.objects.get().standing_approval == standing


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("end", [_withdraw, _disable])
def test_rotation_of_a_standing_approval_that_ends_meanwhile_is_not_begun(
    clock: Clock, end: Callable[[StandingApproval, Clock], None]
) -> None:
    standing, candidate = covered(clock)
    with held_open(partial(end, standing, clock)):
        beginning = start(partial(begin, candidate, clock()))
        wait_until_blocked(beginning)
    assert beginning.result(TIMEOUT_SECONDS) is None
    assert not Rotation.objects.exists()


# --- expiry ---------------------------------------------------------------------------------------------------


def announced() -> list[tuple[str, bool]]:
    """Return the kinds of the notices about expiries, in order, and whether each is an alarm."""
    rows = Notice.objects.filter(kind__startswith="standing_approval.").order_by("created_at")
    return list(rows.values_list("kind", "is_alarm"))


@pytest.mark.parametrize(("days", "ahead"), [(366, 14 * DAY), (90, 9 * DAY), (1, DAY / 10)])
def test_standing_approval_that_expires_is_announced_in_advance_and_alarmed_afterwards(
    clock: Clock, days: int, ahead: timedelta
) -> None:
    """Guarantee: a schedule whose rotations will wait for approvals again does not surprise its operators."""
    row = approve(ask(schedule(clock), clock, days=days), clock)
    notice, alarm = (NoticeKind.STANDING_APPROVAL_EXPIRING, False), (NoticeKind.STANDING_APPROVAL_EXPIRED, True)
    for at, expected in (
        (row.expires_at - ahead - timedelta(seconds=1), []),
        (row.expires_at - ahead, [notice]),
        (row.expires_at - timedelta(seconds=1), [notice]),
        (row.expires_at, [notice, alarm]),
        (row.expires_at + DAY, [notice, alarm]),
    ):
        announce_expiries(at, settings.ENVIRONMENTS)
        assert announced() == expected
    found = Notice.objects.get(kind=NoticeKind.STANDING_APPROVAL_EXPIRED)
    assert (found.subject, found.account) == (row.pk, place_of(row.schedule))
    assert [entry["standing_approval_id"] for entry in details_of("standing_approval.expir")] == [row.pk] * 2


def test_standing_approval_that_expired_while_no_worker_ran_raises_only_the_alarm(clock: Clock) -> None:
    row = approve(ask(schedule(clock), clock), clock)
    for _ in range(2):
        begin_due(row.expires_at + DAY)
    assert announced() == [(NoticeKind.STANDING_APPROVAL_EXPIRED, True)]


def _renew(row: StandingApproval, clock: Clock) -> None:
    approve(ask(row.schedule, clock, days=366), clock)


@pytest.mark.parametrize("end", [_withdraw, _disable, _renew])
def test_standing_approval_that_nothing_relies_on_expires_silently(
    clock: Clock, end: Callable[[StandingApproval, Clock], None]
) -> None:
    row = approve(ask(schedule(clock), clock), clock)
    end(get_standing_approval(row.pk), clock)
    announce_expiries(row.expires_at, settings.ENVIRONMENTS)
    assert announced() == []


@pytest.mark.database
def test_standing_approval_whose_notice_fails_delays_no_other(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors are isolated per approval, and the next tick tries again."""
    first = approve(ask(schedule(clock), clock), clock)
    second = approve(ask(save(PRODUCTION, clock()), clock), clock)

    def fail_for_first(grant: Grant, kind: NoticeKind, account: Account, subject: str, **payload: JsonValue) -> None:
        if subject == first.pk:
            raise DatabaseError
        announce(grant, kind, account, subject, **payload)

    with monkeypatch.context() as patched:
        patched.setattr(expiries, "announce", fail_for_first)
        announce_expiries(first.expires_at, settings.ENVIRONMENTS)
    assert Notice.objects.get(kind=NoticeKind.STANDING_APPROVAL_EXPIRED).subject == second.pk
    announce_expiries(first.expires_at, settings.ENVIRONMENTS)
    assert len(announced()) == 2
