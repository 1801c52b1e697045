"""The facts of a rotation: gathered for `states.next_step`, and recorded as evidence once proved."""

import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from django.db.models import Q

from keyvault.access.catalog import WITHOUT_TRAFFIC
from keyvault.domain.canonical import JsonValue
from keyvault.domain.environments import Environment
from keyvault.domain.ids import mint_id
from keyvault.domain.keys import DEAD_STATES, KeyKind, KeyState, RetirementReason
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.sources import OTHERS, name_source
from keyvault.domain.timestamps import format_timestamp
from keyvault.models import Key, KeyUse, Material, MerchantStatus, UseContext
from keyvault.models.usage import UseOutcome
from keyvault.services.change_feed import receipts
from keyvault.services.keys.lifecycle import last_sequence
from keyvault.services.usage.recorder import Observation, observe
from keyvault.services.usage.reports import (
    MAX_READ,
    KeyUser,
    SourceUse,
    UseAttempts,
    find_attempts,
    find_last_of_keys,
    find_late_uses,
    find_sources,
    find_users,
    has_more_users,
    has_traffic,
)
from keyvault.services.webhooks.deliveries import find_delivery_report
from rotation.domain.events import RotationState
from rotation.domain.plan_fields import DeliveryChannel
from rotation.domain.silence import SourceFacts
from rotation.domain.states import READ_IN, FactGroup, Facts, KeyFacts
from rotation.models import Evidence, EvidenceKind, Rotation


def gather_facts(rotation: Rotation, now: datetime) -> Facts:
    """Gather the input of `next_step`: the rotation's own facts, and the groups that its stage reads. Read-only."""
    stage, replacement = rotation.stage, rotation.replacement
    groups = {group for group, stages in READ_IN.items() if stage in stages}
    retiring = replacement if stage is RotationState.ROLLING_BACK else rotation.predecessor
    account, environment = rotation.credential.account, rotation.credential.environment
    is_observed = FactGroup.OBSERVATION in groups
    observed = observe(now, account.merchant_id, environment) if is_observed else _NOT_OBSERVED
    keys = [key.key_id for key in (rotation.predecessor, replacement) if key is not None]
    last_uses = find_last_of_keys(keys) if FactGroup.LAST_USES in groups else {}
    unconfirmed = list_unconfirmed(replacement) if replacement and FactGroup.ACCEPTANCE in groups else None
    is_notified, has_failed = _find_notification(rotation) if FactGroup.NOTIFICATION in groups else (True, False)
    return Facts(
        state=rotation.current_state,
        plan=rotation.approved_plan,
        entered_at=rotation.entered_at,
        predecessor=_key_facts(rotation, rotation.predecessor, retiring, last_uses, groups, now),
        kind=KeyKind(rotation.credential.kind),
        replacement=(
            None if replacement is None else _key_facts(rotation, replacement, retiring, last_uses, groups, now)
        ),
        deadline=rotation.deadline_at,
        retire_at=rotation.retire_at,
        stalled_from=None if rotation.stalled_from is None else RotationState(rotation.stalled_from),
        has_left=account.merchant.status == MerchantStatus.OFFBOARDED,
        has_approval=FactGroup.APPROVAL not in groups or _is_approved(rotation),
        approval_expires_at=rotation.approval_expires_at,
        is_accepted=unconfirmed == [] and replacement is not None and replacement.state == KeyState.ACTIVE,
        unconfirmed=tuple(unconfirmed or ()),
        is_delivered=rotation.delivered_at is not None,
        is_notified=is_notified,
        notification_failed=has_failed,
        acknowledged_at=rotation.acknowledged_at,
        confirmed_at=rotation.confirmed_at,
        is_proved=rotation.used_at is not None,
        quarantined_at=rotation.quarantined_at,
        is_held=rotation.is_held,
        was_reinstated=rotation.reinstated_at is not None,
        silence_waived=rotation.waived_at is not None,
        written_back_at=rotation.written_back_at,
        observed_through=observed.through,
        lost_at=observed.lost_at,
        is_suspended=MerchantStatus.SUSPENDED in {account.status, account.merchant.status},
        resumed_at=_find_resumption(rotation, retiring),
        sources=tuple(_gather_sources(rotation)) if FactGroup.SOURCES in groups else (),
    )


