"""Keyvault's guards across rows and tables, by name."""

from keyvault.models.triggers.rules import OnWrite, WriteGuard

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
        "NEW.name <> OLD.name OR NEW.sequence <> OLD.sequence + 1 OR NEW.newest_at < OLD.newest_at",
        "an audit chain advances by exactly one entry, and never back in time",
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

BREAK_GLASS = (
    WriteGuard(
        "breakglass_requester",
        "keyvault_breakglass",
        "INSERT",
        "NEW.requester_person = '' OR EXISTS (SELECT 1 FROM keyvault_issuancerequest r "
        "WHERE r.issuance_request_id = NEW.subject AND r.requester_person <> NEW.requester_person)",
        "a break-glass action names the person who requested its subject",
    ),
    WriteGuard(
        "breakglass_not_reviewed_yet",
        "keyvault_breakglass",
        "INSERT",
        "NEW.reviewed_at IS NOT NULL OR NEW.reviewer_id IS NOT NULL OR NEW.reviewer_person IS NOT NULL",
        "a break-glass action is recorded before it is reviewed",
    ),
    WriteGuard(
        "breakglass_second_person",
        "keyvault_breakglass",
        "UPDATE",
        "NEW.reviewer_person IN (NEW.person, NEW.requester_person)",
        "a break-glass action is reviewed by neither its operator nor the requester",
    ),
    WriteGuard(
        "breakglass_reviewer_is_person",
        "keyvault_breakglass",
        "UPDATE",
        "NEW.reviewer_person IS NOT NULL AND NOT EXISTS (SELECT 1 FROM keyvault_operator o "
        "WHERE o.id = NEW.reviewer_id AND o.person = NEW.reviewer_person)",
        "a review names the person of the reviewing operator",
    ),
)

GUARDS = (*AUDIT_CHAINS, *MERCHANTS, *KEYS, *BREAK_GLASS)
