"""Console actions on a rotation, and the action that requests one."""

from datetime import UTC, datetime

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.admin.framework.actions import (
    ActionResult,
    Cleaned,
    CreateAction,
    RowAction,
    Tone,
    VersionedReasonForm,
    resume_action,
    run_service,
)
from keyvault.admin.framework.four_eyes import approve_action, break_glass_warning, reject_action, submitted
from keyvault.domain.errors import StateConflictError
from keyvault.domain.issuance import Delivery
from keyvault.domain.keys import DEAD_STATES, KeyKind
from keyvault.services.secrets.stored_copies import is_in_backend
from rotation.admin.rotation_forms import (
    ApprovePlanForm,
    BypassForm,
    ConfirmForm,
    ExtendForm,
    RetireForm,
    RotationForm,
    WaiveForm,
    overrides_from,
)
from rotation.domain.events import RotationState
from rotation.domain.runbook import REMEDY_LABELS, Remedy
from rotation.domain.states import CLOSED
from rotation.models import Rotation
from rotation.services.rotations.interventions import (
    abort_rotation,
    collect_replacement,
    confirm_rotation,
    extend_rotation,
    hold_quarantine,
    may_be_aborted,
    may_be_confirmed,
    may_be_extended,
    may_be_held,
    may_be_retired,
    may_waive,
    predecessor_ended_at,
    release_quarantine,
    request_retirement,
    resume_rotation,
    rolls_back,
    waive_source,
)
from rotation.services.rotations.requests import (
    approve_rotation,
    bypass_rotation,
    is_undecided,
    reject_rotation,
    request_rotation,
)

S = RotationState


def _request(grant: Grant, cleaned: Cleaned) -> ActionResult:
    rotation = request_rotation(grant, cleaned["credential_id"], overrides_from(cleaned))
    is_waiting = rotation.state == S.AWAITING_APPROVAL
    return submitted(rotation, is_undecided=is_waiting, next_step="the rotation starts as planned.")


def _bypass(grant: Grant, rotation: Rotation, cleaned: Cleaned) -> ActionResult:
    bypass_rotation(grant, rotation, cleaned["plan_digest"], cleaned["reason"])
    return ActionResult("Approval bypassed. The bypass stays on the overview until another person has reviewed it.")


def _abort(grant: Grant, rotation: Rotation, cleaned: Cleaned) -> ActionResult:
    if rolls_back(rotation):
        raise StateConflictError("The merchant may already use the replacement. Roll back instead.")
    abort_rotation(grant, rotation, cleaned["why"])
    if rotation.state == S.ROLLING_BACK:
        return ActionResult(
            "The secret backend already holds the replacement, so the rotation rolls back. The old key stays."
        )
    return ActionResult(f"Rotation aborted. {_describe_remaining_key(rotation)}")


def _roll_back(grant: Grant, rotation: Rotation, cleaned: Cleaned) -> ActionResult:
    if not rolls_back(rotation):
        raise StateConflictError("The replacement has not been delivered. Abort the rotation instead.")
    abort_rotation(grant, rotation, cleaned["why"])
    return ActionResult(f"Rolling back. Both keys verify meanwhile. {_describe_old_key(rotation)}")


def _extend(grant: Grant, rotation: Rotation, cleaned: Cleaned) -> ActionResult:
    extend_rotation(grant, rotation, cleaned["deadline"])
    return ActionResult(f"Deadline extended to {cleaned['deadline']:%Y-%m-%d %H:%M} UTC.")


def _retire(grant: Grant, rotation: Rotation, cleaned: Cleaned) -> ActionResult:
    retirement = request_retirement(grant, rotation, cleaned["retire_at"])
    if retirement.approved_at is not None:
        return ActionResult(f"The old key is retired on {retirement.retire_at:%Y-%m-%d %H:%M} UTC.")
    return ActionResult("Date requested. It applies once a second person has approved it.")


def _waive(grant: Grant, rotation: Rotation, cleaned: Cleaned) -> ActionResult:
    waive_source(grant, rotation, cleaned["source"], cleaned["why"])
    return ActionResult(f"Waived under your name: {cleaned['source']}. The rotation no longer waits for it.")


def _collect(grant: Grant, rotation: Rotation, cleaned: Cleaned) -> ActionResult:
    return ActionResult("The replacement", secret=collect_replacement(grant, rotation))


# --- availability -------------------------------------------------------------------------------------------


def _waits_for_approval(rotation: Rotation) -> bool:
    return is_undecided(rotation) and datetime.now(UTC) < rotation.approval_expires_at


