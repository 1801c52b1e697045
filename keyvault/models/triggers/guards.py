"""Keyvault's guards across rows and tables, by name."""

from keyvault.access.principals import SYSTEM_PREFIX
from keyvault.domain.audit import APPROVAL_SUFFIX
from keyvault.models.triggers.rules import OnWrite, SetOnce, TriggerRule, WriteGuard

IS_APPROVAL = f"NEW.event LIKE '%{APPROVAL_SUFFIX}'"
CLAIM_OF_SEVERAL = "one of several approvals is never claimed on a command line"

_ACTIVE_KEY_OF_OFFBOARDED = (
    "NEW.state = 'active' AND EXISTS (SELECT 1 FROM keyvault_credential c "
    "JOIN keyvault_account a ON a.id = c.account_id JOIN keyvault_merchant m ON m.merchant_id = a.merchant_id "
    "WHERE c.credential_id = NEW.credential_id AND m.status = 'offboarded')"
)

AUDIT_CHAINS = (
    WriteGuard("auditchain_no_delete", "keyvault_auditchain", "DELETE", "1 = 1", "an audit chain is never deleted"),
    WriteGuard(
        "auditchain_no_replace",
        "keyvault_auditchain",
        "INSERT",
        "EXISTS (SELECT 1 FROM keyvault_auditchain c WHERE c.name = NEW.name)",
        "an audit chain of this name exists already",
    ),
    WriteGuard(
        "auditchain_forward",
        "keyvault_auditchain",
        "UPDATE",
        "NEW.name <> OLD.name OR NEW.scope <> OLD.scope OR NEW.newest_at < OLD.newest_at "
        "OR NOT (NEW.sequence = OLD.sequence + 1 OR (NEW.sequence = OLD.sequence "
        "AND NEW.head_hash = OLD.head_hash AND NEW.newest_at = OLD.newest_at AND NEW.signed_in <> OLD.signed_in))",
        "an audit chain advances by exactly one entry, and never back in time",
    ),
    WriteGuard(
        "auditchain_unsigned",
        "keyvault_auditchain",
        "UPDATE",
        "(NEW.sequence > OLD.sequence AND (NEW.unsigned_since IS NULL "
        "OR NEW.signed_in <> OLD.signed_in OR NEW.signed_sequence <> OLD.signed_sequence)) "
        "OR (NEW.sequence = OLD.sequence AND ((NEW.unsigned_since IS NULL) <> (NEW.signed_sequence = NEW.sequence) "
        "OR NEW.signed_sequence > NEW.sequence "
        "OR (NEW.signed_sequence > 0 AND NOT EXISTS (SELECT 1 FROM keyvault_auditcheckpoint c "
        "WHERE c.scope = NEW.scope AND c.number = NEW.signed_in))))",
        "an entry of an audit chain is signed by a checkpoint, or recorded as unsigned",
    ),
)

MERCHANTS = (
    OnWrite(
        "connection_mode",
        "keyvault_providerconnection",
        "coalesce((SELECT a.environment FROM keyvault_account a WHERE a.id = NEW.account_id), '') || ':' || NEW.mode "
        "NOT IN ('sandbox:test', 'production:live')",
        "a sandbox connection is in test mode, a production connection in live mode",
    ),
    # Unique among rows that are not removed: REPLACE would delete the existing one.
    WriteGuard(
        "providerconnection_one",
        "keyvault_providerconnection",
        "INSERT",
        "NEW.removed_at IS NULL AND EXISTS (SELECT 1 FROM keyvault_providerconnection c WHERE c.removed_at IS NULL "
        "AND c.account_id = NEW.account_id AND c.provider = NEW.provider)",
        "an account has at most one current connection to a provider",
    ),
    # Unique among rows without an account: REPLACE would delete the existing one.
    WriteGuard(
        "limitoverride_one_of_endpoint",
        "keyvault_limitoverride",
        "INSERT",
        "NEW.account_id IS NULL AND EXISTS (SELECT 1 FROM keyvault_limitoverride o WHERE o.account_id IS NULL "
        "AND o.environment = NEW.environment AND o.endpoint = NEW.endpoint)",
        "an endpoint has at most one limit for a whole environment",
    ),
)

_ACCOUNTS_ENVIRONMENT = (
    "NOT EXISTS (SELECT 1 FROM keyvault_account a "
    "WHERE a.id = NEW.account_id AND a.environment = NEW.account_environment)"
)

