"""Keyvault's tables: which are append-only, which rows are kept, which columns and states are final."""

from keyvault.models.triggers.rules import (
    AppendOnly,
    FinalStates,
    FourEyes,
    Frozen,
    InitialState,
    Kept,
    SetOnce,
    as_text,
)

DEAD_KEY_STATES = ("deactivated", "compromised", "destroyed")

CHANGE_IS_CONFIRMED = """
    EXISTS (SELECT 1 FROM keyvault_change later WHERE later.sequence > OLD.sequence)
    AND NOT EXISTS (
        SELECT 1 FROM keyvault_verifier v WHERE v.stopped_at IS NULL AND v.confirmed_sequence < OLD.sequence
    )
"""
"""A change that followers no longer need: every live verifier has applied it, and it is not the newest."""

APPEND_ONLY = (
    AppendOnly("keyvault_auditentry", (("id",), ("chain_id", "sequence"))),
    AppendOnly("keyvault_auditcheckpoint", (("id",), ("scope", "number"))),
    AppendOnly("keyvault_change", (("sequence",),), expired=CHANGE_IS_CONFIRMED),
    AppendOnly("keyvault_issuanceapproval", (("id",), ("request_id", "person"))),
    AppendOnly("keyvault_recipientkeyapproval", (("id",), ("recipient_key_id", "person"))),
    AppendOnly("keyvault_operatorchangeapproval", (("id",), ("change_id", "person"))),
)

KEPT = (
    Kept("keyvault_merchant", (("merchant_id",),)),
    Kept("keyvault_account", (("id",), ("merchant_id", "environment"))),
    Kept("keyvault_credential", (("credential_id",),)),
    Kept("keyvault_key", (("key_id",),)),
    Kept("keyvault_issuancerequest", (("issuance_request_id",),)),
    Kept("keyvault_recipientkey", (("recipient_key_id",),)),
    Kept("keyvault_breakglass", (("act_id",),)),
    Kept("keyvault_operator", (("id",), ("username",), ("invitation_digest",))),
    Kept("keyvault_operatorchange", (("change_id",),)),
    Kept("keyvault_servicetoken", (("token_id",),)),
    Kept("keyvault_customertoken", (("token_id",),), expired="OLD.expires_at < CURRENT_TIMESTAMP"),
    Kept("keyvault_order", (("order_token",),)),
    Kept("keyvault_catalogendpoint", (("name",),)),
    Kept("keyvault_limitoverride", (("id",), ("account_id", "endpoint"))),
    Kept("keyvault_notice", (("notice_id",),), expired="NOT OLD.is_alarm OR OLD.seen_at IS NOT NULL"),
    Kept("keyvault_webhookendpoint", (("id",), ("account_id", "url"))),
    Kept("keyvault_providerconnection", (("id",),)),
    Kept("keyvault_installation", (("id",),)),
    Kept("keyvault_pepperversion", (("id",), ("pepper_set", "number"))),
)

