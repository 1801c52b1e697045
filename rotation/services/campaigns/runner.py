"""The worker's part of campaigns: begin rotations at the approved pace, halt, complete, expire.

Outcomes are read from the rotations themselves, so none is counted twice or missed. A member's rotation and the link
to it are written in one transaction, under the campaign's lease and with its row locked. Thus a killed worker leaves
no half-begun member, two workers never begin the same one, and none begins after the request to pause has returned.
"""

import logging
from collections.abc import Callable, Collection
from datetime import datetime, timedelta

from django.conf import settings
from django.db import transaction
from django.db.models import Count, QuerySet

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER
from keyvault.domain.canonical import JsonValue
from keyvault.domain.errors import KeyvaultError, RequestInvalidError, StateConflictError
from keyvault.domain.notifications import NoticeKind
from keyvault.services.recording.authorization import authorize
from keyvault.services.recording.notifications import announce
from keyvault.services.recording.transaction import recorded
from keyvault.services.usage.recorder import utc_now
from keyvault.services.work import leases
from keyvault.services.work.clock import require_true_clock
from keyvault.services.work.leases import Lease
from rotation.domain.events import RotationState
from rotation.domain.pacing import (
    FAILED,
    PROVED,
    START_WITHIN,
    UNPROVED,
    CampaignTally,
    Pace,
    count_to_begin,
    judge_halt,
    tally_of,
)
from rotation.domain.plan_fields import PlanOverrides
from rotation.domain.states import CLOSED as CLOSED_ROTATIONS
from rotation.models import Campaign, CampaignMember, CampaignState, Rotation
from rotation.models.campaigns import UNDER_WAY
from rotation.services.campaigns.campaigns import about, is_unaltered
from rotation.services.campaigns.selection import OBSTACLE_LABELS, Selection, find_obstacle
from rotation.services.rotations.requests import begin_rotation

C, S = CampaignState, RotationState

_log = logging.getLogger(__name__)

SKIPPED = "skipped"
"""Outcome of a member that no longer qualified at its turn; any other member's outcome is its rotation's state."""

_MAX_SKIPS = 100
"""Maximum number of members skipped in one turn. Skips do not count towards the pace, but the lease is limited."""

_ALTERED = "the approved campaign was altered"


def tick(clock: Callable[[], datetime] = utc_now, environments: Collection[str] | None = None) -> None:
    """Advance every open campaign by one turn. Safe to run in several workers at the same time.

    `environments`: those to advance in, among the ones that this process serves; None: all of these.
    """
    served = [each for each in settings.ENVIRONMENTS if environments is None or each in environments]
    under_way = Campaign.objects.filter(environment__in=served, state__in=UNDER_WAY)
    for campaign_id in under_way.order_by("created_at").values_list("campaign_id", flat=True):
        try:
            # The turns before this one may have taken as long as a lease lasts.
            advance_campaign(campaign_id, clock())
        except Exception:  # noqa: BLE001  errors are isolated per campaign
            _log.exception("unexpected error in a campaign's turn", extra={"campaign_id": campaign_id})


def advance_campaign(campaign_id: str, now: datetime) -> None:
    """Advance the campaign by one turn, unless another worker holds it; a failure is recorded and retried next turn."""
    lease = leases.claim(subject_of(campaign_id), now)
    if lease is None:
        return
    try:
        _take_turn(lease, campaign_id, now)
    except KeyvaultError as error:
        why = error.internal or error.detail
        _log.warning("campaign not advanced", extra={"campaign_id": campaign_id, "why": why})
        leases.postpone(lease, now, why)
    else:
        leases.release(lease)


def subject_of(campaign_id: str) -> str:
    """Return the name of the lease on a campaign."""
    return f"campaign:{campaign_id}"


def list_waiting(campaign: Campaign) -> "QuerySet[CampaignMember]":
    """List the members whose turn has not come, in order."""
    return CampaignMember.objects.filter(campaign=campaign, rotation__isnull=True, outcome="").order_by("pk")


def _take_turn(lease: Lease, campaign_id: str, now: datetime) -> None:
    campaign = Campaign.objects.select_related("requester").get(pk=campaign_id)
    if campaign.state == C.AWAITING_APPROVAL:
        if now >= campaign.approval_expires_at:
            _close(lease, campaign, C.EXPIRED, "not approved in time", now)
        return
    began_at, is_waiting = campaign.began_at, list_waiting(campaign).exists()
    if is_waiting and began_at is not None and now >= began_at + START_WITHIN:
        _close(
            lease, campaign, C.EXPIRED, f"not all rotations began within {START_WITHIN.days} days of the approval", now
        )
    elif campaign.state != C.RUNNING:
        return
    elif (why := judge_halt(Pace.from_json(campaign.pace), _tally(campaign))) is not None:
        _halt(lease, campaign, why, now)
    elif is_waiting:
        _begin_some(lease, campaign, now)
    elif not campaign.rotations.exclude(state__in=[*CLOSED_ROTATIONS, S.STALLED]).exists():
        _close(lease, campaign, C.COMPLETED, "", now)


