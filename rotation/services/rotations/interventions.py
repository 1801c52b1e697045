"""Manual changes to a rotation: abort, roll back, resume, extend, confirm, retire, collect; and the acknowledgement."""

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta

from django.db.models import prefetch_related_objects

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import KeyHolder, OperatorPrincipal, is_claimed
from keyvault.domain.environments import Environment
from keyvault.domain.errors import Fault, NotFoundError, RequestInvalidError, StateConflictError
from keyvault.domain.free_text import clean_text, find_reason_fault
from keyvault.domain.issuance import Delivery
from keyvault.domain.keys import DEAD_STATES, KeyKind, KeyState
from keyvault.domain.plaintext import Plaintext
from keyvault.domain.timestamps import format_timestamp
from keyvault.models import BreakGlass, Material
from keyvault.services.approvals.break_glass import exclude_collector, is_reviewed_by, list_actions, note_break_glass
from keyvault.services.approvals.four_eyes import note_command_line_approval, require_authority
from keyvault.services.issuance.requests import approvals_needed
from keyvault.services.keys.lifecycle import discard_key, resume_key
from keyvault.services.operators.operators import operator_row
from keyvault.services.recording.transaction import recorded
from keyvault.services.secrets.stored_copies import find_stored, read_string
from keyvault.services.usage.reports import find_last, find_sources, has_traffic
from keyvault.services.work.leases import Lease, claim, finish, hold, release_queued
from rotation.domain.events import OUTCOMES, Event, RotationState
from rotation.domain.plan_fields import Proof, default_of
from rotation.domain.policy import expiry_of_replacement, find_expiry_faults, find_far_faults
from rotation.domain.states import CLOSED
from rotation.models import EvidenceKind, Retirement, Rotation
from rotation.services.rotations.facts import gather_facts, list_waived, note_evidence
from rotation.services.rotations.reports import about, get_rotation, subject_of
from rotation.services.rotations.requests import BYPASSED, announce_end
from rotation.services.rotations.side_effects import announce_replacement, has_unsettled_delivery
from rotation.services.rotations.transitions import send_due_notices
from rotation.services.rotations.turns import wake_rotation

S = RotationState

_CLAIMS, _CLAIM_AGAIN_SECONDS = 10, 0.1
pause = time.sleep

FindLastUse = Callable[[str], datetime | None]
"""Returns when the key of an id was last used."""


def abort_rotation(grant: Grant, rotation: Rotation, why: str) -> Rotation:
    """End a rotation: cancel it and discard its replacement before delivery, roll it back afterwards.

    Raises StateConflictError when it is closed, already revoking or rolling back, or a worker is performing a step;
    BackendUnavailableError when the backend cannot tell whether it holds the replacement.
    """
    outcome = OUTCOMES[Event.ABORTED].get(rotation.stage)
    if rotation.is_held:
        raise StateConflictError("An operator holds the key in quarantine. Release it first.")
    if not isinstance(outcome, RotationState):
        raise StateConflictError(f"The rotation can no longer be ended: it is {rotation.get_state_display()}.")
    lease = claim_rotation(rotation, grant.at)
    if lease is None:
        raise StateConflictError("A worker is processing the rotation. Try again.")
    try:
        if outcome is S.ROLLING_BACK or _may_be_delivered(rotation):
            _roll_back(grant, rotation, lease, why)
        else:
            _cancel(grant, rotation, lease, why)
    finally:
        # A canceled rotation's row is deleted.
        release_queued(lease, grant.at, grant.at)
    return rotation


def claim_rotation(rotation: Rotation, now: datetime) -> Lease | None:
    """Claim the rotation's lease, retrying for a second, since a worker's turn is usually short; None: still held."""
    for _ in range(_CLAIMS):
        lease = claim(subject_of(rotation.rotation_id), now, ignore_due_at=True)
        if lease is not None:
            return lease
        pause(_CLAIM_AGAIN_SECONDS)
    return None


def rolls_back(rotation: Rotation) -> bool:
    """Whether ending it now rolls it back, since the merchant may already use the replacement."""
    return OUTCOMES[Event.ABORTED].get(rotation.stage) is S.ROLLING_BACK or rotation.delivered_at is not None


def predecessor_ended_at(rotation: Rotation, now: datetime) -> datetime | None:
    """Return when the old key was revoked, reported compromised, destroyed or expired; None: it is still usable."""
    key = rotation.predecessor
    ends = [at for at in (key.deactivated_at, key.compromised_at, key.destroyed_at) if at is not None]
    if key.expires_at is not None and now >= key.expires_at:
        ends.append(key.expires_at)
    return min(ends, default=None)


