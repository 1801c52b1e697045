"""Every CHECK and every unique constraint of keyvault's tables, tested by SQL that bypasses the models.

The triggers are dropped here, so each constraint is seen to hold on its own.
"""

import re
from typing import Any

import pytest
from django.apps import apps
from django.db import IntegrityError, connection, transaction
from django.db.models import CheckConstraint, UniqueConstraint

from keyvault.models.triggers import drop_triggers

from .attacks import Row, insert_copy, read_row, settle_foreign_keys, update
from .conftest import World

pytestmark = [pytest.mark.database, pytest.mark.django_db]

LONG_AGO = "2001-01-01 00:00:00+00:00"

HALF_OR_OUTSIDE: list[Row] = [
    {"limit_count": 5},
    {"limit_seconds": 5},
    {"limit_count": 0, "limit_seconds": 1},
    {"limit_count": 1, "limit_seconds": 0},
    {"limit_count": 1_000_001, "limit_seconds": 1},
    {"limit_count": 1, "limit_seconds": 86_401},
]
"""Invalid limits."""

FORBIDDEN: list[tuple[str, str, Row]] = [
    ("operator_no_superuser", "keyvault_operator", {"is_superuser": True}),
    ("merchant_status", "keyvault_merchant", {"status": "other"}),
    ("account_status", "keyvault_account", {"status": "other"}),
    ("account_environment", "keyvault_account", {"environment": "staging"}),
    *(("account_limit_whole", "keyvault_account", limit) for limit in HALF_OR_OUTSIDE),
    ("account_customer_token_seconds", "keyvault_account", {"customer_token_seconds": 59}),
    ("account_customer_token_seconds", "keyvault_account", {"customer_token_seconds": 86_401}),
    ("connection_mode", "keyvault_providerconnection", {"mode": "other"}),
    ("notice_kind", "keyvault_notice", {"kind": "other"}),
    ("notice_of_an_account", "keyvault_notice", {"account_id": None, "account_environment": None}),
    ("webhook_delivery_state", "keyvault_webhookdelivery", {"state": "other"}),
    ("alarm_delivery_channel", "keyvault_alarmdelivery", {"channel": "other"}),
    ("credential_kind", "keyvault_credential", {"kind": "other"}),
    ("credential_delivery", "keyvault_credential", {"delivery": "other"}),
    ("credential_origin_header", "keyvault_credential", {"origin_header": "other"}),
    ("key_state", "keyvault_key", {"state": "other"}),
    ("key_material", "keyvault_key", {"material": "other"}),
    ("key_digest_bytes", "keyvault_key", {"digest": bytes(31)}),
    ("key_digest_bytes", "keyvault_key", {"digest": b""}),
    ("key_pepper_version", "keyvault_key", {"pepper_version": 0}),
    ("key_activated_at", "keyvault_key", {"state": "active", "activated_at": None}),
    ("key_suspended_at", "keyvault_key", {"state": "suspended", "suspended_at": None}),
    ("key_deactivated_at", "keyvault_key", {"state": "deactivated", "retirement": "expired"}),
    ("key_compromised_at", "keyvault_key", {"state": "compromised"}),
    ("key_destroyed_at", "keyvault_key", {"state": "destroyed"}),
    ("key_expires_later", "keyvault_key", {"expires_at": LONG_AGO}),
    ("key_retirement", "keyvault_key", {"state": "deactivated", "deactivated_at": LONG_AGO}),
    (
        "key_retirement",
        "keyvault_key",
        {"state": "deactivated", "deactivated_at": LONG_AGO, "retirement": "revoked"},
    ),
    (
        "key_retirement",
        "keyvault_key",
        {"state": "deactivated", "deactivated_at": LONG_AGO, "retirement": "revoked", "reason": "other"},
    ),
    (
        "key_retirement",
        "keyvault_key",
        {"state": "deactivated", "deactivated_at": LONG_AGO, "retirement": "expired", "reason": "superseded"},
    ),
    ("key_backend_version", "keyvault_key", {"material": "held", "backend_version": None}),
    ("token_scope", "keyvault_servicetoken", {"scope": "other"}),
    ("token_digest_bytes", "keyvault_servicetoken", {"digest": bytes(33)}),
    ("token_expires_later", "keyvault_servicetoken", {"expires_at": LONG_AGO}),
    ("pepper_set", "keyvault_pepperversion", {"pepper_set": "other"}),
    ("audit_chain_scope", "keyvault_auditchain", {"scope": "staging"}),
    ("audit_checkpoint_scope", "keyvault_auditcheckpoint", {"scope": "staging"}),
    ("installation_one", "keyvault_installation", {"id": 2}),
    ("request_kind", "keyvault_issuancerequest", {"kind": "other"}),
    ("request_state", "keyvault_issuancerequest", {"state": "other"}),
    ("request_delivery", "keyvault_issuancerequest", {"delivery": "other"}),
    ("request_expires_later", "keyvault_issuancerequest", {"expires_at": LONG_AGO}),
    ("request_expires_in_days", "keyvault_issuancerequest", {"expires_in_days": 0}),
    ("request_expires_in_days", "keyvault_issuancerequest", {"expires_in_days": 3651}),
    ("request_issued_key", "keyvault_issuancerequest", {"state": "issued", "key_id": None}),
    ("request_issued_key", "keyvault_issuancerequest", {"state": "issued", "credential_id": None}),
    ("request_issued_key", "keyvault_issuancerequest", {"state": "issued", "issued_at": None}),
    ("request_recipient", "keyvault_issuancerequest", {"recipient_public_key": "k" * 43}),
    ("request_recipient", "keyvault_issuancerequest", {"delivery": "sealed"}),
    ("request_recipient", "keyvault_issuancerequest", {"delivery": "sealed", "recipient_public_key": "k" * 42}),
    ("request_collected_at", "keyvault_issuancerequest", {"state": "collected", "collected_at": None}),
    ("operator_change_kind", "keyvault_operatorchange", {"kind": "other"}),
    ("operator_change_state", "keyvault_operatorchange", {"state": "other", "closed_at": LONG_AGO}),
    (
        "operator_change_of_another",
        "keyvault_operatorchange",
        {"requester_person": "per_of_none", "operator_person": "per_of_none"},
    ),
    ("operator_change_expires_later", "keyvault_operatorchange", {"approval_expires_at": LONG_AGO}),
    ("operator_change_closed", "keyvault_operatorchange", {"closed_at": LONG_AGO}),
    ("operator_change_closed", "keyvault_operatorchange", {"state": "applied"}),
    ("role_use_role", "keyvault_roleuse", {"role": "other"}),
    ("break_glass_excluded", "keyvault_breakglass", {"excluded_persons": ""}),
    (
        "break_glass_excluded",
        "keyvault_breakglass",
        {"requester_person": "per_of_none", "is_claimed": True, "event": "x.approved"},
    ),
    ("break_glass_excluded", "keyvault_breakglass", {"person": "per_of_none"}),
    ("break_glass_excluded", "keyvault_breakglass", {"person": "per_of_none", "is_claimed": True}),
    (
        "break_glass_excluded",
        "keyvault_breakglass",
        {
            "requester_person": "system:host",
            "excluded_persons": "system:host",
            "is_claimed": True,
            "event": "x.approved",
        },
    ),
    ("break_glass_reviewed", "keyvault_breakglass", {"reviewed_at": LONG_AGO}),
    ("break_glass_reviewed", "keyvault_breakglass", {"reviewer_person": "per_of_none"}),
    ("operator_scope_environments", "keyvault_operator", {"scope_environments": "other"}),
    ("use_outcome", "keyvault_usecontext", {"outcome": "other"}),
    ("attempt_outcome", "keyvault_keyattempt", {"outcome": "other"}),
    ("usage_total_outcome", "keyvault_usagetotal", {"outcome": "other"}),
    ("usage_total_environment", "keyvault_usagetotal", {"environment": "staging"}),
    ("customer_token_digest_bytes", "keyvault_customertoken", {"digest": bytes(31)}),
    ("customer_token_pepper_version", "keyvault_customertoken", {"pepper_version": 0}),
    ("customer_token_expires_later", "keyvault_customertoken", {"expires_at": LONG_AGO}),
    ("order_amount", "keyvault_order", {"amount_minor": 0}),
    ("order_currency", "keyvault_order", {"currency": "eur"}),
    ("order_currency", "keyvault_order", {"currency": "EU"}),
    ("endpoint_bearer", "keyvault_catalogendpoint", {"bearer": "other"}),
    ("endpoint_on_limiter_loss", "keyvault_catalogendpoint", {"on_limiter_loss": "other"}),
    *(("endpoint_limit_whole", "keyvault_catalogendpoint", limit) for limit in HALF_OR_OUTSIDE),
    *(("limit_whole", "keyvault_limitoverride", limit) for limit in HALF_OR_OUTSIDE),
    ("limit_environment", "keyvault_limitoverride", {"environment": "staging"}),
    ("refusal_door", "keyvault_refusal", {"door": "other"}),
    ("refusal_environment", "keyvault_refusal", {"environment": "staging"}),
]
"""A constraint, a table, and values that it must refuse. The first entry violates the constraint in the plainest
way.
"""

