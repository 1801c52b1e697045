"""Request, approve, reject, pause, resume and cancel campaigns.

One approval covers the selection, the plan and the pace. It is bound to a digest over all three and over the selected
credentials. A request expires if it is not approved in time, an approval if its rotations were not begun in time.
Workers do the rest, see `runner`.
"""

import secrets
from collections.abc import Sequence
from dataclasses import replace

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import OperatorPrincipal, is_claimed
from keyvault.access.scopes import AccessScope
from keyvault.domain.canonical import JsonValue, canonical_digest
from keyvault.domain.environments import Environment
from keyvault.domain.errors import Fault, NotFoundError, RequestInvalidError, StateConflictError
from keyvault.domain.free_text import clean_text
from keyvault.domain.ids import mint_id
from keyvault.models import Account, Credential
from keyvault.services.approvals.four_eyes import approving_operator, record_approval
from keyvault.services.issuance.requests import approvals_needed
from keyvault.services.operators.operators import operator_row
from keyvault.services.recording.authorization import authorize
from keyvault.services.recording.transaction import recorded
from rotation.domain.pacing import Pace, find_pace_faults
from rotation.domain.plan_fields import FIELDS, PlanOverrides, find_value_faults
from rotation.domain.policy import APPROVAL_LIFETIME
from rotation.models import Campaign, CampaignApproval, CampaignMember, CampaignState
from rotation.services.campaigns.selection import Selection, select_credentials

C = CampaignState

CLOSED = frozenset({C.COMPLETED, C.REJECTED, C.EXPIRED, C.CANCELLED})
_OLDEST_DAYS = 3650


def request_campaign(
    grant: Grant,
    *,
    environment: Environment,
    merchants: Sequence[str] | None,
    older_than_days: int | None,
    overrides: PlanOverrides,
    pace: Pace,
    reason: str,
) -> Campaign:
    """Select credentials and request their rotation. The selection is final. `merchants` None: all.

    The campaign runs immediately where the environment requires no second person. Raises RequestInvalidError, listing
    each fault, also when nothing is selected; NotFoundError and PermissionMissingError for accounts that the operator
    may not change.
    """
    operator = grant.principal
    if not isinstance(operator, OperatorPrincipal):
        raise TypeError("only operators request campaigns")
    overrides = replace(overrides, reason=reason.strip())
    selection = Selection(environment, None if merchants is None else tuple(sorted(set(merchants))), older_than_days)
    faults = [*_selection_faults(selection), *find_pace_faults(pace)]
    faults += find_value_faults(overrides, environment, grant.at)
    if not overrides.reason:
        faults.append(Fault("/reason", "a short reason"))
    if faults:
        raise RequestInvalidError("The campaign is invalid.", faults)
    overrides = replace(overrides, reason=clean_text(overrides.reason, FIELDS["reason"].most))
    authorize(operator, P.ROTATIONS_WRITE, now=grant.at, within=selection.scope)
    selected = select_credentials(selection, overrides, grant.at)
    if not selected.credentials:
        raise RequestInvalidError(_nothing_selected(selected.left_out), [Fault("/older_than_days", "select more")])
    _authorize_accounts(grant, selected.credentials)
    needed = approvals_needed(environment)
    campaign = Campaign(
        campaign_id=mint_id("cmp", secrets.token_bytes),
        environment=environment,
        state=C.AWAITING_APPROVAL,
        reason=overrides.reason,
        selection={**selection.as_json(), "left_out": selected.left_out, "count": len(selected.credentials)},
        overrides=overrides.as_json(),
        pace=pace.as_json(),
        approvals_needed=needed,
        requester=operator_row(operator),
        requester_person=operator.person,
        is_requester_claimed=is_claimed(operator),
        created_at=grant.at,
        approval_expires_at=grant.at + APPROVAL_LIFETIME,
    )
    campaign.plan_digest = _digest(campaign, [credential.pk for credential in selected.credentials])
    with recorded(
        grant,
        P.ROTATIONS_WRITE,
        "campaign.requested",
        account=scope_of(campaign),
        **about(campaign),
        plan_digest=campaign.plan_digest,
        selection=campaign.selection,
        overrides=campaign.overrides,
        pace=campaign.pace,
        members=len(selected.credentials),
        approvals_needed=needed,
    ):
        campaign.save()
        CampaignMember.objects.bulk_create(
            CampaignMember(campaign=campaign, credential=credential) for credential in selected.credentials
        )
        if not needed:
            campaign.compare_and_swap(state=C.RUNNING, began_at=grant.at)
    return campaign


def approve_campaign(grant: Grant, campaign: Campaign, plan_digest: str) -> Campaign:
    """Approve exactly this selection, plan and pace. Raises StateConflictError, see `approve_issuance`."""
    _require_undecided(grant, campaign)
    if not is_unaltered(campaign):
        raise StateConflictError("The campaign was altered.", internal=f"{campaign.campaign_id} fails its digest")
    operator = approving_operator(grant, campaign, plan_digest)
    event, within = "campaign.approved", scope_of(campaign)
    with recorded(grant, P.ROTATIONS_APPROVE, event, account=within, **about(campaign), plan_digest=plan_digest):
        approval, environment = CampaignApproval(campaign=campaign), campaign.environment
        if record_approval(grant, campaign, operator, approval, environment=environment, event=event):
            campaign.compare_and_swap(state=C.RUNNING, began_at=grant.at)
    return campaign


