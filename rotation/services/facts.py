"""What is known of a rotation, gathered for `states.next_step`, and kept as evidence when a fact is taken as proved."""

import secrets
from datetime import datetime

from django.db.models import Count, Max, Min, Sum

from keyvault.domain.canonical import JsonValue
from keyvault.domain.ids import mint_id
from keyvault.domain.keys import KeyState
from keyvault.models import Key, Material, UseBucket
from keyvault.models.usage import Outcome
from keyvault.services.usage import observe
from rotation.models import Evidence, EvidenceKind, Rotation
from rotation.states import Facts, KeyFacts, RotationState


def gather_facts(rotation: Rotation, now: datetime) -> Facts:
    """Reads only."""
    observation = observe()
    replacement = rotation.replacement
    return Facts(
        state=rotation.current_state,
        plan=rotation.approved_plan,
        entered_at=rotation.entered_at,
        predecessor=_key_facts(rotation.predecessor, now, refused_since=rotation.entered_at),
        replacement=None if replacement is None else _key_facts(replacement, now),
        stalled_from=None if rotation.stalled_from is None else RotationState(rotation.stalled_from),
        has_approval=rotation.approvals.count() >= rotation.approvals_needed,
        approval_expires_at=rotation.approval_expires_at,
        is_accepted=replacement is not None and is_accepted_everywhere(replacement),
        is_delivered=rotation.delivered_at is not None,
        acknowledged_at=rotation.acknowledged_at,
        observed_through=observation.through,
        lost_at=observation.lost_at,
    )


def is_accepted_everywhere(key: Key) -> bool:
    """Whether every verifier would accept the key now.

    Each verification reads the database, so that holds as soon as the activation is committed. A verifier
    that caches has to confirm first, and this is where it will be asked.
    """
    return KeyState(key.state) is KeyState.ACTIVE


ACKNOWLEDGEMENT = "credentials.acknowledge"
"""An endpoint of ours: using it is a sign of life, but no traffic that proves anything."""


def _key_facts(key: Key, now: datetime, refused_since: datetime | None = None) -> KeyFacts:
    buckets = UseBucket.objects.filter(key=key)
    allowed = buckets.filter(outcome=Outcome.ALLOWED)
    traffic = allowed.exclude(endpoint=ACKNOWLEDGEMENT).aggregate(
        count=Sum("count"), sources=Count("source", distinct=True), first=Min("first_at")
    )
    refused = buckets.filter(outcome=Outcome.REFUSED)
    if refused_since is not None:
        refused = refused.filter(last_at__gte=refused_since)
    return KeyFacts(
        state=KeyState(key.state),
        is_expired=key.expires_at is not None and now >= key.expires_at,
        count=traffic["count"] or 0,
        sources=traffic["sources"],
        first_used_at=traffic["first"],
        last_used_at=allowed.aggregate(at=Max("last_at"))["at"],
        refused_at=refused.aggregate(at=Max("last_at"))["at"],
        material_destroyed=key.material in {Material.NONE, Material.DESTROYED},
    )


def note_evidence(rotation: Rotation, kind: EvidenceKind, seen: dict[str, JsonValue], now: datetime) -> None:
    """Inside the `recorded` block of the transition that takes the fact as proved."""
    Evidence(
        evidence_id=mint_id("evd", secrets.token_bytes), rotation=rotation, kind=kind, seen=seen, created_at=now
    ).save()


def proof_seen(rotation: Rotation, facts: Facts) -> dict[str, JsonValue]:
    """How the replacement was proved in use: counts by source, or the acknowledgement."""
    replacement = facts.replacement
    seen: dict[str, JsonValue] = {
        "key_id": rotation.replacement_id,
        "policy": facts.plan.proof.value,
        "acknowledged_at": _text(facts.acknowledged_at),
    }
    if replacement is not None:
        seen |= {
            "authentications": replacement.count,
            "first_used_at": _text(replacement.first_used_at),
            "by_source": list_users(rotation.replacement_id or ""),
        }
    return seen


def silence_seen(
    rotation: Rotation, facts: Facts, period_seconds: int, last_at: datetime | None
) -> dict[str, JsonValue]:
    """How the predecessor was seen to be silent: since when, and up to when verifiers had reported."""
    return {
        "key_id": rotation.predecessor_id,
        "period_seconds": period_seconds,
        "since": _text(facts.entered_at),
        "last_seen_at": _text(last_at),
        "observed_through": _text(facts.observed_through),
    }


def list_users(key_id: str) -> list[JsonValue]:
    """Who used a key: by source, user agent and endpoint, the latest first, at most 50."""
    rows = (
        UseBucket.objects.filter(key_id=key_id, outcome=Outcome.ALLOWED)
        .values("source", "user_agent", "endpoint")
        .annotate(total=Sum("count"), last=Max("last_at"))
        .order_by("-last")[:50]
    )
    return [
        {
            "source": row["source"],
            "user_agent": row["user_agent"],
            "endpoint": row["endpoint"],
            "count": row["total"],
            "last_at": _text(row["last"]),
        }
        for row in rows
    ]


def _text(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat()