def _may_be_approved(rotation: Rotation) -> bool:
    """Whether the rotation awaits approval and its plan can be shown."""
    return _waits_for_approval(rotation) and rotation.readable_plan is not None


def _may_be_resumed(rotation: Rotation) -> bool:
    """Whether the rotation stalled before its deadline; after it, the deadline must be extended."""
    is_late = rotation.deadline_at is not None and datetime.now(UTC) >= rotation.deadline_at
    return rotation.state == S.STALLED and rotation.stalled_from is not None and not is_late


def _may_be_rolled_back(rotation: Rotation) -> bool:
    return may_be_aborted(rotation) and rolls_back(rotation) and has_old_key(rotation)


def has_old_key(rotation: Rotation) -> bool:
    """Whether the old key can be used again: neither revoked, compromised nor expired."""
    return predecessor_ended_at(rotation, datetime.now(UTC)) is None


def may_be_collected(rotation: Rotation) -> bool:
    """Whether the console offers to collect the replacement.

    A sealed key is fetched by the merchant. A public key is shown on its own page at any time. The merchant reads a
    stored key in the secret backend, so it is no longer offered when the rotation has proved its use and is closed.
    """
    key = rotation.replacement
    is_ended = rotation.current_state in CLOSED and rotation.used_at is not None
    is_wanted = rotation.delivery is Delivery.SHOW_ONCE or not is_ended
    is_uncollected = rotation.delivered_at is not None and rotation.collected_at is None
    is_good = key is not None and key.state not in DEAD_STATES
    is_shown = rotation.delivery is not Delivery.SEALED and rotation.credential.kind == KeyKind.PRIVATE
    return is_uncollected and is_good and is_shown and is_wanted and rotation.stage is not S.ROLLING_BACK


# --- explanations --------------------------------------------------------------------------------------------


def _explain_approval(rotation: Rotation) -> str:
    if rotation.state == S.EMERGENCY:
        return (
            "The credential has no usable key. You approve exactly this plan: the replacement is created immediately, "
            "outside of any window. You will not see it."
        )
    return "You approve exactly this plan. You will not see the replacement."


def _explain_rollback(rotation: Rotation) -> str:
    return (
        "The merchant may already use the replacement, so it is not revoked immediately. Both keys verify; the "
        "replacement is retired after the same quiet period and quarantine, and then revoked. "
        f"{_describe_old_key(rotation)}"
    )


def _describe_old_key(rotation: Rotation) -> str:
    if rotation.credential.kind == KeyKind.PUBLIC:
        return "The old key is shown on its own page."
    if is_in_backend(rotation.predecessor):
        return "The old key is written back to the secret backend."
    return "No copy of the old key is stored here. The merchant must use its own copy."


def _describe_remaining_key(rotation: Rotation) -> str:
    if has_old_key(rotation):
        return "The old key stays unchanged."
    return "The credential has no usable key."


def _warn_of_bypass(rotation: Rotation) -> str:
    return (
        "This is break-glass access: the plan starts without review by a second person. An alarm is raised "
        "immediately, and the bypass stays on the overview under your name until a second person has reviewed it."
    )


def _explain_confirmation(rotation: Rotation) -> str:
    goes = "retired on an approved date" if rotation.approved_plan.deadline is None else "retired once unused"
    return (
        "You confirm for the merchant that the replacement is in use. There is no other proof. The old key is then "
        f"{goes}, quarantined and revoked."
    )


def _explain_collection(rotation: Rotation) -> str:
    if rotation.credential.delivery == Delivery.SHOW_ONCE:
        return "The next page shows the replacement once, and the copy stored here is then destroyed."
    return "The next page shows the replacement once. The secret backend keeps its copy."


REQUEST = CreateAction(
    "request",
    REMEDY_LABELS[Remedy.REQUEST_AGAIN],
    P.ROTATIONS_WRITE,
    RotationForm,
    _request,
    "Creates and delivers a replacement. The old key is suspended and revoked only after the replacement is proved in "
    "use. In production a second person must approve the plan first.",
    "Submit request",
    account_of=lambda cleaned: cleaned["credential_id"].account,
    preset=lambda query: {"credential_id": query.get("credential")},
    is_once=True,
)