KEYS = (
    WriteGuard(
        "credential_environment",
        "keyvault_credential",
        "INSERT",
        _ACCOUNTS_ENVIRONMENT,
        "a credential has the environment of its account",
    ),
    WriteGuard(
        "issuancerequest_environment",
        "keyvault_issuancerequest",
        "INSERT",
        _ACCOUNTS_ENVIRONMENT,
        "an issuance request has the environment of its account",
    ),
    WriteGuard(
        "notice_environment",
        "keyvault_notice",
        "INSERT",
        "(NEW.account_id IS NULL AND NEW.account_environment IS NOT NULL) OR (NEW.account_id IS NOT NULL AND "
        "NOT EXISTS (SELECT 1 FROM keyvault_account a WHERE a.id = NEW.account_id "
        "AND a.environment = coalesce(NEW.account_environment, '')))",
        "a notice has the environment of its account",
    ),
    WriteGuard(
        "key_environment",
        "keyvault_key",
        "INSERT",
        "NOT EXISTS (SELECT 1 FROM keyvault_credential c WHERE c.credential_id = NEW.credential_id "
        "AND c.account_environment = NEW.account_environment)",
        "a key has the environment of its credential",
    ),
    WriteGuard(
        "key_of_a_merchant_insert",
        "keyvault_key",
        "INSERT",
        _ACTIVE_KEY_OF_OFFBOARDED,
        "an offboarded merchant gets no active keys",
    ),
    WriteGuard(
        "key_of_a_merchant_update",
        "keyvault_key",
        "UPDATE",
        f"{_ACTIVE_KEY_OF_OFFBOARDED} AND OLD.state <> 'active'",
        "an offboarded merchant gets no active keys",
    ),
    OnWrite(
        "key_two_active",
        "keyvault_key",
        "NEW.state = 'active' AND (SELECT count(*) FROM keyvault_key k WHERE k.credential_id = NEW.credential_id "
        "AND k.state = 'active' AND k.key_id <> NEW.key_id) >= 2",
        "a credential has at most two active keys",
    ),
)

RECIPIENTS: tuple[TriggerRule, ...] = (
    WriteGuard(
        "recipientkey_of_account",
        "keyvault_recipientkey",
        "INSERT",
        "NOT EXISTS (SELECT 1 FROM keyvault_credential c JOIN keyvault_key k ON k.credential_id = c.credential_id "
        "WHERE c.credential_id = NEW.credential_id AND c.account_id = NEW.account_id "
        "AND c.account_environment = NEW.account_environment AND k.key_id = NEW.key_id)",
        "a recipient key is set with a key of its credential, and has the account of it",
    ),
    WriteGuard(
        "recipientkey_delayed",
        "keyvault_recipientkey",
        "INSERT",
        # An earlier `created_at` would make the key apply immediately. The hour allows for clocks that differ.
        "NEW.account_environment <> 'sandbox' AND (NEW.approvals_needed < 2 OR NOT coalesce("
        "epoch(NEW.created_at) >= epoch(CURRENT_TIMESTAMP) - 3600 "
        "AND epoch(NEW.applies_at) >= epoch(NEW.created_at) + 86400, FALSE))",
        "a recipient key in production applies 24 hours later, or with the approval of two persons",
    ),
    WriteGuard(
        "recipientkeyapproval_is_person",
        "keyvault_recipientkeyapproval",
        "INSERT",
        "NOT EXISTS (SELECT 1 FROM keyvault_operator o "
        "WHERE o.id = NEW.approver_id AND o.person = NEW.person AND o.is_active)",
        "an approval names the person of the approving operator, who is not disabled",
    ),
)

OPERATORS: tuple[TriggerRule, ...] = (
    WriteGuard(
        "operatorchange_of_another",
        "keyvault_operatorchange",
        "INSERT",
        "NEW.requester_person = NEW.operator_person OR NOT EXISTS (SELECT 1 FROM keyvault_operator o "
        "WHERE o.id = NEW.operator_id AND o.person = NEW.operator_person)",
        "a change names the person of its operator, who does not request it",
    ),
    WriteGuard(
        "operatorchange_approved_by_another",
        "keyvault_operatorchangeapproval",
        "INSERT",
        "EXISTS (SELECT 1 FROM keyvault_operatorchange c "
        "WHERE c.change_id = NEW.change_id AND c.operator_person = NEW.person)",
        "a person does not approve a change of their own operator",
    ),
    WriteGuard(
        "operatorchange_in_time",
        "keyvault_operatorchangeapproval",
        "INSERT",
        "EXISTS (SELECT 1 FROM keyvault_operatorchange c WHERE c.change_id = NEW.change_id "
        "AND (c.state <> 'awaiting_approval' OR c.approval_expires_at <= NEW.created_at))",
        "a change is approved while it awaits approval",
    ),
)


