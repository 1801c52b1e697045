"""Schedules: saved only if feasible, the narrowest applies, and each due rotation starts exactly once."""

import logging
from datetime import datetime, timedelta
from itertools import chain
from threading import Barrier, Thread
from typing import Any

import pytest
from django.db import connection, connections
from django.db.models import QuerySet
from django.test.utils import CaptureQueriesContext

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import OperatorPrincipal
from keyvault.access.roles import Role
from keyvault.access.scopes import AccessScope
from keyvault.domain.environments import Environment
from keyvault.domain.errors import PermissionMissingError, RequestInvalidError, StateConflictError
from keyvault.domain.keys import KeyKind
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.revocation import RevocationReason
from keyvault.models import Account, AuditEntry, BreakGlass, Credential, Key, Notice
from keyvault.services.keys.lifecycle import revoke_key
from keyvault.services.merchants.merchants import resume_account, suspend_account, suspend_merchant
from keyvault.services.recording.authorization import authorize
from keyvault.services.usage.recorder import UsageLog
from rotation.domain.cryptoperiods import delay_after
from rotation.domain.events import RotationState as S
from rotation.domain.plan_fields import DeliveryChannel, PlanOverrides, Proof
from rotation.domain.states import CLOSED
from rotation.domain.windows import Window
from rotation.models import (
    BlackoutCalendar,
    Rotation,
    RotationSchedule,
    ScheduleCheck,
    ScheduledCredential,
    ScheduleSweep,
)
from rotation.services.rotations.engine import advance_rotation
from rotation.services.rotations.interventions import abort_rotation
from rotation.services.rotations.requests import approve_rotation, begin_rotation, reject_rotation
from rotation.services.schedules import schedules, starting
from rotation.services.schedules.candidates import RETRY_DELAY, list_candidates
from rotation.services.schedules.schedules import (
    ScheduleDraft,
    ScheduleScope,
    disable_schedule,
    enable_schedule,
    find_schedule,
    get_calendar,
    save_calendar,
    save_schedule,
)
from rotation.services.schedules.starting import begin_due
from tests.clocks import Clock
from tests.factories import make_operator, on_host
from tests.rotation import scene
from tests.rotation.steps import damage as damage_plan

pytestmark = pytest.mark.django_db

SANDBOX, PRODUCTION = Environment.SANDBOX, Environment.PRODUCTION
DAY = timedelta(days=1)
NIGHTS = Window("Europe/Berlin", (0, 1, 2, 3, 4), 1_320, 240)


def save(
    scope: ScheduleScope | Account | Credential | Environment,
    now: datetime,
    by: OperatorPrincipal | None = None,
    **terms: Any,
) -> RotationSchedule:
    """Save a schedule as the technical account manager, every 90 days by default."""
    if isinstance(scope, Account):
        scope = ScheduleScope(Environment(scope.environment), account=scope)
    elif isinstance(scope, Credential):
        scope = ScheduleScope(scope.environment, credential=scope)
    elif isinstance(scope, Environment):
        scope = ScheduleScope(scope)
    grant = authorize(by or scene.tam(), P.SCHEDULES_WRITE, scope.place, now=now)
    return save_schedule(grant, scope, ScheduleDraft(**{"cryptoperiod_days": 90, **terms}), known=find_schedule(scope))


def calendar(name: str, now: datetime, *periods: tuple[datetime, datetime]) -> BlackoutCalendar:
    records = [{"begins_at": begins.isoformat(), "ends_at": ends.isoformat()} for begins, ends in periods]
    known = BlackoutCalendar.objects.filter(name=name).first()
    return save_calendar(authorize(scene.tam(), P.SCHEDULES_WRITE, now=now), name, records, known=known)


def begun(now: datetime) -> list[Rotation]:
    return list(Rotation.objects.filter(pk__in=begin_due(now)).order_by("credential__label"))


def pointers(error: RequestInvalidError) -> set[str]:
    return {fault.pointer for fault in error.faults}


def events(prefix: str) -> list[str]:
    return list(AuditEntry.objects.filter(event__startswith=prefix).order_by("pk").values_list("event", flat=True))


# --- saving -------------------------------------------------------------------------------------------------


@pytest.mark.database
def test_schedule_saved_again_updates_the_row_and_its_owner(clock: Clock) -> None:
    place = scene.account()
    first = save(place, clock(), window=NIGHTS, overrides=PlanOverrides(proof=Proof.ACK))
    again = save(place, clock(), by=scene.admin(), cryptoperiod_days=30)
    assert (again.pk, again.cryptoperiod_days, again.window, again.overrides) == (first.pk, 30, None, {})
    assert again.author_person == scene.admin().person != scene.tam().person
    assert find_schedule(ScheduleScope(SANDBOX, account=place)) == again
    assert find_schedule(ScheduleScope(SANDBOX)) is None
    assert events("schedule.") == ["schedule.saved", "schedule.saved"]