def may_be_aborted(rotation: Rotation) -> bool:
    return isinstance(OUTCOMES[Event.ABORTED].get(rotation.stage), RotationState) and not rotation.is_held


def _may_be_delivered(rotation: Rotation) -> bool:
    """Whether the merchant may have the replacement; a worker may have died between writing and recording it."""
    stored = None if rotation.replacement is None else find_stored(rotation.credential)
    # Another key there is an earlier replacement whose write arrived late: a rollback writes the predecessor over it.
    is_there = stored is not None and stored.labels.get("key_id") != rotation.predecessor_id
    return rotation.delivered_at is not None or is_there or has_unsettled_delivery(rotation)


def _cancel(grant: Grant, rotation: Rotation, lease: Lease, why: str) -> None:
    with recorded(
        grant,
        P.ROTATIONS_WRITE,
        "rotation.cancelled",
        account=rotation.credential.account,
        **about(rotation),
        why=clean_text(why, 300),
    ):
        # Keys are locked before the rotation, and its lease last, as in the engine.
        if rotation.replacement is not None:
            discard_key(grant, rotation.replacement)
        was_planned = rotation.state != S.AWAITING_APPROVAL
        rotation.compare_and_swap(state=S.CANCELLED, entered_at=grant.at, closed_at=grant.at, why=clean_text(why, 300))
        if was_planned:
            announce_end(grant, rotation)
        finish(lease)
        rotation.expire_date(grant.at)


def _roll_back(grant: Grant, rotation: Rotation, lease: Lease, why: str) -> None:
    """Begin the rollback and resume a suspended predecessor. Raises StateConflictError when it has ended."""
    predecessor, now = rotation.predecessor, grant.at
    if predecessor_ended_at(rotation, now) is not None:
        raise StateConflictError("The rotation cannot be rolled back: the old key is no longer usable.")
    if rotation.quarantined_at is not None:
        # The quarantine ends now, and no later turn would report attempts that were made in it.
        send_due_notices(grant, rotation, gather_facts(rotation, now), lease)
    with recorded(
        grant,
        P.ROTATIONS_WRITE,
        "rotation.rolling_back",
        account=rotation.credential.account,
        **about(rotation),
        was=rotation.state,
        why=clean_text(why, 300),
    ):
        if rotation.quarantined_at is not None and predecessor.state == KeyState.SUSPENDED:
            resume_key(grant, predecessor)
        rotation.compare_and_swap(
            state=S.ROLLING_BACK,
            stalled_from=None,
            entered_at=now,
            quarantined_at=None,
            written_back_at=None,
            confirmed_at=None,
            deadline_at=None if rotation.deadline_at is None else now + _roll_back_time(rotation),
            why=clean_text(why, 300),
        )
        hold(lease)


def _roll_back_time(rotation: Rotation) -> timedelta:
    """Return the environment's default deadline plus the plan's quiet period."""
    seconds = default_of("deadline", rotation.credential.environment)
    return timedelta(seconds=seconds + rotation.approved_plan.quiet_seconds)


def resume_rotation(grant: Grant, rotation: Rotation) -> Rotation:
    """Resume a stalled rotation in the state it stalled in, with its timers restarted.

    Raises StateConflictError unless it is stalled, or when its deadline has passed.
    """
    if rotation.state != S.STALLED or rotation.stalled_from is None:
        raise StateConflictError(f"Only a stalled rotation can be resumed; this one is {rotation.state}.")
    would_stall = OUTCOMES[Event.DEADLINE].get(rotation.stage) is S.STALLED
    if would_stall and rotation.deadline_at is not None and grant.at >= rotation.deadline_at:
        raise StateConflictError("The deadline has passed. Extend it to resume the rotation.")
    with recorded(grant, P.ROTATIONS_WRITE, "rotation.resumed", account=rotation.credential.account, **about(rotation)):
        _resume(grant, rotation)
        wake_rotation(rotation, grant.at)
    return rotation


def _resume(grant: Grant, rotation: Rotation) -> None:
    rotation.compare_and_swap(state=rotation.stalled_from, stalled_from=None, entered_at=grant.at, why="")
    if rotation.state == S.PUBLISHING and rotation.delivered_at is not None:
        announce_replacement(grant, rotation)  # The endpoint did not accept the first message.


