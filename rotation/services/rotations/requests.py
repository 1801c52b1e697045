"""Request, approve, bypass and reject rotations; schedules and campaigns request them on behalf of an operator."""

import secrets
from dataclasses import dataclass

from django.db import IntegrityError as DatabaseIntegrityError

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import OperatorPrincipal, Service, is_claimed
from keyvault.domain.canonical import JsonValue
from keyvault.domain.errors import Fault, RequestInvalidError, StateConflictError
from keyvault.domain.free_text import clean_text, find_reason_fault
from keyvault.domain.ids import mint_id
from keyvault.domain.keys import DEAD_STATES, KeyState
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.timestamps import format_timestamp
from keyvault.models import Credential, Key, ServiceToken
from keyvault.models import Operator as OperatorRow
from keyvault.services.approvals.break_glass import note_break_glass
from keyvault.services.approvals.four_eyes import approving_operator, record_approval
from keyvault.services.issuance.requests import approvals_needed, approvals_needed_by
from keyvault.services.merchants.merchants import require_not_offboarded
from keyvault.services.operators.operators import operator_row
from keyvault.services.recording.notifications import announce
from keyvault.services.recording.transaction import recorded
from keyvault.services.work.leases import forget
from rotation.domain.events import RotationState
from rotation.domain.plan_fields import PlanOverrides
from rotation.domain.policy import APPROVAL_LIFETIME, Plan
from rotation.domain.states import CLOSED
from rotation.models import (
    Campaign,
    EvidenceKind,
    Rotation,
    RotationApproval,
    RotationSchedule,
    StandingApproval,
)
from rotation.models.triggers import ONE_OPEN_ROTATION
from rotation.services.rotations.facts import note_evidence
from rotation.services.rotations.planning import find_predecessor, plan_reissue, plan_rotation
from rotation.services.rotations.reports import about, subject_of
from rotation.services.rotations.turns import enqueue_turn, wake_rotation

S = RotationState

_REQUEST_PERMISSIONS = frozenset({P.ROTATIONS_WRITE, P.ROTATIONS_BEGIN})


@dataclass(frozen=True, slots=True)
class _Requester:
    """The requester of a rotation, and the number of approvals by others that it needs.

    `is_claimed`: see `RequestColumns`. It is False if a campaign or a standing approval covers the rotation: then the
    covering approval has the break-glass action.
    """

    person: str
    approvals: int
    is_claimed: bool
    operator: OperatorRow | None = None
    token: ServiceToken | None = None
    schedule: RotationSchedule | None = None
    campaign: Campaign | None = None
    standing_approval: StandingApproval | None = None


def request_rotation(grant: Grant, credential: Credential, overrides: PlanOverrides) -> Rotation:
    """Request a rotation; it is scheduled immediately where the policy requires no second person.

    Raises RequestInvalidError, listing why the plan cannot be met; StateConflictError when the credential has an open
    rotation, or not exactly one key to replace.
    """
    _require_no_open_rotation(credential)
    plan = plan_rotation(credential, overrides, grant.at)
    requester = _requester_of(grant, credential)
    return _store_request(grant, credential, find_predecessor(credential), plan, requester, S.SCHEDULED)


def begin_rotation(
    grant: Grant,
    credential: Credential,
    overrides: PlanOverrides,
    *,
    author: OperatorRow,
    schedule: RotationSchedule | None = None,
    campaign: Campaign | None = None,
    standing_approval: StandingApproval | None = None,
) -> Rotation:
    """Request a rotation for a schedule or a campaign, on behalf of its author.

    The approvals of the campaign, or of the schedule's standing approval, cover this plan. Raises what
    `request_rotation` raises.
    """
    _require_no_open_rotation(credential)
    plan = plan_rotation(credential, overrides, grant.at)
    needed = approvals_needed(credential.environment)
    covering = campaign or standing_approval
    requester = _Requester(
        author.person,
        needed,
        schedule is not None and covering is None and schedule.is_author_claimed,
        operator=author,
        schedule=schedule,
        campaign=campaign,
        standing_approval=standing_approval,
    )
    return _store_request(grant, credential, find_predecessor(credential), plan, requester, S.SCHEDULED)


def reissue_key(grant: Grant, credential: Credential, reason: str) -> Rotation:
    """Request a key for a credential without a usable one; it is made as soon as it is approved, in no window.

    Raises StateConflictError when it has a key that verifies or is suspended, or an open rotation.
    """
    if (fault := find_reason_fault(reason)) is not None:
        raise RequestInvalidError("A reissue needs a reason.", [Fault("/reason", fault)])
    _require_no_open_rotation(credential)
    for key in credential.keys.exclude(state__in=DEAD_STATES):
        if key.state != KeyState.PRE_ACTIVATION and (key.expires_at is None or key.expires_at > grant.at):
            raise StateConflictError(f"The credential has a key that is {key.state}: rotate, resume or revoke it.")
    used = credential.keys.exclude(state=KeyState.PRE_ACTIVATION).select_related("credential__account")
    latest: Key | None = used.order_by("-created_at").first()
    if latest is None:
        raise StateConflictError("The credential never had a key: its issuance is not completed.")
    plan = plan_reissue(credential, latest, reason, grant.at)
    return _store_request(grant, credential, latest, plan, _requester_of(grant, credential), S.EMERGENCY)


