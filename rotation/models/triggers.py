"""Rotation's rules for the database triggers, which `keyvault.models.triggers` installs."""

from keyvault.models.triggers.guards import CLAIM_OF_SEVERAL, IS_APPROVAL
from keyvault.models.triggers.rules import (
    AppendOnly,
    FinalStates,
    FourEyes,
    Frozen,
    Kept,
    TriggerRule,
    WriteGuard,
    is_changed,
    short_name,
    sql_list,
)
from rotation.domain.states import CLOSED

ONE_OPEN_ROTATION = "a credential has at most one open rotation"
"""Message of a refusal, by which the service recognizes it."""

_CLOSED = sql_list(tuple(sorted(state.value for state in CLOSED)))

APPEND_ONLY = (
    AppendOnly("rotation_rotationapproval", (("id",), ("rotation_id", "person"))),
    AppendOnly("rotation_campaignapproval", (("id",), ("campaign_id", "person"))),
    AppendOnly("rotation_scheduleapproval", (("id",), ("standing_id", "person"))),
    AppendOnly("rotation_evidence", (("evidence_id",),)),
)

KEPT = (
    Kept("rotation_rotation", (("rotation_id",),)),
    Kept("rotation_retirement", (("id",),)),
    Kept("rotation_campaign", (("campaign_id",),)),
    Kept("rotation_standingapproval", (("approval_id",), ("schedule_id", "state"))),
    Kept("rotation_campaignmember", (("id",), ("campaign_id", "credential_id"), ("rotation_id",))),
)

FROZEN = (
    Frozen(
        "rotation_retirement",
        ("id", "rotation_id", "retire_at", "requester_person", "is_requester_claimed"),
        "a retirement date is immutable, and is approved only once",
        refused_if="OLD.approved_at IS NOT NULL",
    ),
    Frozen(
        "rotation_campaignmember",
        ("id", "campaign_id", "credential_id"),
        "a member keeps its campaign and credential, and gets one rotation",
        refused_if="(OLD.rotation_id IS NOT NULL AND coalesce(NEW.rotation_id, '') <> OLD.rotation_id)",
    ),
)

STATES = (
    FinalStates(
        "campaign_no_reopening",
        "rotation_campaign",
        ("completed", "rejected", "expired", "cancelled"),
        "a closed campaign stays closed",
    ),
    FinalStates(
        "standingapproval_no_reopening",
        "rotation_standingapproval",
        ("rejected", "withdrawn", "void"),
        "a standing approval that has ended stays ended",
    ),
)

FOUR_EYES = (
    FourEyes(
        table="rotation_rotation",
        key="rotation_id",
        approval="rotation_rotationapproval",
        foreign_key="rotation_id",
        approved="NEW.state NOT IN ('requested', 'awaiting_approval', 'emergency', 'rejected', 'expired', 'cancelled') "
        "AND NOT (NEW.bypassed_at IS NOT NULL AND EXISTS (SELECT 1 FROM keyvault_breakglass g "
        "WHERE g.event = 'rotation.bypassed' AND g.subject = NEW.rotation_id))",
        environment="(SELECT a.environment FROM keyvault_account a JOIN keyvault_credential c "
        "ON c.account_id = a.id WHERE c.credential_id = NEW.credential_id)",
        frozen=(
            "credential_id",
            "account_id",
            "account_environment",
            "predecessor_id",
            "plan",
            "standing_approval_id",
        ),
    ),
    FourEyes(
        table="rotation_campaign",
        key="campaign_id",
        approval="rotation_campaignapproval",
        foreign_key="campaign_id",
        approved="NEW.state NOT IN ('awaiting_approval', 'rejected', 'expired', 'cancelled')",
        environment="NEW.environment",
        frozen=("environment", "selection", "overrides", "pace"),
        by_services=False,
    ),
    FourEyes(
        table="rotation_standingapproval",
        key="approval_id",
        approval="rotation_scheduleapproval",
        foreign_key="standing_id",
        approved="NEW.state NOT IN ('awaiting_approval', 'rejected', 'withdrawn', 'void')",
        environment="(SELECT s.environment FROM rotation_rotationschedule s WHERE s.id = NEW.schedule_id)",
        frozen=("schedule_id", "terms", "approval_expires_at", "expires_at"),
        by_services=False,
    ),
)

# Unique among open rows: REPLACE would delete the existing one.
_ONE_OPEN = tuple(
    WriteGuard(
        f"rotation_one_open_{when.lower()}",
        "rotation_rotation",
        when,
        f"NEW.state NOT IN {_CLOSED} AND EXISTS (SELECT 1 FROM rotation_rotation r "  # noqa: S608  our own names only
        f"WHERE r.credential_id = NEW.credential_id AND r.rotation_id <> {row}.rotation_id "
        f"AND r.state NOT IN {_CLOSED})",
        ONE_OPEN_ROTATION,
    )
    for when, row in (("INSERT", "NEW"), ("UPDATE", "OLD"))
)