def extend_rotation(grant: Grant, rotation: Rotation, deadline: datetime) -> Rotation:
    """Set a later deadline and resume a rotation that stalled at the old one. One person suffices: no key is revoked.

    Raises RequestInvalidError for a time that is past, earlier than the present deadline, too far away, or after the
    expiry of the replacement, or of the predecessor unless the plan has `predecessor_may_expire`; StateConflictError
    when there is no deadline, or where it has no effect, see `may_be_extended`.
    """
    if rotation.deadline_at is None:
        raise StateConflictError("The rotation has no deadline. A public key is retired on an approved date.")
    if not may_be_extended(rotation):
        raise StateConflictError(
            f"The deadline cannot be extended while the rotation is {rotation.get_state_display()}. Extend it between "
            "approval and quarantine, or in a rollback. To change a plan that awaits approval, request a new rotation."
        )
    faults = list(find_far_faults({"deadline": deadline}, grant.at))
    if deadline <= max(grant.at, rotation.deadline_at):
        faults.append(Fault("/deadline", "later than now and than the current deadline"))
    if not faults:
        faults = _find_expiry_faults(rotation, deadline, grant.at)
    if faults:
        raise RequestInvalidError("The new deadline is invalid.", faults)
    with recorded(
        grant,
        P.ROTATIONS_WRITE,
        "rotation.extended",
        account=rotation.credential.account,
        **about(rotation),
        was=format_timestamp(rotation.deadline_at),
        deadline=format_timestamp(deadline),
    ):
        was_late = grant.at >= rotation.deadline_at
        rotation.compare_and_swap(deadline_at=deadline, reminded_percent=0)
        if was_late and rotation.state == S.STALLED and rotation.stalled_from is not None:
            _resume(grant, rotation)
        wake_rotation(rotation, grant.at)
    return rotation


def _find_expiry_faults(rotation: Rotation, deadline: datetime, now: datetime) -> list[Fault]:
    """Find the keys that would expire before a later deadline; none in a rollback, which needs its time."""
    if rotation.stage is S.ROLLING_BACK:
        return []
    plan, old, new = rotation.approved_plan, rotation.predecessor, rotation.replacement
    old_expires_at = None if predecessor_ended_at(rotation, now) is not None else old.expires_at
    new_expires_at = expiry_of_replacement(plan, plan.find_opening(now) or now) if new is None else new.expires_at
    faults = find_expiry_faults(plan, deadline, old_expires_at, new_expires_at)
    return [Fault("/deadline", fault.detail) for fault in faults]


def may_be_extended(rotation: Rotation) -> bool:
    """Whether the rotation has a deadline, and has stalled or can stall at it."""
    counts = rotation.state == S.STALLED or OUTCOMES[Event.DEADLINE].get(rotation.current_state) is S.STALLED
    return counts and rotation.deadline_at is not None


def confirm_rotation(grant: Grant, rotation: Rotation, why: str) -> Rotation:
    """Confirm for the merchant that the replacement of a public key or a dormant credential is in use.

    `why`: who informed the operator, and how. Raises RequestInvalidError without it; StateConflictError where the
    plan requires traffic or an acknowledgement, or the rotation does not wait for proof.
    """
    if (fault := find_reason_fault(why)) is not None:
        raise RequestInvalidError("A confirmation needs a reason: who informed you, and how.", [Fault("/why", fault)])
    if not may_be_confirmed(rotation):
        raise StateConflictError(
            "The plan accepts no confirmation by an operator, or the rotation does not wait for proof."
        )
    with recorded(
        grant,
        P.ROTATIONS_WRITE,
        "rotation.confirmed",
        account=rotation.credential.account,
        **about(rotation),
        why=clean_text(why, 300),
    ):
        rotation.compare_and_swap(confirmed_at=grant.at)
        staying = rotation.predecessor_id if rotation.state == S.ROLLING_BACK else rotation.replacement_id
        seen = {"key_id": staying, "by": grant.principal.actor, "why": clean_text(why, 300)}
        note_evidence(rotation, EvidenceKind.CONFIRMED, dict(seen), grant.at)
        wake_rotation(rotation, grant.at)
    return rotation


