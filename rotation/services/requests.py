"""Rotations as people and services see them: asked for, approved, rejected, aborted, acknowledged, read."""

import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import IntegrityError as DatabaseIntegrityError
from django.db.models import QuerySet

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import KeyHolder, Operator, Service
from keyvault.domain.canonical import JsonValue
from keyvault.domain.environments import Environment
from keyvault.domain.errors import NotFoundError, RequestInvalidError, StateConflictError
from keyvault.domain.free_text import clean_text
from keyvault.domain.ids import mint_id
from keyvault.domain.issuance import Delivery
from keyvault.domain.keys import KeyKind, KeyState
from keyvault.domain.plaintext import Plaintext
from keyvault.models import Credential, Key, Material, ServiceToken
from keyvault.services.break_glass import note_break_glass
from keyvault.services.four_eyes import approving_operator, locked, note_command_line_approval
from keyvault.services.issuance import approvals_needed
from keyvault.services.keys import burn_key
from keyvault.services.leases import claim, hold, release, wake
from keyvault.services.material import find_stored, read_string
from keyvault.services.operators import operator_row
from keyvault.services.recording import recorded
from keyvault.services.usage import longest_gap_seconds
from rotation.models import Rotation, RotationApproval
from rotation.policy import (
    APPROVAL_LIFETIME,
    DEFAULTS,
    Plan,
    Proof,
    default_quiet_seconds,
    find_far_faults,
    find_faults,
)
from rotation.services.facts import gather_facts, list_users
from rotation.states import CLOSED, UNPUBLISHED, RotationState, next_step

S = RotationState


@dataclass(frozen=True, slots=True)
class Wish:
    """What somebody asks for; None leaves it to the environment's defaults."""

    reason: str = ""
    not_before: datetime | None = None
    deadline: datetime | None = None
    proof: Proof | None = None
    proof_count: int | None = None
    proof_sources: int | None = None
    soak_seconds: int | None = None
    quiet_seconds: int | None = None
    quarantine_seconds: int | None = None
    expires_in_days: int | None = None
    predecessor_may_expire: bool = False


def request_rotation(grant: Grant, credential: Credential, wish: Wish) -> Rotation:
    """Asks for a rotation; scheduled at once where the policy wants no second person.

    Raises RequestInvalidError, listing why the plan cannot be met; StateConflictError when the credential
    has an open rotation, or not exactly one key to replace.
    """
    faults = list(find_far_faults({"not_before": wish.not_before, "deadline": wish.deadline}, grant.at))
    if faults:
        raise RequestInvalidError("The rotation cannot be done like that.", faults)
    predecessor = _predecessor(credential)
    environment = credential.environment
    plan = _plan(credential, predecessor, wish, grant.at)
    faults = list(find_faults(plan, environment, predecessor.expires_at, grant.at))
    if faults:
        raise RequestInvalidError("The rotation cannot be done like that.", faults)
    principal = grant.principal
    if not isinstance(principal, Operator | Service):
        raise TypeError("operators and services ask for rotations")
    # A service's wish takes an operator even where an operator's own would be enough.
    needed = max(approvals_needed(environment), 1 if isinstance(principal, Service) else 0)
    rotation = Rotation(
        rotation_id=mint_id("rot", secrets.token_bytes),
        credential=credential,
        predecessor=predecessor,
        state=S.AWAITING_APPROVAL if needed else S.SCHEDULED,
        plan=plan.as_json(),
        plan_digest=plan.digest(),
        approvals_needed=needed,
        requester=operator_row(principal) if isinstance(principal, Operator) else None,
        requested_via=ServiceToken.objects.get(pk=principal.token_id) if isinstance(principal, Service) else None,
        requester_person=principal.person,
        created_at=grant.at,
        approval_expires_at=grant.at + APPROVAL_LIFETIME,
        entered_at=grant.at,
    )
    try:
        with recorded(
            grant,
            P.ROTATIONS_WRITE,
            "rotation.requested",
            account=credential.account,
            **_about(rotation),
            plan_digest=rotation.plan_digest,
            plan=rotation.plan,
            approvals_needed=needed,
        ):
            rotation.save()
    except DatabaseIntegrityError:
        if Rotation.objects.filter(credential=credential).exclude(state__in=CLOSED).exists():
            raise StateConflictError("The credential has an open rotation already.") from None
        raise
    return rotation