def _find_resumption(rotation: Rotation, retiring: Key | None) -> datetime | None:
    """Return when operators last resumed the merchant, the account or the key that is being retired."""
    account = rotation.credential.account
    times = (account.resumed_at, account.merchant.resumed_at, None if retiring is None else retiring.resumed_at)
    return max(filter(None, times), default=None)


_NOT_OBSERVED = Observation(None, None)


def _is_approved(rotation: Rotation) -> bool:
    return rotation.bypassed_at is not None or rotation.approvals.count() >= rotation.approvals_needed


def _gather_sources(rotation: Rotation) -> Iterator[SourceFacts]:
    """Yield the sources of the key that is being retired, the latest first."""
    keys, rolls_back = (rotation.predecessor, rotation.replacement), rotation.stage is RotationState.ROLLING_BACK
    staying, retiring = keys if rolls_back else reversed(keys)
    if staying is None or retiring is None or rotation.credential.kind == KeyKind.PUBLIC:
        return  # the sources of public keys are not recorded
    sources = find_sources(retiring.key_id, staying.key_id)
    waived = list_waived(rotation, retiring) if sources else set()
    delivered_at = rotation.written_back_at if rolls_back else rotation.delivered_at
    for use in sources.values():
        yield SourceFacts(
            use.name,
            used_at=use.seen_at,
            moved_at=use.moved_at,
            gap_seconds=find_gap(use, rotation.credential.environment, delivered_at),
            is_waived=use.name in waived,
        )


def list_waived(rotation: Rotation, key: Key) -> set[str]:
    """List the names of the sources that operators have waived for the key that is being retired."""
    return read_waived(rotation.evidence.all(), key)


def read_waived(evidence: Iterable[Evidence], key: Key) -> set[str]:
    """Read the same names from all evidence of a rotation."""
    waivers = (each.seen for each in evidence if each.kind == EvidenceKind.SOURCE_WAIVED)
    return {seen["source"] for seen in waivers if seen["key_id"] == key.key_id}


def find_gap(use: SourceUse, environment: Environment, delivered_at: datetime | None) -> int | None:
    """Return the gap by which a source's silence is measured, in seconds; None: it was seen only once.

    A gap still open at the delivery of the other key counts with its length at that time. The sandbox does not measure
    by gaps. The gap of OTHERS is unknown.
    """
    if use.name == OTHERS:
        return None
    if environment is not Environment.PRODUCTION or use.last_at is None:
        return 0
    if use.longest_gap_seconds is None:
        return None
    is_open = 0 if delivered_at is None else int((delivered_at - use.last_at).total_seconds())
    return max(use.longest_gap_seconds, is_open)


def list_unconfirmed(key: Key) -> list[str]:
    """List the ids of the verifiers that must confirm the key's newest change before the key is delivered.

    A verifier answers from memory and could refuse a key that it has not loaded yet. A verifier without an update for
    longer than its staleness bound reads the database for each verdict, so it accepts the key and is not listed.
    """
    return receipts.list_unconfirmed(last_sequence(key))


def _find_notification(rotation: Rotation) -> tuple[bool, bool]:
    """Return whether the merchant's webhook endpoint accepted the message, and whether all attempts were given up.

    (True, False) unless the plan requires it. `notified_at` decides once it is set, since deliveries are purged.
    """
    if DeliveryChannel.WEBHOOK not in rotation.approved_plan.channels or rotation.notified_at is not None:
        return True, False
    found = find_delivery_report(NoticeKind.REPLACEMENT_AVAILABLE, rotation.rotation_id)
    return found.delivered_at is not None, found.has_failed