def may_be_confirmed(rotation: Rotation, find_last_use: FindLastUse = find_last) -> bool:
    """Whether an operator may confirm the use of the key that stays. `find_last_use`: when a key was last used."""
    plan = rotation.readable_plan
    if plan is None:
        return False
    if rotation.state == S.ROLLING_BACK:
        # Confirms the return to the old key; a later use of the replacement requires another confirmation.
        return rotation.written_back_at is not None and not _is_return_confirmed(rotation, find_last_use)
    if rotation.confirmed_at is not None or rotation.stage is not S.AWAITING_PROOF:
        return False
    # A credential that was dormant when planned is no longer dormant once its old key has traffic.
    return plan.proof is Proof.CONFIRMATION or (plan.is_dormant and not has_traffic(rotation.predecessor_id))


def _is_return_confirmed(rotation: Rotation, find_last_use: FindLastUse) -> bool:
    if rotation.confirmed_at is None:
        return False
    used_at = None if rotation.replacement_id is None else find_last_use(rotation.replacement_id)
    return used_at is None or used_at <= rotation.confirmed_at


def waive_source(grant: Grant, rotation: Rotation, source: str, why: str) -> Rotation:
    """Waive a source of the key that is being retired: the rotation no longer waits for it, and it may be refused.

    Raises RequestInvalidError without a reason, or for a source that did not use the key; StateConflictError when the
    source is waived already, or the rotation does not retire a private key by silence.
    """
    if not isinstance(grant.principal, OperatorPrincipal):
        raise TypeError("only operators waive a source")
    if not may_waive(rotation):
        raise StateConflictError("The rotation does not wait for the silence of sources.")
    faults = [] if (fault := find_reason_fault(why)) is None else [Fault("/why", fault)]
    retiring = rotation.replacement if rotation.stage is S.ROLLING_BACK else rotation.predecessor
    if retiring is None or source not in find_sources(retiring.key_id):
        faults.append(Fault("/source", "a source of the key that is being retired, by its name on the rotation's page"))
    if faults:
        raise RequestInvalidError("The source cannot be waived.", faults)
    if retiring is not None and source in list_waived(rotation, retiring):
        raise StateConflictError("The source is waived already.")
    seen = {
        "source": source,
        "key_id": "" if retiring is None else retiring.key_id,
        "by": grant.principal.actor,
        "why": clean_text(why, 300),
    }
    with recorded(
        grant,
        P.ROTATIONS_WRITE,
        "rotation.source_waived",
        account=rotation.credential.account,
        **about(rotation),
        source=source,
        why=clean_text(why, 300),
    ):
        note_evidence(rotation, EvidenceKind.SOURCE_WAIVED, dict(seen), grant.at)
        wake_rotation(rotation, grant.at)
    return rotation


def hold_quarantine(grant: Grant, rotation: Rotation, why: str) -> Rotation:
    """Hold the key in quarantine suspended: the rotation neither resumes nor revokes it until it is released.

    Raises RequestInvalidError without a reason; StateConflictError when no key is in quarantine, or it is held already.
    """
    if (fault := find_reason_fault(why)) is not None:
        raise RequestInvalidError("Holding a key needs a reason.", [Fault("/why", fault)])
    if not may_be_held(rotation):
        raise StateConflictError("The rotation has no key in quarantine, or an operator holds it already.")
    account, why = rotation.credential.account, clean_text(why, 300)
    with recorded(grant, P.KEYS_SUSPEND, "rotation.quarantine_held", account=account, **about(rotation), why=why):
        rotation.compare_and_swap(held_at=grant.at)
        wake_rotation(rotation, grant.at)
    return rotation


def release_quarantine(grant: Grant, rotation: Rotation) -> Rotation:
    """Release a held key: its quarantine begins again. Raises StateConflictError unless it is held."""
    if not rotation.is_held:
        raise StateConflictError("No operator holds the key of this rotation.")
    account = rotation.credential.account
    with recorded(grant, P.KEYS_RESUME, "rotation.quarantine_released", account=account, **about(rotation)):
        rotation.compare_and_swap(held_at=None, entered_at=grant.at)
        wake_rotation(rotation, grant.at)
    return rotation


def may_be_held(rotation: Rotation) -> bool:
    """Whether the rotation has suspended a key that no operator holds yet."""
    key = rotation.replacement if rotation.state == S.ROLLING_BACK else rotation.predecessor
    is_quarantined = rotation.state in {S.QUARANTINE, S.ROLLING_BACK} and rotation.quarantined_at is not None
    return is_quarantined and key is not None and key.state == KeyState.SUSPENDED and not rotation.is_held


