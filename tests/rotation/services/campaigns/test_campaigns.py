"""Campaigns as operators act on them: one expiring approval of exactly this selection, plan and pace."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection, models
from django.test.utils import CaptureQueriesContext

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import OperatorPrincipal, Service
from keyvault.access.roles import Role
from keyvault.access.scopes import EVERYWHERE
from keyvault.domain.environments import Environment
from keyvault.domain.errors import PermissionMissingError, RequestInvalidError, StateConflictError
from keyvault.domain.keys import KeyKind
from keyvault.domain.revocation import RevocationReason
from keyvault.domain.timestamps import format_timestamp
from keyvault.models import AuditEntry, BreakGlass
from keyvault.services.keys.lifecycle import revoke_key, suspend_key
from keyvault.services.merchants.merchants import suspend_account
from keyvault.services.recording.authorization import authorize
from keyvault.services.webhooks.endpoints import add_endpoint
from rotation.domain.pacing import Pace
from rotation.domain.plan_fields import DeliveryChannel, PlanOverrides, Proof
from rotation.domain.policy import APPROVAL_LIFETIME
from rotation.models import Campaign, CampaignMember, CampaignState
from rotation.services.campaigns import selection
from rotation.services.campaigns.campaigns import (
    approve_campaign,
    cancel_campaign,
    get_campaign,
    pause_campaign,
    reject_campaign,
    request_campaign,
    resume_campaign,
)
from rotation.services.campaigns.reports import describe_campaign
from rotation.services.campaigns.runner import tick
from tests.clocks import Clock
from tests.factories import make_operator, on_host
from tests.rotation.campaigning import approved, asked, details_of, events, issued, on_platform
from tests.rotation.scene import account, admin, approver, issue, rotate, tam
from tests.services.rows import disable_triggers

pytestmark = pytest.mark.django_db

C = CampaignState
SANDBOX, PRODUCTION = Environment.SANDBOX, Environment.PRODUCTION
DAYS_40 = timedelta(days=40)


@pytest.mark.database
def test_request_selects_old_keys_and_explains_what_is_left_out(clock: Clock) -> None:
    old, _ = issue(account("old"), clock.now - DAYS_40)
    issue(account("young"), clock.now)
    busy, _ = issue(account("busy"), clock.now - DAYS_40)
    rotate(busy.credential, clock.now)
    dead, _ = issue(account("dead"), clock.now - DAYS_40)
    revoke_key(authorize(admin(), P.KEYS_REVOKE, account("dead"), now=clock.now), dead, RevocationReason.SUPERSEDED)
    issue(account("asleep"), clock.now - DAYS_40)
    suspend_account(authorize(admin(), P.MERCHANTS_WRITE, account("asleep"), now=clock.now), account("asleep"))
    issue(account("old"), clock.now - DAYS_40, kind=KeyKind.PUBLIC)
    issue(account("old", PRODUCTION), clock.now - DAYS_40)

    campaign = asked(clock, older_than_days=30)

    assert [member.credential_id for member in campaign.members.all()] == [old.credential_id]
    assert campaign.selection["left_out"] == {"merchant_inactive": 1, "open_rotation": 1}


def test_request_selects_the_oldest_keys_of_the_named_merchants_first(clock: Clock) -> None:
    newer, _ = issue(account("one"), clock.now - DAYS_40)
    older, _ = issue(account("two"), clock.now - 2 * DAYS_40)
    issue(account("three"), clock.now - 3 * DAYS_40)
    campaign = asked(clock, merchants=["two", "one", "one"])
    assert [m.credential_id for m in campaign.members.order_by("pk")] == [older.credential_id, newer.credential_id]
    assert campaign.selection["merchants"] == ["one", "two"]


def test_request_with_a_suspended_key_leaves_the_credential_out(clock: Clock) -> None:
    usable, _ = issue(account("one"), clock.now)
    key, _ = issue(account("two"), clock.now)
    suspend_key(authorize(admin(), P.KEYS_SUSPEND, account("two"), now=clock.now), key)
    assert [member.credential_id for member in asked(clock).members.all()] == [usable.credential_id]


@pytest.mark.parametrize(
    ("chosen", "pointers"),
    [
        ({"merchants": ["merchant-0", "nobody"]}, ["/merchants"]),
        ({"merchants": []}, ["/merchants"]),
        ({"older_than_days": -1}, ["/older_than_days"]),
        ({"older_than_days": 10**9}, ["/older_than_days"]),
        ({"pace": Pace(per_minute=0, concurrency=0)}, ["/per_minute", "/concurrency"]),
        ({"reason": "  "}, ["/reason"]),
        ({"overrides": PlanOverrides(quiet_seconds=0)}, ["/quiet_seconds"]),
        ({"overrides": PlanOverrides(proof=Proof.CONFIRMATION, proof_count=0)}, ["/proof_count"]),
        ({"older_than_days": 1}, ["/older_than_days"]),
    ],
)
def test_request_that_is_infeasible_names_each_fault(clock: Clock, chosen: dict[str, Any], pointers: list[str]) -> None:
    issued(clock, 2)
    with pytest.raises(RequestInvalidError) as refused:
        asked(clock, **chosen)
    assert [fault.pointer for fault in refused.value.faults] == pointers
    assert not Campaign.objects.exists()


def test_request_leaves_out_a_credential_with_an_infeasible_plan(clock: Clock) -> None:
    """A key that expires too early for the plan does not hold up the others."""
    issue(account("one"), clock.now)
    issue(account("two"), clock.now, expires_in_days=1)
    campaign = asked(clock, overrides=PlanOverrides(quiet_seconds=3 * 86_400))
    assert campaign.members.count() == 1
    assert campaign.selection["left_out"] == {"plan_cannot_be_met": 1}


def test_request_that_selects_nothing_lists_what_was_left_out(clock: Clock) -> None:
    for key in issued(clock, 2):
        rotate(key.credential, clock.now)
    with pytest.raises(RequestInvalidError, match="left out: 2 open rotation"):
        asked(clock)


def test_request_for_too_many_is_refused(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is checked before anything is planned or written."""
    issued(clock, 3)
    monkeypatch.setattr(selection, "MAX_MEMBERS", 2)
    with pytest.raises(RequestInvalidError, match="at most 2"):
        asked(clock)