def _key_facts(
    rotation: Rotation,
    key: Key,
    retiring: Key | None,
    last_uses: Mapping[str, datetime],
    groups: Collection[FactGroup],
    now: datetime,
) -> KeyFacts:
    """Gather the facts of one key. `retiring`: the key that is being retired; `groups`: those that the stage reads."""
    attempts = _find_attempts(rotation, key) if key is retiring else UseAttempts()
    proves = FactGroup.TRAFFIC in groups and key is rotation.replacement
    may_be_dormant = FactGroup.TRAFFIC in groups and key is rotation.predecessor and rotation.approved_plan.is_dormant
    return KeyFacts(
        state=KeyState(key.state),
        # A key that was revoked by hand did not expire, even if its expiry has passed since.
        is_expired=key.retirement == RetirementReason.EXPIRED or (key.state not in DEAD_STATES and _is_past(key, now)),
        has_traffic=may_be_dormant and has_traffic(key.key_id),
        last_used_at=last_uses.get(key.key_id),
        tried_at=attempts.last_at,
        tried_by_known_at=attempts.last_known_at,
        material_destroyed=key.material in {Material.NONE, Material.DESTROYED},
        **(_traffic(key) if proves else {}),
    )


def _find_attempts(rotation: Rotation, retiring: Key) -> UseAttempts:
    """Find the attempts since the rotation suspended the key, without those of waived sources, which are expected.

    A use that was reported after the rotation suspended the key counts as one, too, see `find_last_judged`. Attempts
    with an old public key have no effect: shipped apps keep using it.
    """
    is_ignored = rotation.credential.kind == KeyKind.PUBLIC and rotation.stage is not RotationState.ROLLING_BACK
    if rotation.quarantined_at is None or is_ignored:
        return UseAttempts()
    evidence = list(rotation.evidence.all())
    waived = read_waived(evidence, retiring)
    found = find_attempts(retiring.key_id, rotation.quarantined_at, waived)
    judged_at = find_last_judged(retiring, rotation.quarantined_at, evidence)
    if judged_at is None:
        return found
    late = find_late_uses(retiring.key_id, judged_at, rotation.quarantined_at, waived)
    return UseAttempts(
        max(filter(None, (found.last_at, late.last_at)), default=None),
        max(filter(None, (found.last_known_at, late.last_known_at)), default=None),
    )


def find_last_judged(key: Key, quarantined_at: datetime, evidence: Iterable[Evidence]) -> datetime | None:
    """Return the last use of the key that the rotation knew when it found the key silent and suspended it.

    A later use contradicts that silence. Verifiers report a use seconds later, or much later after an outage, and may
    allow the key until they have read its suspension. None: silence was not required.
    """
    for each in evidence:
        if each.kind == EvidenceKind.SILENT and each.created_at == quarantined_at:
            last_at, through = each.seen["last_seen_at"], each.seen["observed_through"]
            known_at = key.created_at if last_at is None else datetime.fromisoformat(last_at)
            return known_at if through is None else min(known_at, datetime.fromisoformat(through))
    return None


def _is_past(key: Key, now: datetime) -> bool:
    return key.expires_at is not None and now >= key.expires_at


_MAX_CLIENTS = 20_000
"""Maximum clients of a replacement whose sources are counted as proof, twice as many as a plan may require sources."""


def _traffic(key: Key) -> dict[str, Any]:
    """Return the traffic of a key without acknowledgements. The cost does not depend on how long it was used.

    Beyond _MAX_CLIENTS the number of sources is a lower bound, and the rotation waits for another proof.
    """
    # The query of the console has joined the row; that of the engine has not, so it reads the newest count.
    use = getattr(key, "use", None) if Key.use.is_cached(key) else KeyUse.objects.filter(key=key).first()
    if use is None or use.first_minute is None:
        return {}
    traffic = ~Q(endpoint__in=WITHOUT_TRAFFIC) & ~Q(source="")
    used = UseContext.objects.filter(traffic, key=key, outcome=UseOutcome.ALLOWED)
    clients = used.order_by("source", "user_agent").values_list("source", "user_agent").distinct()[:_MAX_CLIENTS]
    # An acknowledgement may have come first. The end of the first minute of traffic is late rather than early.
    first_minute_end = datetime.fromtimestamp((use.first_minute + 1) * 60, UTC)
    return {
        "count": use.count - use.acknowledgements,
        "sources": len({name_source(*client) for client in clients}),
        "minutes": use.minutes,
        "first_used_at": first_minute_end if use.acknowledgements else use.first_at,
    }