ROW_ACTIONS = (
    approve_action(
        P.ROTATIONS_APPROVE,
        approve_rotation,
        explain=_explain_approval,
        approved="Approved. The worker starts the rotation as planned.",
        is_undecided=is_undecided,
        is_available=_may_be_approved,
        form=ApprovePlanForm,
    ),
    reject_action(
        P.ROTATIONS_APPROVE,
        run_service(reject_rotation, "Rotation rejected."),
        lambda rotation: (
            f"No replacement is created. {_describe_remaining_key(rotation)} The requester sees the reason."
        ),
        is_available=_waits_for_approval,
    ),
    resume_action(
        "resume",
        REMEDY_LABELS[Remedy.RESUME],
        P.ROTATIONS_WRITE,
        run_service(resume_rotation, "Rotation resumed where it stalled, with new timers."),
        lambda rotation: f"Resumes the rotation from {rotation.get_stalled_from_display()} with new timers.",
        is_available=_may_be_resumed,
    ),
    RowAction(
        "confirm",
        REMEDY_LABELS[Remedy.CONFIRM],
        P.ROTATIONS_WRITE,
        run_service(confirm_rotation, "Confirmed under your name. The worker continues the rotation."),
        _explain_confirmation,
        form=ConfirmForm,
        is_available=may_be_confirmed,
        tone=Tone.GOOD,
    ),
    RowAction(
        "waive",
        REMEDY_LABELS[Remedy.WAIVE],
        P.ROTATIONS_WRITE,
        _waive,
        "The rotation no longer waits for the silence of this source. If the source calls with the key that is being "
        "retired after that, it is refused.",
        form=WaiveForm,
        is_available=may_waive,
        tone=Tone.DANGER,
    ),
    RowAction(
        "hold",
        REMEDY_LABELS[Remedy.HOLD],
        P.KEYS_SUSPEND,
        run_service(hold_quarantine, "Held. The rotation waits until an operator releases the key."),
        "The key in quarantine stays suspended. The rotation neither resumes nor revokes it until an operator releases "
        "it; then the quarantine begins again.",
        form=VersionedReasonForm,
        is_available=may_be_held,
        tone=Tone.DANGER,
    ),
    resume_action(
        "release",
        REMEDY_LABELS[Remedy.RELEASE],
        P.KEYS_RESUME,
        run_service(release_quarantine, "Released. The quarantine begins again."),
        "The rotation continues with a new quarantine. A known source that uses the key may reinstate it, as the plan "
        "allows; otherwise the key is revoked afterwards.",
        is_available=lambda rotation: rotation.is_held and rotation.current_state not in CLOSED,
    ),
    RowAction(
        "retire",
        REMEDY_LABELS[Remedy.RETIRE],
        P.ROTATIONS_WRITE,
        _retire,
        lambda rotation: (
            "The old public key is refused from this time, if the replacement is confirmed by then. It is quarantined "
            "and then revoked. Shops and apps that use it fail; traffic does not reinstate it."
        ),
        form=RetireForm,
        is_available=may_be_retired,
        step_up=True,
    ),
    RowAction(
        "extend",
        REMEDY_LABELS[Remedy.EXTEND],
        P.ROTATIONS_WRITE,
        _extend,
        lambda rotation: (
            "No key is revoked. "
            + ("Both keys verify for longer. " if has_old_key(rotation) else "")
            + "A rotation that stalled at its deadline continues."
        ),
        form=ExtendForm,
        is_available=may_be_extended,
    ),
    RowAction(
        "collect",
        REMEDY_LABELS[Remedy.COLLECT],
        P.ISSUANCE_COLLECT,
        _collect,
        _explain_collection,
        is_available=may_be_collected,
        warn=lambda rotation: break_glass_warning(rotation.credential.account),
        step_up=True,
    ),
    RowAction(
        "bypass",
        REMEDY_LABELS[Remedy.BYPASS],
        P.ROTATIONS_BYPASS,
        _bypass,
        "The plan starts without the approval of a second person.",
        form=BypassForm,
        is_available=_may_be_approved,
        warn=_warn_of_bypass,
        tone=Tone.DANGER,
        step_up=True,
    ),
    RowAction(
        "abort",
        REMEDY_LABELS[Remedy.ABORT],
        P.ROTATIONS_WRITE,
        _abort,
        lambda rotation: f"{_describe_remaining_key(rotation)} An undelivered replacement is discarded.",
        form=VersionedReasonForm,
        is_available=lambda rotation: may_be_aborted(rotation) and not rolls_back(rotation),
        tone=Tone.DANGER,
    ),
    RowAction(
        "roll-back",
        REMEDY_LABELS[Remedy.ROLL_BACK],
        P.ROTATIONS_WRITE,
        _roll_back,
        _explain_rollback,
        form=VersionedReasonForm,
        is_available=_may_be_rolled_back,
        tone=Tone.DANGER,
        step_up=True,
    ),
)
