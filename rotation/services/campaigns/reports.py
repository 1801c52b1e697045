"""Read access to campaigns: progress, obstacles, and the earliest time at which all rotations have begun."""

from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import Count, IntegerField, Q, Sum, Value

from keyvault.domain.canonical import JsonValue
from keyvault.domain.keys import KeyState
from keyvault.domain.timestamps import format_timestamp
from keyvault.models import Key, KeyUse, UseBucket
from keyvault.models.row_count import RowCount
from keyvault.models.usage import UseOutcome
from rotation.domain.events import RotationState
from rotation.domain.pacing import FAILED, PROVED, START_WITHIN, UNPROVED, Pace, seconds_to_begin
from rotation.models import Campaign, CampaignMember, CampaignState
from rotation.services.campaigns.runner import SKIPPED, list_waiting

S = RotationState

MAX_BUCKETS = 10_000
"""Maximum counts of refused requests that a description adds up: some for each minute and source."""


def describe_campaign(campaign: Campaign, now: datetime) -> dict[str, JsonValue]:
    """Describe the campaign for the console and the command line.

    `progress` counts members. `waiting` and `skipped` have no rotation; `begun` is the sum of `unproved`, `proved`,
    `failed` and `stalled`. A `completed` rotation is proved, or unproved if its old key ended before the proof.
    `percent_proved`: replacements in use. `percent_ended`: members without further automatic progress. `all_begun_at`:
    the earliest time, at the approved pace. `requests`: allowed verifications with the replacements, and refused ones
    with suspended keys of these credentials since the campaign began, in at most MAX_BUCKETS counts.
    """
    progress, by_state, lately = _count(campaign, now)
    pace = Pace.from_json(campaign.pace)
    members = max(1, progress["members"])
    is_running = campaign.state == CampaignState.RUNNING
    ended = progress["skipped"] + progress["completed"] + progress["failed"] + progress["stalled"]
    begun_at = now + timedelta(seconds=seconds_to_begin(pace, progress["waiting"]))
    start_by = None if campaign.began_at is None else campaign.began_at + START_WITHIN
    return {
        "campaign_id": campaign.campaign_id,
        "environment": campaign.environment,
        "state": campaign.state,
        "why": campaign.why,
        "reason": campaign.reason,
        "selection": campaign.selection,
        "overrides": campaign.overrides,
        "pace": campaign.pace,
        "plan_digest": campaign.plan_digest,
        "requested_by": campaign.requester.username,
        "approvals": [approval.approver.username for approval in campaign.approvals.select_related("approver")],
        "approvals_needed": campaign.approvals_needed,
        "created_at": format_timestamp(campaign.created_at),
        "approval_expires_at": format_timestamp(campaign.approval_expires_at),
        "began_at": format_timestamp(campaign.began_at),
        "start_by": format_timestamp(start_by),
        "closed_at": format_timestamp(campaign.closed_at),
        "progress": progress,
        "rotations_by_state": by_state,
        "percent_proved": 100 * progress["proved"] // members,
        "percent_ended": 100 * ended // members,
        "begun_in_last_minute": lately,
        "all_begun_at": format_timestamp(begun_at) if is_running and progress["waiting"] else None,
        "requests": _requests(campaign),
    }


MAX_USED = 2_000
"""Maximum credentials of a campaign whose uses are read."""


@dataclass(frozen=True, slots=True)
class UsedKeys:
    """How many of the keys that a campaign replaces are in use.

    `keys`: active keys of its first MAX_USED credentials. `used_today`, `used_lately`: in the last 24 hours and 30
    days. `never_used`: since they were issued.
    """

    keys: int
    used_today: int
    used_lately: int
    never_used: int