def reject_campaign(grant: Grant, campaign: Campaign, why: str) -> Campaign:
    """Reject the campaign before it begins. Raises StateConflictError once it is decided."""
    _require_undecided(grant, campaign)
    return _enter(grant, campaign, P.ROTATIONS_APPROVE, C.REJECTED, "campaign.rejected", why)


def pause_campaign(grant: Grant, campaign: Campaign, why: str) -> Campaign:
    """Begin no more rotations until resumed; open ones continue. Raises StateConflictError unless it runs."""
    _require_state(campaign, C.RUNNING)
    return _enter(grant, campaign, P.ROTATIONS_WRITE, C.PAUSED, "campaign.paused", why)


def resume_campaign(grant: Grant, campaign: Campaign, why: str) -> Campaign:
    """Resume the campaign. After a halt this takes a reason, and earlier failures no longer count towards a halt.

    Raises StateConflictError unless it is paused or halted, RequestInvalidError without that reason.
    """
    _require_state(campaign, C.PAUSED, C.HALTED)
    is_halted = campaign.state == C.HALTED
    if is_halted and not is_unaltered(campaign):
        raise StateConflictError("The approved campaign was altered. Cancel it and request another one.")
    if is_halted and not why.strip():
        raise RequestInvalidError("A halted campaign is resumed with a reason.", [Fault("/why", "a reason")])
    was_halted = {"resumed_at": grant.at} if is_halted else {}
    return _enter(grant, campaign, P.ROTATIONS_WRITE, C.RUNNING, "campaign.resumed", why, **was_halted)


def cancel_campaign(grant: Grant, campaign: Campaign, why: str) -> Campaign:
    """Cancel the campaign; open rotations continue. Raises StateConflictError when it is closed."""
    _require_state(campaign, C.AWAITING_APPROVAL, C.RUNNING, C.PAUSED, C.HALTED)
    return _enter(grant, campaign, P.ROTATIONS_WRITE, C.CANCELLED, "campaign.cancelled", why)


def get_campaign(campaign_id: str) -> Campaign:
    """Get the campaign. Raises NotFoundError."""
    campaign: Campaign | None = Campaign.objects.select_related("requester").filter(pk=campaign_id).first()
    if campaign is None:
        raise NotFoundError
    return campaign


def scope_of(campaign: Campaign) -> AccessScope:
    """Return the accounts from which the campaign selected."""
    return Selection.from_json(campaign.selection).scope


def is_unaltered(campaign: Campaign) -> bool:
    """Whether its selection, plan, pace and members still match its digest."""
    members = CampaignMember.objects.filter(campaign=campaign).values_list("credential_id", flat=True)
    return _digest(campaign, list(members)) == campaign.plan_digest


def about(campaign: Campaign) -> dict[str, JsonValue]:
    return {"campaign_id": campaign.campaign_id, "environment": campaign.environment}


def _digest(campaign: Campaign, credential_ids: list[str]) -> str:
    return canonical_digest(
        {
            "what": "campaign",
            "reason": campaign.reason,
            "selection": campaign.selection,
            "overrides": campaign.overrides,
            "pace": campaign.pace,
            "credentials": sorted(credential_ids),
        }
    )


def _enter(
    grant: Grant, campaign: Campaign, permission: P, state: CampaignState, event: str, why: str, **changes: object
) -> Campaign:
    why = clean_text(why.strip(), 300)
    closed_at = grant.at if state in CLOSED else None
    with recorded(grant, permission, event, account=scope_of(campaign), **about(campaign), why=why):
        campaign.compare_and_swap(state=state, why=why, closed_at=closed_at, **changes)
    return campaign


def _require_undecided(grant: Grant, campaign: Campaign) -> None:
    _require_state(campaign, C.AWAITING_APPROVAL)
    if grant.at >= campaign.approval_expires_at:
        raise StateConflictError("The campaign was not approved in time. Request another one.")


def _require_state(campaign: Campaign, *states: CampaignState) -> None:
    if campaign.state not in states:
        raise StateConflictError(f"This is not possible while the campaign is {campaign.get_state_display()}.")


def _authorize_accounts(grant: Grant, credentials: Sequence[Credential]) -> None:
    """Require the requester's permission for each account, so that a campaign cannot circumvent it."""
    for account in {credential.account for credential in credentials}:
        authorize(grant.principal, P.ROTATIONS_WRITE, account, now=grant.at)


def _selection_faults(selection: Selection) -> list[Fault]:
    faults = []
    if selection.merchants is not None:
        its = Account.objects.filter(environment=selection.environment, merchant_id__in=selection.merchants)
        unknown = sorted(set(selection.merchants) - set(its.values_list("merchant_id", flat=True)))
        faults += [Fault("/merchants", f"there is no merchant {name}") for name in unknown[:10]]
        if not selection.merchants:
            faults.append(Fault("/merchants", "at least one, or omit it for all"))
    if selection.older_than_days is not None and not 0 <= selection.older_than_days <= _OLDEST_DAYS:
        faults.append(Fault("/older_than_days", f"0 to {_OLDEST_DAYS}"))
    return faults


def _nothing_selected(left_out: dict[str, int]) -> str:
    reasons = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in left_out.items())
    return f"No credential is selected; left out: {reasons}." if reasons else "No active private key matches."
