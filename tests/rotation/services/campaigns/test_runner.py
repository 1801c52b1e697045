"""What workers do for campaigns: pace, halts, skips, ends; a killed or duplicated worker changes nothing."""

from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import pytest
from django.db import models

from keyvault.access.permissions import Permission as P
from keyvault.access.roles import Role
from keyvault.domain.environments import Environment
from keyvault.domain.errors import RequestInvalidError, StateConflictError
from keyvault.domain.issuance import Delivery
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.revocation import RevocationReason
from keyvault.models import AuditEntry, Key, Notice
from keyvault.services.keys.lifecycle import revoke_key
from keyvault.services.merchants.merchants import suspend_account
from keyvault.services.recording.audit_chain import verify_audit
from keyvault.services.recording.authorization import authorize
from keyvault.services.usage.recorder import UsageLog
from keyvault.services.work.leases import LEASE, Lease, claim
from rotation.domain.events import RotationState as S
from rotation.domain.pacing import START_WITHIN, Pace
from rotation.domain.plan_fields import PlanOverrides
from rotation.models import Campaign, CampaignMember, CampaignState, Rotation
from rotation.services.campaigns import runner
from rotation.services.campaigns.campaigns import cancel_campaign, is_unaltered, pause_campaign, resume_campaign
from rotation.services.campaigns.reports import describe_campaign, list_failed_first
from rotation.services.campaigns.runner import subject_of, tick
from rotation.services.rotations.engine import advance_rotation
from rotation.services.rotations.interventions import may_collect
from rotation.services.rotations.requests import begin_rotation
from tests.clocks import Clock
from tests.factories import the_operator
from tests.killing import KilledError
from tests.plans import copy_row, explain
from tests.rotation.campaigning import approved, asked, become, details_of, events, fresh, issued, oldest, on_platform
from tests.rotation.scene import account, acknowledge_replacement, admin, issue, rotate, set_recipient, tam
from tests.services.racing import held_open, race, start, wait_until_blocked

pytestmark = [pytest.mark.database, pytest.mark.django_db]

C = CampaignState


def ticked(clock: Clock, seconds: float = 5) -> None:
    clock.tick(seconds)
    tick(clock)


def begun(campaign: Campaign) -> int:
    """Return the number of started members, which must equal the number of rotations."""
    linked = CampaignMember.objects.filter(campaign=campaign, rotation__campaign=campaign).count()
    assert linked == campaign.rotations.count()
    return linked


def may_write(clock: Clock) -> Any:
    return on_platform(tam(), P.ROTATIONS_WRITE, clock)


# --- pace ---------------------------------------------------------------------------------------------------


def test_tick_starts_at_the_approved_rate(clock: Clock) -> None:
    """Twelve a minute are one per tick; a second worker's tick in between starts no more within the minute."""
    issued(clock, 16)
    campaign = asked(clock, pace=Pace(per_minute=12, concurrency=100))
    counts = []
    for _ in range(14):
        tick(clock)
        ticked(clock, 2)
        counts.append(begun(campaign))
        clock.tick(3)
    assert counts == [2, 4, 6, 8, 10, 12, 12, 12, 12, 12, 12, 12, 14, 16]