def approve_rotation(grant: Grant, rotation: Rotation, plan_digest: str) -> Rotation:
    """One person's yes to exactly this plan. Raises StateConflictError, see `approve_issuance`."""
    if rotation.state != S.AWAITING_APPROVAL or grant.at >= rotation.approval_expires_at:
        raise StateConflictError(f"The rotation does not wait for approval: it is {rotation.state}.")
    if rotation.plan_digest != rotation.approved_plan.digest():
        raise StateConflictError("The plan was altered.", internal=f"{rotation.rotation_id} fails its digest")
    operator = approving_operator(
        grant,
        rotation.approvals,
        shown_digest=plan_digest,
        stored_digest=rotation.plan_digest,
        requester_person=rotation.requester_person,
    )
    with recorded(
        grant,
        P.ROTATIONS_APPROVE,
        "rotation.approved",
        account=rotation.credential.account,
        **_about(rotation),
        plan_digest=plan_digest,
    ):
        locked(rotation)
        RotationApproval(
            rotation=rotation,
            approver=operator_row(operator),
            person=operator.person,
            plan_digest=plan_digest,
            created_at=grant.at,
        ).save()
        note_command_line_approval(
            grant, rotation.credential.account.environment, "rotation.approved", rotation.rotation_id
        )
        if rotation.approvals.count() >= rotation.approvals_needed:
            rotation.compare_and_swap(state=S.SCHEDULED, entered_at=grant.at)
    wake(subject_of(rotation.rotation_id))
    return rotation


def reject_rotation(grant: Grant, rotation: Rotation, why: str) -> Rotation:
    if rotation.state != S.AWAITING_APPROVAL:
        raise StateConflictError(f"The rotation does not wait for approval: it is {rotation.state}.")
    with recorded(
        grant,
        P.ROTATIONS_APPROVE,
        "rotation.rejected",
        account=rotation.credential.account,
        **_about(rotation),
        why=clean_text(why, 300),
    ):
        rotation.compare_and_swap(state=S.REJECTED, entered_at=grant.at, closed_at=grant.at, why=clean_text(why, 300))
    return rotation


def abort_rotation(grant: Grant, rotation: Rotation, why: str) -> Rotation:
    """Ends a rotation whose replacement nobody has been given; the replacement, if made, is burned.

    Raises StateConflictError afterwards, since the merchant may already use it, and while a worker is in the
    middle of a step; BackendUnavailableError when the backend cannot say whether it holds the replacement.
    """
    state = S(rotation.stalled_from) if rotation.stalled_from else rotation.current_state
    if state != S.AWAITING_APPROVAL and state not in UNPUBLISHED:
        raise StateConflictError(_TOO_LATE)
    lease = claim(subject_of(rotation.rotation_id), grant.at, now_or_never=True)
    if lease is None:
        raise StateConflictError("A worker is at it this moment. Try again.")
    try:
        _require_undelivered(rotation)
        with recorded(
            grant,
            P.ROTATIONS_WRITE,
            "rotation.cancelled",
            account=rotation.credential.account,
            **_about(rotation),
            why=clean_text(why, 300),
        ):
            hold(lease)
            # Keys before the rotation, as the engine locks them.
            if rotation.replacement is not None:
                burn_key(grant, rotation.replacement)
            rotation.compare_and_swap(
                state=S.CANCELLED, entered_at=grant.at, closed_at=grant.at, why=clean_text(why, 300)
            )
    finally:
        release(lease)
    return rotation


