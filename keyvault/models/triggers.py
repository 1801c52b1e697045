"""Rules that a CHECK cannot express, as triggers on both databases: append-only tables, four eyes, final states.

Each rule is a condition under which a write is refused. The triggers are created after every `migrate`, since SQLite
rebuilds a table, and drops its triggers, when a column changes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper

_APPEND_ONLY = (
    "keyvault_auditentry",
    "keyvault_auditcheckpoint",
    "keyvault_installation",
    "keyvault_change",
    "keyvault_issuanceapproval",
    "rotation_rotationapproval",
    "rotation_campaignapproval",
    "rotation_evidence",
)
"""Tables whose rows never change."""

_KEPT: dict[str, tuple[tuple[str, ...], ...]] = {
    "keyvault_merchant": (("merchant_id",),),
    "keyvault_account": (("id",), ("merchant_id", "environment")),
    "keyvault_credential": (("credential_id",),),
    "keyvault_key": (("key_id",),),
    "keyvault_issuancerequest": (("request_id",),),
    "keyvault_breakglass": (("act_id",),),
    "keyvault_operator": (("id",), ("username",)),
    "keyvault_servicetoken": (("token_id",),),
    "keyvault_customertoken": (("token_id",),),
    "keyvault_order": (("order_token",),),
    "keyvault_catalogendpoint": (("name",),),
    "keyvault_limitoverride": (("id",), ("account_id", "endpoint")),
    "keyvault_notice": (("notice_id",),),
    "keyvault_webhookendpoint": (("id",), ("account_id", "url")),
    "keyvault_providerconnection": (("id",),),
    "keyvault_pepperversion": (("id",), ("pepper_set", "number")),
    "rotation_rotation": (("rotation_id",),),
    "rotation_retirement": (("id",),),
    "rotation_campaign": (("campaign_id",),),
    "rotation_campaignmember": (("id",), ("campaign_id", "credential_id"), ("rotation_id",)),
}
"""Tables whose rows are never deleted, with each set of unique columns.

