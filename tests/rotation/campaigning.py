"""Many credentials and a campaign over them, for the campaign tests."""

import json
from collections.abc import Sequence
from typing import Any

from django.db import models

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import OperatorPrincipal
from keyvault.domain.environments import Environment
from keyvault.models import AuditEntry, Key
from keyvault.services.recording.authorization import authorize
from rotation.domain.events import RotationState as S
from rotation.domain.pacing import Pace
from rotation.domain.plan_fields import PlanOverrides, Proof
from rotation.models import Campaign, CampaignMember, Rotation
from rotation.services.campaigns.campaigns import approve_campaign, get_campaign, request_campaign
from tests.clocks import Clock

from .scene import account, approver, issue, tam


def issued(clock: Clock, count: int, environment: Environment = Environment.SANDBOX) -> list[Key]:
    """Issue one key per merchant, the first one oldest."""
    return [issue(account(f"merchant-{number}", environment), clock.now)[0] for number in range(count)]


def on_platform(operator: OperatorPrincipal, permission: P, clock: Clock, requester_person: str | None = None) -> Grant:
    return authorize(operator, permission, now=clock.now, requester_person=requester_person)


def asked(
    clock: Clock,
    *,
    environment: Environment = Environment.SANDBOX,
    merchants: Sequence[str] | None = None,
    older_than_days: int | None = None,
    overrides: PlanOverrides | None = None,
    pace: Pace | None = None,
    reason: str = "yearly",
    by: OperatorPrincipal | None = None,
) -> Campaign:
    """Request a campaign as `tam`, by acknowledgement and with the environment's shortest periods by default."""
    short = {"quiet_seconds": 5, "quarantine_seconds": 5} if environment is Environment.SANDBOX else {}
    chosen: dict[str, Any] = {"proof": Proof.ACK, **short}
    return request_campaign(
        on_platform(by or tam(), P.ROTATIONS_WRITE, clock),
        environment=environment,
        merchants=merchants,
        older_than_days=older_than_days,
        overrides=overrides or PlanOverrides(**chosen),
        pace=pace or Pace(per_minute=600, concurrency=100),
        reason=reason,
    )


def approved(clock: Clock, campaign: Campaign, by: OperatorPrincipal | None = None) -> Campaign:
    """Approve the campaign, by default as `approver`."""
    grant = on_platform(by or approver(), P.ROTATIONS_APPROVE, clock, campaign.requester_person)
    return approve_campaign(grant, campaign, campaign.plan_digest)


def events(campaign: Campaign) -> list[str]:
    """Return the events of the campaign's own audit entries, in order."""
    entries = AuditEntry.objects.filter(event__startswith="campaign.").order_by("pk")
    return [entry.event for entry in entries if details_of(entry).get("campaign_id") == campaign.campaign_id]


def details_of(entry: AuditEntry) -> dict[str, Any]:
    details: dict[str, Any] = json.loads(bytes(entry.body))["details"]
    return details


def become(rotation: Rotation, state: S, clock: Clock) -> None:
    """Put the rotation into the state as if the engine had moved it there now."""
    facts = {"accepted_at": clock.now, "delivered_at": clock.now, "used_at": clock.now, "silent_at": clock.now}
    proved = facts if state in {S.OVERLAP, S.QUARANTINE, S.REVOKING, S.COMPLETED} else {}
    models.QuerySet(Rotation).filter(pk=rotation.pk).update(
        state=state,
        entered_at=clock.now,
        stalled_from=S.AWAITING_PROOF if state is S.STALLED else None,
        closed_at=clock.now if state in {S.COMPLETED, S.CANCELLED, S.ROLLED_BACK} else None,
        **proved,
    )


def oldest(campaign: Campaign) -> Rotation:
    """Return the rotation that was started first and has not changed since."""
    member = CampaignMember.objects.filter(campaign=campaign, rotation__state=S.SCHEDULED).order_by("pk")[0]
    assert member.rotation is not None
    return member.rotation


def fresh(campaign: Campaign) -> Campaign:
    return get_campaign(campaign.pk)