ROWS: dict[str, Row] = {
    "keyvault_issuancerequest": {"state": "issued"},
    "keyvault_key": {"state": "active"},
    "keyvault_operatorchange": {"state": "awaiting_approval"},
}
"""The row to attack, where the first one would not do."""
ONCE: dict[str, str] = {
    "account_unique": "keyvault_account",
    "connection_unique": "keyvault_providerconnection",
    "webhook_endpoint_unique": "keyvault_webhookendpoint",
    "pepper_version_unique": "keyvault_pepperversion",
    "audit_entry_unique": "keyvault_auditentry",
    "audit_checkpoint_unique": "keyvault_auditcheckpoint",
    "issuance_approval_once": "keyvault_issuanceapproval",
    "recipient_approval_once": "keyvault_recipientkeyapproval",
    "use_context_unique": "keyvault_usecontext",
    "operator_change_approval_once": "keyvault_operatorchangeapproval",
    "role_use_unique": "keyvault_roleuse",
    "use_bucket_unique": "keyvault_usebucket",
    "usage_total_unique": "keyvault_usagetotal",
    "key_attempt_unique": "keyvault_keyattempt",
    "key_source_unique": "keyvault_keysource",
    "limit_of_pair_unique": "keyvault_limitoverride",
    "limit_of_endpoint_unique": "keyvault_limitoverride",
    "idempotent_request_once": "keyvault_idempotentrequest",
    "webhook_delivery_once": "keyvault_webhookdelivery",
    "alarm_delivery_once": "keyvault_alarmdelivery",
    "confirmation_unique": "keyvault_confirmation",
}
"""A unique constraint and the table whose rows it covers."""