FROZEN = (
    Frozen(
        "keyvault_merchant",
        ("merchant_id",),
        "a merchant keeps its id and does not return from offboarding",
        refused_if="(OLD.status = 'offboarded' AND NEW.status <> 'offboarded')",
        name="merchant_stays_gone",
    ),
    Frozen(
        "keyvault_account",
        ("id", "environment", "merchant_id"),
        "an account keeps its merchant and environment",
    ),
    Frozen(
        "keyvault_installation", ("id", "installation_id", "created_at"), "a database keeps the id of its installation"
    ),
    Frozen(
        "keyvault_operator",
        ("id", "username"),
        "an operator keeps the user name and, once it has a scope, the person",
        refused_if=f"({as_text('scope_merchants').format(row='OLD')} <> '[]' AND (NEW.person <> OLD.person "
        f"OR {as_text('scope_merchants').format(row='NEW')} = '[]'))",
    ),
    Frozen(
        "keyvault_credential",
        ("credential_id", "account_id", "account_environment", "kind", "delivery"),
        "a credential keeps its account, kind and delivery",
    ),
    Frozen(
        "keyvault_key",
        ("key_id", "credential_id", "account_environment", "created_at", as_text("expires_at")),
        "a key keeps its credential and expiry",
    ),
    Frozen(
        "keyvault_recipientkey",
        (
            "recipient_key_id",
            "credential_id",
            "account_id",
            "account_environment",
            "key_id",
            "public_key",
            "approvals_needed",
            "created_at",
        ),
        "a recipient key keeps its credential and public key, and applies earlier only once enough persons approve it",
        refused_if="(NEW.applies_at <> OLD.applies_at AND (NEW.applies_at > OLD.applies_at OR NEW.approvals_needed > "
        "(SELECT count(*) FROM keyvault_recipientkeyapproval v WHERE v.recipient_key_id = NEW.recipient_key_id)))",
    ),
    Frozen(
        "keyvault_breakglass",
        ("act_id", "event", "subject", "coalesce({row}.account_id, 0)", "person", "requester_person", "is_claimed"),
        "the record of a break-glass action is immutable, and is reviewed only once",
        refused_if="OLD.reviewed_at IS NOT NULL",
    ),
    Frozen(
        "keyvault_servicetoken",
        ("token_id", "creator_person", "is_creator_claimed"),
        "a service token keeps its id, lineage and responsible person, and its expiry is never extended",
        refused_if="NEW.expires_at > OLD.expires_at OR (OLD.lineage <> '' AND NEW.lineage <> OLD.lineage)",
    ),
    Frozen(
        "keyvault_customertoken",
        ("token_id", "account_id", "customer_id", "expires_at"),
        "a customer token keeps its account, customer and expiry",
    ),
    Frozen(
        "keyvault_order",
        (
            "order_token",
            "account_id",
            "amount_minor",
            "currency",
            "coalesce({row}.customer_id, '')",
            "created_at",
        ),
        "an order is immutable",
    ),
    Frozen("keyvault_catalogendpoint", ("name",), "a catalog endpoint keeps its name"),
    Frozen(
        "keyvault_limitoverride",
        ("id", "coalesce({row}.account_id, 0)", "environment", "endpoint"),
        "a limit override keeps its account, environment and endpoint",
    ),
    Frozen(
        "keyvault_notice",
        (
            "notice_id",
            "coalesce({row}.account_id, 0)",
            "coalesce({row}.account_environment, '')",
            "kind",
            "subject",
            "CAST({row}.payload AS TEXT)",
            "created_at",
        ),
        "a notice is immutable, and is marked as seen only once",
        refused_if="OLD.seen_at IS NOT NULL",
    ),
    Frozen("keyvault_webhookendpoint", ("id", "account_id", "url"), "a webhook endpoint keeps its account and URL"),
    Frozen(
        "keyvault_providerconnection",
        ("id", "account_id", "provider", "backend_path"),
        "a connection keeps its account, provider and path, and does not return after removal",
        refused_if="(OLD.removed_at IS NOT NULL AND NEW.removed_at IS NULL)",
    ),
)

STATES = (
    FinalStates(
        "key_no_revival", "keyvault_key", DEAD_KEY_STATES, "a terminated key never verifies again", may_move=True
    ),
    InitialState(
        "key_never_pre_active_again", "keyvault_key", "pre_activation", "a key never returns to pre_activation"
    ),
    FinalStates(
        "operatorchange_closed",
        "keyvault_operatorchange",
        ("applied", "rejected", "withdrawn"),
        "a decided change of an operator stays decided",
    ),
    SetOnce(
        "recipientkey_no_revival",
        "keyvault_recipientkey",
        "withdrawn_at",
        "a withdrawn recipient key stays withdrawn",
    ),
    SetOnce("servicetoken_no_revival", "keyvault_servicetoken", "revoked_at", "a revoked token stays revoked"),
    SetOnce("customertoken_no_revival", "keyvault_customertoken", "revoked_at", "a revoked token stays revoked"),
)

FOUR_EYES = (
    FourEyes(
        table="keyvault_issuancerequest",
        key="issuance_request_id",
        approval="keyvault_issuanceapproval",
        foreign_key="request_id",
        approved="NEW.state IN ('approved', 'issued', 'collected')",
        environment="(SELECT a.environment FROM keyvault_account a WHERE a.id = NEW.account_id)",
        frozen=(
            "account_id",
            "account_environment",
            "kind",
            "label",
            "delivery",
            "recipient_public_key",
            "expires_in_days",
            "requested_via_id",
        ),
    ),
    FourEyes(
        table="keyvault_operatorchange",
        key="change_id",
        approval="keyvault_operatorchangeapproval",
        foreign_key="change_id",
        approved="NEW.state = 'applied'",
        environment="'production'",
        frozen=(
            "operator_id",
            "operator_person",
            "kind",
            "roles_before",
            "roles",
            "scope_before",
            "scope",
            "why",
            "approval_expires_at",
        ),
        by_services=False,
    ),
)