@pytest.mark.parametrize(
    ("terms", "pointer"),
    [
        ({"cryptoperiod_days": 0}, "/cryptoperiod_days"),
        ({"cryptoperiod_days": 3_651}, "/cryptoperiod_days"),
        ({"jitter_days": 90}, "/jitter_days"),
        ({"lead_days": 90}, "/lead_days"),
        ({"cryptoperiod_days": 2, "window": Window("UTC", (0,), 0, 60)}, "/window"),
        ({"overrides": PlanOverrides(quiet_seconds=0)}, "/overrides/quiet_seconds"),
        ({"overrides": PlanOverrides(quiet_seconds=30 * 86_400)}, "/overrides/deadline"),
        ({"overrides": PlanOverrides(quiet_seconds=10**9)}, "/overrides/quiet_seconds"),
        ({"overrides": PlanOverrides(proof=Proof.CONFIRMATION)}, "/overrides/proof"),
        ({"overrides": PlanOverrides(expires_in_days=90)}, "/overrides/expires_in_days"),
        ({"overrides": PlanOverrides(reason="\0")}, "/overrides/reason"),
        ({"overrides": PlanOverrides(channels=(DeliveryChannel.WEBHOOK,))}, "/overrides/channels"),
        ({"overrides": PlanOverrides(window=NIGHTS)}, "/overrides/window"),
    ],
)
def test_schedule_that_is_infeasible_is_refused_with_the_field(
    clock: Clock, terms: dict[str, Any], pointer: str
) -> None:
    with pytest.raises(RequestInvalidError) as refused:
        save(SANDBOX, clock(), **terms)
    assert pointer in pointers(refused.value)
    assert not RotationSchedule.objects.exists()


@pytest.mark.parametrize(
    ("environment", "overrides", "least"),
    [
        (PRODUCTION, {}, 98),  # Quiet for 7 days, and a soak time of 600 s.
        (PRODUCTION, {"quiet_seconds": 14 * 86_400}, 105),
        (PRODUCTION, {"predecessor_may_expire": True}, 91),
        (SANDBOX, {}, 91),
        (SANDBOX, {"quiet_seconds": 2 * 86_400}, 93),
    ],
)
def test_schedule_whose_keys_expire_before_their_rotations_is_refused(
    clock: Clock, environment: Environment, overrides: dict[str, Any], least: int
) -> None:
    """The last date that is accepted leaves time for soak and quiet period after the cryptoperiod."""
    with pytest.raises(RequestInvalidError) as refused:
        save(environment, clock(), overrides=PlanOverrides(expires_in_days=least - 1, **overrides))
    assert pointers(refused.value) == {"/overrides/expires_in_days"}
    assert f"{least} or more" in refused.value.faults[0].detail
    save(environment, clock(), overrides=PlanOverrides(expires_in_days=least, **overrides))
    key, _ = scene.issue(scene.account(environment=environment), clock(), expires_in_days=least)
    assert [each.predecessor for each in begun(clock() + 90 * DAY + timedelta(minutes=5))] == [key]


@pytest.mark.parametrize("name", ["not_before", "deadline", "retire_at"])
def test_schedule_with_a_date_in_its_plan_is_refused(clock: Clock, name: str) -> None:
    with pytest.raises(RequestInvalidError) as refused:
        save(SANDBOX, clock(), overrides=PlanOverrides(**{name: clock() + DAY}))  # type: ignore[arg-type]  # one of three dates
    assert f"/overrides/{name}" in pointers(refused.value)


def test_schedule_with_a_window_closed_by_a_calendar_is_refused(clock: Clock) -> None:
    """An opening later than the cryptoperiod allows is detected when the schedule is saved."""
    frozen = calendar("freeze", clock(), (clock() + 100 * DAY, clock() + 140 * DAY))
    with pytest.raises(RequestInvalidError) as refused:
        save(SANDBOX, clock(), cryptoperiod_days=30, calendar=frozen)
    assert pointers(refused.value) == {"/window"}
    assert save(SANDBOX, clock(), cryptoperiod_days=60, calendar=frozen).calendar == frozen


def test_schedule_of_another_environment_or_of_a_public_key_is_refused(clock: Clock) -> None:
    place = scene.account()
    private, _ = scene.issue(place, clock())
    public, _ = scene.issue(place, clock(), kind=KeyKind.PUBLIC, label="web")
    for scope, pointer in (
        (ScheduleScope(PRODUCTION, account=place), "/account"),
        (ScheduleScope(PRODUCTION, credential=private.credential), "/credential"),
        (ScheduleScope(SANDBOX, account=place, credential=private.credential), "/credential"),
        (ScheduleScope(SANDBOX, credential=public.credential), "/credential"),
    ):
        with pytest.raises(RequestInvalidError) as refused:
            save(scope, clock())
        assert pointer in pointers(refused.value)


def test_schedule_saved_without_the_permission_is_refused(clock: Clock) -> None:
    """A grant for one account covers neither another account's schedule nor the environment's."""
    place, other = scene.account(), scene.account("globex")
    with pytest.raises(PermissionMissingError):
        save(place, clock(), by=scene.approver())
    grant = authorize(scene.tam(), P.SCHEDULES_WRITE, place, now=clock())
    for scope in (ScheduleScope(SANDBOX, account=other), ScheduleScope(SANDBOX)):
        with pytest.raises(PermissionMissingError):
            save_schedule(grant, scope, ScheduleDraft(90))
    assert not RotationSchedule.objects.exists()


