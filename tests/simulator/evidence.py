"""The facts of a simulated rotation, as `rotation.services.rotations.facts` gathers them from the database."""

from datetime import UTC, datetime, timedelta

from keyvault.domain.keys import KeyKind
from keyvault.domain.sources import find_longest_gap
from keyvault.services.usage.recorder import Observation
from keyvault.services.usage.reports import SourceUse
from rotation.domain.events import RotationState
from rotation.domain.plan_fields import DeliveryChannel
from rotation.domain.silence import SourceFacts
from rotation.domain.states import Facts, KeyFacts
from rotation.services.rotations.facts import find_gap
from tests.simulator.rules import Rules
from tests.simulator.store import StoredCredential, StoredKey, StoredRotation

S = RotationState

_BY_SILENCE = frozenset({S.OVERLAP, S.ROLLING_BACK})


def gather_facts(rotation: StoredRotation, observation: Observation, rules: Rules, now: datetime) -> Facts:
    """Gather the input of `next_step`."""
    credential, replacement = rotation.credential, rotation.replacement
    rolls_back = rotation.rolls_back
    is_ignored = credential.kind is KeyKind.PUBLIC and not rolls_back
    since = None if is_ignored else rotation.quarantined_at
    needs_notice = DeliveryChannel.WEBHOOK in rotation.plan.channels
    return Facts(
        state=rotation.state,
        plan=rotation.plan,
        entered_at=rotation.entered_at,
        predecessor=_key_facts(rotation.predecessor, now, None if rolls_back else since, rotation),
        kind=credential.kind,
        replacement=None
        if replacement is None
        else _key_facts(
            replacement, now, since if rolls_back else None, rotation, proves=rotation.stage is S.AWAITING_PROOF
        ),
        deadline=rotation.deadline,
        retire_at=rotation.retire_at,
        stalled_from=rotation.stalled_from,
        has_left=credential.has_left,
        has_approval=rotation.has_approval,
        approval_expires_at=rotation.approval_expires_at,
        is_accepted=replacement is not None and replacement.is_usable(now) and replacement.accepted_at <= now,
        is_delivered=rotation.delivered_at is not None,
        is_notified=not needs_notice or rotation.notified_at is not None,
        notification_failed=rotation.notification_failed,
        acknowledged_at=rotation.acknowledged_at,
        confirmed_at=rotation.confirmed_at,
        is_proved=rotation.used_at is not None,
        quarantined_at=rotation.quarantined_at,
        was_reinstated=rotation.reinstated_at is not None,
        silence_waived=rotation.silence_waived,
        written_back_at=rotation.written_back_at,
        observed_through=observation.through,
        lost_at=observation.lost_at,
        sources=rules.merge_sources(_list_sources(rotation, rules)) if rotation.stage in _BY_SILENCE else (),
    )


def find_source_gap(
    key: StoredKey, name: str, credential: StoredCredential, delivered_at: datetime | None, occasion: timedelta
) -> int | None:
    """Return the gap that the silence of a source is measured by, in seconds; None: it was seen only once."""
    row, keys = key.sources[name], credential.keys
    was_seen_once = timedelta(minutes=row.last_minute - row.first_minute) <= occasion
    first_at = datetime.fromtimestamp(row.first_minute * 60, UTC)
    uses = [each.sources[name] for each in keys[: keys.index(key) + 1] if name in each.sources]
    minutes = sorted((use.first_minute, use.last_minute, use.longest_gap_minutes) for use in uses)
    gap_seconds = None if was_seen_once else find_longest_gap(minutes) * 60
    return find_gap(SourceUse(name, first_at, row.last_at, None, gap_seconds), credential.environment, delivered_at)


def _list_sources(rotation: StoredRotation, rules: Rules) -> tuple[SourceFacts, ...]:
    staying, retiring = rotation.replacement, rotation.predecessor
    delivered_at = rotation.delivered_at
    if rotation.rolls_back and rotation.replacement is not None:
        staying, retiring = rotation.predecessor, rotation.replacement
        delivered_at = rotation.written_back_at
    if staying is None or rotation.credential.kind is KeyKind.PUBLIC:
        return ()
    found = [
        SourceFacts(
            name,
            used_at=max(row.last_at, retiring.attempts.get(name, row.last_at)),
            moved_at=staying.sources[name].last_at if name in staying.sources else None,
            gap_seconds=find_source_gap(retiring, name, rotation.credential, delivered_at, rules.occasion),
            is_waived=name in rotation.waived,
        )
        for name, row in retiring.sources.items()
    ]
    return tuple(sorted(found, key=lambda source: (source.used_at, source.name), reverse=True))


def _key_facts(
    key: StoredKey, now: datetime, tried_since: datetime | None, rotation: StoredRotation, *, proves: bool = False
) -> KeyFacts:
    tried = {}
    if tried_since is not None:
        tried = {name: at for name, at in key.attempts.items() if at >= tried_since and name not in rotation.waived}
    known = [at for name, at in tried.items() if name in key.sources]
    return KeyFacts(
        state=key.state,
        is_expired=key.is_expired or (not key.is_dead and key.is_past(now)),
        has_traffic=key.last_used_at is not None,
        last_used_at=key.last_used_at,
        tried_at=max(tried.values(), default=None),
        tried_by_known_at=max(known, default=None),
        material_destroyed=not key.has_copy,
        count=key.count if proves else 0,
        sources=len(key.sources) if proves else 0,
        minutes=key.minutes if proves else 0,
        first_used_at=key.first_used_at if proves else None,
    )