def note_evidence(rotation: Rotation, kind: EvidenceKind, seen: dict[str, JsonValue], now: datetime) -> None:
    """Record evidence. Call it inside the `recorded` block of the transition that takes the fact as proved."""
    Evidence(
        evidence_id=mint_id("evd", secrets.token_bytes), rotation=rotation, kind=kind, seen=seen, created_at=now
    ).save()


def proof_seen(rotation: Rotation, facts: Facts) -> dict[str, JsonValue]:
    """Describe how the replacement was proved: counts by source, the acknowledgement, or an operator's confirmation."""
    replacement = facts.replacement
    seen: dict[str, JsonValue] = {
        "key_id": rotation.replacement_id,
        "policy": facts.plan.proof.value,
        "acknowledged_at": format_timestamp(facts.acknowledged_at),
        "confirmed_at": format_timestamp(facts.confirmed_at),
    }
    if replacement is not None:
        seen |= {
            "authentications": replacement.count,
            "sources": replacement.sources,
            "minutes": replacement.minutes,
            "first_used_at": format_timestamp(replacement.first_used_at),
            "by_source": _count_by_source(rotation.replacement_id or ""),
            "has_more_sources": has_more_users(rotation.replacement_id or "", outcomes=(UseOutcome.ALLOWED,)),
        }
    return seen


def _count_by_source(key_id: str) -> list[JsonValue]:
    """Count the allowed uses of a key by source, the latest first. Evidence is permanent and holds no exact address.

    The evidence states whether the key has more clients than are read, so that sources or uses are missing.
    """
    counts: dict[str, list[KeyUser]] = {}
    for user in find_users(key_id, outcomes=(UseOutcome.ALLOWED,), limit=MAX_READ):
        counts.setdefault(name_source(user.source, user.user_agent), []).append(user)
    return [
        {
            "source": name,
            "count": sum(user.count for user in users),
            "first_at": format_timestamp(min(user.first_at for user in users)),
            "last_at": format_timestamp(max(user.last_at for user in users)),
        }
        for name, users in counts.items()
    ]


def silence_seen(
    key_id: str | None, facts: Facts, period_seconds: int, last_at: datetime | None
) -> dict[str, JsonValue]:
    """Describe how a key was observed to be silent: since when, and up to when verifiers had reported."""
    return {
        "key_id": key_id,
        "period_seconds": period_seconds,
        "since": format_timestamp(max(facts.entered_at, facts.resumed_at or facts.entered_at)),
        "last_seen_at": format_timestamp(last_at),
        "observed_through": format_timestamp(facts.observed_through),
    }


_MAX_CITED = 200
"""Maximum sources that evidence of silence names, the latest first."""


def sources_seen(key_id: str | None, facts: Facts, last_at: datetime | None) -> dict[str, JsonValue]:
    """Describe how a key was observed to be silent for the quiet period, and why no source needs it.

    `last_at`: its last allowed or denied use. A source's last use may be an attempt while the key was suspended. The
    evidence states whether the key has more sources than it names.
    """
    used = (source.used_at for source in facts.sources)
    last_at = max(filter(None, (last_at, *used)), default=None)
    named: list[JsonValue] = [
        {
            "source": source.name,
            "last_used_at": format_timestamp(source.used_at),
            "moved_at": format_timestamp(source.moved_at),
            "longest_gap_seconds": source.gap_seconds,
            "is_waived": source.is_waived,
        }
        for source in facts.sources[:_MAX_CITED]
    ]
    return {
        **silence_seen(key_id, facts, facts.plan.quiet_seconds, last_at),
        "sources": named,
        "has_more_sources": len(facts.sources) > _MAX_CITED,
    }