GUARDS = (
    *_ONE_OPEN,
    WriteGuard(
        "rotation_account",
        "rotation_rotation",
        "INSERT",
        "NOT EXISTS (SELECT 1 FROM keyvault_credential c WHERE c.credential_id = NEW.credential_id "
        "AND c.account_id = NEW.account_id AND c.account_environment = NEW.account_environment)",
        "a rotation has the account and environment of its credential",
    ),
    WriteGuard(
        "rotation_bypass_stays",
        "rotation_rotation",
        "UPDATE",
        "OLD.bypassed_at IS NOT NULL AND NEW.bypassed_at IS NULL",
        "the time of a bypass is never cleared",
    ),
    WriteGuard(
        "rotation_retirement_approved",
        "rotation_rotation",
        "UPDATE",
        f"{is_changed('retire_at')} "  # noqa: S608  our own names only
        "AND NOT EXISTS (SELECT 1 FROM rotation_retirement t WHERE t.rotation_id = NEW.rotation_id "
        "AND t.retire_at = NEW.retire_at AND t.approved_at IS NOT NULL "
        "AND (t.approver_person <> '' OR EXISTS (SELECT 1 FROM keyvault_credential c "
        "JOIN keyvault_account a ON a.id = c.account_id "
        "WHERE c.credential_id = NEW.credential_id AND a.environment = 'sandbox')))",
        "a retirement date is approved before it takes effect",
    ),
    WriteGuard(
        "campaignmember_as_asked",
        "rotation_campaignmember",
        "INSERT",
        "NEW.rotation_id IS NOT NULL OR NOT EXISTS (SELECT 1 FROM rotation_campaign c "
        "WHERE c.campaign_id = NEW.campaign_id AND c.state = 'awaiting_approval') "
        "OR EXISTS (SELECT 1 FROM rotation_campaignapproval v WHERE v.campaign_id = NEW.campaign_id)",
        "members are added only when a campaign is requested, without a rotation",
    ),
    WriteGuard(
        "rotation_of_campaign",
        "rotation_rotation",
        "INSERT",
        "NEW.campaign_id IS NOT NULL AND NOT EXISTS (SELECT 1 FROM rotation_campaignmember m "
        "JOIN rotation_campaign c ON c.campaign_id = m.campaign_id WHERE m.campaign_id = NEW.campaign_id "
        "AND m.credential_id = NEW.credential_id AND m.rotation_id IS NULL AND c.state = 'running')",
        "only a running campaign begins rotations, one for each member",
    ),
    WriteGuard(
        "standingapproval_by_author",
        "rotation_standingapproval",
        "INSERT",
        "NOT EXISTS (SELECT 1 FROM rotation_rotationschedule s "
        "WHERE s.id = NEW.schedule_id AND s.author_person = NEW.requester_person)",
        "the author of a schedule requests its standing approval",
    ),
    WriteGuard(
        "rotation_of_standing_approval",
        "rotation_rotation",
        "INSERT",
        "NEW.standing_approval_id IS NOT NULL AND NOT EXISTS (SELECT 1 FROM rotation_standingapproval s "
        "WHERE s.approval_id = NEW.standing_approval_id AND s.schedule_id = NEW.schedule_id AND s.state = 'approved' "
        "AND s.requester_person = NEW.requester_person AND s.expires_at > NEW.created_at)",
        "only a valid standing approval of its schedule covers a rotation",
    ),
    WriteGuard(
        "breakglass_rotation_requester",
        "keyvault_breakglass",
        "INSERT",
        "(NEW.event <> 'rotation.retirement_approved' AND EXISTS (SELECT 1 FROM rotation_rotation r "
        "WHERE r.rotation_id = NEW.subject AND r.requester_person <> NEW.requester_person)) "
        "OR (NEW.event = 'rotation.retirement_approved' AND NOT EXISTS (SELECT 1 FROM rotation_retirement t "
        "WHERE t.rotation_id = NEW.subject AND t.requester_person = NEW.requester_person)) "
        "OR EXISTS (SELECT 1 FROM rotation_campaign c "
        "WHERE c.campaign_id = NEW.subject AND c.requester_person <> NEW.requester_person) "
        "OR EXISTS (SELECT 1 FROM rotation_standingapproval s "
        "WHERE s.approval_id = NEW.subject AND s.requester_person <> NEW.requester_person)",
        "a break-glass action names the requester of its rotation, retirement date, campaign or standing approval",
    ),
    *(
        WriteGuard(
            f"breakglass_claim_alone_of_{short_name(request.table)}",
            "keyvault_breakglass",
            "INSERT",
            # One person approves a retirement date, whatever its rotation requires.
            f"NEW.is_claimed AND {IS_APPROVAL} AND NEW.event <> 'rotation.retirement_approved' "  # noqa: S608  our own names only
            f"AND EXISTS (SELECT 1 FROM {request.table} r "
            f"WHERE r.{request.key} = NEW.subject AND r.approvals_needed > 1)",
            CLAIM_OF_SEVERAL,
        )
        for request in FOUR_EYES
    ),
)

RULES: tuple[TriggerRule, ...] = (*APPEND_ONLY, *KEPT, *FROZEN, *STATES, *FOUR_EYES, *GUARDS)