def _requester_of(grant: Grant, credential: Credential) -> _Requester:
    principal = grant.principal
    if not isinstance(principal, OperatorPrincipal | Service):
        raise TypeError("only operators and services request rotations")
    needed = approvals_needed_by(principal, credential.environment)
    if isinstance(principal, OperatorPrincipal):
        return _Requester(principal.person, needed, is_claimed(principal), operator=operator_row(principal))
    token = ServiceToken.objects.get(pk=principal.token_id)
    return _Requester(principal.person, needed, token.is_creator_claimed, token=token)


def _store_request(
    grant: Grant, credential: Credential, predecessor: Key, plan: Plan, requester: _Requester, approved: RotationState
) -> Rotation:
    """Store the request. `approved`: the state to enter once it has enough approvals."""
    rotation = Rotation(
        rotation_id=mint_id("rot", secrets.token_bytes),
        credential=credential,
        account=credential.account,
        account_environment=credential.account_environment,
        predecessor=predecessor,
        state=approved if approved is S.EMERGENCY or not requester.approvals else S.AWAITING_APPROVAL,
        plan=plan.as_json(),
        plan_digest=plan.digest(),
        approvals_needed=requester.approvals,
        requester=requester.operator,
        requested_via=requester.token,
        requester_person=requester.person,
        is_requester_claimed=requester.is_claimed,
        schedule=requester.schedule,
        campaign=requester.campaign,
        standing_approval=requester.standing_approval,
        created_at=grant.at,
        approval_expires_at=grant.at + APPROVAL_LIFETIME,
        entered_at=grant.at,
        deadline_at=plan.deadline,
        retire_at=plan.retire_at,
    )
    try:
        with recorded(
            grant,
            _REQUEST_PERMISSIONS,
            "rotation.requested",
            account=credential.account,
            **about(rotation),
            plan_digest=rotation.plan_digest,
            plan=rotation.plan,
            approvals_needed=requester.approvals,
            schedule=None if requester.schedule is None else str(requester.schedule.pk),
            campaign_id=None if requester.campaign is None else requester.campaign.campaign_id,
            standing_approval_id=None if requester.standing_approval is None else requester.standing_approval.pk,
        ):
            require_not_offboarded(credential.account)
            rotation.save()
            covering = requester.campaign or requester.standing_approval
            if covering is not None and requester.approvals:
                _copy_approvals(rotation, covering)
            if rotation.state in {S.SCHEDULED, S.EMERGENCY}:
                _announce_plan(grant, rotation)
                _note_waivers(grant, rotation)
            enqueue_turn(rotation, grant.at)
    except DatabaseIntegrityError as error:
        # Matched by text, since the open rotation may have closed by now: the trigger's message or the index's name.
        if any(text in str(error) for text in (ONE_OPEN_ROTATION, "rotation_one_open")):
            _require_no_open_rotation(credential)
            raise StateConflictError(
                "The credential had an open rotation, which has closed meanwhile. Try again."
            ) from None
        raise
    return rotation


def _require_no_open_rotation(credential: Credential) -> None:
    """Raise StateConflictError, which names the open rotation, if there is one."""
    is_open = Rotation.objects.filter(credential=credential).exclude(state__in=CLOSED)
    for rotation_id, state in is_open.values_list("rotation_id", "state")[:1]:
        raise StateConflictError(
            f"The credential has an open rotation already: {rotation_id}, which is {state}. "
            "Wait for its end or abort it."
        )


def _copy_approvals(rotation: Rotation, covering: Campaign | StandingApproval) -> None:
    """Copy to the rotation the approvals that cover its selection and its plan."""
    for approval in covering.approvals.filter(plan_digest=covering.plan_digest):
        RotationApproval(
            rotation=rotation,
            approver=approval.approver,
            person=approval.person,
            plan_digest=rotation.plan_digest,
            created_at=approval.created_at,
        ).save()
    if rotation.approvals.count() < rotation.approvals_needed:
        raise StateConflictError(f"{covering} needs more approvals.")
    rotation.compare_and_swap(state=S.SCHEDULED)


def _note_waivers(grant: Grant, rotation: Rotation) -> None:
    """Record the plan's waivers as evidence, in the name of the operator whose decision made the plan effective."""
    plan = rotation.approved_plan
    for name in plan.waived_sources:
        seen: dict[str, JsonValue] = {
            "source": name,
            "key_id": rotation.predecessor_id,
            "by": grant.principal.actor,
            "why": f"waived in the plan: {plan.reason}"[:300],
        }
        note_evidence(rotation, EvidenceKind.SOURCE_WAIVED, seen, grant.at)