def _is_excluded(column: str) -> str:
    """Return the condition that the person in the column must not review the break-glass action; NULL for no person."""
    return f"replace(NEW.excluded_persons, NEW.{column}, '') <> NEW.excluded_persons"


BREAK_GLASS: tuple[TriggerRule, ...] = (
    WriteGuard(
        "breakglass_requester",
        "keyvault_breakglass",
        "INSERT",
        "NEW.requester_person = '' OR EXISTS (SELECT 1 FROM keyvault_issuancerequest r "
        "WHERE r.issuance_request_id = NEW.subject AND r.requester_person <> NEW.requester_person) "
        "OR EXISTS (SELECT 1 FROM keyvault_operatorchange c "
        "WHERE c.change_id = NEW.subject AND c.requester_person <> NEW.requester_person)",
        "a break-glass action names the person who requested its subject",
    ),
    WriteGuard(
        "breakglass_excluded",
        "keyvault_breakglass",
        "INSERT",
        f"NOT ({_is_excluded('requester_person')}) OR (NOT ({_is_excluded('person')}) "
        f"AND NOT (NEW.is_claimed AND {IS_APPROVAL} AND NEW.requester_person NOT LIKE '{SYSTEM_PREFIX}%'))",
        "a break-glass action excludes its operator and the requester from its review",
    ),
    WriteGuard(
        "breakglass_excludes_concerned",
        "keyvault_breakglass",
        "INSERT",
        "EXISTS (SELECT 1 FROM keyvault_operatorchange c WHERE c.change_id = NEW.subject "
        "AND replace(NEW.excluded_persons, c.operator_person, '') = NEW.excluded_persons)",
        "the person whose operator was changed does not review the change",
    ),
    WriteGuard(
        "breakglass_claimed",
        "keyvault_breakglass",
        "INSERT",
        "NEW.is_claimed <> (NEW.host_user <> '')",
        "a break-glass action on a command line is recorded as claimed",
    ),
    WriteGuard(
        "breakglass_claim_alone",
        "keyvault_breakglass",
        "INSERT",
        f"NEW.is_claimed AND {IS_APPROVAL} AND EXISTS (SELECT 1 FROM keyvault_issuancerequest r "  # noqa: S608  our own names only
        "WHERE r.issuance_request_id = NEW.subject AND r.approvals_needed > 1)",
        CLAIM_OF_SEVERAL,
    ),
    WriteGuard(
        "breakglass_not_reviewed_yet",
        "keyvault_breakglass",
        "INSERT",
        "NEW.reviewed_at IS NOT NULL OR NEW.reviewer_id IS NOT NULL OR NEW.reviewer_person IS NOT NULL "
        "OR NEW.first_reviewer_id IS NOT NULL OR NEW.first_reviewer_person IS NOT NULL",
        "a break-glass action is recorded before it is reviewed",
    ),
    WriteGuard(
        "breakglass_excluded_stay",
        "keyvault_breakglass",
        "UPDATE",
        "substr(NEW.excluded_persons, 1, length(OLD.excluded_persons)) <> OLD.excluded_persons",
        "a person who must not review a break-glass action stays excluded",
    ),
    WriteGuard(
        "breakglass_second_person",
        "keyvault_breakglass",
        "UPDATE",
        f"({_is_excluded('reviewer_person')}) OR ({_is_excluded('first_reviewer_person')})",
        "a break-glass action is reviewed by neither its operator, the requester nor a collector",
    ),
    WriteGuard(
        "breakglass_claim_reviewed",
        "keyvault_breakglass",
        "UPDATE",
        "NEW.is_claimed AND coalesce(NEW.first_reviewer_person, NEW.reviewer_person) = NEW.reviewer_person",
        "a claimed action is reviewed by two persons",
    ),
    *(
        WriteGuard(
            f"breakglass_{reviewer}_is_person",
            "keyvault_breakglass",
            "UPDATE",
            f"NEW.{reviewer}_person IS NOT NULL AND NOT EXISTS (SELECT 1 FROM keyvault_operator o "  # noqa: S608  our own names only
            f"WHERE o.id = NEW.{reviewer}_id AND o.person = NEW.{reviewer}_person)",
            "a review names the person of the reviewing operator",
        )
        for reviewer in ("reviewer", "first_reviewer")
    ),
    SetOnce(
        "breakglass_first_review_stays",
        "keyvault_breakglass",
        "first_reviewer_person",
        "a review stays recorded",
    ),
)

GUARDS: tuple[TriggerRule, ...] = (*AUDIT_CHAINS, *MERCHANTS, *KEYS, *RECIPIENTS, *OPERATORS, *BREAK_GLASS)