Replacing a row by any of these sets (SQLite's REPLACE) is refused like the update that it would be. An update of such a
column, which SQLite's UPDATE OR REPLACE could use to delete another row, is refused by the table's `…_stays`.
"""

_UNTRUNCATED = (*_APPEND_ONLY, "keyvault_auditchain", *_KEPT)

_TERMINAL = "('deactivated', 'compromised', 'destroyed')"
_CLOSED = "('cancelled', 'completed', 'expired', 'rejected', 'rolled_back')"
_APPROVED = "('approved', 'issued', 'collected')"


@dataclass(frozen=True, slots=True)
class WriteGuard:
    """Refuses an operation `when` (INSERT, UPDATE or DELETE) on a row of `table` for which `condition` holds."""

    name: str
    table: str
    when: str
    condition: str
    message: str


def _conditions() -> Iterator[WriteGuard]:
    for table in _APPEND_ONLY:
        short = table.split("_", 1)[1]
        yield WriteGuard(f"{short}_no_update", table, "UPDATE", "1 = 1", f"{short} is append-only")
        yield WriteGuard(f"{short}_no_delete", table, "DELETE", "1 = 1", f"{short} is append-only")
    # SQLite's REPLACE deletes the old row without its delete trigger, so an existing number is refused first.
    yield WriteGuard(
        "auditentry_no_replace",
        "keyvault_auditentry",
        "INSERT",
        "EXISTS (SELECT 1 FROM keyvault_auditentry e WHERE e.id = NEW.id "
        "OR (e.chain_id = NEW.chain_id AND e.sequence = NEW.sequence))",
        "auditentry is append-only",
    )
    yield WriteGuard(
        "auditcheckpoint_no_replace",
        "keyvault_auditcheckpoint",
        "INSERT",
        "EXISTS (SELECT 1 FROM keyvault_auditcheckpoint c WHERE c.id = NEW.id "
        "OR (c.scope = NEW.scope AND c.number = NEW.number))",
        "auditcheckpoint is append-only",
    )
    yield WriteGuard(
        "installation_no_replace",
        "keyvault_installation",
        "INSERT",
        "EXISTS (SELECT 1 FROM keyvault_installation i WHERE i.id = NEW.id)",
        "installation is append-only",
    )
    yield WriteGuard(
        "change_no_replace",
        "keyvault_change",
        "INSERT",
        "EXISTS (SELECT 1 FROM keyvault_change c WHERE c.sequence = NEW.sequence)",
        "change is append-only",
    )
    for approval, request in (
        ("keyvault_issuanceapproval", "request_id"),
        ("rotation_rotationapproval", "rotation_id"),
        ("rotation_campaignapproval", "campaign_id"),
    ):
        short = approval.split("_", 1)[1]
        yield WriteGuard(
            f"{short}_no_replace",
            approval,
            "INSERT",
            f"EXISTS (SELECT 1 FROM {approval} v WHERE v.id = NEW.id "  # noqa: S608  our own names only
            f"OR (v.{request} = NEW.{request} AND v.person = NEW.person))",
            f"{short} is append-only",
        )
    yield WriteGuard(
        "evidence_no_replace",
        "rotation_evidence",
        "INSERT",
        "EXISTS (SELECT 1 FROM rotation_evidence e WHERE e.evidence_id = NEW.evidence_id)",
        "evidence is append-only",
    )
    for table, unique in _KEPT.items():
        short = table.split("_", 1)[1]
        yield WriteGuard(f"{short}_no_delete", table, "DELETE", "1 = 1", f"{short} rows are never deleted")
        yield WriteGuard(
            f"{short}_no_replace",
            table,
            "INSERT",
            f"EXISTS (SELECT 1 FROM {table} t WHERE {_match_any(unique)})",  # noqa: S608  our own names only
            f"{short} rows are never replaced",
        )
    for when, row in (("INSERT", "NEW"), ("UPDATE", "OLD")):
        # Unique among open rows: REPLACE would delete the existing one.
        yield WriteGuard(
            f"rotation_one_open_{when.lower()}",
            "rotation_rotation",
            when,
            f"NEW.state NOT IN {_CLOSED} AND EXISTS (SELECT 1 FROM rotation_rotation r "  # noqa: S608  our own names only
            f"WHERE r.credential_id = NEW.credential_id AND r.rotation_id <> {row}.rotation_id "
            f"AND r.state NOT IN {_CLOSED})",
            "a credential has one open rotation",
        )
    yield WriteGuard("auditchain_no_delete", "keyvault_auditchain", "DELETE", "1 = 1", "a chain is never deleted")
    yield WriteGuard(
        "auditchain_no_replace",
        "keyvault_auditchain",
        "INSERT",
        "EXISTS (SELECT 1 FROM keyvault_auditchain c WHERE c.name = NEW.name)",
        "a chain is opened once",
    )
    yield WriteGuard(
        "auditchain_forward",
        "keyvault_auditchain",
        "UPDATE",
        "NEW.name <> OLD.name OR NEW.sequence <> OLD.sequence + 1",
        "a chain moves one entry at a time",
    )
    yield WriteGuard(
        "providerconnection_stays",
        "keyvault_providerconnection",
        "UPDATE",
        "NEW.id <> OLD.id OR NEW.account_id <> OLD.account_id OR NEW.provider <> OLD.provider "
        "OR NEW.backend_path <> OLD.backend_path OR (OLD.removed_at IS NOT NULL AND NEW.removed_at IS NULL)",
        "a connection keeps its account, its provider and its place, and does not come back once removed",
    )
    yield WriteGuard(
        "connection_mode_insert",
        "keyvault_providerconnection",
        "INSERT",
        _WRONG_MODE,
        "test mode is for sandbox, live mode for production",
    )
    yield WriteGuard(
        "connection_mode_update",
        "keyvault_providerconnection",
        "UPDATE",
        _WRONG_MODE,
        "test mode is for sandbox, live mode for production",
    )
    # Unique among rows that are not removed: REPLACE would delete the existing one.
    yield WriteGuard(
        "providerconnection_one",
        "keyvault_providerconnection",
        "INSERT",
        "NEW.removed_at IS NULL AND EXISTS (SELECT 1 FROM keyvault_providerconnection c WHERE c.removed_at IS NULL "
        "AND c.account_id = NEW.account_id AND c.provider = NEW.provider)",
        "an account has one connection to a provider",
    )
    yield WriteGuard(
        "merchant_stays_gone",
        "keyvault_merchant",
        "UPDATE",
        "NEW.merchant_id <> OLD.merchant_id OR (OLD.status = 'offboarded' AND NEW.status <> 'offboarded')",
        "a merchant that has left does not come back",
    )
    for when in ("INSERT", "UPDATE"):
        yield WriteGuard(
            f"key_of_a_merchant_{when.lower()}",
            "keyvault_key",
            when,
            "NEW.state = 'active' AND EXISTS (SELECT 1 FROM keyvault_credential c "  # noqa: S608  our own names only
            "JOIN keyvault_account a ON a.id = c.account_id JOIN keyvault_merchant m ON m.merchant_id = a.merchant_id "
            "WHERE c.credential_id = NEW.credential_id AND m.status = 'offboarded')"
            + ("" if when == "INSERT" else " AND OLD.state <> 'active'"),
            "a merchant that has left gets no keys",
        )
    yield WriteGuard(
        "account_stays",
        "keyvault_account",
        "UPDATE",
        "NEW.id <> OLD.id OR NEW.environment <> OLD.environment OR NEW.merchant_id <> OLD.merchant_id",
        "an account never changes its merchant or environment",
    )
    yield WriteGuard(
        "operator_stays",
        "keyvault_operator",
        "UPDATE",
        "NEW.id <> OLD.id OR NEW.username <> OLD.username OR NEW.person <> OLD.person",
        "a log-in never passes to another person",
    )
    yield WriteGuard(
        "credential_stays",
        "keyvault_credential",
        "UPDATE",
        "NEW.credential_id <> OLD.credential_id OR NEW.account_id <> OLD.account_id OR NEW.kind <> OLD.kind "
        "OR NEW.delivery <> OLD.delivery",
        "a credential never changes its account, its kind or its delivery",
    )
    yield WriteGuard(
        "breakglass_stays",
        "keyvault_breakglass",
        "UPDATE",
        "NEW.act_id <> OLD.act_id OR NEW.event <> OLD.event OR NEW.subject <> OLD.subject OR NEW.person <> OLD.person "
        # A migration sets the requester of rows of earlier releases once.
        "OR (NEW.requester_person <> OLD.requester_person AND OLD.requester_person <> '')",
        "an act under break-glass stays as it was noted",
    )
    yield WriteGuard(
        "breakglass_requester",
        "keyvault_breakglass",
        "INSERT",
        "NEW.requester_person = '' OR EXISTS (SELECT 1 FROM keyvault_issuancerequest r "
        "WHERE r.request_id = NEW.subject AND r.requester_person <> NEW.requester_person)",
        "an act under break-glass names who asked for it",
    )
    yield WriteGuard(
        "breakglass_rotation_requester",
        "keyvault_breakglass",
        "INSERT",
        "(NEW.event <> 'rotation.retirement_approved' AND EXISTS (SELECT 1 FROM rotation_rotation r "
        "WHERE r.rotation_id = NEW.subject AND r.requester_person <> NEW.requester_person)) "
        "OR (NEW.event = 'rotation.retirement_approved' AND NOT EXISTS (SELECT 1 FROM rotation_retirement t "
        "WHERE t.rotation_id = NEW.subject AND t.requester_person = NEW.requester_person)) "
        "OR EXISTS (SELECT 1 FROM rotation_campaign c "
        "WHERE c.campaign_id = NEW.subject AND c.requester_person <> NEW.requester_person)",
        "an act about a rotation or a campaign names who asked for that",
    )
    yield WriteGuard(
        "breakglass_not_reviewed_yet",
        "keyvault_breakglass",
        "INSERT",
        "NEW.reviewed_at IS NOT NULL OR NEW.reviewer_id IS NOT NULL OR NEW.reviewer_person IS NOT NULL",
        "an act under break-glass is noted before it is reviewed",
    )
    yield WriteGuard(
        "breakglass_second_person",
        "keyvault_breakglass",
        "UPDATE",
        "NEW.reviewer_person IN (NEW.person, NEW.requester_person)",
        "whoever did or asked for an act under break-glass does not review it",
    )
    yield WriteGuard(
        "breakglass_reviewer_is_person",
        "keyvault_breakglass",
        "UPDATE",
        "NEW.reviewer_person IS NOT NULL AND NOT EXISTS (SELECT 1 FROM keyvault_operator o "
        "WHERE o.id = NEW.reviewer_id AND o.person = NEW.reviewer_person)",
        "a review is in the name of its reviewer",
    )
    yield WriteGuard(
        "servicetoken_no_revival",
        "keyvault_servicetoken",
        "UPDATE",
        "OLD.revoked_at IS NOT NULL AND (NEW.revoked_at IS NULL OR NEW.revoked_at <> OLD.revoked_at)",
        "a revoked token stays revoked",
    )
    yield WriteGuard(
        "servicetoken_stays",
        "keyvault_servicetoken",
        "UPDATE",
        "NEW.token_id <> OLD.token_id OR NEW.creator_person <> OLD.creator_person OR NEW.expires_at > OLD.expires_at "
        "OR (OLD.lineage <> '' AND NEW.lineage <> OLD.lineage)",
        "a token keeps its name, its lineage and who answers for it, and never lives longer",
    )
    yield WriteGuard(
        "customertoken_no_revival",
        "keyvault_customertoken",
        "UPDATE",
        "OLD.revoked_at IS NOT NULL AND (NEW.revoked_at IS NULL OR NEW.revoked_at <> OLD.revoked_at)",
        "a revoked token stays revoked",
    )
    yield WriteGuard(
        "customertoken_stays",
        "keyvault_customertoken",
        "UPDATE",
        "NEW.token_id <> OLD.token_id OR NEW.account_id <> OLD.account_id OR NEW.customer_id <> OLD.customer_id "
        "OR NEW.expires_at <> OLD.expires_at",
        "a token keeps its account, its customer and its expiry",
    )
    yield WriteGuard(
        "order_stays",
        "keyvault_order",
        "UPDATE",
        "NEW.order_token <> OLD.order_token OR NEW.account_id <> OLD.account_id "
        "OR NEW.amount_minor <> OLD.amount_minor OR NEW.currency <> OLD.currency "
        "OR coalesce(NEW.customer_id, '') <> coalesce(OLD.customer_id, '') OR NEW.created_at <> OLD.created_at",
        "an order is not changed afterwards",
    )
    yield WriteGuard(
        "catalogendpoint_stays",
        "keyvault_catalogendpoint",
        "UPDATE",
        "NEW.name <> OLD.name",
        "an endpoint keeps its name",
    )
    # Unique among rows without an account: REPLACE would delete the existing one.
    yield WriteGuard(
        "limitoverride_one_of_endpoint",
        "keyvault_limitoverride",
        "INSERT",
        "NEW.account_id IS NULL AND EXISTS (SELECT 1 FROM keyvault_limitoverride o WHERE o.account_id IS NULL "
        "AND o.environment = NEW.environment AND o.endpoint = NEW.endpoint)",
        "an endpoint has one limit in an environment",
    )
    yield WriteGuard(
        "limitoverride_stays",
        "keyvault_limitoverride",
        "UPDATE",
        "NEW.id <> OLD.id OR coalesce(NEW.account_id, 0) <> coalesce(OLD.account_id, 0) "
        "OR NEW.environment <> OLD.environment OR NEW.endpoint <> OLD.endpoint",
        "a limit stays with its account and endpoint",
    )
    yield WriteGuard(
        "key_no_revival",
        "keyvault_key",
        "UPDATE",
        f"OLD.state IN {_TERMINAL} AND NEW.state NOT IN {_TERMINAL}",
        "a dead key never verifies again",
    )
    yield WriteGuard(
        "key_never_pre_active_again",
        "keyvault_key",
        "UPDATE",
        "OLD.state <> 'pre_activation' AND NEW.state = 'pre_activation'",
        "activation is not undone",
    )
    yield WriteGuard(
        "key_stays",
        "keyvault_key",
        "UPDATE",
        "NEW.key_id <> OLD.key_id OR NEW.credential_id <> OLD.credential_id OR NEW.created_at <> OLD.created_at "
        "OR coalesce(CAST(NEW.expires_at AS TEXT), '') <> coalesce(CAST(OLD.expires_at AS TEXT), '')",
        "a key keeps its credential and its expiry",
    )
    yield from _peppers()
    for when in ("INSERT", "UPDATE"):
        yield WriteGuard(
            f"key_two_active_{when.lower()}",
            "keyvault_key",
            when,
            "NEW.state = 'active' AND (SELECT count(*) FROM keyvault_key k WHERE k.credential_id = NEW.credential_id "
            "AND k.state = 'active' AND k.key_id <> NEW.key_id) >= 2",
            "at most two keys of a credential verify",
        )
    yield from _four_eyes(
        request="keyvault_issuancerequest",
        key="request_id",
        approval="keyvault_issuanceapproval",
        foreign_key="request_id",
        approved=f"NEW.state IN {_APPROVED}",
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
    )
    yield WriteGuard(
        "notice_stays",
        "keyvault_notice",
        "UPDATE",
        "NEW.notice_id <> OLD.notice_id OR COALESCE(NEW.account_id, 0) <> COALESCE(OLD.account_id, 0) "
        "OR NEW.kind <> OLD.kind "
        "OR NEW.subject <> OLD.subject OR CAST(NEW.payload AS TEXT) <> CAST(OLD.payload AS TEXT) "
        "OR NEW.created_at <> OLD.created_at OR OLD.seen_at IS NOT NULL",
        "what was announced stays as it was, and is seen once",
    )
    yield WriteGuard(
        "webhookendpoint_stays",
        "keyvault_webhookendpoint",
        "UPDATE",
        "NEW.id <> OLD.id OR NEW.account_id <> OLD.account_id OR NEW.url <> OLD.url",
        "an endpoint keeps its account and its address",
    )
    yield WriteGuard(
        "rotation_bypass_stays",
        "rotation_rotation",
        "UPDATE",
        "OLD.bypassed_at IS NOT NULL AND NEW.bypassed_at IS NULL",
        "a bypass stays in sight",
    )
    yield WriteGuard(
        "rotation_retirement_approved",
        "rotation_rotation",
        "UPDATE",
        "coalesce(CAST(NEW.retire_at AS TEXT), '') <> coalesce(CAST(OLD.retire_at AS TEXT), '') "
        "AND NOT EXISTS (SELECT 1 FROM rotation_retirement t WHERE t.rotation_id = NEW.rotation_id "
        "AND t.retire_at = NEW.retire_at AND t.approved_at IS NOT NULL "
        "AND (t.approver_person <> '' OR EXISTS (SELECT 1 FROM keyvault_credential c "
        "JOIN keyvault_account a ON a.id = c.account_id "
        "WHERE c.credential_id = NEW.credential_id AND a.environment = 'sandbox')))",
        "a date is approved before it counts",
    )
    yield WriteGuard(
        "retirement_stays",
        "rotation_retirement",
        "UPDATE",
        "NEW.id <> OLD.id OR NEW.rotation_id <> OLD.rotation_id OR NEW.retire_at <> OLD.retire_at "
        "OR NEW.requester_person <> OLD.requester_person OR OLD.approved_at IS NOT NULL",
        "a date is approved as it was asked, and once",
    )
    yield from _four_eyes(
        request="rotation_rotation",
        key="rotation_id",
        approval="rotation_rotationapproval",
        foreign_key="rotation_id",
        approved="NEW.state NOT IN ('requested', 'awaiting_approval', 'emergency', 'rejected', 'expired', 'cancelled') "
        "AND NOT (NEW.bypassed_at IS NOT NULL AND EXISTS (SELECT 1 FROM keyvault_breakglass g "
        "WHERE g.event = 'rotation.bypassed' AND g.subject = NEW.rotation_id))",
        environment="(SELECT a.environment FROM keyvault_account a JOIN keyvault_credential c "
        "ON c.account_id = a.id WHERE c.credential_id = NEW.credential_id)",
        frozen=("credential_id", "predecessor_id", "plan"),
    )
    yield from _four_eyes(
        request="rotation_campaign",
        key="campaign_id",
        approval="rotation_campaignapproval",
        foreign_key="campaign_id",
        approved="NEW.state NOT IN ('awaiting_approval', 'rejected', 'expired', 'cancelled')",
        environment="NEW.environment",
        frozen=("environment", "selection", "wish", "pace"),
        by_services=False,
    )
    yield WriteGuard(
        "campaign_no_reopening",
        "rotation_campaign",
        "UPDATE",
        "OLD.state IN ('completed', 'rejected', 'expired', 'cancelled') AND NEW.state <> OLD.state",
        "a campaign that is closed stays closed",
    )
    yield WriteGuard(
        "campaignmember_as_asked",
        "rotation_campaignmember",
        "INSERT",
        "NEW.rotation_id IS NOT NULL OR NOT EXISTS (SELECT 1 FROM rotation_campaign c "
        "WHERE c.campaign_id = NEW.campaign_id AND c.state = 'awaiting_approval') "
        "OR EXISTS (SELECT 1 FROM rotation_campaignapproval v WHERE v.campaign_id = NEW.campaign_id)",
        "a campaign is about what was selected when it was asked for",
    )
    yield WriteGuard(
        "campaignmember_stays",
        "rotation_campaignmember",
        "UPDATE",
        "NEW.id <> OLD.id OR NEW.campaign_id <> OLD.campaign_id OR NEW.credential_id <> OLD.credential_id "
        "OR (OLD.rotation_id IS NOT NULL AND coalesce(NEW.rotation_id, '') <> OLD.rotation_id)",
        "a member stays with its campaign, and gets one rotation",
    )
    yield WriteGuard(
        "rotation_of_campaign",
        "rotation_rotation",
        "INSERT",
        "NEW.campaign_id IS NOT NULL AND NOT EXISTS (SELECT 1 FROM rotation_campaignmember m "
        "JOIN rotation_campaign c ON c.campaign_id = m.campaign_id WHERE m.campaign_id = NEW.campaign_id "
        "AND m.credential_id = NEW.credential_id AND m.rotation_id IS NULL AND c.state = 'running')",
        "a campaign that runs begins one rotation for each of its members",
    )


_GOOD_AT_RETIREMENT = "{row}.revoked_at IS NULL AND {row}.expires_at > NEW.retired_at"
_ENVIRONMENT_OF_KEY = (
    "(SELECT a.environment FROM keyvault_credential c JOIN keyvault_account a ON a.id = c.account_id "
    "WHERE c.credential_id = {row}.credential_id)"
)
_ENVIRONMENT_OF_CUSTOMER_TOKEN = "(SELECT a.environment FROM keyvault_account a WHERE a.id = {row}.account_id)"  # noqa: S105  a query, no secret
_DIGESTED = (
    ("keyvault_key", _ENVIRONMENT_OF_KEY, f"{{row}}.state NOT IN {_TERMINAL}"),
    ("keyvault_servicetoken", "'service'", _GOOD_AT_RETIREMENT),
    ("keyvault_customertoken", _ENVIRONMENT_OF_CUSTOMER_TOKEN, _GOOD_AT_RETIREMENT),
)
"""Tables of digests, each with the SQL of a row's pepper set and of whether the row can still be verified."""


def _peppers() -> Iterator[WriteGuard]:
    """Yield the rules of peppers: digests move to newer versions only, and a version in use is not retired."""
    for table, pepper_set, _ in _DIGESTED:
        short = table.split("_", 1)[1]
        yield WriteGuard(
            f"{short}_digest_stays",
            table,
            "UPDATE",
            "(NEW.digest <> OLD.digest OR NEW.pepper_version <> OLD.pepper_version) "
            "AND (NEW.digest = OLD.digest OR NEW.pepper_version <= OLD.pepper_version)",
            f"a digest of {short} is only replaced by one of a newer pepper",
        )
        for when, moved in (("INSERT", ""), ("UPDATE", "NEW.pepper_version <> OLD.pepper_version AND ")):
            yield WriteGuard(
                f"{short}_pepper_{when.lower()}",
                table,
                when,
                f"{moved}EXISTS (SELECT 1 FROM keyvault_pepperversion p "  # noqa: S608  our own names only
                "WHERE p.number = NEW.pepper_version "
                f"AND p.retired_at IS NOT NULL AND p.pepper_set = {pepper_set.format(row='NEW')})",
                f"no {short} is hashed with a retired pepper",
            )
    for table, pepper_set, active in _DIGESTED:
        short = table.split("_", 1)[1]
        yield WriteGuard(
            f"pepperversion_of_{short}",
            "keyvault_pepperversion",
            "UPDATE",
            f"NEW.retired_at IS NOT NULL AND OLD.retired_at IS NULL "  # noqa: S608  our own names only
            f"AND EXISTS (SELECT 1 FROM {table} d WHERE d.pepper_version = NEW.number "
            f"AND {active.format(row='d')} AND {pepper_set.format(row='d')} = NEW.pepper_set)",
            f"a pepper that a living {short} is hashed with is not retired",
        )
    yield WriteGuard(
        "pepperversion_newest",
        "keyvault_pepperversion",
        "UPDATE",
        "NEW.retired_at IS NOT NULL AND OLD.retired_at IS NULL "
        "AND NOT EXISTS (SELECT 1 FROM keyvault_pepperversion p WHERE p.pepper_set = NEW.pepper_set "
        "AND p.number > NEW.number AND p.retired_at IS NULL AND p.hashes_from_at <= NEW.retired_at)",
        "a pepper is retired once a newer one makes the digests",
    )
    yield WriteGuard(
        "pepperversion_stays",
        "keyvault_pepperversion",
        "UPDATE",
        "NEW.id <> OLD.id OR NEW.pepper_set <> OLD.pepper_set OR NEW.number <> OLD.number "
        "OR NEW.check_value <> OLD.check_value OR NEW.created_at <> OLD.created_at "
        "OR (coalesce(CAST(NEW.hashes_from_at AS TEXT), '') <> coalesce(CAST(OLD.hashes_from_at AS TEXT), '') "
        "AND (OLD.number = 1 OR OLD.hashes_from_at IS NOT NULL OR OLD.retired_at IS NOT NULL))",
        "a pepper version stays what it is",
    )
    yield WriteGuard(
        "pepperversion_no_revival",
        "keyvault_pepperversion",
        "UPDATE",
        "(OLD.retired_at IS NOT NULL AND (NEW.retired_at IS NULL OR NEW.retired_at <> OLD.retired_at)) "
        "OR (OLD.destroyed_at IS NOT NULL AND (NEW.destroyed_at IS NULL OR NEW.destroyed_at <> OLD.destroyed_at)) "
        "OR (NEW.destroyed_at IS NOT NULL AND NEW.retired_at IS NULL)",
        "a retired pepper stays retired, and only such a one is destroyed",
    )


def _match_any(unique: tuple[tuple[str, ...], ...]) -> str:
    """Return SQL: row `t` equals the new row in any of these sets of columns."""
    return " OR ".join("(" + " AND ".join(f"t.{column} = NEW.{column}" for column in key) + ")" for key in unique)


_WRONG_MODE = (
    "coalesce((SELECT a.environment FROM keyvault_account a WHERE a.id = NEW.account_id), '') || ':' || NEW.mode "
    "NOT IN ('sandbox:test', 'production:live')"
)


def _four_eyes(
    *,
    request: str,
    key: str,
    approval: str,
    foreign_key: str,
    approved: str,
    environment: str,
    frozen: tuple[str, ...],
    by_services: bool = True,
) -> Iterator[WriteGuard]:
    """Yield the rules of four eyes.

    Requesters do not approve. Each person approves once and the requested digest only. The state changes only with
    enough approvals. `by_services`: a service token may request, and its responsible person is the requester.
    """
    short = request.split("_", 1)[1]
    asked = f"SELECT 1 FROM {request} r WHERE r.{key} = NEW.{foreign_key}"  # noqa: S608  our own names only
    yield WriteGuard(
        f"{short}_second_person",
        approval,
        "INSERT",
        f"EXISTS ({asked} AND r.requester_person = NEW.person)",
        "whoever asked cannot approve",
    )
    yield WriteGuard(
        f"{short}_same_digest",
        approval,
        "INSERT",
        f"NOT EXISTS ({asked} AND r.plan_digest = NEW.plan_digest)",
        "an approval is bound to exactly what was asked",
    )
    yield WriteGuard(
        f"{short}_approver_is_person",
        approval,
        "INSERT",
        "NOT EXISTS (SELECT 1 FROM keyvault_operator o WHERE o.id = NEW.approver_id AND o.person = NEW.person)",
        "an approval is in the name of its approver",
    )
    by_token = (
        " AND NOT EXISTS (SELECT 1 FROM keyvault_servicetoken t "
        "WHERE t.token_id = NEW.requested_via_id AND t.creator_person = NEW.requester_person)"
        if by_services
        else ""
    )
    yield WriteGuard(
        f"{short}_requester_is_person",
        request,
        "INSERT",
        "NOT EXISTS (SELECT 1 FROM keyvault_operator o "  # noqa: S608  our own names only
        f"WHERE o.id = NEW.requester_id AND o.person = NEW.requester_person){by_token}",
        "whoever asks is the person who answers for it",
    )
    counted = (
        f"{approved} AND NEW.approvals_needed > (SELECT count(*) FROM {approval} v "  # noqa: S608  our own names only
        f"WHERE v.{foreign_key} = NEW.{key} AND v.plan_digest = NEW.plan_digest AND v.person <> NEW.requester_person)"
    )
    for when in ("INSERT", "UPDATE"):
        yield WriteGuard(f"{short}_enough_{when.lower()}", request, when, counted, "not enough persons have approved")
    yield WriteGuard(
        f"{short}_production_policy",
        request,
        "INSERT",
        f"NEW.approvals_needed < 1 AND coalesce({environment}, '') <> 'sandbox'",
        "production takes a second person",
    )
    changed = " OR ".join(
        f"coalesce(CAST(NEW.{column} AS TEXT), '') <> coalesce(CAST(OLD.{column} AS TEXT), '')"
        for column in (key, "plan_digest", "approvals_needed", "requester_person", *frozen)
    )
    yield WriteGuard(f"{short}_stays", request, "UPDATE", changed, "what was asked is not changed afterwards")


_CONDITIONS = tuple(_conditions())


def ensure_triggers(connection: BaseDatabaseWrapper) -> None:
    """Create the triggers of every existing table in one transaction; repeatable."""
    with transaction.atomic(using=connection.alias):
        drop_triggers(connection)
        _create_triggers(connection)


def _create_triggers(connection: BaseDatabaseWrapper) -> None:
    tables = set(connection.introspection.table_names())
    with connection.cursor() as cursor:
        for guard in _CONDITIONS:
            if guard.table in tables and _reads_only(guard, tables):
                for statement in _create(guard, connection.vendor):
                    cursor.execute(statement)
        if connection.vendor == "postgresql":
            for table in sorted(tables.intersection(_UNTRUNCATED)):
                cursor.execute(
                    f"CREATE TRIGGER {_prefixed(_no_truncate(table))} BEFORE TRUNCATE ON {table} "
                    f"EXECUTE FUNCTION {_prefixed('refuse_truncate')}()"
                )


def drop_triggers(connection: BaseDatabaseWrapper) -> None:
    """Drop every trigger: before they are created again, before a migration on SQLite, and in tests."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                "SELECT tgname, tgrelid::regclass::text FROM pg_trigger WHERE NOT tgisinternal AND tgname LIKE %s",
                [_prefixed("%")],
            )
            for name, table in cursor.fetchall():
                cursor.execute(f"DROP TRIGGER {name} ON {table}")
            cursor.execute(
                f"CREATE OR REPLACE FUNCTION {_prefixed('refuse_truncate')}() RETURNS trigger LANGUAGE plpgsql AS "
                "$$ BEGIN RAISE EXCEPTION '% is never truncated', TG_TABLE_NAME USING ERRCODE = 'check_violation'; "
                "END $$"
            )
        else:
            cursor.execute("SELECT name FROM sqlite_master WHERE type = 'trigger' AND name LIKE %s", [_prefixed("%")])
            for (name,) in cursor.fetchall():
                cursor.execute(f"DROP TRIGGER {name}")


def list_triggers(connection: BaseDatabaseWrapper) -> set[str]:
    """Return the names of the enabled triggers, to compare with `expected_triggers`."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                "SELECT tgname FROM pg_trigger WHERE NOT tgisinternal AND tgenabled <> 'D' AND tgname LIKE %s",
                [_prefixed("%")],
            )
        else:
            cursor.execute("SELECT name FROM sqlite_master WHERE type = 'trigger' AND name LIKE %s", [_prefixed("%")])
        return {name.removeprefix(_prefixed("")) for (name,) in cursor.fetchall()}


