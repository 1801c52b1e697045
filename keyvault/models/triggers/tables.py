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

APPEND_ONLY = (
    AppendOnly("keyvault_auditentry", (("id",), ("chain_id", "sequence"))),
    AppendOnly("keyvault_auditcheckpoint", (("id",), ("scope", "number"))),
    AppendOnly("keyvault_installation", (("id",),)),
    AppendOnly("keyvault_change", (("sequence",),)),
    AppendOnly("keyvault_issuanceapproval", (("id",), ("request_id", "person"))),
)

KEPT = (
    Kept("keyvault_merchant", (("merchant_id",),)),
    Kept("keyvault_account", (("id",), ("merchant_id", "environment"))),
    Kept("keyvault_credential", (("credential_id",),)),
    Kept("keyvault_key", (("key_id",),)),
    Kept("keyvault_issuancerequest", (("issuance_request_id",),)),
    Kept("keyvault_breakglass", (("act_id",),)),
    Kept("keyvault_operator", (("id",), ("username",))),
    Kept("keyvault_servicetoken", (("token_id",),)),
    Kept("keyvault_customertoken", (("token_id",),)),
    Kept("keyvault_order", (("order_token",),)),
    Kept("keyvault_catalogendpoint", (("name",),)),
    Kept("keyvault_limitoverride", (("id",), ("account_id", "endpoint"))),
    Kept("keyvault_notice", (("notice_id",),)),
    Kept("keyvault_webhookendpoint", (("id",), ("account_id", "url"))),
    Kept("keyvault_providerconnection", (("id",),)),
    Kept("keyvault_pepperversion", (("id",), ("pepper_set", "number"))),
)

FROZEN = (
    Frozen(
        "keyvault_merchant",
        ("merchant_id",),
        "a merchant that has left does not come back",
        refused_if="(OLD.status = 'offboarded' AND NEW.status <> 'offboarded')",
        name="merchant_stays_gone",
    ),
    Frozen(
        "keyvault_account",
        ("id", "environment", "merchant_id"),
        "an account never changes its merchant or environment",
    ),
    Frozen("keyvault_operator", ("id", "username", "person"), "a log-in never passes to another person"),
    Frozen(
        "keyvault_credential",
        ("credential_id", "account_id", "kind", "delivery"),
        "a credential never changes its account, its kind or its delivery",
    ),
    Frozen(
        "keyvault_key",
        ("key_id", "credential_id", "created_at", as_text("expires_at")),
        "a key keeps its credential and its expiry",
    ),
    Frozen(
        "keyvault_breakglass",
        ("act_id", "event", "subject", "person", "requester_person"),
        "an act under break-glass stays as it was noted",
    ),
    Frozen(
        "keyvault_servicetoken",
        ("token_id", "creator_person"),
        "a token keeps its name, its lineage and who answers for it, and never lives longer",
        refused_if="NEW.expires_at > OLD.expires_at OR (OLD.lineage <> '' AND NEW.lineage <> OLD.lineage)",
    ),
    Frozen(
        "keyvault_customertoken",
        ("token_id", "account_id", "customer_id", "expires_at"),
        "a token keeps its account, its customer and its expiry",
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
        "an order is not changed afterwards",
    ),
    Frozen("keyvault_catalogendpoint", ("name",), "an endpoint keeps its name"),
    Frozen(
        "keyvault_limitoverride",
        ("id", "coalesce({row}.account_id, 0)", "environment", "endpoint"),
        "a limit stays with its account and endpoint",
    ),
    Frozen(
        "keyvault_notice",
        (
            "notice_id",
            "coalesce({row}.account_id, 0)",
            "kind",
            "subject",
            "CAST({row}.payload AS TEXT)",
            "created_at",
        ),
        "what was announced stays as it was, and is seen once",
        refused_if="OLD.seen_at IS NOT NULL",
    ),
    Frozen("keyvault_webhookendpoint", ("id", "account_id", "url"), "an endpoint keeps its account and its address"),
    Frozen(
        "keyvault_providerconnection",
        ("id", "account_id", "provider", "backend_path"),
        "a connection keeps its account, its provider and its place, and does not come back once removed",
        refused_if="(OLD.removed_at IS NOT NULL AND NEW.removed_at IS NULL)",
    ),
)

STATES = (
    FinalStates("key_no_revival", "keyvault_key", DEAD_KEY_STATES, "a dead key never verifies again", may_move=True),
    InitialState("key_never_pre_active_again", "keyvault_key", "pre_activation", "activation is not undone"),
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
            "kind",
            "label",
            "delivery",
            "recipient_public_key",
            "expires_in_days",
            "requested_via_id",
        ),
    ),
)