_WAIVING = frozenset({S.SCHEDULED, S.STAGED, S.PUBLISHING, S.AWAITING_PROOF, S.OVERLAP, S.ROLLING_BACK})


def may_waive(rotation: Rotation) -> bool:
    """Whether the silence of sources decides when the rotation retires a key."""
    is_private = rotation.credential.kind == KeyKind.PRIVATE
    return is_private and rotation.stage in _WAIVING and rotation.quarantined_at is None


def request_retirement(grant: Grant, rotation: Rotation, retire_at: datetime) -> Retirement:
    """Request the date on which an old public key is taken out of service; it takes effect once approved, if required.

    Raises RequestInvalidError for a date that is past or too far away; StateConflictError for a private key's rotation,
    and where a date has no effect, see `may_be_retired`.
    """
    if rotation.credential.kind != KeyKind.PUBLIC:
        raise StateConflictError("Only a public key's rotation has a retirement date; silence retires a private key.")
    _require_retirable(rotation)
    faults = list(find_far_faults({"retire_at": retire_at}, grant.at))
    if retire_at <= grant.at:
        faults.append(Fault("/retire_at", "later than now"))
    if faults:
        raise RequestInvalidError("The retirement date is invalid.", faults)
    operator = grant.principal
    if not isinstance(operator, OperatorPrincipal):
        raise TypeError("only operators request a retirement")
    account = rotation.credential.account
    retirement = Retirement(
        rotation=rotation,
        retire_at=retire_at,
        requester=operator_row(operator),
        requester_person=operator.person,
        is_requester_claimed=is_claimed(operator),
        created_at=grant.at,
    )
    with recorded(
        grant,
        P.ROTATIONS_WRITE,
        "rotation.retirement_asked",
        account=account,
        **about(rotation),
        retire_at=format_timestamp(retire_at),
    ):
        retirement.save()
        if not approvals_needed(rotation.credential.environment):
            retirement.compare_and_swap(approved_at=grant.at)
            rotation.compare_and_swap(retire_at=retire_at)
        wake_rotation(rotation, grant.at)
    return retirement


def may_be_retired(rotation: Rotation) -> bool:
    """Whether a retirement date has an effect: the old key is public, and the rotation has yet to retire it."""
    is_before = rotation.stage not in CLOSED | {S.QUARANTINE, S.REVOKING, S.ROLLING_BACK}
    return is_before and rotation.credential.kind == KeyKind.PUBLIC


def _require_retirable(rotation: Rotation) -> None:
    if not may_be_retired(rotation):
        raise StateConflictError(
            f"A retirement date has no effect while the rotation is {rotation.get_state_display()}. Set it before the "
            "quarantine of the old key; after a rollback, request a new rotation."
        )


def approve_retirement(grant: Grant, retirement: Retirement) -> Retirement:
    """Approve the date as a second person.

    Raises StateConflictError for one's own request, and for a date that is decided, past, superseded or without effect.
    """
    operator = grant.principal
    if not isinstance(operator, OperatorPrincipal):
        raise TypeError("only operators approve")
    if operator.person == retirement.requester_person:
        raise StateConflictError("This requires a second person: the requester cannot approve it.")
    require_authority(operator)
    if retirement.approved_at is not None or retirement.retire_at <= grant.at:
        raise StateConflictError("This date is approved already, or past. Request another one.")
    rotation = get_rotation(retirement.rotation_id)
    _require_retirable(rotation)
    newest = rotation.retirements.order_by("-created_at", "-pk").first()
    if newest != retirement:
        raise StateConflictError("Another date was requested since. Review that one.")
    with recorded(
        grant,
        P.ROTATIONS_APPROVE,
        "rotation.retirement_approved",
        account=rotation.credential.account,
        **about(rotation),
        retire_at=format_timestamp(retirement.retire_at),
    ):
        environment = rotation.credential.account.environment
        note_command_line_approval(
            grant,
            environment,
            event="rotation.retirement_approved",
            subject=rotation.rotation_id,
            requester_person=retirement.requester_person,
            is_requester_claimed=retirement.is_requester_claimed,
        )
        retirement.compare_and_swap(
            approver=operator_row(operator), approver_person=operator.person, approved_at=grant.at
        )
        rotation.compare_and_swap(retire_at=retirement.retire_at)
        wake_rotation(rotation, grant.at)
    return retirement


