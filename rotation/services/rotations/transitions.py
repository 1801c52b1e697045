"""A rotation's transitions: each is one transaction with its audit entry, evidence, key changes and notices."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.backends import meters
from keyvault.domain.canonical import JsonValue
from keyvault.domain.errors import StateConflictError
from keyvault.domain.keys import KeyKind, KeyState
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.revocation import RevocationReason
from keyvault.domain.sources import network_of_source
from keyvault.domain.timestamps import format_timestamp
from keyvault.models import Key, Notice
from keyvault.services.keys.lifecycle import resume_key, revoke_key, suspend_key
from keyvault.services.recording.notifications import announce
from keyvault.services.recording.transaction import recorded
from keyvault.services.usage.reports import UseAttempt, list_attempts, list_late_uses, list_latest
from keyvault.services.work import leases
from keyvault.services.work.clock import require_true_clock
from keyvault.services.work.leases import Lease
from rotation.domain.events import RotationState
from rotation.domain.policy import due_reminder
from rotation.domain.states import CLOSED, TRANSITIONS, Facts, Move
from rotation.models import EvidenceKind, Rotation
from rotation.services.rotations.facts import (
    find_last_judged,
    note_evidence,
    proof_seen,
    read_waived,
    silence_seen,
    sources_seen,
)
from rotation.services.rotations.reports import about

S = RotationState

_log = logging.getLogger(__name__)

ALARM_AGAIN = timedelta(hours=1)
"""Interval after which continuing attempts in one quarantine raise another alarm; the first one does immediately."""

Changes = dict[str, object]


def make_transition(grant: Grant, rotation: Rotation, facts: Facts, step: Move, lease: Lease) -> None:
    """Perform the transition `step`.

    Raises StateConflictError for an unknown transition, a lost lease or a concurrent change.
    """
    _transit(grant, rotation, step, lease, partial(_enter, grant, rotation, facts, step))


def stall(grant: Grant, rotation: Rotation, why: str, lease: Lease) -> None:
    """Stall the rotation with both keys usable. Needs no facts, since failing to gather them may be the reason.

    Raises what `make_transition` raises.
    """
    _transit(grant, rotation, Move(S.STALLED, why[:300]), lease, partial(_stop, grant, rotation, S.STALLED))


def report_blocked(grant: Grant, rotation: Rotation, why: str, lease: Lease) -> None:
    """Raise one alarm per state for a rotation that cannot continue and has no transition to `stalled`."""
    kind, subject, account = NoticeKind.ROTATION_BLOCKED, rotation.rotation_id, rotation.credential.account
    sent = Notice.objects.filter(kind=kind, subject=subject, created_at__gte=rotation.entered_at)
    if rotation.state == S.STALLED or rotation.current_state in CLOSED or sent.exists():
        return
    payload: dict[str, JsonValue] = {**about(rotation), "state": rotation.state, "why": why[:300]}
    with recorded(grant, P.ROTATIONS_ADVANCE, "rotation.blocked", account=account, **payload):
        announce(grant, kind, account, subject, **payload)
        leases.hold(lease)


def _transit(grant: Grant, rotation: Rotation, step: Move, lease: Lease, enter: Callable[[], Changes]) -> None:
    was = rotation.current_state
    if step.to not in TRANSITIONS[was]:
        raise StateConflictError(
            "This transition is not allowed.", internal=f"{rotation.rotation_id}: {was} to {step.to}"
        )
    account, event = rotation.credential.account, f"rotation.{step.to}"
    happened = None if step.event is None else step.event.value
    with recorded(
        grant,
        P.ROTATIONS_ADVANCE,
        event,
        account=account,
        **about(rotation),
        was=was.value,
        why=step.why,
        happened=happened,
    ):
        changes = enter()
        if step.to in CLOSED:
            changes["closed_at"] = grant.at
        rotation.compare_and_swap(**{"state": step.to, "entered_at": grant.at, "why": step.why, **changes})
        _announce(grant, rotation, was, step)
        # Last: a transaction of a person locks a key first, and then this row to wake the rotation.
        if step.to in CLOSED:
            leases.finish(lease)
            rotation.expire_date(grant.at)
        else:
            leases.hold(lease)
    meters.note_transition(step.to)
    if was is S.AWAITING_PROOF and step.to is S.OVERLAP and rotation.delivered_at is not None:
        meters.note_proof((grant.at - rotation.delivered_at).total_seconds())
    _log.info(
        "rotation moved",
        extra={"rotation_id": rotation.rotation_id, "was": was.value, "to": step.to, "why": step.why},
    )


def _enter(grant: Grant, rotation: Rotation, facts: Facts, step: Move) -> Changes:
    """Perform what entering a state implies, in the transaction of the transition; return the changed columns."""
    match step.to:
        case S.PUBLISHING:
            return _publish(grant, rotation)
        case S.AWAITING_PROOF:
            return {"notified_at": grant.at}
        case S.OVERLAP:
            return (
                _reinstate(grant, rotation, facts, step)
                if facts.state is S.QUARANTINE
                else _overlap(grant, rotation, facts)
            )
        case S.QUARANTINE:
            return _quarantine(grant, rotation, facts, step)
        case S.REVOKING:
            return _revoke(grant, rotation, facts)
        case S.ROLLING_BACK:
            return _quarantine_replacement(grant, rotation, facts)
        case S.ROLLED_BACK:
            return _end_replacement(grant, rotation, facts)
        case S.CANCELLED | S.STALLED | S.COMPLETED:
            return _stop(grant, rotation, step.to)
        case S.EXPIRED:
            require_true_clock()
    return {}


def _stop(grant: Grant, rotation: Rotation, to: RotationState) -> Changes:
    """Stop; undo a quarantine that cannot continue, so that both keys are usable and silence is awaited again."""
    # A quarantine that ended in the revocation was not undone: the closed rotation keeps its time.
    changes = {} if rotation.state == S.REVOKING else _lift(grant, rotation)
    if to is S.STALLED:
        is_lifted = rotation.state == S.QUARANTINE and not rotation.is_held
        changes["stalled_from"] = S.OVERLAP if is_lifted else rotation.state
    return changes


def _publish(grant: Grant, rotation: Rotation) -> Changes:
    """Accept the replacement; from `rolling_back`, after the predecessor has ended, have it delivered again."""
    changes = _lift(grant, rotation)
    note_evidence(rotation, EvidenceKind.ACCEPTED, {"key_id": rotation.replacement_id}, grant.at)
    return {**changes, "accepted_at": grant.at, "delivered_at": None, "written_back_at": None}


def _overlap(grant: Grant, rotation: Rotation, facts: Facts) -> Changes:
    note_evidence(rotation, EvidenceKind.USED, proof_seen(rotation, facts), grant.at)
    return {"used_at": grant.at}


def _reinstate(grant: Grant, rotation: Rotation, facts: Facts, step: Move) -> Changes:
    """Reinstate the predecessor, once per rotation, with an alarm: a known source still uses it (the tripwire)."""
    seen: dict[str, JsonValue] = {
        "key_id": rotation.predecessor_id,
        "last_seen_at": format_timestamp(facts.predecessor.tried_by_known_at),
        "attempts": _cite_attempts(rotation),
    }
    note_evidence(rotation, EvidenceKind.TRIED, seen, grant.at)
    # An unknown source may have tried the key, too. The attempts are known only while the quarantine lasts.
    payload = {**_describe(rotation, step), **_describe_use(rotation, _list_attempts(rotation)), "is_reinstated": True}
    announce(grant, NoticeKind.USED_IN_QUARANTINE, rotation.credential.account, rotation.rotation_id, **payload)
    return {**_lift(grant, rotation), "reinstated_at": grant.at, "silent_at": None, "alarmed_at": grant.at}


def _quarantine(grant: Grant, rotation: Rotation, facts: Facts, step: Move) -> Changes:
    _require_living(rotation.replacement, rotation, grant.at)
    # The approved plan or the approved date waived silence; it was not observed.
    is_waived = step.event is not None or facts.kind is KeyKind.PUBLIC
    seen = sources_seen(rotation.predecessor_id, facts, facts.predecessor.last_used_at)
    note_evidence(rotation, EvidenceKind.WAIVED if is_waived else EvidenceKind.SILENT, seen, grant.at)
    suspend_key(grant, rotation.predecessor, hides_copy=True)
    times = {"waived_at": grant.at if is_waived else None, "silent_at": None if is_waived else grant.at}
    return {"quarantined_at": grant.at, "alarmed_at": None, **times}


def _revoke(grant: Grant, rotation: Rotation, facts: Facts) -> Changes:
    _require_living(rotation.replacement, rotation, grant.at)
    _note_attempts(grant, rotation, facts, rotation.predecessor_id, facts.predecessor.tried_at)
    require_true_clock()
    cited = list(rotation.evidence.order_by("created_at").values_list("evidence_id", flat=True))
    revoke_key(grant, rotation.predecessor, RevocationReason.SUPERSEDED, evidence=cited)
    return {}


def _quarantine_replacement(grant: Grant, rotation: Rotation, facts: Facts) -> Changes:
    _require_living(rotation.predecessor, rotation, grant.at)
    replacement = facts.replacement
    last_at = None if replacement is None else replacement.last_used_at
    seen = sources_seen(rotation.replacement_id, facts, last_at)
    note_evidence(rotation, EvidenceKind.SILENT, seen, grant.at)
    if rotation.replacement is not None:
        suspend_key(grant, rotation.replacement, hides_copy=True)
    return {"quarantined_at": grant.at, "alarmed_at": None}


def _end_replacement(grant: Grant, rotation: Rotation, facts: Facts) -> Changes:
    key = rotation.replacement
    if key is None or facts.replacement is None or facts.replacement.is_dead:
        return {}
    _require_living(rotation.predecessor, rotation, grant.at)
    _note_attempts(grant, rotation, facts, key.key_id, facts.replacement.tried_at)
    require_true_clock()
    cited = list(rotation.evidence.order_by("created_at").values_list("evidence_id", flat=True))
    revoke_key(grant, key, RevocationReason.SUPERSEDED, evidence=cited)
    return {}


def lift_quarantine(grant: Grant, rotation: Rotation, lease: Lease) -> None:
    """Resume the key that the rotation had suspended, in a transaction of its own before all that remains to do."""
    if rotation.quarantined_at is None or rotation.state == S.ROLLING_BACK:
        return
    account = rotation.credential.account
    with recorded(grant, P.ROTATIONS_ADVANCE, "rotation.quarantine_lifted", account=account, **about(rotation)):
        rotation.compare_and_swap(**_lift(grant, rotation))
        leases.hold(lease)


def _lift(grant: Grant, rotation: Rotation) -> Changes:
    """Resume the key that the rotation had suspended; a dead key stays dead, and a held one suspended."""
    if rotation.quarantined_at is None or rotation.is_held:
        return {}
    key = _retiring(rotation)
    if key is not None and key.state == KeyState.SUSPENDED and not _is_expired(key, grant.at):
        resume_key(grant, key)
    return {"quarantined_at": None, "held_at": None}


def _retiring(rotation: Rotation) -> Key | None:
    """Return the key that is being retired: in a rollback the replacement, else the predecessor."""
    return rotation.replacement if rotation.state == S.ROLLING_BACK else rotation.predecessor


def _require_living(key: Key | None, rotation: Rotation, now: datetime) -> None:
    """Require that this key is usable until commit, inside the transaction that takes the other key away.

    The row is locked, so a revocation of it happens either before (then this raises StateConflictError) or after.
    """
    fresh = None if key is None else Key.objects.select_for_update(no_key=True).get(pk=key.pk)
    if fresh is None or fresh.state != KeyState.ACTIVE or _is_expired(fresh, now):
        raise StateConflictError("The other key is no longer usable.", internal=f"{rotation.rotation_id}: {fresh!r}")


def _is_expired(key: Key, now: datetime) -> bool:
    return key.expires_at is not None and now >= key.expires_at


def _list_attempts(rotation: Rotation) -> list[UseAttempt]:
    """List the sources that tried the quarantined key, or used it unknown to its rotation, the latest first."""
    key, since = _retiring(rotation), rotation.quarantined_at
    if key is None or since is None:
        return []
    attempts, evidence = list_attempts(key.key_id, since), list(rotation.evidence.all())
    judged_at = find_last_judged(key, since, evidence)
    if judged_at is None:
        return attempts
    # A waived source is expected to use the key until its suspension.
    late = list_late_uses(key.key_id, judged_at, since, without=read_waived(evidence, key))
    return list_latest([*attempts, *late])


def _describe_attempts(attempts: Iterable[UseAttempt]) -> list[JsonValue]:
    return [
        {"source": each.source, "last_at": format_timestamp(each.last_at), "is_known": each.is_known}
        for each in attempts
    ]


def _note_attempts(grant: Grant, rotation: Rotation, facts: Facts, key_id: str, tried_at: datetime | None) -> None:
    """Note the attempts to use the key in its quarantine, or that there were none, as evidence for its revocation."""
    seen = silence_seen(key_id, facts, facts.plan.quarantine_seconds, tried_at)
    seen["attempts"] = _cite_attempts(rotation)
    note_evidence(rotation, EvidenceKind.TRIED if seen["attempts"] else EvidenceKind.UNTRIED, seen, grant.at)


def _cite_attempts(rotation: Rotation) -> list[JsonValue]:
    """Describe the attempts by network. Evidence is permanent and holds no user agent of an unknown client."""
    cited: dict[str, UseAttempt] = {}
    for attempt in _list_attempts(rotation):
        network = network_of_source(attempt.source)
        latest = cited.get(network, attempt)
        cited[network] = replace(latest, source=network, is_known=latest.is_known or attempt.is_known)
    return _describe_attempts(cited.values())


# --- notices ------------------------------------------------------------------------------------------------


def _announce(grant: Grant, rotation: Rotation, was: RotationState, step: Move) -> None:
    """Announce the transition, in its transaction."""
    account, subject, payload = rotation.credential.account, rotation.rotation_id, _describe(rotation, step)
    match step.to:
        case S.OVERLAP if was is not S.QUARANTINE:  # else `_reinstate` has announced it
            announce(grant, NoticeKind.PREDECESSOR_RETIRING, account, subject, **payload)
        case S.STALLED:
            announce(grant, NoticeKind.ROTATION_STALLED, account, subject, **payload)
        case S.EMERGENCY:
            announce(grant, NoticeKind.ROTATION_PLANNED, account, subject, **payload, is_emergency=True)
        case to if to in CLOSED:
            # An unplanned end raises an alarm. The end of the merchant's last readable key has raised its own alarm.
            is_alarm = step.event is not None and not (to is S.COMPLETED and _was_emergency(rotation))
            announce(grant, NoticeKind.ROTATION_ENDED, account, subject, is_alarm, **payload, state=to.value)


def _describe(rotation: Rotation, step: Move) -> dict[str, JsonValue]:
    return {
        **about(rotation),
        "predecessor_key_id": rotation.predecessor_id,
        "replacement_key_id": rotation.replacement_id,
        "why": step.why,
    }


def _was_emergency(rotation: Rotation) -> bool:
    """Whether the predecessor had ended when the replacement was delivered."""
    ended_at = rotation.predecessor.compromised_at or rotation.predecessor.deactivated_at
    return ended_at is not None and rotation.delivered_at is not None and ended_at <= rotation.delivered_at


def send_due_notices(grant: Grant, rotation: Rotation, facts: Facts, lease: Lease) -> None:
    """Send what is due: reminders of an unused replacement, and alarms about a key tried in quarantine.

    The engine calls it in each turn, and `_roll_back` before it ends a quarantine.
    """
    changes, notices = _reminder(rotation, facts, grant.at)
    alarm = _alarm(rotation, facts, grant.at)
    if alarm is not None:
        changes["alarmed_at"] = grant.at
        notices.append((NoticeKind.USED_IN_QUARANTINE, alarm))
    if not notices:
        return
    account, kinds = rotation.credential.account, [kind.value for kind, _ in notices]
    permissions = frozenset({P.ROTATIONS_ADVANCE, P.ROTATIONS_WRITE})
    with recorded(grant, permissions, "rotation.told", account=account, **about(rotation), kinds=list(kinds)):
        rotation.compare_and_swap(**changes)
        for kind, payload in notices:
            announce(grant, kind, account, rotation.rotation_id, **about(rotation), **payload)
        leases.hold(lease)


_Notices = list[tuple[NoticeKind, dict[str, JsonValue]]]


def _reminder(rotation: Rotation, facts: Facts, now: datetime) -> tuple[Changes, _Notices]:
    if facts.state is not S.AWAITING_PROOF or facts.deadline is None or rotation.delivered_at is None:
        return {}, []
    percent = due_reminder(rotation.delivered_at, facts.deadline, rotation.reminded_percent, now)
    if percent is None:
        return {}, []
    payload: dict[str, JsonValue] = {
        "replacement_key_id": rotation.replacement_id,
        "percent_of_deadline": percent,
        "deadline": format_timestamp(facts.deadline),
    }
    return {"reminded_percent": percent}, [(NoticeKind.REPLACEMENT_AWAITED, payload)]


def _alarm(rotation: Rotation, facts: Facts, now: datetime) -> dict[str, JsonValue] | None:
    """Build the alarm for an attempt that does not reinstate the key; None: none is due.

    An unknown source may have found the key. Public keys raise no alarm.
    """
    if facts.quarantined_at is None or facts.kind is KeyKind.PUBLIC:
        return None
    retiring = facts.replacement if facts.stage is S.ROLLING_BACK else facts.predecessor
    tried_at = None if retiring is None else retiring.tried_at
    if tried_at is None:
        return None
    attempts = _list_attempts(rotation)
    unknown = [each for each in attempts if not each.is_known]
    is_new = rotation.alarmed_at is None or tried_at >= rotation.alarmed_at + ALARM_AGAIN
    # The first unknown source raises its own alarm, whatever was reported about known ones. A verifier may report it
    # after an alarm about a later attempt.
    if not is_new and (not unknown or _is_exposure_reported(rotation)):
        return None
    return {**_describe_use(rotation, attempts), "is_reinstated": False}


def _describe_use(rotation: Rotation, attempts: list[UseAttempt]) -> dict[str, JsonValue]:
    """Describe the use of the key in quarantine. An unknown source is an exposure: it may have found the key."""
    key = _retiring(rotation)
    return {
        "key_id": None if key is None else key.key_id,
        "attempts": _describe_attempts(attempts),
        "is_exposure": any(not each.is_known for each in attempts),
    }


def _is_exposure_reported(rotation: Rotation) -> bool:
    """Whether an exposure was reported since the quarantine began."""
    sent = Notice.objects.filter(kind=NoticeKind.USED_IN_QUARANTINE, subject=rotation.rotation_id)
    return sent.filter(created_at__gte=rotation.quarantined_at, payload__is_exposure=True).exists()