AGAIN: dict[str, Row] = {
    "limit_of_endpoint_unique": {"account_id": None},
}
"""How the second row differs from the first, where an equal row would violate another rule."""


@pytest.fixture
def bare_world(world: World) -> World:
    """Return the world without triggers."""
    settle_foreign_keys()
    drop_triggers(connection)
    return world


def test_checks_every_constraint_of_keyvault_is_tested() -> None:
    """A constraint that no test has seen refuse a row may be one that NULL passes."""
    checks, uniques = set(), set()
    for model in apps.get_app_config("keyvault").get_models():
        for constraint in model._meta.constraints:
            if isinstance(constraint, CheckConstraint):
                checks.add(constraint.name)
            elif isinstance(constraint, UniqueConstraint):
                uniques.add(constraint.name)
    of_reviews = {"break_glass_second_person", "break_glass_first_second_person", "break_glass_claim_reviewed"}
    assert checks == {name for name, _, _ in FORBIDDEN} | of_reviews
    assert uniques == set(ONCE)


def test_checks_forbidden_value_is_refused_by_its_constraint(bare_world: World, subtests: pytest.Subtests) -> None:
    """The database itself checks every value and timestamp, whichever program writes."""
    for name, table, changes in FORBIDDEN:
        row = read_row(table, **ROWS.get(table, {}))
        key = next(iter(row))
        with (
            subtests.test(name, **changes),
            pytest.raises(IntegrityError, match=rf"\b{name}\b"),
            transaction.atomic(),
        ):
            update(table, changes, **{key: row[key]})


def test_checks_break_glass_reviewed_by_the_same_person_is_refused(bare_world: World) -> None:
    """No person reviews a break-glass act that they did or requested, under any of their logins."""
    act = read_row("keyvault_breakglass")
    for person in (act["person"], act["requester_person"]):
        for review, name in (
            ({"reviewed_at": act["created_at"], "reviewer_person": person}, "break_glass_second_person"),
            ({"first_reviewer_person": person}, "break_glass_first_second_person"),
        ):
            with pytest.raises(IntegrityError, match=rf"\b{name}\b"), transaction.atomic():
                update("keyvault_breakglass", review)


def test_checks_claimed_approval_reviewed_by_one_person_is_refused(
    bare_world: World, subtests: pytest.Subtests
) -> None:
    """Two persons review it; the claimed approver is one of them at most."""
    act = read_row("keyvault_breakglass")
    claim = {"is_claimed": True, "event": "x.approved", "excluded_persons": act["requester_person"]}
    update("keyvault_breakglass", claim)
    for first, last in (
        (None, "per_of_none"),
        ("per_of_none", "per_of_none"),
        (None, act["person"]),
        (act["person"], act["person"]),
    ):
        review = {"reviewed_at": act["created_at"], "first_reviewer_person": first, "reviewer_person": last}
        with (
            subtests.test(f"{first}, {last}"),
            pytest.raises(IntegrityError, match="break_glass_claim_reviewed"),
            transaction.atomic(),
        ):
            update("keyvault_breakglass", review)
    update("keyvault_breakglass", {**review, "first_reviewer_person": "per_of_none"})


def test_checks_duplicate_row_is_refused(bare_world: World, subtests: pytest.Subtests) -> None:
    """One account per environment, one approval per person, one entry per number."""
    for name, table in ONCE.items():
        message = name if connection.vendor == "postgresql" else rf"UNIQUE constraint failed: {table}\.{_columns(name)}"
        with subtests.test(name), pytest.raises(IntegrityError, match=message), transaction.atomic():
            insert_copy(table, {"id": None, **AGAIN.get(name, {})})


def _columns(name: str) -> str:
    """Return the columns of a unique constraint in the form in which SQLite names it."""
    for model in apps.get_app_config("keyvault").get_models():
        for constraint in model._meta.constraints:
            if constraint.name == name and isinstance(constraint, UniqueConstraint):
                fields: list[Any] = [model._meta.get_field(field) for field in constraint.fields]
                return ", .*".join(re.escape(field.column) for field in fields)
    raise AssertionError(name)