def test_schedule_disabled_and_enabled_is_recorded_and_rechecked(clock: Clock) -> None:
    frozen = calendar("freeze", clock())
    row = save(SANDBOX, clock(), cryptoperiod_days=30, calendar=frozen)
    grant = authorize(scene.admin(), P.SCHEDULES_WRITE, now=clock())
    disable_schedule(grant, row)
    with pytest.raises(StateConflictError):
        disable_schedule(grant, row)
    calendar("freeze", clock(), (clock() + DAY, clock() + 60 * DAY))  # nothing enabled conflicts with it
    row = RotationSchedule.objects.get()
    with pytest.raises(RequestInvalidError):
        enable_schedule(grant, row)
    calendar("freeze", clock())
    row = RotationSchedule.objects.get()
    enable_schedule(grant, row)
    assert (row.is_enabled, row.author_person) == (True, scene.admin().person)
    with pytest.raises(StateConflictError):
        enable_schedule(grant, row)
    assert events("schedule.") == ["schedule.saved", "schedule.disabled", "schedule.enabled"]


# --- calendars ----------------------------------------------------------------------------------------------


def test_calendar_that_closes_a_schedule_is_refused_with_its_name(clock: Clock) -> None:
    frozen = calendar("freeze", clock(), (clock() + 100 * DAY, clock() + 110 * DAY))
    key, _ = scene.first_key(clock())
    save(key.credential, clock(), cryptoperiod_days=30, calendar=frozen)
    save(SANDBOX, clock(), cryptoperiod_days=300, calendar=BlackoutCalendar.objects.get())
    with pytest.raises(RequestInvalidError) as refused:
        calendar("freeze", clock(), (clock() + 100 * DAY, clock() + 160 * DAY))
    assert key.credential_id in refused.value.faults[0].detail
    assert "sandbox" not in refused.value.faults[0].detail.split("(")[0]
    assert BlackoutCalendar.objects.get().periods == frozen.periods
    assert events("calendar.") == ["calendar.saved"]


def test_calendar_can_change_beside_a_schedule_whose_keys_expire_too_early(clock: Clock) -> None:
    """An earlier release accepted such a schedule, and no calendar is its cause."""
    calendar("freeze", clock(), (clock() + 100 * DAY, clock() + 110 * DAY))
    row = save(PRODUCTION, clock(), calendar=BlackoutCalendar.objects.get())
    damage(row, overrides={**row.overrides, "expires_in_days": 91})
    calendar("freeze", clock(), (clock() + 100 * DAY, clock() + 111 * DAY))
    assert events("calendar.") == ["calendar.saved", "calendar.saved"]