def test_tick_takes_the_turn_of_each_campaign_at_its_own_time(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: a turn after a slow one has a lease that lasts, and its rotations count from when they begin."""
    issued(clock, 2)
    campaigns = [asked(clock, merchants=[f"merchant-{number}"]) for number in range(2)]
    take_turn, at, taken_over = runner._take_turn, clock(), list[Lease | None]()

    def take_slowly(lease: Lease, campaign_id: str, now: datetime) -> None:
        taken_over.append(claim(lease.subject, clock()))
        take_turn(lease, campaign_id, now)
        clock.now += LEASE

    monkeypatch.setattr(runner, "_take_turn", take_slowly)
    tick(clock)
    assert taken_over == [None, None]
    assert [campaign.rotations.get().created_at for campaign in campaigns] == [at, at + LEASE]


def test_tick_respects_the_concurrency_until_a_rotation_is_proved(clock: Clock) -> None:
    """A slot is free once the replacement is proved, not after a quiet period of days."""
    issued(clock, 4)
    campaign = asked(clock, pace=Pace(per_minute=600, concurrency=2))
    for _ in range(3):
        ticked(clock)
    assert begun(campaign) == 2
    become(oldest(campaign), S.OVERLAP, clock)
    ticked(clock)
    ticked(clock)
    assert begun(campaign) == 3


def test_tick_reads_the_members_only_before_it_starts_some(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A campaign of 10,000 members waits for days while it has no room, and after all have started."""
    issued(clock, 2)
    campaign = asked(clock, pace=Pace(concurrency=1))
    read: list[str] = []

    def reading(row: Campaign) -> bool:
        read.append(row.pk)
        return is_unaltered(row)

    monkeypatch.setattr(runner, "is_unaltered", reading)
    for started in (1, 1, 1):
        ticked(clock)
        assert (begun(campaign), len(read)) == (started, 1)
    become(oldest(campaign), S.OVERLAP, clock)
    for _ in range(3):
        ticked(clock)
        assert (begun(campaign), len(read)) == (2, 2)


def test_tick_starts_in_the_selected_order_with_the_approved_plan(clock: Clock) -> None:
    keys = issued(clock, 3)
    campaign = asked(clock, overrides=PlanOverrides(quiet_seconds=77, quarantine_seconds=9), pace=Pace(per_minute=1))
    tick(clock)
    rotation = campaign.rotations.get()
    first = CampaignMember.objects.filter(campaign=campaign).order_by("pk")[0]
    assert rotation.credential_id == first.credential_id
    assert rotation.predecessor_id in {key.pk for key in keys}
    plan = rotation.approved_plan
    assert (plan.quiet_seconds, plan.quarantine_seconds, plan.reason) == (77, 9, "yearly")
    asked_for = details_of(AuditEntry.objects.get(event="rotation.requested"))
    assert asked_for["campaign_id"] == campaign.campaign_id


def test_replacement_of_a_campaign_is_sealed_to_the_recipient_key(clock: Clock, verifier: UsageLog) -> None:
    """Guarantee: a campaign's replacement reaches a merchant with a recipient key without an operator."""
    key, _ = issue(account("merchant-0"), clock.now, delivery=Delivery.SHOW_ONCE)
    set_recipient(key, clock.now)
    campaign = asked(clock, pace=Pace(per_minute=600, concurrency=10))
    ticked(clock)
    rotation = oldest(campaign)
    advance_rotation(rotation.pk, clock)
    sealed = Rotation.objects.get(pk=rotation.pk)
    assert sealed.handover is not None
    assert sealed.handover["key_id"] == sealed.replacement_id
    assert sealed.awaits_requester is False


def test_tick_of_an_environment_not_served_here_starts_nothing(clock: Clock, settings: Any) -> None:
    issued(clock, 1)
    campaign = asked(clock)
    settings.ENVIRONMENTS = frozenset()
    tick(clock)
    assert begun(campaign) == 0


# --- skips --------------------------------------------------------------------------------------------------


def _rotate(key: Key, clock: Clock) -> None:
    rotate(key.credential, clock.now)


def _revoke(key: Key, clock: Clock) -> None:
    place = key.credential.account
    revoke_key(authorize(admin(), P.KEYS_REVOKE, place, now=clock.now), key, RevocationReason.SUPERSEDED)


def _suspend(key: Key, clock: Clock) -> None:
    place = key.credential.account
    suspend_account(authorize(admin(), P.MERCHANTS_WRITE, place, now=clock.now), place)


@pytest.mark.postgres_once
@pytest.mark.parametrize(
    ("meanwhile", "why"),
    [
        (_rotate, "it has an open rotation"),
        (_revoke, "it has no usable key"),
        (_suspend, "its merchant or account is not active"),
    ],
)
def test_tick_skips_a_disqualified_credential_with_the_reason(
    clock: Clock, meanwhile: Callable[[Key, Clock], None], why: str
) -> None:
    """Another member starts in its place in the same tick."""
    issued(clock, 3)
    campaign = asked(clock, pace=Pace(per_minute=1))
    member = CampaignMember.objects.filter(campaign=campaign).order_by("pk")[0]
    meanwhile(Key.objects.select_related("credential__account__merchant").get(credential=member.credential), clock)
    ticked(clock)
    member.refresh_from_db()
    assert (member.outcome, member.why, member.rotation) == ("skipped", why, None)
    assert begun(campaign) == 1


def test_tick_skips_a_credential_that_got_a_new_key_since_it_was_selected(clock: Clock) -> None:
    issued(clock, 1)
    campaign = asked(clock)
    models.QuerySet(Key).update(activated_at=clock.now + timedelta(seconds=1))
    ticked(clock)
    assert campaign.members.get().why == "its key is younger than selected"


@pytest.mark.sqlite
def test_tick_skips_a_credential_whose_plan_became_infeasible(clock: Clock) -> None:
    """The key now expires before the end of the plan; the fault is worded as for a single request."""
    issue(account("one"), clock.now, expires_in_days=4)
    campaign = asked(clock, overrides=PlanOverrides(quiet_seconds=3 * 86_400))
    clock.tick(2 * 86_400)
    tick(clock)
    member = campaign.members.get()
    assert member.outcome == "skipped"
    assert member.why.startswith("/deadline: soak and quiet period need 259200 seconds")


# --- halts --------------------------------------------------------------------------------------------------


def test_tick_halts_at_the_first_stall_and_raises_an_alarm(clock: Clock) -> None:
    """No further rotation starts, running ones continue, and the alarm is on the failing account."""
    issued(clock, 4)
    campaign = asked(clock, pace=Pace(per_minute=24, concurrency=10))
    ticked(clock)
    assert begun(campaign) == 2
    failed_member = oldest(campaign)
    become(failed_member, S.STALLED, clock)
    ticked(clock)
    ticked(clock)
    campaign = fresh(campaign)
    assert (campaign.state, campaign.why, begun(campaign)) == (C.HALTED, "a rotation stalled", 2)
    alarm = Notice.objects.get(is_alarm=True)
    assert (alarm.account, alarm.subject, alarm.kind) == (
        failed_member.credential.account,
        campaign.campaign_id,
        NoticeKind.CAMPAIGN_HALTED,
    )
    assert alarm.payload == {"rotation_id": failed_member.rotation_id, "why": "a rotation stalled"}
    assert events(campaign) == ["campaign.requested", "campaign.halted"]


def test_resume_after_a_halt_takes_a_reason_and_does_not_count_the_same_stall_again(clock: Clock) -> None:
    issued(clock, 4)
    campaign = asked(clock, pace=Pace(per_minute=12, concurrency=10))
    ticked(clock)
    become(oldest(campaign), S.STALLED, clock)
    ticked(clock)
    halted = fresh(campaign)
    with pytest.raises(RequestInvalidError, match="with a reason"):
        resume_campaign(may_write(clock), halted, " ")
    resume_campaign(may_write(clock), halted, "its backend was sealed, and is not any more")
    ticked(clock)
    assert (fresh(campaign).state, begun(campaign)) == (C.RUNNING, 2)
    become(oldest(campaign), S.STALLED, clock)
    ticked(clock)
    assert (fresh(campaign).state, begun(campaign)) == (C.HALTED, 2)


@pytest.mark.sqlite
def test_tick_halts_on_a_share_of_failures_once_it_is_exceeded(clock: Clock) -> None:
    issued(clock, 12)
    campaign = asked(clock, pace=Pace(per_minute=120, concurrency=100, halt_on_stall=False, halt_at_failed_percent=20))
    ticked(clock)
    for state in (S.OVERLAP, S.QUARANTINE, S.COMPLETED, S.OVERLAP, S.STALLED):
        become(oldest(campaign), state, clock)
    ticked(clock)
    assert fresh(campaign).state == C.RUNNING
    become(oldest(campaign), S.CANCELLED, clock)
    ticked(clock)
    campaign = fresh(campaign)
    assert (campaign.state, campaign.why) == (
        C.HALTED,
        "2 of 6 rotations failed or stalled, which is more than 20 percent",
    )
    resume_campaign(may_write(clock), campaign, "looked at both")
    ticked(clock)
    assert fresh(campaign).state == C.RUNNING


@pytest.mark.sqlite
def test_tick_without_a_halt_continues_past_stalls(clock: Clock) -> None:
    """A stalled rotation waits for an operator and occupies no slot."""
    issued(clock, 3)
    pace = Pace(per_minute=600, concurrency=1, halt_on_stall=False, halt_at_failed_percent=None)
    campaign = asked(clock, pace=pace)
    for _ in range(3):
        ticked(clock)
        become(oldest(campaign), S.STALLED, clock)
    ticked(clock)
    campaign = fresh(campaign)
    assert (campaign.state, begun(campaign)) == (C.COMPLETED, 3)
    description = describe_campaign(campaign, clock.now)
    assert (description["percent_proved"], description["percent_ended"]) == (0, 100)


# --- pause and end ------------------------------------------------------------------------------------------


def test_pause_starts_no_more_until_resumed(clock: Clock) -> None:
    issued(clock, 4)
    campaign = asked(clock, pace=Pace(per_minute=12, concurrency=10))
    ticked(clock)
    pause_campaign(may_write(clock), fresh(campaign), "a sale begins")
    for _ in range(3):
        ticked(clock)
    assert begun(campaign) == 1
    resume_campaign(may_write(clock), fresh(campaign), "")
    ticked(clock)
    assert begun(campaign) == 2


@pytest.mark.postgres_once
@pytest.mark.parametrize("end", [S.COMPLETED, S.STALLED])
def test_pause_lasts_until_resumed_whatever_its_rotations_do(clock: Clock, end: S) -> None:
    """A paused campaign neither completes nor halts, and its worker has nothing to retry."""
    issued(clock, 1)
    campaign = asked(clock)
    ticked(clock)
    pause_campaign(may_write(clock), fresh(campaign), "a sale begins")
    become(campaign.rotations.get(), end, clock)
    ticked(clock)
    assert fresh(campaign).state == C.PAUSED
    resume_campaign(may_write(clock), fresh(campaign), "")
    ticked(clock)
    assert fresh(campaign).state == (C.COMPLETED if end is S.COMPLETED else C.HALTED)


def test_cancel_starts_no_more_and_keeps_running_rotations(clock: Clock) -> None:
    issued(clock, 4)
    campaign = asked(clock, pace=Pace(per_minute=12, concurrency=10))
    ticked(clock)
    cancel_campaign(may_write(clock), fresh(campaign), "")
    ticked(clock)
    assert (begun(campaign), campaign.rotations.get().state) == (1, S.SCHEDULED)


def test_tick_completes_when_no_rotation_is_running(clock: Clock) -> None:
    issued(clock, 2)
    campaign = asked(clock)
    ticked(clock)
    become(oldest(campaign), S.COMPLETED, clock)
    become(oldest(campaign), S.QUARANTINE, clock)
    ticked(clock)
    assert fresh(campaign).state == C.RUNNING
    become(campaign.rotations.get(state=S.QUARANTINE), S.COMPLETED, clock)
    ticked(clock)
    campaign = fresh(campaign)
    assert (campaign.state, campaign.closed_at) == (C.COMPLETED, clock.now)
    description = describe_campaign(campaign, clock.now)
    assert (description["percent_proved"], description["percent_ended"], description["all_begun_at"]) == (
        100,
        100,
        None,
    )


@pytest.mark.postgres_once
@pytest.mark.parametrize("act", [None, pause_campaign])
def test_tick_with_an_expired_approval_starts_nothing(clock: Clock, act: Any) -> None:
    """An approval is valid for thirty days; the rest must be requested anew, whatever paused the campaign."""
    issued(clock, 2)
    campaign = asked(clock, pace=Pace(per_minute=12, concurrency=1))
    ticked(clock)
    if act is not None:
        act(may_write(clock), fresh(campaign), "")
    clock.now = campaign.created_at + START_WITHIN - timedelta(seconds=1)
    tick(clock)
    assert fresh(campaign).state != C.EXPIRED
    ticked(clock, 1)
    campaign = fresh(campaign)
    assert (campaign.state, begun(campaign)) == (C.EXPIRED, 1)
    assert campaign.rotations.get().state == S.SCHEDULED


@pytest.mark.sqlite
def test_tick_with_all_started_does_not_expire(clock: Clock) -> None:
    issued(clock, 1)
    campaign = asked(clock)
    ticked(clock)
    ticked(clock, START_WITHIN.total_seconds())
    assert fresh(campaign).state == C.RUNNING


def test_members_that_stalled_or_failed_are_listed_first(clock: Clock) -> None:
    issued(clock, 6)
    campaign = asked(clock, pace=Pace(per_minute=48, halt_on_stall=False, halt_at_failed_percent=None))
    ticked(clock)
    become(oldest(campaign), S.OVERLAP, clock)
    become(oldest(campaign), S.CANCELLED, clock)
    become(oldest(campaign), S.STALLED, clock)
    listed = [member.rotation.state if member.rotation else None for member in list_failed_first(campaign, 5)]
    assert listed == [S.STALLED, S.CANCELLED, S.SCHEDULED, S.OVERLAP, None]


def test_key_of_a_campaign_is_collected_by_whoever_did_not_approve_the_campaign(clock: Clock) -> None:
    """The campaign's author may be absent when the key is there; its approver never gets the key."""
    issued(clock, 1, Environment.PRODUCTION)
    campaign = approved(clock, asked(clock, environment=Environment.PRODUCTION), by=admin())
    ticked(clock)
    rotation = campaign.rotations.get()
    deputy = the_operator("deputy", Role.KEY_ADMINISTRATOR)
    assert [may_collect(rotation, each.person) for each in (tam(), deputy, admin())] == [True, True, False]


@pytest.mark.sqlite
def test_rotation_that_completed_without_proof_is_not_counted_as_proved(clock: Clock) -> None:
    """A rotation also completes when its old key is revoked by hand; nothing then shows that the new one is in use."""
    issued(clock, 4)
    campaign = asked(clock, pace=Pace(per_minute=48, halt_on_stall=False, halt_at_failed_percent=50))
    ticked(clock)
    become(oldest(campaign), S.OVERLAP, clock)
    unproved = oldest(campaign)
    become(unproved, S.COMPLETED, clock)
    models.QuerySet(Rotation).filter(pk=unproved.pk).update(used_at=None)
    described: dict[str, Any] = {**describe_campaign(fresh(campaign), clock.now)}
    progress = described["progress"]
    assert (progress["proved"], progress["unproved"], progress["completed"], progress["begun"]) == (1, 3, 1, 4)
    assert described["percent_proved"] == 25
    states = [member.rotation.state if member.rotation else None for member in list_failed_first(campaign, 4)]
    assert states == [S.COMPLETED, S.SCHEDULED, S.SCHEDULED, S.OVERLAP]
    become(oldest(campaign), S.CANCELLED, clock)
    become(oldest(campaign), S.CANCELLED, clock)
    ticked(clock)
    assert fresh(campaign).why == "2 of 3 rotations failed or stalled, which is more than 50 percent"


# --- dead, duplicate and late workers -----------------------------------------------------------------------


def test_tick_killed_between_start_and_link_starts_once(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotation, approval, audit entry and link are one transaction: no half of it survives the worker."""
    issued(clock, 1)
    campaign = asked(clock)
    whole = begin_rotation

    def killed(*args: Any, **options: Any) -> Rotation:
        whole(*args, **options)
        raise KilledError

    monkeypatch.setattr(runner, "begin_rotation", killed)
    with pytest.raises(KilledError):
        ticked(clock)
    assert not Rotation.objects.exists()
    assert not AuditEntry.objects.filter(event="rotation.requested").exists()
    monkeypatch.undo()
    ticked(clock)
    assert begun(campaign) == 0, "a dead worker's lease is kept until it expires"
    ticked(clock, LEASE.total_seconds())
    assert begun(campaign) == 1
    assert verify_audit().first_broken is None


@pytest.mark.postgres
def test_tick_reads_no_campaign_that_is_closed(clock: Clock) -> None:
    """Closed campaigns are kept, and workers look every five seconds."""
    issued(clock, 1)
    cancel_campaign(may_write(clock), asked(clock), "not now")
    copy_row(Campaign, campaign_id="'cmp_' || n")
    (plan,) = explain(partial(tick, clock))
    assert "campaign_under_way" in plan


@pytest.mark.parametrize("meanwhile", ["lease", "pause"])
def test_tick_overtaken_halfway_starts_nothing(clock: Clock, monkeypatch: pytest.MonkeyPatch, meanwhile: str) -> None:
    """A worker that slept past its lease, or read its data before the pause, is refused when it starts a rotation."""
    issued(clock, 1)
    campaign = asked(clock)

    def overtaken(row: Campaign) -> bool:
        if meanwhile == "pause":
            pause_campaign(may_write(clock), fresh(campaign), "stop")
        else:
            assert claim(subject_of(campaign.pk), clock.now + LEASE) is not None
        return True

    monkeypatch.setattr(runner, "is_unaltered", overtaken)
    ticked(clock)
    assert begun(campaign) == 0


def test_tick_overtaken_by_a_pause_skips_nobody(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that does not qualify now may qualify again when the campaign is resumed."""
    (key,) = issued(clock, 1)
    campaign = asked(clock)
    revoke_key(authorize(admin(), P.KEYS_REVOKE, key.credential.account, now=clock()), key, RevocationReason.SUPERSEDED)

    def overtaken(row: Campaign) -> bool:
        pause_campaign(may_write(clock), fresh(campaign), "stop")
        return True

    monkeypatch.setattr(runner, "is_unaltered", overtaken)
    ticked(clock)
    assert (fresh(campaign).state, campaign.members.get().outcome) == (C.PAUSED, "")


def test_tick_that_fails_for_one_campaign_continues_with_the_next(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    issued(clock, 2)
    first = asked(clock, merchants=["merchant-0"])
    clock.tick(1)
    second = asked(clock, merchants=["merchant-1"])

    def failing(row: Campaign) -> bool:
        if row.pk == first.pk:
            raise StateConflictError("another writer was faster")
        return True

    monkeypatch.setattr(runner, "is_unaltered", failing)
    ticked(clock)
    assert (begun(first), begun(second)) == (0, 1)


def test_campaign_with_the_engine_rotates_all_of_them(clock: Clock, verifier: UsageLog) -> None:
    """Each rotation is requested, delivered, acknowledged, silent, quarantined and revoked; the counts agree."""
    keys = issued(clock, 3)
    campaign = asked(clock)

    def advance() -> None:
        verifier.flush()
        for rotation_id in list(campaign.rotations.values_list("pk", flat=True)):
            advance_rotation(rotation_id, clock)

    ticked(clock)
    advance()
    for rotation in campaign.rotations.all():
        acknowledge_replacement(rotation.rotation_id, clock.now)
    for _ in range(6):
        clock.tick(6)
        advance()
    ticked(clock)
    campaign = fresh(campaign)
    assert campaign.state == C.COMPLETED, describe_campaign(campaign, clock.now)["rotations_by_state"]
    assert describe_campaign(campaign, clock.now)["progress"] == {
        "members": 3,
        "waiting": 0,
        "skipped": 0,
        "begun": 3,
        "unproved": 0,
        "proved": 3,
        "completed": 3,
        "failed": 0,
        "stalled": 0,
    }
    assert {Key.objects.get(pk=key.pk).state for key in keys} <= {"deactivated", "destroyed"}
    assert verify_audit().first_broken is None


# --- races on a database with several writers ---------------------------------------------------------------


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_race_of_ticks_starts_each_member_once_and_keeps_the_pace(clock: Clock) -> None:
    """Four ticks at the same time, repeatedly: together they begin no more in a minute than the pace allows."""
    issued(clock, 8)
    campaign = asked(clock, pace=Pace(per_minute=6, concurrency=100))
    for _ in range(5):
        clock.tick(5)
        assert race(*[partial(tick, clock)] * 4) == [None] * 4
        assert begun(campaign) <= 6
    clock.tick(60)
    for _ in range(8):
        ticked(clock)
    assert begun(campaign) == 8
    assert Rotation.objects.count() == 8


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_race_of_a_pause_with_a_running_start_waits_for_it(clock: Clock) -> None:
    """After a pause has returned no rotation starts: it waits for a start that was faster."""
    issued(clock, 1)
    campaign = asked(clock)

    def hold_row_lock() -> None:
        list(Campaign.objects.select_for_update(no_key=True).filter(pk=campaign.pk))

    with held_open(hold_row_lock):
        pausing = start(lambda: pause_campaign(may_write(clock), fresh(campaign), "stop"))
        wait_until_blocked(pausing)
    pausing.result(30)
    ticked(clock)
    assert begun(campaign) == 0


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_race_of_a_start_with_a_faster_pause_starts_nothing(clock: Clock) -> None:
    """The start waits for the pause to commit, sees it, and leaves the member unchanged."""
    issued(clock, 1)
    campaign = asked(clock)
    clock.tick(5)
    with held_open(lambda: pause_campaign(may_write(clock), fresh(campaign), "stop")):
        ticking = start(partial(tick, clock))
        wait_until_blocked(ticking)
    ticking.result(30)
    assert begun(campaign) == 0
    assert campaign.members.get().outcome == ""