def _announce_plan(grant: Grant, rotation: Rotation) -> None:
    plan = rotation.approved_plan
    announce(
        grant,
        NoticeKind.ROTATION_PLANNED,
        rotation.credential.account,
        rotation.rotation_id,
        **about(rotation),
        predecessor_key_id=rotation.predecessor_id,
        not_before=format_timestamp(plan.not_before),
        deadline=format_timestamp(plan.deadline),
        is_emergency=rotation.state == S.EMERGENCY,
    )


def announce_end(grant: Grant, rotation: Rotation) -> None:
    """Announce that a person ended a planned rotation. Call it inside the `recorded` block that ends it."""
    announce(
        grant,
        NoticeKind.ROTATION_ENDED,
        rotation.credential.account,
        rotation.rotation_id,
        **about(rotation),
        predecessor_key_id=rotation.predecessor_id,
        replacement_key_id=rotation.replacement_id,
        state=rotation.state,
        why=rotation.why,
    )


def approve_rotation(grant: Grant, rotation: Rotation, plan_digest: str) -> Rotation:
    """Approve exactly this plan as one person. Raises StateConflictError, see `approve_issuance`."""
    _require_undecided(grant, rotation)
    operator = approving_operator(grant, rotation, plan_digest)
    with recorded(
        grant,
        P.ROTATIONS_APPROVE,
        "rotation.approved",
        account=rotation.credential.account,
        **about(rotation),
        plan_digest=plan_digest,
    ):
        approval, environment = RotationApproval(rotation=rotation), rotation.credential.account.environment
        is_enough = record_approval(
            grant, rotation, operator, approval, environment=environment, event="rotation.approved"
        )
        if is_enough and rotation.state == S.AWAITING_APPROVAL:
            rotation.compare_and_swap(state=S.SCHEDULED, entered_at=grant.at)
            _announce_plan(grant, rotation)
            _note_waivers(grant, rotation)
        wake_rotation(rotation, grant.at)
    return rotation


BYPASSED = "rotation.bypassed"
"""Event of a bypass, also of its break-glass action."""


def bypass_rotation(grant: Grant, rotation: Rotation, plan_digest: str, reason: str) -> Rotation:
    """Bypass the approval (break-glass): raise an alarm and require a review by a second person.

    Raises RequestInvalidError without a reason, StateConflictError when the rotation does not wait for approval.
    """
    if (fault := find_reason_fault(reason)) is not None:
        raise RequestInvalidError("A bypass needs a reason.", [Fault("/reason", fault)])
    _require_undecided(grant, rotation)
    if plan_digest != rotation.plan_digest:
        raise StateConflictError("The plan is not what you were shown. Review it again.")
    account = rotation.credential.account
    with recorded(grant, P.ROTATIONS_BYPASS, BYPASSED, account=account, **about(rotation), why=clean_text(reason, 300)):
        note_break_glass(
            grant,
            event=BYPASSED,
            subject=rotation.rotation_id,
            requester_person=rotation.requester_person,
            why=f"no second person: {reason}",
        )
        rotation.compare_and_swap(bypassed_at=grant.at)
        if rotation.state == S.AWAITING_APPROVAL:
            rotation.compare_and_swap(state=S.SCHEDULED, entered_at=grant.at)
            _announce_plan(grant, rotation)
            _note_waivers(grant, rotation)
        announce(grant, NoticeKind.ROTATION_BYPASSED, account, rotation.rotation_id, **about(rotation))
        wake_rotation(rotation, grant.at)
    return rotation


def reject_rotation(grant: Grant, rotation: Rotation, why: str) -> Rotation:
    _require_undecided(grant, rotation)
    was_planned = rotation.state == S.EMERGENCY
    with recorded(
        grant,
        P.ROTATIONS_APPROVE,
        "rotation.rejected",
        account=rotation.credential.account,
        **about(rotation),
        why=clean_text(why, 300),
    ):
        rotation.compare_and_swap(state=S.REJECTED, entered_at=grant.at, closed_at=grant.at, why=clean_text(why, 300))
        if was_planned:
            announce_end(grant, rotation)
        forget(subject_of(rotation.rotation_id))
        rotation.expire_date(grant.at)
    return rotation


def is_undecided(rotation: Rotation) -> bool:
    """Whether the rotation waits for an approval."""
    if rotation.state == S.AWAITING_APPROVAL:
        return True
    enough = rotation.bypassed_at is not None or rotation.approvals.count() >= rotation.approvals_needed
    return rotation.state == S.EMERGENCY and not enough


def _require_undecided(grant: Grant, rotation: Rotation) -> None:
    if not is_undecided(rotation) or grant.at >= rotation.approval_expires_at:
        raise StateConflictError(f"The rotation does not wait for approval: it is {rotation.state}.")
    if rotation.plan_digest != rotation.approved_plan.digest():
        raise StateConflictError("The plan was altered.", internal=f"{rotation.rotation_id} fails its digest")
