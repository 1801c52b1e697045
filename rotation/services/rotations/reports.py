"""Read access to rotations, for the API, the console and the command line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from django.db.models import Q

from keyvault.domain.canonical import JsonValue
from keyvault.domain.errors import NotFoundError
from keyvault.domain.timestamps import format_timestamp
from keyvault.models import Credential, Key
from keyvault.services.usage.reports import MAX_USERS, has_more_users, list_users
from rotation.domain.events import RotationState
from rotation.domain.pacing import FAILED
from rotation.domain.silence import AwaitedSource, SourceFacts
from rotation.domain.states import ABANDONED, CLOSED, Move, Wait, list_awaited_sources, next_step
from rotation.models import Rotation
from rotation.services.rotations.facts import gather_facts

S = RotationState


def describe(rotation: Rotation, now: datetime) -> dict[str, JsonValue]:
    """Describe the rotation for the API, the console and the command line, without any secret."""
    plan = rotation.readable_plan
    waits = find_waits(rotation, now)
    return {
        **summarize(rotation),
        "waiting_for": waits.waiting_for,
        "waiting_sources": [
            {
                "source": source.name,
                "last_used_at": format_timestamp(source.used_at),
                "until": format_timestamp(source.until),
            }
            for source in waits.awaited[:MAX_AWAITED]
        ],
        "has_more_waiting_sources": len(waits.awaited) > MAX_AWAITED,
        "plan": rotation.plan if plan is None else plan.as_shown(),
        "approvals": [approval.approver.username for approval in rotation.approvals.select_related("approver")],
        "handover": None if rotation.delivered_at is None else rotation.handover,
        "evidence": [
            {
                "evidence_id": evidence.evidence_id,
                "kind": evidence.kind,
                "seen": evidence.seen,
                "created_at": format_timestamp(evidence.created_at),
            }
            for evidence in rotation.evidence.order_by("created_at", "evidence_id")
        ],
        "predecessor_users": list_users(rotation.predecessor_id),
        "has_more_predecessor_users": has_more_users(rotation.predecessor_id, limit=MAX_USERS),
    }


def summarize(rotation: Rotation) -> dict[str, JsonValue]:
    """Describe the rotation by its own columns, for lists."""
    return {
        "rotation_id": rotation.rotation_id,
        "state": rotation.state,
        "why": rotation.why,
        "stalled_from": rotation.stalled_from,
        "credential_id": rotation.credential_id,
        "merchant_id": rotation.account.merchant_id,
        "environment": rotation.account_environment,
        "predecessor_key_id": rotation.predecessor_id,
        "replacement_key_id": rotation.replacement_id,
        "plan_digest": rotation.plan_digest,
        "approvals_needed": rotation.approvals_needed,
        "is_bypass": rotation.bypassed_at is not None,
        "campaign_id": rotation.campaign_id,
        "created_at": format_timestamp(rotation.created_at),
        "deadline": format_timestamp(rotation.deadline_at),
        "retire_at": format_timestamp(rotation.retire_at),
        "accepted_at": format_timestamp(rotation.accepted_at),
        "delivered_at": format_timestamp(rotation.delivered_at),
        "acknowledged_at": format_timestamp(rotation.acknowledged_at),
        "confirmed_at": format_timestamp(rotation.confirmed_at),
        "used_at": format_timestamp(rotation.used_at),
        "silent_at": format_timestamp(rotation.silent_at),
        "quarantined_at": format_timestamp(rotation.quarantined_at),
        "held_at": format_timestamp(rotation.held_at),
        "reinstated_at": format_timestamp(rotation.reinstated_at),
        "closed_at": format_timestamp(rotation.closed_at),
    }


MAX_AWAITED = 50
"""Maximum sources shown that a rotation waits for, the latest first."""


@dataclass(frozen=True, slots=True)
class Waits:
    """What a rotation waits for.

    `waiting_for`: None if it is closed. `awaited`: the sources whose silence it awaits, also while it is stalled.
    `until`: when the wait ends by itself; None: with an event. `sources`: all sources of the key that is being
    retired, in the stages that judge their silence. `last_uses`: of both keys, in the stages that depend on them.
    """

    waiting_for: str | None
    awaited: list[AwaitedSource] = field(default_factory=list)
    until: datetime | None = None
    sources: Sequence[SourceFacts] = ()
    last_uses: Mapping[str, datetime | None] = field(default_factory=dict)


def find_waits(rotation: Rotation, now: datetime) -> Waits:
    """Return what the rotation waits for."""
    if rotation.current_state in CLOSED:
        return Waits(None)
    if rotation.readable_plan is None:
        return Waits("a release that can read its plan")
    facts = gather_facts(rotation, now)
    step = next_step(facts, now)
    awaited = list_awaited_sources(facts)
    pairs = ((rotation.predecessor_id, facts.predecessor), (rotation.replacement_id, facts.replacement))
    last_uses = {pk: key.last_used_at for pk, key in pairs if pk is not None and key is not None}
    if isinstance(step, Move):
        return Waits("its next turn", awaited, sources=facts.sources, last_uses=last_uses)
    until = step.until if isinstance(step, Wait) else None
    return Waits(step.waiting_for, awaited, until, facts.sources, last_uses)


def get_rotation(rotation_id: str) -> Rotation:
    """Get the rotation with its keys. Raises NotFoundError."""
    rotation = _find(Q(rotation_id=rotation_id))
    if rotation is None:
        raise NotFoundError
    return rotation


def find_introduction(key_id: str) -> Rotation | None:
    """Find the rotation whose replacement this key is, unless it was abandoned; an acknowledgement applies to it."""
    return _find(Q(replacement_id=key_id) & ~Q(state__in=sorted(ABANDONED)))


def find_sealed(key_id: str) -> Rotation | None:
    """Find the open rotation of this predecessor that has delivered a handover, which is not acknowledged."""
    is_delivered = Q(delivered_at__isnull=False, handover__isnull=False, acknowledged_at=None)
    is_ending = Q(state__in=sorted(CLOSED | FAILED)) | Q(state=S.STALLED, stalled_from__in=sorted(FAILED))
    return _find(Q(predecessor_id=key_id) & is_delivered & ~is_ending)


def list_undelivered(credential_id: str) -> list[str]:
    """List the replacement of the credential's open rotation if it is not what the merchant reads.

    In a rollback the merchant reads the predecessor again.
    """
    is_unread = Q(delivered_at=None) | Q(
        Q(state=S.ROLLING_BACK) | Q(stalled_from=S.ROLLING_BACK), written_back_at__isnull=False
    )
    rotations = Rotation.objects.filter(is_unread, credential=credential_id, replacement__isnull=False)
    return list(rotations.exclude(state__in=CLOSED).values_list("replacement_id", flat=True))


def subject_of(rotation_id: str) -> str:
    """Return the name of the lease on a rotation."""
    return f"rotation:{rotation_id}"


def about(rotation: Rotation) -> dict[str, JsonValue]:
    """Return the ids that every audit entry and notice of a rotation carries."""
    return {"rotation_id": rotation.rotation_id, "credential_id": rotation.credential_id}


def _find(wanted: Q) -> Rotation | None:
    """Find the newest matching rotation, with all that its keys need.

    Three queries: PostgreSQL plans the join of all seven tables for longer than it takes to read the rows.
    """
    rotation: Rotation | None = Rotation.objects.filter(wanted).order_by("-created_at").first()
    if rotation is not None:
        credential = Credential.objects.select_related("account__merchant").get(pk=rotation.credential_id)
        keys = Key.objects.in_bulk([pk for pk in (rotation.predecessor_id, rotation.replacement_id) if pk is not None])
        for key in keys.values():
            key.credential = credential
        rotation.account, rotation.credential = credential.account, credential
        rotation.predecessor = keys[rotation.predecessor_id]
        rotation.replacement = None if rotation.replacement_id is None else keys[rotation.replacement_id]
    return rotation