def test_calendar_has_a_limited_number_of_enabled_schedules(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of the calendar validates and marks all of them."""
    monkeypatch.setattr(schedules, "MAX_OF_CALENDAR", 1)
    row = save(SANDBOX, clock(), calendar=calendar("freeze", clock()))
    save(SANDBOX, clock(), calendar=get_calendar("freeze"), lead_days=1)
    other = scene.account()
    with pytest.raises(RequestInvalidError, match="too many schedules") as refused:
        save(other, clock(), calendar=get_calendar("freeze"))
    assert pointers(refused.value) == {"/calendar"}
    grant = authorize(scene.tam(), P.SCHEDULES_WRITE, now=clock())
    row.refresh_from_db()
    disable_schedule(grant, row)
    save(other, clock(), calendar=get_calendar("freeze"))
    with pytest.raises(RequestInvalidError, match="too many schedules"):
        enable_schedule(grant, RotationSchedule.objects.get(pk=row.pk))


@pytest.mark.database
def test_calendar_of_many_schedules_is_saved_in_few_queries(clock: Clock) -> None:
    calendar("freeze", clock())

    def count_queries() -> int:
        with CaptureQueriesContext(connection) as queries:
            calendar("freeze", clock(), (clock() + DAY, clock() + 2 * DAY))
        return len(queries)

    for name in ("acme", "globex"):
        save(scene.account(name), clock(), calendar=get_calendar("freeze"))
        save(scene.issue(scene.account(name), clock())[0].credential, clock(), calendar=get_calendar("freeze"))
    few = count_queries()
    for name in ("initech", "hooli", "umbrella"):
        save(scene.account(name), clock(), calendar=get_calendar("freeze"))
        save(scene.issue(scene.account(name), clock())[0].credential, clock(), calendar=get_calendar("freeze"))
    assert count_queries() == few
    assert ScheduleSweep.objects.filter(account__merchant="umbrella").exists()


def test_calendar_changed_while_a_schedule_is_saved_makes_one_of_them_conflict(clock: Clock) -> None:
    """Schedule and calendar are checked against each other, or one of them is not saved."""
    stale = calendar("freeze", clock())
    calendar("freeze", clock(), (clock() + DAY, clock() + 60 * DAY))
    with pytest.raises(StateConflictError):
        save(SANDBOX, clock(), cryptoperiod_days=30, calendar=stale)
    fresh = BlackoutCalendar.objects.get()
    version = fresh.version
    save(SANDBOX, clock(), cryptoperiod_days=90, calendar=fresh)
    assert BlackoutCalendar.objects.get().version == version + 1


@pytest.mark.parametrize(
    ("name", "periods", "pointer"),
    [
        ("", [], "/name"),
        ("Christmas", [], "/name"),
        ("a" * 65, [], "/name"),
        ("x", "soon", "/periods"),
        ("x", [{"begins_at": "2026-12-24"}], "/periods/0"),
        ("x", [{"begins_at": "2026-12-24T00:00:00", "ends_at": "2026-12-24T00:00:00Z"}], "/periods/0/begins_at"),
    ],
)
def test_calendar_with_invalid_values_is_refused_with_the_field(
    clock: Clock, name: str, periods: object, pointer: str
) -> None:
    with pytest.raises(RequestInvalidError) as refused:
        save_calendar(authorize(scene.tam(), P.SCHEDULES_WRITE, now=clock()), name, periods)
    assert pointer in pointers(refused.value)


# --- starting -----------------------------------------------------------------------------------------------


def test_begin_due_requests_once_at_the_end_of_the_cryptoperiod(clock: Clock) -> None:
    key, _ = scene.first_key(clock())
    row = save(SANDBOX, clock(), overrides=PlanOverrides(proof=Proof.ACK, quiet_seconds=7))
    assert begin_due(clock() + 90 * DAY - timedelta(seconds=1)) == []
    (rotation,) = begun(clock() + 90 * DAY)
    assert (rotation.credential_id, rotation.predecessor_id) == (key.credential_id, key.key_id)
    assert (rotation.state, rotation.schedule, rotation.requester) == (S.SCHEDULED, row, row.author)
    plan = rotation.approved_plan
    assert (plan.proof, plan.quiet_seconds, plan.reason) == (Proof.ACK, 7, "cryptoperiod of 90 days")
    assert plan.not_before == clock() + 90 * DAY
    assert begin_due(clock() + 90 * DAY) == []
    assert begin_due(clock() + 200 * DAY) == []


def test_begin_due_in_production_requests_early_and_awaits_a_second_person(clock: Clock) -> None:
    """The owner of the schedule requests each rotation, and cannot approve it."""
    key, _ = scene.first_key(clock(), environment=PRODUCTION)
    save(PRODUCTION, clock(), by=scene.admin(), lead_days=7)
    assert begin_due(clock() + 82 * DAY) == []
    (rotation,) = begun(clock() + 83 * DAY)
    assert (rotation.state, rotation.approved_plan.not_before) == (S.AWAITING_APPROVAL, clock() + 90 * DAY)
    twin = make_operator("admins-other-login", Role.APPROVER, person=scene.admin().person)
    for who, raises in ((twin, True), (scene.approver(), False)):
        place, person = key.credential.account, rotation.requester_person
        try:
            grant = authorize(who, P.ROTATIONS_APPROVE, place, now=clock() + 83 * DAY, requester_person=person)
            approve_rotation(grant, rotation, rotation.plan_digest)
        except StateConflictError:
            assert raises
        else:
            assert not raises
    assert rotation.state == S.SCHEDULED


@pytest.mark.parametrize("is_claimed", [True, False])
def test_begin_due_of_a_schedule_saved_on_a_command_line_is_noted_at_the_approval(
    clock: Clock, is_claimed: bool
) -> None:
    """The approver may have named the author of the schedule there."""
    key, _ = scene.first_key(clock(), environment=PRODUCTION)
    save(PRODUCTION, clock(), by=on_host(scene.tam()) if is_claimed else scene.tam())
    (rotation,) = begun(clock() + 90 * DAY)
    place, at = key.credential.account, clock() + 90 * DAY
    grant = authorize(scene.approver(), P.ROTATIONS_APPROVE, place, now=at, requester_person=rotation.requester_person)
    approve_rotation(grant, rotation, rotation.plan_digest)
    assert [act.subject for act in BreakGlass.objects.all()] == ([rotation.pk] if is_claimed else [])


@pytest.mark.database
def test_begin_due_waits_for_the_window_and_its_blackouts(clock: Clock) -> None:
    """The approved plan carries the window and the blackouts of that day.

    The jitter depends on the credential's random id, so the test takes the date from the row that workers read.
    """
    scene.first_key(clock())
    due_at = clock() + 90 * DAY
    frozen = calendar("freeze", clock(), (due_at - DAY, due_at + 3 * DAY), (clock() - 2 * DAY, clock() - DAY))
    save(SANDBOX, clock(), window=NIGHTS, calendar=frozen, jitter_days=10)
    assert begun(due_at - 12 * DAY) == []
    ask_at = ScheduledCredential.objects.get().ask_at
    assert ask_at is not None
    assert begun(ask_at - timedelta(seconds=1)) == []
    (rotation,) = begun(ask_at)
    plan = rotation.approved_plan
    assert plan.window is not None
    assert plan.window.weekdays == NIGHTS.weekdays
    assert [each.ends_at for each in plan.window.blackouts] == [due_at + 3 * DAY]
    assert plan.window.next_opening(plan.not_before) == plan.not_before
    assert plan.not_before < due_at - DAY


def test_begin_due_applies_the_narrowest_enabled_schedule(clock: Clock) -> None:
    ours, other = scene.account(), scene.account("globex")
    narrow, _ = scene.issue(ours, clock(), label="a-narrow")
    scene.issue(ours, clock(), label="b-account")
    scene.issue(other, clock(), label="c-environment")
    scene.issue(scene.account(environment=PRODUCTION), clock(), label="d-nowhere")
    save(SANDBOX, clock(), cryptoperiod_days=30)
    account_schedule = save(ours, clock(), cryptoperiod_days=60)
    save(narrow.credential, clock(), cryptoperiod_days=90)
    assert [r.credential.label for r in begun(clock() + 31 * DAY)] == ["c-environment"]
    assert [r.credential.label for r in begun(clock() + 61 * DAY)] == ["b-account"]
    disable_schedule(authorize(scene.tam(), P.SCHEDULES_WRITE, ours, now=clock()), account_schedule)
    assert begin_due(clock() + 62 * DAY) == []
    assert [r.credential.label for r in begun(clock() + 91 * DAY)] == ["a-narrow"]


def test_begin_due_skips_credentials_that_cannot_be_rotated(clock: Clock) -> None:
    stopped, left = scene.account("stopped"), scene.account("left")
    revoked, _ = scene.issue(scene.account(), clock(), label="revoked")
    scene.issue(scene.account(), clock(), kind=KeyKind.PUBLIC, label="public")
    scene.issue(stopped, clock())
    scene.issue(left, clock())
    suspend_account(authorize(scene.admin(), P.MERCHANTS_WRITE, stopped, now=clock()), stopped)
    suspend_merchant(authorize(scene.admin(), P.MERCHANTS_WRITE, now=clock()), left.merchant)
    grant = authorize(scene.admin(), P.KEYS_REVOKE, revoked.credential.account, now=clock())
    revoke_key(grant, revoked, RevocationReason.SUPERSEDED)
    save(SANDBOX, clock())
    assert begin_due(clock() + 91 * DAY) == []
    resume_account(authorize(scene.admin(), P.MERCHANTS_WRITE, stopped, now=clock()), stopped)
    assert [r.credential.account for r in begun(clock() + 91 * DAY)] == [stopped]


def test_begin_due_after_the_worker_was_down_catches_up_in_the_next_opening(clock: Clock) -> None:
    """A missed date is caught up once, within the window."""
    scene.first_key(clock())
    save(SANDBOX, clock(), cryptoperiod_days=30, window=NIGHTS)
    later = clock() + 200 * DAY
    (rotation,) = begun(later)
    assert rotation.approved_plan.not_before == NIGHTS.next_opening(later)
    assert begin_due(later + DAY) == []


def test_begin_due_after_a_rotation_is_done_counts_from_the_new_key(clock: Clock, verifier: UsageLog) -> None:
    key, _ = scene.first_key(clock())
    save(
        SANDBOX,
        clock(),
        cryptoperiod_days=30,
        overrides=PlanOverrides(proof=Proof.ACK, quiet_seconds=5, quarantine_seconds=5),
    )
    clock.tick(30 * 86_400)
    (rotation,) = begun(clock())
    advance_rotation(rotation.rotation_id, clock)
    scene.acknowledge_replacement(rotation.rotation_id, clock())
    for _ in range(8):
        clock.tick(10)
        verifier.flush()
        advance_rotation(rotation.rotation_id, clock)
    rotation.refresh_from_db()
    assert rotation.state == S.COMPLETED
    assert begin_due(clock()) == []
    assert begin_due(clock() + 29 * DAY) == []
    (second,) = begun(clock() + 30 * DAY)
    assert second.predecessor_id == rotation.replacement_id != key.key_id


def test_begin_due_after_a_rejection_requests_again_in_a_week(clock: Clock) -> None:
    """The key is not forgotten, and no person is asked again at every tick."""
    place = scene.account(environment=PRODUCTION)
    key, _ = scene.issue(place, clock())
    save(PRODUCTION, clock())
    clock.tick(90 * 86_400)
    (rotation,) = begun(clock())
    reject_rotation(
        authorize(
            scene.approver(),
            P.ROTATIONS_APPROVE,
            place,
            now=clock(),
            requester_person=rotation.requester_person,
        ),
        rotation,
        "not now",
    )
    assert begin_due(clock() + RETRY_DELAY - timedelta(seconds=1)) == []
    (again,) = begun(clock() + RETRY_DELAY)
    assert again.predecessor_id == key.key_id
    # A request without a decision expires and is repeated immediately.
    clock.tick(15 * 86_400)
    advance_rotation(again.rotation_id, clock)
    again.refresh_from_db()
    assert again.state == S.EXPIRED
    assert len(begin_due(clock())) == 1


def test_begin_due_after_an_abort_requests_again_in_a_week(clock: Clock) -> None:
    scene.first_key(clock())
    save(SANDBOX, clock())
    clock.tick(90 * 86_400)
    (rotation,) = begun(clock())
    abort_rotation(
        authorize(scene.tam(), P.ROTATIONS_WRITE, rotation.credential.account, now=clock()), rotation, "later"
    )
    assert begin_due(clock() + DAY) == []
    assert len(begin_due(clock() + RETRY_DELAY)) == 1


def test_begin_due_of_an_infeasible_rotation_is_logged_once_and_delays_nothing(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """The key expires before a rotation could complete: this is logged, and the others have their turn."""
    expiring, _ = scene.issue(scene.account(), clock(), label="a", expires_in_days=91)
    scene.issue(scene.account(), clock() + timedelta(seconds=1), label="b")
    save(PRODUCTION, clock())
    save(SANDBOX, clock(), overrides=PlanOverrides(quiet_seconds=2 * 86_400))
    with caplog.at_level(logging.WARNING, logger="rotation.services.schedules.starting"):
        assert [r.credential.label for r in begun(clock() + 90 * DAY + timedelta(minutes=1))] == ["b"]
        assert begin_due(clock() + 90 * DAY + timedelta(minutes=2)) == []
    records = [record for record in caplog.records if record.name == "rotation.services.schedules.starting"]
    assert len(records) == 1
    assert records[0].credential_id == expiring.credential_id  # type: ignore[attr-defined]  # set by `extra`
    assert "deadline" in records[0].why  # type: ignore[attr-defined]  # the same


def test_begin_due_of_rotations_that_stay_infeasible_raises_one_alarm_a_day(clock: Clock) -> None:
    """Not for a refusal that ends soon, and neither once per retry nor once per credential."""
    for label in ("a", "b"):
        scene.issue(scene.account(), clock(), label=label, expires_in_days=93)
    row = save(SANDBOX, clock(), overrides=PlanOverrides(quiet_seconds=4 * 86_400))
    at, alarms = clock() + 90 * DAY, Notice.objects.filter(kind=NoticeKind.SCHEDULE_STALLED, is_alarm=True)
    retries = [at + timedelta(minutes=2**number - 1) for number in range(11)]
    for retry in retries[:7]:
        assert begin_due(retry) == []
    assert not alarms.exists()
    for retry in retries[7:]:
        assert begin_due(retry) == []
    alarm = alarms.get()
    assert (alarm.subject, alarm.payload["schedule_id"]) == (str(row.pk), row.pk)
    assert "soak and quiet period" in alarm.payload["why"]
    assert alarm.created_at == retries[7]
    begin_due(retries[7] + timedelta(days=2))
    assert alarms.count() == 2


def test_begin_due_with_an_internal_fault_in_one_starts_the_others(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken, _ = scene.issue(scene.account(), clock(), label="a")
    scene.issue(scene.account(), clock(), label="b")
    save(SANDBOX, clock())

    def failing(grant: Any, credential: Credential, *args: Any, **options: Any) -> Rotation:
        if credential.pk == broken.credential_id:
            raise RuntimeError("a bug")
        return begin_rotation(grant, credential, *args, **options)

    monkeypatch.setattr(starting, "begin_rotation", failing)
    assert [r.credential.label for r in begun(clock() + 90 * DAY)] == ["b"]
    monkeypatch.undo()
    assert [r.credential.label for r in begun(clock() + 91 * DAY)] == ["a"]


def test_begin_due_with_many_refused_credentials_reaches_the_others(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: credentials that cannot be rotated starve no others, and each is retried."""
    for label in ("bad1", "bad2", "bad3", "bad4", "bad5", "good"):
        scene.issue(scene.account(), clock.tick(1), label=label)
    save(SANDBOX, clock())
    tried: list[str] = []

    def failing(grant: Any, credential: Credential, *args: Any, **options: Any) -> Rotation:
        tried.append(credential.label)
        if credential.label.startswith("bad"):
            raise StateConflictError("It cannot be rotated.")
        return begin_rotation(grant, credential, *args, **options)

    monkeypatch.setattr(starting, "begin_rotation", failing)
    monkeypatch.setattr(starting, "MAX_TRIED", 2)
    due_at = clock() + 91 * DAY
    labels = [[each.credential.label for each in begun(due_at + tick * DAY)] for tick in range(6)]
    assert labels == [[], [], ["good"], [], [], []]
    assert tried[:6] == ["bad1", "bad2", "bad3", "bad4", "bad5", "good"]
    assert set(tried[6:]) == {"bad1", "bad2", "bad3", "bad4", "bad5"}


def test_begin_due_of_a_refused_credential_waits_across_processes(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guarantee: a tick's result is in the database: a restarted worker neither forgets nor repeats it."""
    key, _ = scene.first_key(clock())
    save(SANDBOX, clock())
    tried: list[str] = []

    def failing(grant: Any, credential: Credential, *args: Any, **options: Any) -> Rotation:
        tried.append(credential.pk)
        raise StateConflictError("It cannot be rotated.")

    monkeypatch.setattr(starting, "begin_rotation", failing)
    due_at = clock() + 91 * DAY
    for _ in range(2):
        begin_due(due_at)
    assert tried == [key.credential_id]
    row = ScheduledCredential.objects.get(pk=key.credential_id)
    assert (row.why, row.refusals) == ("It cannot be rotated.", 1)
    assert row.ask_at == due_at + delay_after(1)
    begin_due(row.ask_at)
    assert len(tried) == 2
    assert caplog.text.count("scheduled rotation cannot be begun") == 1
    monkeypatch.undo()
    assert len(begin_due(due_at + DAY)) == 1
    row.refresh_from_db()
    assert (row.ask_at, row.why, row.refusals) == (None, "", 0)


def failures() -> set[str]:
    """Return the refused credentials and the schedules that cannot be read."""
    refused = ScheduledCredential.objects.filter(refusals__gt=0).exclude(why="").values_list("pk", flat=True)
    return {*refused, *(str(pk) for pk in ScheduleCheck.objects.exclude(fault="").values_list("pk", flat=True))}


@pytest.mark.parametrize("end", ["the schedule is disabled", "the key is revoked", "it is rotated by hand"])
def test_begin_due_forgets_the_failure_of_what_is_no_longer_due(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Guarantee: a refusal is forgotten with its cause. One that still counts is kept."""
    key, _ = scene.first_key(clock())
    other, _ = scene.first_key(clock(), "globex")
    row = save(key.credential, clock())
    save(other.credential, clock())

    def failing(*_: object, **__: object) -> Rotation:
        raise StateConflictError("It cannot be rotated.")

    with monkeypatch.context() as fault:
        fault.setattr(starting, "begin_rotation", failing)
        due_at = clock() + 91 * DAY
        begin_due(due_at)
        assert failures() == {key.credential_id, other.credential_id}
        if end == "the schedule is disabled":
            disable_schedule(authorize(scene.tam(), P.SCHEDULES_WRITE, key.credential.account, now=clock()), row)
        elif end == "the key is revoked":
            grant = authorize(scene.admin(), P.KEYS_REVOKE, key.credential.account, now=clock())
            revoke_key(grant, Key.objects.get(pk=key.pk), RevocationReason.SUPERSEDED)
        else:
            scene.rotate(key.credential, clock())
        begin_due(due_at)
    assert failures() == {other.credential_id}


def test_begin_due_forgets_the_fault_of_a_schedule_that_is_disabled(clock: Clock) -> None:
    """Guarantee: once it is enabled again, a schedule that still cannot be read raises its alarm again."""
    row = save(scene.account(), clock())
    grant = authorize(scene.tam(), P.SCHEDULES_WRITE, scene.account(), now=clock())
    damage(row, window={"time_zone": "Mars/Olympus"})
    begin_due(clock())
    assert failures() == {str(row.pk)}
    disable_schedule(grant, row)
    begin_due(clock())
    assert failures() == set()
    damage(row, is_enabled=True)
    begin_due(clock())
    assert failures() == {str(row.pk)}
    assert Notice.objects.filter(kind=NoticeKind.SCHEDULE_STALLED).count() == 2


def test_begin_due_keeps_the_failures_of_an_environment_that_is_not_served_here(
    clock: Clock, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: a worker for one environment forgets nothing that the other one's worker has learned."""
    key, _ = scene.first_key(clock())
    save(key.credential, clock())
    row = save(scene.account("globex"), clock())
    damage(row, window={"time_zone": "Mars/Olympus"})
    with monkeypatch.context() as fault:
        fault.setattr(starting, "begin_rotation", lambda *_, **__: 1 / 0)
        begin_due(clock() + 91 * DAY)
    assert failures() == {key.credential_id, str(row.pk)}
    settings.ENVIRONMENTS = ("production",)
    begin_due(clock() + 91 * DAY)
    assert failures() == {key.credential_id, str(row.pk)}


UNREADABLE: dict[str, dict[str, Any]] = {
    "a time zone that is not known here": {"window": {"time_zone": "Mars/Olympus"}},
    "a field of a newer release": {"overrides": {"skip_weekends": True}},
    "a value of a newer release": {"overrides": {"proof": "telepathy"}},
}


def damage(row: RotationSchedule, **changes: Any) -> None:
    """Write the schedule as another release would; no service of this release does so."""
    rows: QuerySet[RotationSchedule] = QuerySet(RotationSchedule)
    rows.filter(pk=row.pk).update(**changes)


@pytest.mark.parametrize("changes", UNREADABLE.values(), ids=UNREADABLE)
def test_begin_due_with_an_unreadable_schedule_stalls_it_and_starts_the_others(
    clock: Clock, changes: dict[str, Any]
) -> None:
    """Guarantee: an unreadable row stops only its own keys, visibly.

    A wider schedule, which does not apply to its keys, does not rotate them either.
    """
    ours, other = scene.account(), scene.account("globex")
    scene.issue(ours, clock(), label="ours")
    scene.issue(other, clock(), label="theirs")
    save(SANDBOX, clock())
    row = save(ours, clock())
    stored = {"window": row.window, "overrides": row.overrides}
    damage(row, **changes)
    at = clock() + 91 * DAY
    assert [[each.credential.label for each in begun(at + tick * DAY)] for tick in range(3)] == [["theirs"], [], []]
    alarm = Notice.objects.get(kind=NoticeKind.SCHEDULE_STALLED)
    assert (alarm.is_alarm, alarm.subject, alarm.account, alarm.payload["scope"]) == (
        True,
        str(row.pk),
        ours,
        "acme/sandbox",
    )
    assert alarm.payload["why"].startswith("The schedule cannot be read by this release")
    damage(row, **stored)
    assert [each.credential.label for each in begun(at + 4 * DAY)] == ["ours"]
    damage(row, **changes)
    begin_due(at + 5 * DAY)
    assert Notice.objects.filter(kind=NoticeKind.SCHEDULE_STALLED).count() == 2


def test_begin_due_with_an_unreadable_calendar_stalls_its_schedules(clock: Clock) -> None:
    scene.issue(scene.account(), clock(), label="ours")
    scene.issue(scene.account("globex"), clock(), label="theirs")
    frozen = calendar("freeze", clock())
    row = save(scene.account(), clock(), calendar=frozen)
    save(SANDBOX, clock())
    calendars: QuerySet[BlackoutCalendar] = QuerySet(BlackoutCalendar)
    calendars.filter(pk="freeze").update(periods=[{"from": "2026-12-24"}])
    assert [each.credential.label for each in begun(clock() + 91 * DAY)] == ["theirs"]
    assert Notice.objects.get(kind=NoticeKind.SCHEDULE_STALLED).subject == str(row.pk)


def test_begin_due_beside_an_open_rotation_without_date_starts_the_others(clock: Clock) -> None:
    key, _ = scene.issue(scene.account(), clock(), label="a")
    damage_plan(scene.rotate(key.credential, clock()), {"not_before": "soon"})
    scene.issue(scene.account(), clock(), label="b")
    save(SANDBOX, clock())
    assert [each.credential.label for each in begun(clock() + 91 * DAY)] == ["b"]


def test_begin_due_of_many_starts_a_share_with_each_tick(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "MAX_BEGUN", 2)
    for label in "abc":
        scene.issue(scene.account(), clock(), label=label)
    save(SANDBOX, clock())
    assert [len(begin_due(clock() + 91 * DAY)) for _ in range(3)] == [2, 1, 0]


def test_begin_due_in_an_environment_not_served_here_starts_nothing(clock: Clock, settings: Any) -> None:
    scene.first_key(clock())
    save(SANDBOX, clock())
    settings.ENVIRONMENTS = ("production",)
    assert begin_due(clock() + 91 * DAY) == []


@pytest.mark.database
def test_begin_due_with_nothing_due_needs_few_queries_for_any_number_of_keys(clock: Clock) -> None:
    for number in range(6):
        scene.issue(scene.account(), clock() - number * DAY, label=f"n{number}")
    save(SANDBOX, clock(), cryptoperiod_days=30, jitter_days=9)
    begin_due(clock())
    with CaptureQueriesContext(connection) as few:
        begin_due(clock())
    assert len(few) <= 3 + len(Environment)  # schedules to check, expiries, sweeps, and what is due in each environment
    with CaptureQueriesContext(connection) as more:
        assert len(list_candidates(AccessScope(environments=frozenset({SANDBOX}))).candidates) == 6
    assert len(more) <= 7


def test_candidates_without_a_date_are_of_the_listed_environments_only(clock: Clock) -> None:
    """An operator who lists one environment sees no credential of another, whatever it waits for."""
    for environment in Environment:
        for label in ("dated", "waiting"):
            scene.issue(scene.account(environment=environment), clock(), label=label)
        save(environment, clock())
    begin_due(clock())
    ScheduledCredential.objects.filter(credential__label="waiting").update(ask_at=None)
    for environment in Environment:
        listed = list_candidates(AccessScope(None, frozenset({environment}))).candidates
        found = [candidate.credential for candidate in listed]
        assert len(found) == 2
        assert {(each.environment, each.label) for each in found} == {(environment, "dated"), (environment, "waiting")}


@pytest.mark.database
@pytest.mark.django_db(transaction=True)
def test_begin_due_twice_concurrently_starts_each_once(clock: Clock) -> None:
    """Two simultaneous ticks and the next one start one rotation per credential, and none fails."""
    for number in range(4):
        scene.issue(scene.account(), clock(), label=f"n{number}")
    save(SANDBOX, clock())
    barrier, found = Barrier(2), []

    def tick() -> None:
        try:
            barrier.wait(timeout=30)
            found.append(begin_due(clock() + 91 * DAY))
        finally:
            connections.close_all()

    threads = [Thread(target=tick) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(found) == 2
    # On PostgreSQL a tick passes over the rows that the other one has locked, even if that one does not claim them.
    found.append(begin_due(clock() + 91 * DAY))
    assert sorted(chain(*found)) == sorted(Rotation.objects.values_list("pk", flat=True))
    assert Rotation.objects.exclude(state__in=CLOSED).count() == 4
    assert failures() == set()


def test_begin_of_a_replaced_key_starts_nothing(clock: Clock) -> None:
    """A tick with an outdated list does not rotate the new key."""
    key, _ = scene.first_key(clock())
    save(SANDBOX, clock())
    (candidate,) = list_candidates(AccessScope(environments=frozenset({SANDBOX}))).candidates
    grant = authorize(scene.admin(), P.KEYS_REVOKE, key.credential.account, now=clock())
    revoke_key(grant, Key.objects.get(pk=key.pk), RevocationReason.SUPERSEDED)
    assert starting.begin(candidate, clock() + 91 * DAY) is None
    assert not Rotation.objects.exists()


def test_schedule_or_calendar_created_twice_is_refused(clock: Clock) -> None:
    """A form for a new schedule or calendar never overwrites an existing one."""
    place = scene.account()
    save(place, clock(), cryptoperiod_days=30)
    grant = authorize(scene.admin(), P.SCHEDULES_WRITE, place, now=clock())
    with pytest.raises(StateConflictError, match="Change that one"):
        save_schedule(grant, ScheduleScope(Environment.SANDBOX, account=place), ScheduleDraft(365))
    calendar("xmas", clock())
    with pytest.raises(StateConflictError, match="Change that one"):
        save_calendar(authorize(scene.admin(), P.SCHEDULES_WRITE, now=clock()), "xmas", [])
    assert RotationSchedule.objects.get().cryptoperiod_days == 30