# --- beginning rotations ------------------------------------------------------------------------------------


def _begin_some(lease: Lease, campaign: Campaign, now: datetime) -> None:
    room = count_to_begin(
        Pace.from_json(campaign.pace),
        unproved=campaign.rotations.filter(state__in=UNPROVED).count(),
        begun_in_last_minute=campaign.rotations.filter(created_at__gt=now - timedelta(minutes=1)).count(),
    )
    if not room:
        return
    # This reads every member, so it is left out while no rotation may begin.
    if not is_unaltered(campaign):
        _halt(lease, campaign, _ALTERED, now)
        return
    members = list_waiting(campaign).values_list("pk", flat=True)[: room + _MAX_SKIPS]
    for member_id in members:
        room -= _begin(lease, campaign, member_id, now)
        if not room:
            return


def _begin(lease: Lease, campaign: Campaign, member_id: int, now: datetime) -> bool:
    """Begin a member's rotation, or skip it with a reason. Raises StateConflictError when the campaign was stopped."""
    with transaction.atomic():
        leases.hold(lease)
        # The lock serializes this with a pause.
        rows = Campaign.objects.select_for_update(no_key=True).filter(pk=campaign.pk, state=C.RUNNING)
        member = list_waiting(campaign).filter(pk=member_id).select_related("credential__account__merchant").first()
        if not list(rows) or member is None:
            raise StateConflictError("The campaign was stopped.", internal=f"{campaign.pk} was stopped meanwhile")
        rotation, why = _rotation_of(campaign, member, now)
        members = CampaignMember.objects.filter(pk=member_id)
        members.update(rotation=rotation, outcome="" if rotation else SKIPPED, why=why[:300])
    return rotation is not None


def _rotation_of(campaign: Campaign, member: CampaignMember, now: datetime) -> tuple[Rotation | None, str]:
    """Return the member's rotation, or why there is none."""
    credential = member.credential
    before = Selection.from_json(campaign.selection).active_before(campaign.created_at)
    if (obstacle := find_obstacle(credential.credential_id, before)) is not None:
        return None, OBSTACLE_LABELS[obstacle]
    grant = authorize(WORKER, P.ROTATIONS_BEGIN, credential.account, now=now)
    try:
        overrides = PlanOverrides.from_json(campaign.overrides)
        return begin_rotation(grant, credential, overrides, author=campaign.requester, campaign=campaign), ""
    except RequestInvalidError as error:
        return None, "; ".join(f"{fault.pointer}: {fault.detail}" for fault in error.faults) or error.detail
    except StateConflictError as error:
        return None, error.detail


# --- halting and closing ------------------------------------------------------------------------------------


def _tally(campaign: Campaign) -> CampaignTally:
    """Count the outcomes since the approval, or since the campaign was last resumed after a halt.

    Without a failed or stalled rotation the campaign does not halt, and the proved ones are not counted.
    """
    since = campaign.resumed_at or campaign.began_at
    # A proved rotation counts from its proof on, any other from when it failed or stalled.
    bad = campaign.rotations.filter(state__in=[*FAILED, S.STALLED], entered_at__gt=since)
    counts = list(bad.values_list("state").annotate(n=Count("pk")))
    if counts:
        good = campaign.rotations.filter(state__in=PROVED, used_at__gte=since)
        counts += good.values_list("state").annotate(n=Count("pk"))
    return tally_of({S(state): count for state, count in counts})


def _halt(lease: Lease, campaign: Campaign, why: str, now: datetime) -> None:
    """Halt the campaign until a person resumes it; the alarm belongs to the account of the latest failed rotation."""
    grant = authorize(WORKER, P.ROTATIONS_BEGIN, now=now)
    bad = campaign.rotations.filter(state__in=[*FAILED, S.STALLED]).select_related("credential__account")
    failed_member = bad.order_by("-entered_at", "pk").first()
    with recorded(grant, P.ROTATIONS_BEGIN, "campaign.halted", account=None, **about(campaign), why=why):
        leases.hold(lease)
        campaign.compare_and_swap(state=C.HALTED, why=why)
        if failed_member is not None:
            payload: dict[str, JsonValue] = {"rotation_id": failed_member.rotation_id, "why": why}
            announce(
                grant, NoticeKind.CAMPAIGN_HALTED, failed_member.credential.account, campaign.campaign_id, **payload
            )
    _log.error("campaign halted", extra={"campaign_id": campaign.campaign_id, "why": why})


def _close(lease: Lease, campaign: Campaign, state: CampaignState, why: str, now: datetime) -> None:
    if state is C.EXPIRED:
        require_true_clock()
    grant = authorize(WORKER, P.ROTATIONS_BEGIN, now=now)
    begun = campaign.rotations.count()
    event = f"campaign.{state.value}"
    with recorded(grant, P.ROTATIONS_BEGIN, event, account=None, **about(campaign), why=why, begun=begun):
        leases.hold(lease)
        campaign.compare_and_swap(state=state, why=why, closed_at=grant.at)
