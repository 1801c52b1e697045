"""A campaign over every credential, and what must hold afterwards regardless of the faults."""

from datetime import UTC, datetime

from keyvault.access.permissions import Permission as P
from keyvault.domain.environments import Environment
from keyvault.services.recording.authorization import authorize
from rotation.domain.events import RotationState as S
from rotation.domain.pacing import MAX_CONCURRENCY, MAX_PER_MINUTE, Pace
from rotation.domain.plan_fields import PlanOverrides, Proof
from rotation.domain.states import CLOSED
from rotation.models import Campaign, Rotation
from rotation.services.campaigns.campaigns import get_campaign, request_campaign
from tests.faults import expected_verdicts
from tests.faults.results import Result
from tests.rotation import scene

ONCE = tuple(
    f"rotation.{state}" for state in ("requested", "delivered", "overlap", "quarantine", "revoking", "completed")
)
"""Events that occur once in a rotation, however often a worker was woken."""


def begin_campaign() -> Campaign:
    """Begin a campaign at the maximum pace, with proof by 2 authentications, 2 s of silence and 1 s of quarantine."""
    return request_campaign(
        authorize(scene.tam(), P.ROTATIONS_WRITE, now=datetime.now(UTC)),
        environment=Environment.SANDBOX,
        merchants=None,
        older_than_days=None,
        overrides=PlanOverrides(
            proof=Proof.TRAFFIC, proof_count=2, proof_sources=1, quiet_seconds=2, quarantine_seconds=1
        ),
        pace=Pace(per_minute=MAX_PER_MINUTE, concurrency=MAX_CONCURRENCY),
        reason="an experiment",
    )


def count_closed(campaign: Campaign) -> int:
    return campaign.rotations.filter(state__in=CLOSED).count()


def is_over(campaign: Campaign, members: int) -> bool:
    """Return whether the campaign and the rotation of every member are closed."""
    return count_closed(campaign) == members and get_campaign(campaign.campaign_id).closed_at is not None


def judge_campaign(result: Result, campaign: Campaign, members: int) -> None:
    """Check that every rotation completed once and that none was lost."""
    now = get_campaign(campaign.campaign_id)
    credentials = set(campaign.rotations.values_list("credential_id", flat=True))
    others = [f"{each.rotation_id}: {each.state} {each.why}" for each in campaign.rotations.exclude(state=S.COMPLETED)]
    begun = Rotation.objects.count()
    result.counts |= {"members": members, "completed": campaign.rotations.filter(state=S.COMPLETED).count()}
    result.must_be(now.state == "completed", f"the campaign ends {now.state}: {now.why}")
    result.must_be_none("not completed", others)
    result.must_be(len(credentials) == members, f"{len(credentials)} of {members} credentials were rotated")
    result.must_be(begun == members, f"{begun} rotations of {members} credentials")
    result.must_be_none("steps taken twice", expected_verdicts.find_repeated(*ONCE))