def test_request_that_matches_more_keys_than_it_may_read_is_refused(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request reads no credential of an environment in which too many keys match."""
    issued(clock, 3)
    monkeypatch.setattr(selection, "MAX_READ", 2)
    with pytest.raises(RequestInvalidError, match="More than 2 active keys match") as refused:
        asked(clock)
    assert [fault.pointer for fault in refused.value.faults] == ["/merchants"]
    assert asked(clock, merchants=["merchant-0", "merchant-1"]).members.count() == 2


@pytest.mark.database
def test_request_plans_any_number_of_credentials_with_the_same_queries(clock: Clock) -> None:
    """Guarantee: a campaign of 10,000 members, each with an account and an expiry of its own, is one short request."""
    counts = []
    for numbers in (range(2), range(2, 8)):
        places = [account(f"merchant-{number}") for number in numbers]
        for number, place in zip(numbers, places, strict=True):
            issue(place, clock.now, expires_in_days=300 + number)
        names = [place.merchant_id for place in places]
        with CaptureQueriesContext(connection) as queries:
            campaign = asked(clock, merchants=names)
        assert campaign.selection["count"] == len(names)
        counts.append(len([each for each in queries if each["sql"].startswith("SELECT")]))
    assert counts[0] == counts[1]


def test_request_by_webhook_leaves_out_accounts_without_an_enabled_endpoint(clock: Clock) -> None:
    (key, other) = issued(clock, 2)
    place = key.credential.account
    add_endpoint(authorize(tam(), P.WEBHOOKS_WRITE, place, now=clock.now), place, "https://merchant.example/hooks")
    overrides = PlanOverrides(proof=Proof.ACK, channels=(DeliveryChannel.SECRET_BACKEND, DeliveryChannel.WEBHOOK))
    campaign = asked(clock, overrides=overrides)
    assert [member.credential_id for member in campaign.members.all()] == [key.credential_id]
    assert campaign.selection["left_out"] == {"plan_cannot_be_met": 1}
    with pytest.raises(RequestInvalidError) as refused:
        asked(clock, overrides=overrides, merchants=[other.credential.account.merchant_id])
    assert [fault.pointer for fault in refused.value.faults] == ["/channels"]


def test_request_reads_no_key_that_is_too_young_or_of_another_environment(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    issued(clock, 2)
    issued(clock, 2, PRODUCTION)
    old, _ = issue(account("old"), clock.now - DAYS_40)
    monkeypatch.setattr(selection, "MAX_READ", 1)
    campaign = asked(clock, older_than_days=30)
    assert [member.credential_id for member in campaign.members.all()] == [old.credential_id]


def test_request_without_the_permission_is_refused(clock: Clock) -> None:
    issued(clock, 1)
    with pytest.raises(PermissionMissingError):
        asked(clock, by=approver())


def test_request_by_an_operator_barred_from_one_account_is_refused(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each account in the campaign is authorized separately, as for a single rotation."""
    issued(clock, 2)
    asked_about: list[str] = []

    def barred(principal: OperatorPrincipal, permission: P, place: Any = None, **more: Any) -> Any:
        if place is not None:
            asked_about.append(f"{principal.username} {permission} {place}")
            raise PermissionMissingError("not yours")

    monkeypatch.setattr("rotation.services.campaigns.campaigns.authorize", barred)
    with pytest.raises(PermissionMissingError, match="not yours"):
        asked(clock)
    assert asked_about[0].startswith("tam rotations:write merchant-")
    assert not Campaign.objects.exists()


def test_request_by_a_service_raises(clock: Clock) -> None:
    """Only operators request campaigns; no route passes a service's grant."""
    service = Service("tok", "svc", "per_x", frozenset({P.ROTATIONS_WRITE}), EVERYWHERE)
    grant = authorize(service, P.ROTATIONS_WRITE, now=clock.now)
    with pytest.raises(TypeError):
        request_campaign(
            grant,
            environment=SANDBOX,
            merchants=None,
            older_than_days=None,
            overrides=PlanOverrides(),
            pace=Pace(),
            reason="why",
        )


def test_request_in_sandbox_runs_immediately_and_in_production_awaits_approval(clock: Clock) -> None:
    issued(clock, 1)
    issued(clock, 1, PRODUCTION)
    assert asked(clock).state == C.RUNNING
    waiting = asked(clock, environment=PRODUCTION)
    assert (waiting.state, waiting.approvals_needed, waiting.began_at) == (C.AWAITING_APPROVAL, 1, None)
    tick(clock)
    assert not waiting.rotations.exists()


# --- four eyes, digest, expiry ------------------------------------------------------------------------------


def test_approve_by_a_second_person_starts_rotations_in_that_name(clock: Clock) -> None:
    issued(clock, 1, PRODUCTION)
    campaign = approved(clock, asked(clock, environment=PRODUCTION))
    assert (campaign.state, campaign.began_at) == (C.RUNNING, clock.now)
    tick(clock)
    rotation = campaign.rotations.get()
    assert [approval.approver.username for approval in rotation.approvals.all()] == ["approver"]
    assert (rotation.state, rotation.requester_person) == ("scheduled", tam().person)


def test_approve_by_the_requester_under_another_login_is_refused(clock: Clock) -> None:
    """Requester and approver are two persons, not two logins."""
    issued(clock, 1, PRODUCTION)
    campaign = asked(clock, environment=PRODUCTION, by=admin())
    again = make_operator("admin2", Role.KEY_ADMINISTRATOR, person=admin().person)
    for operator in (admin(), again):
        with pytest.raises(StateConflictError, match="second person"):
            approved(clock, campaign, by=operator)
    assert get_campaign(campaign.pk).state == C.AWAITING_APPROVAL


def test_approve_of_another_digest_is_refused(clock: Clock) -> None:
    issued(clock, 1, PRODUCTION)
    campaign = asked(clock, environment=PRODUCTION)
    grant = on_platform(approver(), P.ROTATIONS_APPROVE, clock, campaign.requester_person)
    with pytest.raises(StateConflictError, match="not what you were shown"):
        approve_campaign(grant, campaign, "0" * 64)


@pytest.mark.parametrize("altered", ["pace", "overrides", "selection", "members"])
def test_approve_of_an_altered_campaign_is_refused(clock: Clock, altered: str) -> None:
    """An attacker who alters the rows gets no approval for them and starts no rotation."""
    issued(clock, 1, PRODUCTION)
    campaign = asked(clock, environment=PRODUCTION)
    alter(campaign, altered, clock)
    with pytest.raises(StateConflictError, match="altered"):
        approved(clock, get_campaign(campaign.pk))


@pytest.mark.parametrize("altered", ["pace", "overrides", "selection", "members"])
def test_tick_of_a_campaign_altered_after_its_approval_begins_nothing(clock: Clock, altered: str) -> None:
    """The approval covers what was shown: an altered campaign halts, and no operator can resume it."""
    issued(clock, 1)
    campaign = asked(clock)
    alter(campaign, altered, clock)
    tick(clock)
    campaign = get_campaign(campaign.pk)
    assert (campaign.state, campaign.why) == (C.HALTED, "the approved campaign was altered")
    assert not campaign.rotations.exists()
    with pytest.raises(StateConflictError, match="altered"):
        resume_campaign(on_platform(tam(), P.ROTATIONS_WRITE, clock), campaign, "go on")


def alter(campaign: Campaign, what: str, clock: Clock) -> None:
    """Alter the rows past services and triggers, as an attacker with the database password might."""
    disable_triggers()
    if what == "members":
        other, _ = issue(account("smuggled", Environment(campaign.environment)), clock.now)
        CampaignMember.objects.create(campaign=campaign, credential=other.credential)
        return
    values = {**getattr(campaign, what), "older_than_days": 1, "per_minute": 500, "quiet_seconds": 1}
    models.QuerySet(Campaign).filter(pk=campaign.pk).update(**{what: values})


def test_approve_too_late_is_refused_and_the_next_tick_expires_it(clock: Clock) -> None:
    issued(clock, 1, PRODUCTION)
    campaign = asked(clock, environment=PRODUCTION)
    clock.now += APPROVAL_LIFETIME
    with pytest.raises(StateConflictError, match="in time"):
        approved(clock, campaign)
    tick(clock)
    campaign = get_campaign(campaign.pk)
    assert (campaign.state, campaign.closed_at) == (C.EXPIRED, clock.now)
    assert events(campaign) == ["campaign.requested", "campaign.expired"]


@pytest.mark.postgres
def test_tick_with_a_wrong_clock_expires_no_campaign(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed campaign stays closed."""
    issued(clock, 1, PRODUCTION)
    campaign = asked(clock, environment=PRODUCTION)
    clock.now += APPROVAL_LIFETIME
    with monkeypatch.context() as wrong:
        wrong.setattr("keyvault.services.work.clock.host_time", lambda: datetime.now(UTC) + timedelta(seconds=30))
        tick(clock)
    assert get_campaign(campaign.pk).state == C.AWAITING_APPROVAL
    clock.tick(60)
    tick(clock)
    assert get_campaign(campaign.pk).state == C.EXPIRED


def test_approve_with_two_required_starts_at_the_second(clock: Clock, settings: Any) -> None:
    issued(clock, 1, PRODUCTION)
    settings.APPROVALS_NEEDED = {**settings.APPROVALS_NEEDED, PRODUCTION: 2}
    campaign = approved(clock, asked(clock, environment=PRODUCTION))
    assert campaign.state == C.AWAITING_APPROVAL
    with pytest.raises(StateConflictError, match="Another person"):
        approved(clock, campaign)
    assert approved(clock, campaign, by=admin()).state == C.RUNNING


def test_approve_on_a_command_line_in_production_awaits_review(clock: Clock) -> None:
    """A command line proves no identity, so such an approval awaits review."""
    issued(clock, 1, PRODUCTION)
    campaign = asked(clock, environment=PRODUCTION)
    approved(clock, campaign, by=on_host(approver()))
    assert BreakGlass.objects.get().subject == campaign.campaign_id


def test_reject_closes_the_campaign(clock: Clock) -> None:
    issued(clock, 1, PRODUCTION)
    campaign = asked(clock, environment=PRODUCTION)
    grant = on_platform(approver(), P.ROTATIONS_APPROVE, clock, campaign.requester_person)
    assert reject_campaign(grant, campaign, "not before the holidays").state == C.REJECTED
    assert (campaign.why, campaign.closed_at) == ("not before the holidays", clock.now)
    with pytest.raises(StateConflictError):
        approved(clock, campaign)


# --- pause, resume, cancel ----------------------------------------------------------------------------------


def test_pause_resume_and_cancel_in_other_states_are_refused(clock: Clock) -> None:
    issued(clock, 2)
    campaign = asked(clock)
    grant = on_platform(tam(), P.ROTATIONS_WRITE, clock)
    with pytest.raises(StateConflictError, match="running"):
        resume_campaign(grant, campaign, "why not")
    pause_campaign(grant, campaign, "lunch")
    with pytest.raises(StateConflictError, match="paused"):
        pause_campaign(grant, campaign, "again")
    resume_campaign(grant, campaign, "")
    cancel_campaign(grant, campaign, "enough")
    for act in (pause_campaign, resume_campaign, cancel_campaign):
        with pytest.raises(StateConflictError, match="cancelled"):
            act(grant, campaign, "x")
    assert events(campaign) == ["campaign.requested", "campaign.paused", "campaign.resumed", "campaign.cancelled"]
    assert details_of(AuditEntry.objects.get(event="campaign.paused"))["why"] == "lunch"


def test_pause_of_a_stale_row_is_refused(clock: Clock) -> None:
    issued(clock, 1)
    campaign = asked(clock)
    stale = get_campaign(campaign.pk)
    grant = on_platform(tam(), P.ROTATIONS_WRITE, clock)
    cancel_campaign(grant, campaign, "")
    with pytest.raises(StateConflictError, match="meanwhile"):
        pause_campaign(grant, stale, "")


def test_describe_contains_no_secret_and_counts_from_the_start(clock: Clock) -> None:
    issued(clock, 3)
    description = describe_campaign(asked(clock, pace=Pace(per_minute=2)), clock.now)
    assert description["progress"] == {
        "members": 3,
        "waiting": 3,
        "skipped": 0,
        "begun": 0,
        "unproved": 0,
        "proved": 0,
        "completed": 0,
        "failed": 0,
        "stalled": 0,
    }
    assert (description["percent_proved"], description["percent_ended"]) == (0, 0)
    assert description["all_begun_at"] == format_timestamp(clock.now + timedelta(seconds=90))
    assert description["requests"] == {"allowed": 0, "refused": 0}