def expected_triggers(vendor: str = "") -> set[str]:
    """Return the names of the triggers of every database, and of those that only the vendor has."""
    names = {guard.name for guard in _CONDITIONS}
    return names | {_no_truncate(table) for table in _UNTRUNCATED} if vendor == "postgresql" else names


def missing_triggers(connection: BaseDatabaseWrapper) -> set[str]:
    """Return the expected triggers that this database lacks."""
    return expected_triggers(connection.vendor) - list_triggers(connection)


def _no_truncate(table: str) -> str:
    return f"{table}_no_truncate"


def _prefixed(name: str) -> str:
    return f"kv_{name}"


def _reads_only(guard: WriteGuard, tables: set[str]) -> bool:
    """Whether every table that the condition reads exists."""
    tokens = set(guard.condition.replace("(", " ").replace(")", " ").split())
    return all(token in tables for token in tokens if token.startswith(("keyvault_", "rotation_")))


def _create(guard: WriteGuard, vendor: str) -> Iterator[str]:
    name = _prefixed(guard.name)
    if vendor == "postgresql":
        # The caller gets a constraint violation (SQLSTATE 23514), as on SQLite.
        yield (
            f"CREATE OR REPLACE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            f"IF {guard.condition} THEN RAISE EXCEPTION '{guard.message}' USING ERRCODE = 'check_violation'; "
            f"END IF; RETURN {'OLD' if guard.when == 'DELETE' else 'NEW'}; END $$"
        )
        yield (f"CREATE TRIGGER {name} BEFORE {guard.when} ON {guard.table} FOR EACH ROW EXECUTE FUNCTION {name}()")
    else:
        yield (
            f"CREATE TRIGGER {name} BEFORE {guard.when} ON {guard.table} FOR EACH ROW "
            f"WHEN {guard.condition} BEGIN SELECT RAISE(ABORT, '{guard.message}'); END"
        )