_TOO_LATE = "The replacement was delivered; the merchant may already use it."


def _require_undelivered(rotation: Rotation) -> None:
    """A worker may have died between writing to the backend and saying so: the backend knows."""
    stored = None if rotation.replacement is None else find_stored(rotation.credential)
    if rotation.delivered_at is not None or (
        stored is not None and stored.labels.get("key_id") == rotation.replacement_id
    ):
        raise StateConflictError(_TOO_LATE)


def resume_rotation(grant: Grant, rotation: Rotation) -> Rotation:
    """Goes on where it stalled, with its timers started anew."""
    if rotation.state != S.STALLED or rotation.stalled_from is None:
        raise StateConflictError(f"Only a stalled rotation is resumed; this one is {rotation.state}.")
    with recorded(
        grant, P.ROTATIONS_WRITE, "rotation.resumed", account=rotation.credential.account, **_about(rotation)
    ):
        rotation.compare_and_swap(state=rotation.stalled_from, stalled_from=None, entered_at=grant.at, why="")
    wake(subject_of(rotation.rotation_id))
    return rotation


def find_introduction(key_id: str) -> Rotation | None:
    """The rotation whose replacement this key is, if it still stands; what an acknowledgement is about."""
    return (
        _rotations()
        .filter(replacement_id=key_id)
        .exclude(state__in=[S.CANCELLED, S.REJECTED, S.EXPIRED])
        .order_by("-created_at")
        .first()
    )


def acknowledge(grant: Grant, rotation: Rotation) -> None:
    """The merchant, by the replacement itself, says that it arrived. Repeatable.

    Raises NotFoundError for a holder of any other key: no service token can say this for the merchant.
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
        **_about(rotation),
        key_id=holder.key_id,
    ):
        rotation.compare_and_swap(acknowledged_at=grant.at)
    wake(subject_of(rotation.rotation_id))


def collect_replacement(grant: Grant, rotation: Rotation) -> Plaintext:
    """The replacement's string, to whoever asked for the rotation, and once; break-glass in production.

    Raises StateConflictError when there is nothing to collect, and for a sealed credential, whose keys no person sees.
    """
    operator = grant.principal
    key = rotation.replacement
    if not isinstance(operator, Operator) or operator.person != rotation.requester_person:
        raise StateConflictError("Only whoever asked for the rotation collects its key.")
    if rotation.credential.delivery == Delivery.SEALED:
        raise StateConflictError(
            "A sealed credential's key is never shown to a person: read the replacement from the secret backend."
        )
    if rotation.collected_at is not None:
        raise StateConflictError("The key was collected already.")
    if key is None or rotation.delivered_at is None:
        raise StateConflictError("The replacement is not there yet.")
    text = read_string(key)
    account = rotation.credential.account
    with recorded(
        grant, P.ISSUANCE_COLLECT, "rotation.collected", account=account, **_about(rotation), key_id=key.key_id
    ):
        rotation.compare_and_swap(collected_at=grant.at)
        if account.environment == Environment.PRODUCTION:
            note_break_glass(
                grant,
                event="rotation.collected",
                subject=rotation.rotation_id,
                why="a production key was shown to a person",
            )
        if rotation.credential.delivery == Delivery.SHOW_ONCE:
            key.compare_and_swap(material=Material.DESTROY_DUE)
    return text


def describe(rotation: Rotation, now: datetime) -> dict[str, JsonValue]:
    """What the API, the console and the command line show; never material."""
    step = next_step(gather_facts(rotation, now), now)
    return {
        "rotation_id": rotation.rotation_id,
        "state": rotation.state,
        "waiting_for": None if rotation.current_state in CLOSED else getattr(step, "waiting_for", "its next turn"),
        "why": rotation.why,
        "credential_id": rotation.credential_id,
        "merchant_id": rotation.credential.account.merchant_id,
        "environment": rotation.credential.account.environment,
        "predecessor_key_id": rotation.predecessor_id,
        "replacement_key_id": rotation.replacement_id,
        "plan": rotation.plan,
        "plan_digest": rotation.plan_digest,
        "approvals": [approval.approver.username for approval in rotation.approvals.select_related("approver")],
        "approvals_needed": rotation.approvals_needed,
        "created_at": _text(rotation.created_at),
        "accepted_at": _text(rotation.accepted_at),
        "delivered_at": _text(rotation.delivered_at),
        "acknowledged_at": _text(rotation.acknowledged_at),
        "used_at": _text(rotation.used_at),
        "silent_at": _text(rotation.silent_at),
        "closed_at": _text(rotation.closed_at),
        "evidence": [
            {
                "evidence_id": evidence.evidence_id,
                "kind": evidence.kind,
                "seen": evidence.seen,
                "created_at": _text(evidence.created_at),
            }
            for evidence in rotation.evidence.order_by("created_at", "evidence_id")
        ],
        "predecessor_users": list_users(rotation.predecessor_id),
    }


def get_rotation(rotation_id: str) -> Rotation:
    """Raises NotFoundError."""
    rotation = _rotations().filter(rotation_id=rotation_id).first()
    if rotation is None:
        raise NotFoundError
    return rotation


def list_open() -> list[str]:
    return list(Rotation.objects.exclude(state__in=CLOSED).order_by("entered_at").values_list("rotation_id", flat=True))


def subject_of(rotation_id: str) -> str:
    """What the lease on a rotation's work is called."""
    return f"rotation:{rotation_id}"