def acknowledge(grant: Grant, rotation: Rotation) -> None:
    """Record the merchant's acknowledgement, authenticated with the replacement itself. Idempotent.

    Raises NotFoundError for a holder of any other key: a service token cannot acknowledge for the merchant.
    """
    holder = grant.principal
    if not isinstance(holder, KeyHolder) or holder.key_id != rotation.replacement_id:
        raise NotFoundError("The key is not the replacement of a rotation.")
    if rotation.acknowledged_at is not None or rotation.current_state in CLOSED:
        return
    with recorded(
        grant,
        P.ROTATIONS_ACKNOWLEDGE,
        "rotation.acknowledged",
        account=rotation.credential.account,
        **about(rotation),
        key_id=holder.key_id,
    ):
        rotation.compare_and_swap(acknowledged_at=grant.at)
        wake_rotation(rotation, grant.at)


def may_collect(rotation: Rotation, person: str, actions: Iterable[BreakGlass] | None = None) -> bool:
    """Whether the person may collect the replacement: anyone who neither approved, bypassed nor reviewed its approval.

    An operator who requested it and bypassed the approval may, too. A scheduled rotation's requester is the author of
    the schedule, who may be absent when the key can be collected.

    `actions`: includes those of `list_approval_actions`; None: they are read.
    """
    if rotation.requested_via_id is None and person == rotation.requester_person:
        return True
    if any(approval.person == person for approval in rotation.approvals.all()):
        return False
    subjects = _list_approved(rotation)
    return not any(
        is_reviewed_by(action, person) or (action.event == BYPASSED and action.person == person)
        for action in (list_approval_actions(rotation) if actions is None else actions)
        if action.subject in subjects
    )


def list_collectable(rotations: Sequence[Rotation], person: str) -> list[Rotation]:
    """Return the rotations for which `may_collect` holds, with two queries however many there are."""
    prefetch_related_objects(rotations, "approvals")
    actions = list_actions({subject for rotation in rotations for subject in _list_approved(rotation)})
    return [rotation for rotation in rotations if may_collect(rotation, person, actions)]


def list_approval_actions(rotation: Rotation) -> list[BreakGlass]:
    """List the break-glass actions on the approval of the rotation, the oldest first."""
    return list_actions(_list_approved(rotation))


def _list_approved(rotation: Rotation) -> list[str]:
    """List the ids whose break-glass actions concern the approval of the rotation: its own, and what covers it."""
    ids = (rotation.rotation_id, rotation.campaign_id, rotation.standing_approval_id)
    return [each for each in ids if each is not None]


def collect_replacement(grant: Grant, rotation: Rotation) -> Plaintext:
    """Return the replacement's string, once, to a person for whom `may_collect` holds; break-glass in production.

    Raises StateConflictError when there is nothing to collect, and for a sealed replacement, which no person sees.
    """
    operator = grant.principal
    key = rotation.replacement
    if not isinstance(operator, OperatorPrincipal) or not may_collect(rotation, operator.person):
        raise StateConflictError(
            "A person who approved the rotation, or bypassed or reviewed its approval, cannot collect its key."
        )
    if rotation.delivery is Delivery.SEALED:
        raise StateConflictError(
            "The replacement is sealed to the merchant's recipient key and is never shown to a person. The merchant "
            "fetches it with its current key."
        )
    if rotation.collected_at is not None:
        raise StateConflictError("The key was collected already.")
    if key is None or rotation.delivered_at is None:
        raise StateConflictError("The replacement is not delivered yet.")
    if rotation.stage is S.ROLLING_BACK or key.state in DEAD_STATES:
        raise StateConflictError("The replacement is being retired, or has ended. The merchant uses its other key.")
    text = read_string(key)
    account = rotation.credential.account
    with recorded(
        grant, P.ISSUANCE_COLLECT, "rotation.collected", account=account, **about(rotation), key_id=key.key_id
    ):
        is_secret = rotation.credential.kind != KeyKind.PUBLIC
        if is_secret and rotation.credential.delivery == Delivery.SHOW_ONCE:
            key.compare_and_swap(material=Material.DESTROY_DUE)  # Keys are locked before rotations.
        rotation.compare_and_swap(collected_at=grant.at, awaits_requester=False)
        if is_secret and account.environment == Environment.PRODUCTION:
            exclude_collector(operator.person, *_list_approved(rotation))
            note_break_glass(
                grant,
                event="rotation.collected",
                subject=rotation.rotation_id,
                requester_person=rotation.requester_person,
                why="a production key was shown to a person",
            )
    return text