def count_used_keys(campaign: Campaign, now: datetime) -> UsedKeys:
    """Count the active keys of the campaign's credentials by their last allowed use, by one query."""
    first = CampaignMember.objects.filter(campaign=campaign).order_by("pk").values("credential")[:MAX_USED]
    keys = Key.objects.filter(credential__in=first, state=KeyState.ACTIVE)
    counts = keys.aggregate(
        keys=Count("pk"),
        used_today=Count("pk", filter=Q(use__last_at__gte=now - timedelta(days=1))),
        used_lately=Count("pk", filter=Q(use__last_at__gte=now - timedelta(days=30))),
        never_used=Count("pk", filter=Q(use__isnull=True)),
    )
    return UsedKeys(**counts)


def list_failed_first(campaign: Campaign, limit: int) -> list[CampaignMember]:
    """List at most `limit` members: stalled and failed first, then skipped, unproved, proved and waiting ones."""
    rows = CampaignMember.objects.filter(campaign=campaign).select_related("credential__account", "rotation")
    is_unproved = Q(rotation__state__in=UNPROVED) | Q(rotation__state=S.COMPLETED, rotation__used_at=None)
    is_proved = Q(rotation__state__in=PROVED, rotation__used_at__isnull=False)
    states = [Q(rotation__state=S.STALLED), Q(rotation__state__in=FAILED), is_unproved, is_proved]
    groups = [rows.filter(group) for group in states]
    groups.insert(2, rows.filter(outcome=SKIPPED))
    groups.append(list_waiting(campaign))
    # Limited inside, as SQLite requires.
    parts = [
        CampaignMember.objects.filter(pk__in=group.order_by("pk").values("pk")[:limit])
        .order_by()
        .annotate(place=Value(place, IntegerField()))
        .values_list("place", "pk")
        for place, group in enumerate(groups)
    ]
    ids = [pk for _, pk in sorted(parts[0].union(*parts[1:], all=True))][:limit]
    found = rows.in_bulk(ids)
    return [found[pk] for pk in ids]


def _count(campaign: Campaign, now: datetime) -> tuple[dict[str, int], dict[str, int], int]:
    """Return the members by their progress, the rotations by state, and those begun in the last minute."""
    rows = campaign.rotations.values_list("state").annotate(n=Count("pk"))
    by_state: Counter[str] = Counter(dict(rows.order_by("state")))
    counted = {
        "ended_unproved": campaign.rotations.filter(state=S.COMPLETED, used_at=None),
        "skipped": CampaignMember.objects.filter(campaign=campaign, outcome=SKIPPED),
        "begun_lately": campaign.rotations.filter(created_at__gt=now - timedelta(minutes=1)),
    }
    counts = {name: RowCount(rows.order_by().values("pk")) for name, rows in counted.items()}
    ended_unproved, skipped, lately = Campaign.objects.values_list(*counts.values()).get(pk=campaign.pk)
    count: int = campaign.selection["count"]
    begun = by_state.total()
    progress = {
        "members": count,
        "waiting": count - skipped - begun,
        "skipped": skipped,
        "begun": begun,
        "unproved": sum(by_state[state] for state in UNPROVED) + ended_unproved,
        "proved": sum(by_state[state] for state in PROVED) - ended_unproved,
        "completed": by_state[S.COMPLETED],
        "failed": sum(by_state[state] for state in FAILED),
        "stalled": by_state[S.STALLED],
    }
    return progress, dict(by_state), lately


def _requests(campaign: Campaign) -> dict[str, JsonValue]:
    if campaign.began_at is None:
        return {"allowed": 0, "refused": 0}
    begun = campaign.rotations.order_by()
    allowed = KeyUse.objects.filter(key__in=begun.values("replacement")).aggregate(total=Sum("count"))
    refused = UseBucket.objects.filter(
        context__key__credential__in=begun.values("credential"),
        context__outcome=UseOutcome.REFUSED,
        last_at__gte=campaign.began_at,
    )
    counts = refused.order_by().values_list("count", flat=True)[:MAX_BUCKETS]
    return {"allowed": allowed["total"] or 0, "refused": sum(counts)}