def _rotations() -> QuerySet[Rotation]:
    return Rotation.objects.select_related(
        "credential__account__merchant", "predecessor__credential__account", "replacement__credential__account"
    )


def _predecessor(credential: Credential) -> Key:
    if credential.kind == KeyKind.PUBLIC:
        raise StateConflictError("A public key is not rotated by evidence: shipped apps hold it for months.")
    active: list[Key] = list(credential.keys.select_related("credential__account").filter(state=KeyState.ACTIVE))
    if not active:
        raise StateConflictError("The credential has no usable key to replace; issue it anew.")
    if len(active) > 1:
        raise StateConflictError("Two keys of the credential verify already; revoke one of them first.")
    return active[0]


def _plan(credential: Credential, predecessor: Key, wish: Wish, now: datetime) -> Plan:
    """The wish, with the environment's defaults for all that it leaves open."""
    defaults = DEFAULTS[credential.environment]
    not_before = wish.not_before or now
    longest = not_before + timedelta(seconds=defaults.deadline_seconds)
    if predecessor.expires_at is not None and not wish.predecessor_may_expire:
        longest = min(longest, predecessor.expires_at)
    return Plan(
        credential_id=credential.credential_id,
        predecessor_key_id=predecessor.key_id,
        reason=clean_text(wish.reason, 300),
        not_before=not_before,
        deadline=wish.deadline or longest,
        proof=wish.proof or Proof.TRAFFIC,
        proof_count=_or(wish.proof_count, defaults.proof_count),
        proof_sources=_or(wish.proof_sources, defaults.proof_sources),
        soak_seconds=_or(wish.soak_seconds, defaults.soak_seconds),
        quiet_seconds=_or(
            wish.quiet_seconds,
            default_quiet_seconds(credential.environment, longest_gap_seconds(predecessor.key_id)),
        ),
        quarantine_seconds=_or(wish.quarantine_seconds, defaults.quarantine_seconds),
        expires_in_days=wish.expires_in_days,
        predecessor_may_expire=wish.predecessor_may_expire,
    )


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _about(rotation: Rotation) -> dict[str, JsonValue]:
    return {"rotation_id": rotation.rotation_id, "credential_id": rotation.credential_id}


def _text(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat()
