"""Every rule that only a trigger can enforce, attacked by SQL that bypasses the models.

Each rule of `keyvault.models.triggers` has at least one attack, listed by the rule's name. With that trigger dropped
the attack no longer gets its reason, so each trigger is seen to work on its own.
"""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.db import connection

from keyvault.access import principals
from keyvault.models import IssuanceApproval, Key, LimitOverride, Operator
from keyvault.models.triggers import (
    drop_triggers,
    ensure_triggers,
    expected_triggers,
    list_never_truncated,
    list_rules,
    list_triggers,
)
from keyvault.models.triggers.rules import AppendOnly, FourEyes, Kept
from keyvault.services.recording.authorization import operator_principal
from tests.factories import make_operator

from .attacks import (
    MESSAGES,
    Row,
    defer_foreign_keys,
    delete,
    execute,
    expect_refusal,
    insert,
    insert_copy,
    read_row,
    refused,
    settle_foreign_keys,
    update,
)
from .conftest import World, fresh_id
from .test_pepper_triggers import ATTACKS as PEPPER_ATTACKS

pytestmark = [pytest.mark.database, pytest.mark.django_db]

REPLACE = "INSERT OR REPLACE"


def _replace(table: str, changes: Row | None = None, **where: Any) -> None:
    """Replace a row: SQLite does so without firing a DELETE trigger; PostgreSQL only supports INSERT."""
    insert_copy(table, changes or {}, verb=REPLACE if connection.vendor == "sqlite" else "INSERT", **where)


def _column(table: str, column: str) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {column} FROM {table} ORDER BY 1")  # noqa: S608  our own names only
        return list(cursor.fetchall())


def _row_of(username: str) -> Operator:
    return Operator.objects.get(username=username)


_REQUESTS = {
    "keyvault_issuanceapproval": ("pending", "request_id"),
    "keyvault_recipientkeyapproval": ("recipient", "recipient_key_id"),
    "keyvault_operatorchangeapproval": ("change", "change_id"),
    "rotation_rotationapproval": ("waiting", "rotation_id"),
    "rotation_campaignapproval": ("campaign", "campaign_id"),
    "rotation_scheduleapproval": ("standing", "standing_id"),
}
"""The subject of each approval table: the world's pending one, and the column that names it."""


def _approval(table: str, world: World, **changes: object) -> Row:
    """Return a valid approval of the pending subject, with changes, for `insert`."""
    attribute, column = _REQUESTS[table]
    subject: Any = getattr(world, attribute)
    return {
        "version": 1,
        column: subject.pk,
        "approver_id": _row_of("approver").pk,
        "person": world.approver.person,
        "plan_digest": subject.plan_digest,
        "created_at": subject.created_at,
        **changes,
    }


def _approve(table: str, world: World, **changes: object) -> None:
    insert(table, _approval(table, world, **changes))


_CHANGES = "keyvault_operatorchangeapproval"


def _copy_change(world: World, **changes: object) -> None:
    insert_copy("keyvault_operatorchange", {"change_id": fresh_id(), **changes}, change_id=world.change.pk)


def _update_change(world: World, **changes: object) -> None:
    update("keyvault_operatorchange", changes, change_id=world.change.pk)


def _applied(world: World) -> Row:
    return {"state": "applied", "closed_at": world.change.created_at}


def _replace_approval_of_change(world: World) -> None:
    _approve(_CHANGES, world)
    _replace(_CHANGES, {"id": None}, change_id=world.change.pk)


def _reopen_change(world: World) -> None:
    _update_change(world, state="withdrawn", closed_at=world.change.created_at)
    _update_change(world, state="awaiting_approval", closed_at=None)


def _by_tam(world: World) -> Row:
    return {"approver_id": _row_of("tam").pk, "person": world.tam.person}


def _new_rotation(world: World) -> Row:
    """Return a new rotation of a credential that has no open one."""
    return {"rotation_id": fresh_id(), "credential_id": world.dead_key.credential_id}


def _reactivate() -> None:
    update("keyvault_merchant", {"status": "offboarded"})
    update("keyvault_merchant", {"status": "active"})


def _suspended_key(world: World) -> str:
    update("keyvault_key", {"state": "suspended", "suspended_at": world.key.created_at}, key_id=world.key.key_id)
    return world.key.key_id


def _after_leaving(attack: Callable[[], None]) -> None:
    update("keyvault_merchant", {"status": "offboarded"})
    attack()


def _copy_campaign(world: World, **changes: object) -> None:
    insert_copy("rotation_campaign", {"campaign_id": fresh_id(), **changes}, campaign_id=world.campaign.pk)


def _change_campaign(world: World, **changes: object) -> None:
    update("rotation_campaign", changes, campaign_id=world.campaign.pk)


def _reopen_campaign(world: World) -> None:
    _change_campaign(world, state="cancelled")
    _change_campaign(world, state="awaiting_approval")


def _copy_standing(world: World, **changes: object) -> None:
    """Copy the request after all are withdrawn, since a schedule has one in each living state."""
    update("rotation_standingapproval", {"state": "withdrawn"})
    row = {"approval_id": fresh_id(), "state": "awaiting_approval", **changes}
    insert_copy("rotation_standingapproval", row, approval_id=world.standing.pk)


def _change_standing(world: World, **changes: object) -> None:
    update("rotation_standingapproval", changes, approval_id=world.standing.pk)


def _reopen_standing(world: World) -> None:
    _change_standing(world, state="withdrawn")
    _change_standing(world, state="awaiting_approval")


def _next_member() -> int:
    return int(_column("rotation_campaignmember", "max(id)")[0][0]) + 1


def _copy_member(world: World, **changes: object) -> None:
    row = {"id": _next_member(), "credential_id": world.dead_key.credential_id, **changes}
    insert_copy("rotation_campaignmember", row, campaign_id=world.campaign.pk)


def _unbypass(world: World) -> None:
    update("rotation_rotation", {"bypassed_at": world.waiting.created_at}, rotation_id=world.waiting.pk)
    update("rotation_rotation", {"bypassed_at": None}, rotation_id=world.waiting.pk)


def _reopen(world: World) -> None:
    """SQLite would delete the open rotation to make room for the closed one."""
    closed = {"rotation_id": fresh_id(), "state": "cancelled"}
    insert_copy("rotation_rotation", closed, rotation_id=world.waiting.pk)
    update("rotation_rotation", {"state": "awaiting_approval"}, or_replace=True, rotation_id=closed["rotation_id"])


def _revive_token(world: World, revoked_at: object) -> None:
    update("keyvault_servicetoken", {"revoked_at": world.token.created_at}, token_id=world.token.pk)
    update("keyvault_servicetoken", {"revoked_at": revoked_at}, token_id=world.token.pk)


def _revive_customer_token(world: World, revoked_at: object) -> None:
    token = world.customer_token
    update("keyvault_customertoken", {"revoked_at": token.created_at}, token_id=token.pk)
    update("keyvault_customertoken", {"revoked_at": revoked_at}, token_id=token.pk)


_RECIPIENTS = "keyvault_recipientkey"


def _copy_recipient(world: World, **changes: object) -> None:
    row = {"recipient_key_id": fresh_id(), **changes}
    insert_copy(_RECIPIENTS, row, recipient_key_id=world.recipient.pk)


def _change_recipient(world: World, **changes: object) -> None:
    update(_RECIPIENTS, changes, recipient_key_id=world.recipient.pk)


def _revive_recipient(world: World, withdrawn_at: object) -> None:
    _change_recipient(world, withdrawn_at=world.recipient.created_at)
    _change_recipient(world, withdrawn_at=withdrawn_at)


def _empty_limit() -> int:
    return LimitOverride.objects.get(account=None).pk


def _third_active(write: Callable[[World], None]) -> Callable[[World], None]:
    """Two keys of a credential verify; the attack adds a third."""

    def attack(world: World) -> None:
        _copy_key(world, "second000000key0", state="active")
        write(world)

    return attack


def _copy_key(world: World, key_id: str, **changes: object) -> None:
    insert_copy("keyvault_key", {"key_id": key_id, **changes}, key_id=world.key.key_id)


def _activate_third(world: World) -> None:
    _copy_key(world, "third0000000key0", state="pre_activation")
    update("keyvault_key", {"state": "active"}, key_id="third0000000key0")


ATTACKS: dict[str, Callable[[World], object]] = {
    # Append-only: written rows stay.
    "auditentry_no_update": lambda _: update("keyvault_auditentry", {"actor": "operator:nobody"}),
    "auditentry_no_delete": lambda _: delete("keyvault_auditentry", sequence=2),
    "auditentry_no_replace": lambda _: _replace("keyvault_auditentry", {"actor": "operator:nobody"}),
    "auditcheckpoint_no_update": lambda _: update("keyvault_auditcheckpoint", {"signer": "local"}),
    "auditcheckpoint_no_delete": lambda _: delete("keyvault_auditcheckpoint", scope="service", number=1),
    "auditcheckpoint_no_replace": lambda _: _replace("keyvault_auditcheckpoint", {"id": None, "signature": b"x" * 64}),
    "installation_stays": lambda _: update("keyvault_installation", {"installation_id": "another"}),
    "installation_no_delete": lambda _: delete("keyvault_installation"),
    "installation_no_replace": lambda _: _replace("keyvault_installation", {"installation_id": "another"}),
    "change_no_update": lambda _: update("keyvault_change", {"subject_id": "another"}),
    "change_no_delete": lambda _: delete("keyvault_change"),
    "change_no_replace": lambda _: _replace("keyvault_change", {"subject_id": "another"}),
    "issuanceapproval_no_update": lambda _: update("keyvault_issuanceapproval", {"person": "per_other"}),
    "issuanceapproval_no_delete": lambda _: delete("keyvault_issuanceapproval"),
    "issuanceapproval_no_replace": lambda _: _replace("keyvault_issuanceapproval", {"id": None}),
    "recipientkeyapproval_no_update": lambda _: update("keyvault_recipientkeyapproval", {"person": "per_other"}),
    "recipientkeyapproval_no_delete": lambda _: delete("keyvault_recipientkeyapproval"),
    "recipientkeyapproval_no_replace": lambda _: _replace("keyvault_recipientkeyapproval", {"id": None}),
    "rotationapproval_no_update": lambda _: update("rotation_rotationapproval", {"person": "per_other"}),
    "rotationapproval_no_delete": lambda _: delete("rotation_rotationapproval"),
    "rotationapproval_no_replace": lambda _: _replace("rotation_rotationapproval", {"id": None}),
    "campaignapproval_no_update": lambda _: update("rotation_campaignapproval", {"person": "per_other"}),
    "campaignapproval_no_delete": lambda _: delete("rotation_campaignapproval"),
    "campaignapproval_no_replace": lambda _: _replace("rotation_campaignapproval", {"id": None}),
    "evidence_no_update": lambda _: update("rotation_evidence", {"kind": "silent"}),
    "evidence_no_delete": lambda _: delete("rotation_evidence"),
    "evidence_no_replace": lambda _: _replace("rotation_evidence", {"kind": "silent"}),
    # The head of a chain advances by one entry at a time.
    "auditchain_no_delete": lambda _: delete("keyvault_auditchain", name="account:acme/sandbox"),
    "auditchain_no_replace": lambda _: _replace("keyvault_auditchain", {"sequence": 0}, name="platform"),
    "auditchain_forward": lambda _: update("keyvault_auditchain", {"sequence": 0}, name="platform"),
    "auditchain_unsigned": lambda _: update(
        "keyvault_auditchain", {"signed_in": 2, "unsigned_since": None}, name="platform"
    ),
    # The environments stay separate.
    "connection_mode_insert": lambda world: insert_copy(
        "keyvault_providerconnection", {"id": None, "provider": "other", "account_id": world.sandbox.pk}, mode="live"
    ),
    "connection_mode_update": lambda world: update(
        "keyvault_providerconnection", {"mode": "live"}, account_id=world.sandbox.pk
    ),
    "providerconnection_stays": lambda _: update("keyvault_providerconnection", {"backend_path": "1/con_x"}),
    "providerconnection_one": lambda _: _replace("keyvault_providerconnection", {"id": None}, mode="live"),
    "providerconnection_no_delete": lambda _: delete("keyvault_providerconnection"),
    "providerconnection_no_replace": lambda _: _replace(
        "keyvault_providerconnection", {"removed_at": "2026-01-01"}, mode="live"
    ),
    "account_stays": lambda world: update("keyvault_account", {"environment": "sandbox"}, id=world.production.pk),
    "account_no_delete": lambda world: delete("keyvault_account", id=world.sandbox.pk),
    "account_no_replace": lambda world: _replace("keyvault_account", {"environment": "x"}, id=world.production.pk),
    # Keys: no revival of a dead key, at most two active.
    "credential_stays": lambda world: update(
        "keyvault_credential", {"account_id": world.sandbox.pk}, credential_id=world.key.credential_id
    ),
    "credential_environment": lambda world: insert_copy(
        "keyvault_credential",
        {"credential_id": fresh_id(), "account_environment": "sandbox"},
        credential_id=world.key.credential_id,
    ),
    "credential_no_delete": lambda world: delete("keyvault_credential", credential_id=world.key.credential_id),
    "credential_no_replace": lambda world: _replace(
        "keyvault_credential", {"kind": "public"}, credential_id=world.key.credential_id
    ),
    "key_environment": lambda world: _copy_key(world, "other0000000key0", account_environment="sandbox"),
    "key_no_revival": lambda world: update("keyvault_key", {"state": "active"}, key_id=world.dead_key.key_id),
    "key_never_pre_active_again": lambda world: update(
        "keyvault_key", {"state": "pre_activation"}, key_id=world.key.key_id
    ),
    "key_stays": lambda world: update(
        "keyvault_key", {"credential_id": world.other_key.credential_id}, key_id=world.key.key_id
    ),
    "key_two_active_insert": _third_active(lambda world: _copy_key(world, "third0000000key0", state="active")),
    "key_two_active_update": _third_active(_activate_third),
    "key_no_delete": lambda world: delete("keyvault_key", key_id=world.dead_key.key_id),
    "key_no_replace": lambda world: _replace("keyvault_key", {"state": "active"}, key_id=world.dead_key.key_id),
    # Recipient keys: in production none applies immediately without two persons.
    "recipientkey_of_account": lambda world: _copy_recipient(world, key_id=world.other_key.key_id),
    "recipientkey_delayed": lambda world: _copy_recipient(world, applies_at=read_row(_RECIPIENTS)["created_at"]),
    "recipientkey_stays": lambda world: _change_recipient(world, public_key="k" * 43),
    "recipientkey_no_revival": lambda world: _revive_recipient(world, None),
    "recipientkey_no_delete": lambda _: delete(_RECIPIENTS),
    "recipientkey_no_replace": lambda _: _replace(_RECIPIENTS, {"public_key": "k" * 43}),
    "recipientkeyapproval_is_person": lambda world: _approve(
        "keyvault_recipientkeyapproval", world, approver_id=_row_of("tam").pk, person="per_nobody"
    ),
    # Four eyes.
    "operator_stays": lambda world: update("keyvault_operator", {"person": world.approver.person}, username="tam"),
    "issuancerequest_second_person": lambda world: _approve("keyvault_issuanceapproval", world, **_by_tam(world)),
    "issuancerequest_approver_is_person": lambda world: _approve(
        "keyvault_issuanceapproval", world, approver_id=_row_of("tam").pk, person="per_nobody"
    ),
    "issuancerequest_requester_is_person": lambda world: insert_copy(
        "keyvault_issuancerequest",
        {"issuance_request_id": fresh_id(), "requester_person": "per_nobody"},
        issuance_request_id=world.pending.pk,
    ),
    "issuancerequest_same_digest": lambda world: _approve("keyvault_issuanceapproval", world, plan_digest="0" * 64),
    "issuancerequest_enough_insert": lambda world: insert_copy(
        "keyvault_issuancerequest",
        {"issuance_request_id": fresh_id(), "state": "approved"},
        issuance_request_id=world.pending.pk,
    ),
    "issuancerequest_enough_update": lambda world: update(
        "keyvault_issuancerequest", {"state": "approved"}, issuance_request_id=world.pending.pk
    ),
    "issuancerequest_claim_noted": lambda world: _approve_claimed("keyvault_issuanceapproval", world, "approved"),
    "issuancerequest_production_policy": lambda world: insert_copy(
        "keyvault_issuancerequest",
        {"issuance_request_id": fresh_id(), "approvals_needed": 0},
        issuance_request_id=world.pending.pk,
    ),
    "issuancerequest_environment": lambda world: insert_copy(
        "keyvault_issuancerequest",
        {"issuance_request_id": fresh_id(), "account_environment": "sandbox"},
        issuance_request_id=world.pending.pk,
    ),
    "issuancerequest_stays": lambda world: update(
        "keyvault_issuancerequest", {"approvals_needed": 0}, issuance_request_id=world.pending.pk
    ),
    "issuancerequest_no_delete": lambda world: delete("keyvault_issuancerequest", issuance_request_id=world.pending.pk),
    "issuancerequest_no_replace": lambda world: _replace(
        "keyvault_issuancerequest", {"label": "another"}, issuance_request_id=world.pending.pk
    ),
    "operatorchange_second_person": lambda world: _approve(_CHANGES, world, **_by_tam(world)),
    "operatorchange_approver_is_person": lambda world: _approve(
        _CHANGES, world, approver_id=_row_of("tam").pk, person="per_nobody"
    ),
    "operatorchange_approved_by_another": lambda world: _approve(
        _CHANGES, world, approver_id=_row_of("auditor").pk, person=world.auditor.person
    ),
    "operatorchange_in_time": lambda world: _approve(_CHANGES, world, created_at=world.change.approval_expires_at),
    "operatorchange_same_digest": lambda world: _approve(_CHANGES, world, plan_digest="0" * 64),
    "operatorchange_requester_is_person": lambda world: _copy_change(world, requester_person="per_nobody"),
    "operatorchange_of_another": lambda world: _copy_change(world, operator_person="per_nobody"),
    "operatorchange_enough_insert": lambda world: _copy_change(world, **_applied(world)),
    "operatorchange_enough_update": lambda world: _update_change(world, **_applied(world)),
    "operatorchange_claim_noted": lambda world: _approve_claimed(
        _CHANGES, world, "applied", closed_at=world.change.created_at
    ),
    "operatorchange_production_policy": lambda world: _copy_change(world, approvals_needed=0),
    "operatorchange_stays": lambda world: _update_change(world, approvals_needed=0),
    "operatorchange_closed": lambda world: _reopen_change(world),
    "operatorchange_no_delete": lambda world: delete("keyvault_operatorchange", change_id=world.change.pk),
    "operatorchange_no_replace": lambda world: _replace(
        "keyvault_operatorchange", {"version": 9}, change_id=world.change.pk
    ),
    "operatorchangeapproval_no_update": lambda _: update(_CHANGES, {"person": "per_other"}),
    "operatorchangeapproval_no_delete": lambda _: delete(_CHANGES),
    "operatorchangeapproval_no_replace": lambda world: _replace_approval_of_change(world),
    "campaign_second_person": lambda world: _approve("rotation_campaignapproval", world, **_by_tam(world)),
    "campaign_approver_is_person": lambda world: _approve(
        "rotation_campaignapproval", world, approver_id=_row_of("tam").pk, person="per_nobody"
    ),
    "campaign_same_digest": lambda world: _approve("rotation_campaignapproval", world, plan_digest="0" * 64),
    "campaign_requester_is_person": lambda world: _copy_campaign(world, requester_person="per_nobody"),
    "campaign_enough_insert": lambda world: _copy_campaign(world, state="running"),
    "campaign_enough_update": lambda world: _change_campaign(world, state="running"),
    "campaign_claim_noted": lambda world: _approve_claimed("rotation_campaignapproval", world, "running"),
    "campaign_production_policy": lambda world: _copy_campaign(world, approvals_needed=0),
    "campaign_stays": lambda world: _change_campaign(world, pace='{"per_minute": 6000}'),
    "campaign_no_delete": lambda world: delete("rotation_campaign", campaign_id=world.campaign.pk),
    "campaign_no_replace": lambda world: _replace("rotation_campaign", {"why": "x"}, campaign_id=world.campaign.pk),
    "campaign_no_reopening": lambda world: _reopen_campaign(world),
    "campaignmember_as_asked": lambda world: _copy_member(world, rotation_id=world.waiting.pk),
    "campaignmember_stays": lambda world: update(
        "rotation_campaignmember", {"credential_id": world.dead_key.credential_id}, campaign_id=world.campaign.pk
    ),
    "campaignmember_no_delete": lambda world: delete("rotation_campaignmember", campaign_id=world.campaign.pk),
    "campaignmember_no_replace": lambda world: _replace(
        "rotation_campaignmember", {"id": _next_member()}, campaign_id=world.campaign.pk
    ),
    "scheduleapproval_no_update": lambda _: update("rotation_scheduleapproval", {"person": "per_other"}),
    "scheduleapproval_no_delete": lambda _: delete("rotation_scheduleapproval"),
    "scheduleapproval_no_replace": lambda _: _replace("rotation_scheduleapproval", {"id": None}),
    "standingapproval_second_person": lambda world: _approve("rotation_scheduleapproval", world, **_by_tam(world)),
    "standingapproval_approver_is_person": lambda world: _approve(
        "rotation_scheduleapproval", world, approver_id=_row_of("tam").pk, person="per_nobody"
    ),
    "standingapproval_same_digest": lambda world: _approve("rotation_scheduleapproval", world, plan_digest="0" * 64),
    "standingapproval_requester_is_person": lambda world: _copy_standing(world, requester_id=_row_of("approver").pk),
    "standingapproval_by_author": lambda world: _copy_standing(
        world, requester_id=_row_of("approver").pk, requester_person=world.approver.person
    ),
    "standingapproval_enough_insert": lambda world: _copy_standing(world, state="approved"),
    "standingapproval_enough_update": lambda world: _change_standing(world, state="approved"),
    "standingapproval_claim_noted": lambda world: _approve_claimed("rotation_scheduleapproval", world, "approved"),
    "standingapproval_production_policy": lambda world: _copy_standing(world, approvals_needed=0),
    "standingapproval_stays": lambda world: _change_standing(world, expires_at=world.order.created_at),
    "standingapproval_no_delete": lambda world: delete("rotation_standingapproval", approval_id=world.standing.pk),
    "standingapproval_no_replace": lambda world: _replace(
        "rotation_standingapproval", {"approval_id": fresh_id()}, approval_id=world.standing.pk
    ),
    "standingapproval_no_reopening": lambda world: _reopen_standing(world),
    "rotation_of_standing_approval": lambda world: insert_copy(
        "rotation_rotation",
        {**_new_rotation(world), "standing_approval_id": world.standing.pk},
        rotation_id=world.waiting.pk,
    ),
    "rotation_of_campaign": lambda world: insert_copy(
        "rotation_rotation", {**_new_rotation(world), "campaign_id": world.campaign.pk}, rotation_id=world.waiting.pk
    ),
    "merchant_no_delete": lambda _: delete("keyvault_merchant"),
    "merchant_no_replace": lambda _: _replace("keyvault_merchant", {"status": "active"}),
    "merchant_stays_gone": lambda _: _reactivate(),
    "key_of_a_merchant_insert": lambda world: _after_leaving(
        lambda: _copy_key(world, "second000000key0", state="active")
    ),
    "key_of_a_merchant_update": lambda world: _after_leaving(
        lambda: update("keyvault_key", {"state": "active"}, key_id=_suspended_key(world))
    ),
    "notice_environment": lambda _: insert_copy(
        "keyvault_notice", {"notice_id": fresh_id(), "account_environment": None}, account_environment="production"
    ),
    "notice_stays": lambda _: update("keyvault_notice", {"payload": "{}"}),
    "notice_no_delete": lambda _: delete("keyvault_notice"),
    "notice_no_replace": lambda _: _replace("keyvault_notice", {"subject": "x"}),
    "webhookendpoint_stays": lambda _: update("keyvault_webhookendpoint", {"url": "https://other.example"}),
    "webhookendpoint_no_delete": lambda _: delete("keyvault_webhookendpoint"),
    "webhookendpoint_no_replace": lambda _: _replace("keyvault_webhookendpoint", {"disabled_why": "x"}),
    "rotation_retirement_approved": lambda world: update(
        "rotation_rotation", {"retire_at": world.retirement.retire_at}, rotation_id=world.retirement.rotation_id
    ),
    "retirement_stays": lambda world: update(
        "rotation_retirement", {"retire_at": world.retirement.created_at}, id=world.retirement.pk
    ),
    "retirement_no_delete": lambda _: delete("rotation_retirement"),
    "retirement_no_replace": lambda _: _replace("rotation_retirement", {"approver_person": "x"}),
    "rotation_bypass_stays": lambda world: _unbypass(world),
    "rotation_second_person": lambda world: _approve("rotation_rotationapproval", world, **_by_tam(world)),
    "rotation_approver_is_person": lambda world: _approve(
        "rotation_rotationapproval", world, approver_id=_row_of("tam").pk, person="per_nobody"
    ),
    "rotation_requester_is_person": lambda world: insert_copy(
        "rotation_rotation",
        {**_new_rotation(world), "requester_person": "per_nobody"},
        rotation_id=world.waiting.pk,
    ),
    "rotation_same_digest": lambda world: _approve("rotation_rotationapproval", world, plan_digest="0" * 64),
    "rotation_enough_insert": lambda world: insert_copy(
        "rotation_rotation", {**_new_rotation(world), "state": "scheduled"}, rotation_id=world.waiting.pk
    ),
    "rotation_enough_update": lambda world: update(
        "rotation_rotation", {"state": "scheduled"}, rotation_id=world.waiting.pk
    ),
    "rotation_claim_noted": lambda world: _approve_claimed("rotation_rotationapproval", world, "scheduled"),
    "rotation_production_policy": lambda world: insert_copy(
        "rotation_rotation",
        {"rotation_id": fresh_id(), "state": "cancelled", "approvals_needed": 0},
        rotation_id=world.waiting.pk,
    ),
    "rotation_stays": lambda world: update(
        "rotation_rotation", {"predecessor_id": world.dead_key.key_id}, rotation_id=world.waiting.pk
    ),
    "rotation_no_delete": lambda world: delete("rotation_rotation", rotation_id=world.waiting.pk),
    "rotation_no_replace": lambda world: _replace("rotation_rotation", {"why": "x"}, rotation_id=world.waiting.pk),
    "rotation_one_open_insert": lambda world: _replace(
        "rotation_rotation", {"rotation_id": fresh_id()}, rotation_id=world.waiting.pk
    ),
    "rotation_account": lambda world: insert_copy(
        "rotation_rotation",
        {"rotation_id": fresh_id(), "state": "rejected", "account_id": world.sandbox.pk},
        rotation_id=world.waiting.pk,
    ),
    "rotation_one_open_update": lambda world: _reopen(world),
    # The requester and the person responsible.
    "operator_no_delete": lambda _: delete("keyvault_operator", username="admin"),
    "operator_no_replace": lambda world: _replace(
        "keyvault_operator", {"person": world.approver.person}, username="tam"
    ),
    "servicetoken_no_delete": lambda world: delete("keyvault_servicetoken", token_id=world.token.pk),
    "servicetoken_no_replace": lambda world: _replace(
        "keyvault_servicetoken", {"permissions": '["keys:revoke"]'}, token_id=world.token.pk
    ),
    "servicetoken_no_revival": lambda world: _revive_token(world, None),
    "servicetoken_stays": lambda world: update(
        "keyvault_servicetoken", {"creator_person": world.approver.person}, token_id=world.token.pk
    ),
    # Rows made by merchants' backends: a token keeps its expiry, an order keeps its content.
    "customertoken_no_delete": lambda world: delete("keyvault_customertoken", token_id=world.customer_token.pk),
    "customertoken_no_replace": lambda world: _replace(
        "keyvault_customertoken", {"customer_id": "bob"}, token_id=world.customer_token.pk
    ),
    "customertoken_no_revival": lambda world: _revive_customer_token(world, None),
    "customertoken_stays": lambda world: update(
        "keyvault_customertoken", {"customer_id": "bob"}, token_id=world.customer_token.pk
    ),
    "order_no_delete": lambda world: delete("keyvault_order", order_token=world.order.pk),
    "order_no_replace": lambda world: _replace("keyvault_order", {"amount_minor": 2}, order_token=world.order.pk),
    "order_stays": lambda world: update("keyvault_order", {"amount_minor": 2}, order_token=world.order.pk),
    # The catalog and its limits are changed, never deleted.
    "catalogendpoint_no_delete": lambda _: delete("keyvault_catalogendpoint", name="stays.search"),
    "catalogendpoint_no_replace": lambda _: _replace("keyvault_catalogendpoint", {"path": "/x"}, name="stays.search"),
    "catalogendpoint_stays": lambda _: update("keyvault_catalogendpoint", {"name": "other"}, name="stays.search"),
    "limitoverride_no_delete": lambda world: delete("keyvault_limitoverride", account_id=world.production.pk),
    "limitoverride_no_replace": lambda world: _replace(
        "keyvault_limitoverride", {"id": None}, account_id=world.production.pk
    ),
    "limitoverride_one_of_endpoint": lambda _: _replace("keyvault_limitoverride", {"id": None}, id=_empty_limit()),
    "limitoverride_stays": lambda world: update(
        "keyvault_limitoverride", {"endpoint": "orders.create"}, account_id=world.production.pk
    ),
    # A break-glass act stays visible.
    "breakglass_stays": lambda _: update("keyvault_breakglass", {"person": "per_nobody"}),
    "breakglass_requester": lambda world: _note_act(subject=world.pending.pk, requester_person="per_nobody"),
    "breakglass_excludes_concerned": lambda world: _note_act(subject=world.change.pk),
    "breakglass_rotation_requester": lambda world: _note_act(subject=world.waiting.pk, requester_person="per_nobody"),
    "breakglass_not_reviewed_yet": lambda world: _note_act(
        reviewed_at=world.waiting.created_at, reviewer_person="per_nobody"
    ),
    "breakglass_second_person": lambda world: _review_act(world.tam_too),
    "breakglass_reviewer_is_person": lambda world: _review_act(world.approver, reviewer_person="per_nobody"),
    "breakglass_first_reviewer_is_person": lambda world: update(
        "keyvault_breakglass", {"first_reviewer_id": _row_of("approver").pk, "first_reviewer_person": "per_nobody"}
    ),
    "breakglass_excluded": lambda world: _note_act(excluded_persons=world.approver.person),
    "breakglass_excluded_stay": lambda world: update(
        "keyvault_breakglass", {"excluded_persons": f"{world.approver.person} {world.tam.person}"}
    ),
    "breakglass_claimed": lambda _: _note_act(event="rotation.bypassed", host_user="root"),
    "breakglass_claim_reviewed": lambda world: _review_claim(world, "reviewer", reviewed_at=world.waiting.created_at),
    "breakglass_first_review_stays": lambda world: update(
        "keyvault_breakglass", {"first_reviewer_person": None}, act_id=_review_claim(world, "first_reviewer")
    ),
    "breakglass_claim_alone": lambda world: _claim_one_of_two(world, "keyvault_issuancerequest", world.pending.pk),
    "breakglass_claim_alone_of_rotation": lambda world: _claim_one_of_two(
        world, "rotation_rotation", world.waiting.pk, credential_id=world.dead_key.credential_id
    ),
    "breakglass_claim_alone_of_campaign": lambda world: _claim_one_of_two(
        world, "rotation_campaign", world.campaign.pk
    ),
    "breakglass_claim_alone_of_standingapproval": lambda world: _claim_one_of_two(
        world, "rotation_standingapproval", world.standing.pk, state="awaiting_approval"
    ),
    "breakglass_no_delete": lambda _: delete("keyvault_breakglass"),
    "breakglass_no_replace": lambda _: _replace("keyvault_breakglass", {"why": "nothing"}),
    **PEPPER_ATTACKS,
}


def _note_act(**changes: Any) -> None:
    act = read_row("keyvault_breakglass") | changes
    excluded = f"{act['requester_person']} {act['person']}"
    insert_copy("keyvault_breakglass", {"act_id": fresh_id(), "excluded_persons": excluded, **changes})


def _claim(world: World, **changes: Any) -> str:
    """Record an approval that was claimed on a command line; return its id."""
    act_id = fresh_id()
    claim = {"is_claimed": True, "host_user": "root", "event": "x.approved", "excluded_persons": world.tam.person}
    insert_copy("keyvault_breakglass", {"act_id": act_id, **claim, **changes})
    return act_id


def _claim_one_of_two(world: World, table: str, key: str, **changes: Any) -> None:
    """Claim an approval of a new request that takes two."""
    column, subject = REQUEST_KEYS[table], fresh_id()
    if table == "rotation_standingapproval":  # A schedule has one in each living state.
        update(table, {"state": "withdrawn"})
    insert_copy(table, {column: subject, "approvals_needed": 2, **changes}, **{column: key})
    _claim(world, subject=subject)


REQUEST_KEYS = {rule.table: rule.key for rule in list_rules() if isinstance(rule, FourEyes)}


def _approve_claimed(approval: str, world: World, state: str, **changes: Any) -> None:
    """Approve a new request that was made on a command line, without a break-glass action."""
    attribute, column = _REQUESTS[approval]
    original: Any = getattr(world, attribute)
    table = REQUEST_TABLES[approval]
    key, subject = REQUEST_KEYS[table], fresh_id()
    if attribute in {"standing", "waiting"}:  # A schedule has one of each state, a credential one open rotation.
        update(table, {"state": "rejected"}, or_replace=False, **{key: original.pk})
    claim = {key: subject, "is_requester_claimed": True, "state": original.state}
    insert_copy(table, claim, **{key: original.pk})
    _approve(approval, world, **{column: subject})
    update(table, {"state": state, **changes}, or_replace=False, **{key: subject})


REQUEST_TABLES = {rule.approval: rule.table for rule in list_rules() if isinstance(rule, FourEyes)}


def _review_claim(world: World, reviewer: str, **changes: Any) -> str:
    """Review a claimed approval as one other person; return its id."""
    act_id, admin = _claim(world), _row_of("admin")
    review = {f"{reviewer}_id": admin.pk, f"{reviewer}_person": admin.person}
    update("keyvault_breakglass", {**review, **changes}, act_id=act_id)
    return act_id


def _review_act(operator: principals.OperatorPrincipal, **changes: Any) -> None:
    row = read_row("keyvault_operator", username=operator.username)
    review = {"reviewed_at": row["date_joined"], "reviewer_id": row["id"], "reviewer_person": operator.person}
    update("keyvault_breakglass", {**review, **changes})


@pytest.mark.parametrize("event", ["rotation.retirement_approved", "rotation.approved"])
def test_triggers_act_on_a_rotation_with_a_wrong_requester_is_refused(world: World, event: str) -> None:
    """A retirement's requester is the person who asked for the date; every other act names the rotation's requester."""
    with refused(
        "a break-glass action names the requester of its rotation, retirement date, campaign or standing approval"
    ):
        _note_act(subject=world.retirement.rotation_id, event=event, requester_person="per_nobody")
    _note_act(subject=world.retirement.rotation_id, event=event, requester_person=world.tam.person)
    with refused(
        "a break-glass action names the requester of its rotation, retirement date, campaign or standing approval"
    ):
        _note_act(subject=world.campaign.pk, requester_person="per_nobody")


def test_triggers_review_of_an_act_is_final(world: World) -> None:
    """A review cannot be taken back, nor replaced."""
    _review_act(operator_principal(_row_of("admin")))
    with refused("is reviewed only once"):
        update("keyvault_breakglass", {"reviewed_at": None, "reviewer_id": None, "reviewer_person": None})


def test_triggers_service_request_without_an_approval_is_refused_in_the_sandbox(world: World) -> None:
    """An operator's own request suffices there; a service's does not."""
    sandbox = {"account_id": world.sandbox.pk, "account_environment": "sandbox"}
    own = {"issuance_request_id": fresh_id(), "approvals_needed": 0, **sandbox}
    insert_copy("keyvault_issuancerequest", own, issuance_request_id=world.pending.pk)
    token = {"requester_id": None, "requested_via_id": world.token.pk, "requester_person": world.token.creator_person}
    with refused("a request in production or by a service requires a second person"):
        insert_copy(
            "keyvault_issuancerequest",
            {**own, **token, "issuance_request_id": fresh_id()},
            issuance_request_id=world.pending.pk,
        )


@pytest.mark.parametrize("requester", ["per_nobody", ""])
def test_triggers_requester_of_an_act_changed_is_refused(world: World, requester: str) -> None:
    """The requester cannot be replaced or removed to allow a review."""
    with refused("the record of a break-glass action is immutable"):
        update("keyvault_breakglass", {"requester_person": requester})


def test_triggers_delivery_of_a_credential_changed_is_refused(world: World) -> None:
    """The delivery is part of the approved request: a sealed credential's keys are never shown to a person."""
    with refused("a credential keeps its account, kind and delivery"):
        update("keyvault_credential", {"delivery": "show_once"}, credential_id=world.key.credential_id)


def test_triggers_every_rule_is_tested() -> None:
    """A rule that no test has seen refuse a statement may be misspelled."""
    assert set(ATTACKS) == expected_triggers()


def test_triggers_attack_on_a_rule_is_refused_by_that_rule(world: World, subtests: pytest.Subtests) -> None:
    """Each database rule holds for raw SQL, on its own."""
    for name, attack in ATTACKS.items():
        with subtests.test(name):
            expect_refusal(name, partial(attack, world))


# ------------------------------------------------------------------------------------------------- append-only


@pytest.mark.postgres
def test_triggers_truncate_of_a_kept_table_is_refused(world: World, subtests: pytest.Subtests) -> None:
    """TRUNCATE fires no row trigger; every kept table refuses it."""
    settle_foreign_keys()
    for table in list_never_truncated():
        with subtests.test(table), refused("is never truncated"):
            execute(f"TRUNCATE {table} CASCADE")


@pytest.mark.parametrize(
    "table", ["keyvault_auditentry", "keyvault_auditcheckpoint", "keyvault_change", "keyvault_issuanceapproval"]
)
def test_triggers_upsert_on_an_append_only_row_is_refused(world: World, table: str) -> None:
    """`INSERT … ON CONFLICT DO UPDATE` is an update."""
    key = "sequence" if table == "keyvault_change" else "id"
    with refused("is append-only"):
        insert_copy(table, {}, tail=f"ON CONFLICT ({key}) DO UPDATE SET {key} = excluded.{key}")


def test_triggers_upsert_on_a_dead_key_does_not_revive_it(world: World) -> None:
    """A dead key never verifies again, not even through the update half of an upsert."""
    with refused("key rows are never replaced"):
        insert_copy(
            "keyvault_key",
            {},
            tail="ON CONFLICT (key_id) DO UPDATE SET state = 'active'",
            key_id=world.dead_key.key_id,
        )


def test_triggers_dead_key_deleted_and_inserted_anew_is_refused(world: World) -> None:
    """A dead key never verifies again, not even after its deletion, for which foreign keys would be deferred."""
    defer_foreign_keys()
    with refused("key rows are never deleted"):
        delete("keyvault_key", key_id=world.dead_key.key_id)


def test_triggers_account_replaced_by_its_merchant_and_environment_is_refused(world: World) -> None:
    """Covers the unique pair of merchant and environment, with a new primary key."""
    with refused("account rows are never replaced"):
        _replace("keyvault_account", {"id": None, "status": "active"}, id=world.production.pk)


def test_triggers_operator_replaced_by_name_is_refused(world: World) -> None:
    """A new row under an old name would be credited with the old row's acts."""
    with refused("operator rows are never replaced"):
        _replace("keyvault_operator", {"id": None, "person": "per_nobody"}, username="tam")


def test_triggers_notice_without_account_moved_to_an_account_is_refused(world: World) -> None:
    """A notice without an account stays so: NULL passes no rule."""
    row = {"notice_id": "ntc_installation", "kind": "operator.locked", "is_alarm": True}
    row |= {"account_id": None, "account_environment": None}
    insert("keyvault_notice", read_row("keyvault_notice") | row | {"seen_at": None, "seen_by_id": None})
    with refused("a notice is immutable"):
        update("keyvault_notice", {"account_id": world.sandbox.pk}, notice_id="ntc_installation")


_PARTIAL: dict[str, set[tuple[str, ...]]] = {
    "rotation_rotation": {("credential_id",)},
    "keyvault_limitoverride": {("environment", "endpoint")},
    "keyvault_providerconnection": {("account_id", "provider")},
}
"""Unique among some of the rows only; each has its own rule."""


def test_triggers_every_unique_constraint_of_a_kept_table_is_listed(subtests: pytest.Subtests) -> None:
    """A unique constraint added by a later migration opens no way to replace a row."""
    kept = {rule.table: rule.unique for rule in list_rules() if isinstance(rule, AppendOnly | Kept)}
    with connection.cursor() as cursor:
        for table, known in kept.items():
            with subtests.test(table):
                found = connection.introspection.get_constraints(cursor, table).values()
                unique = {tuple(each["columns"]) for each in found if each["unique"] or each["primary_key"]}
                assert unique == set(known) | _PARTIAL.get(table, set())


@pytest.mark.parametrize(
    ("table", "key", "because"),
    [
        ("keyvault_account", "id", "an account keeps"),
        ("keyvault_credential", "credential_id", "a credential keeps"),
        ("keyvault_key", "key_id", "a key keeps"),
        ("keyvault_operator", "id", "an operator keeps"),
        ("keyvault_operator", "username", "an operator keeps"),
    ],
)
def test_triggers_row_moved_onto_another_is_refused(world: World, table: str, key: str, because: str) -> None:
    """UPDATE OR REPLACE deletes the row whose key it takes, without firing a DELETE trigger."""
    first, second, *_ = [value for (value,) in _column(table, key)]
    with refused(because):
        update(table, {key: first}, or_replace=True, **{key: second})


def test_triggers_request_moved_onto_an_approved_one_is_refused(world: World) -> None:
    """A pending request cannot take the name of an approved one."""
    with refused("the content of a request is immutable"):
        changes = {"issuance_request_id": world.issued.pk}
        update("keyvault_issuancerequest", changes, or_replace=True, issuance_request_id=world.pending.pk)
    with refused("the content of a request is immutable"):
        changes = {"rotation_id": world.scheduled.pk}
        update("rotation_rotation", changes, or_replace=True, rotation_id=world.waiting.pk)


def test_triggers_request_given_to_another_token_is_refused(world: World) -> None:
    """The requesting token decides who collects; no UPDATE hands the key to another token."""
    for request in (world.pending, world.issued):
        with refused(MESSAGES["issuancerequest_stays"]):
            update("keyvault_issuancerequest", {"requested_via_id": world.token.pk}, issuance_request_id=request.pk)


@pytest.mark.parametrize("revoked_at", [None, "2099-01-01 00:00:00+00:00"])
def test_triggers_revoked_token_given_another_time_is_refused(world: World, revoked_at: str | None) -> None:
    """A revoked token never becomes valid again, neither immediately nor from a later date."""
    with refused("a revoked token stays revoked"):
        _revive_token(world, revoked_at)


@pytest.mark.parametrize("revoked_at", [None, "2099-01-01 00:00:00+00:00"])
def test_triggers_revoked_customer_token_given_another_time_is_refused(world: World, revoked_at: str | None) -> None:
    with refused("a revoked token stays revoked"):
        _revive_customer_token(world, revoked_at)


@pytest.mark.parametrize(
    "changes",
    [
        {"customer_id": "bob"},
        {"expires_at": "2099-01-01 00:00:00+00:00"},
        {"token_id": "0" * 16},
    ],
)
def test_triggers_customer_token_reassigned_or_prolonged_is_refused(world: World, changes: Row) -> None:
    """A customer token keeps its owner and its expiry."""
    with refused("a customer token keeps its account, customer and expiry"):
        update("keyvault_customertoken", changes, token_id=world.customer_token.pk)


@pytest.mark.parametrize(
    "changes",
    [{"amount_minor": 2}, {"currency": "USD"}, {"customer_id": "bob"}, {"customer_id": None}, {"order_token": "x"}],
)
def test_triggers_order_changed_afterwards_is_refused(world: World, changes: Row) -> None:
    with refused("an order is immutable"):
        update("keyvault_order", changes, order_token=world.order.pk)


@pytest.mark.parametrize("step", [-1, 0, 2, 10])
def test_triggers_chain_head_moves_by_any_other_step_is_refused(world: World, step: int) -> None:
    """The head of a chain moves only with an entry and by one, neither back nor further ahead."""
    head = read_row("keyvault_auditchain", name="platform")
    with refused("an audit chain advances by exactly one entry"):
        update("keyvault_auditchain", {"sequence": head["sequence"] + step}, name="platform")


def test_triggers_chain_set_back_in_time_is_refused(world: World) -> None:
    head = read_row("keyvault_auditchain", name="platform")
    with refused("an audit chain advances by exactly one entry, and never back in time"):
        changes = {"newest_at": "2000-01-01 00:00:00+00:00", "unsigned_since": "2000-01-01 00:00:00+00:00"}
        update("keyvault_auditchain", {"sequence": head["sequence"] + 1, **changes}, name="platform")


def test_triggers_chain_renamed_is_refused(world: World) -> None:
    """A chain keeps its name, so that no chain can replace another."""
    head = read_row("keyvault_auditchain", name="platform")
    changes = {"sequence": head["sequence"] + 1, "unsigned_since": head["newest_at"]}
    for identity in ({"name": "elsewhere"}, {"scope": "sandbox"}):
        with refused("an audit chain advances by exactly one entry"):
            update("keyvault_auditchain", {**changes, **identity}, name="platform")


@pytest.mark.parametrize(
    ("steps", "changes"),
    [
        (0, {"unsigned_since": None}),
        (0, {"signed_sequence": 0, "unsigned_since": None}),
        (0, {"signed_sequence": 10_000}),
        (1, {"unsigned_since": None}),
        (1, {"signed_sequence": 10_000}),
        (1, {}),
    ],
)
def test_triggers_unsigned_entry_recorded_as_signed_is_refused(world: World, steps: int, changes: Row) -> None:
    """A chain whose row is forged as signed would never be signed again."""
    head = read_row("keyvault_auditchain", name="platform")
    assert head["unsigned_since"] is not None
    moved = {"sequence": head["sequence"] + steps, "signed_in": head["signed_in"] + 1}
    with refused("an entry of an audit chain is signed by a checkpoint, or recorded as unsigned"):
        update("keyvault_auditchain", moved | changes, name="platform")
    signed = {"signed_in": head["signed_in"] + 1, "signed_sequence": head["sequence"], "unsigned_since": None}
    with refused("an entry of an audit chain is signed by a checkpoint, or recorded as unsigned"):
        update("keyvault_auditchain", signed, name="platform")


# ------------------------------------------------------------------------------------------- environments, keys


def test_triggers_account_moved_to_the_other_environment_is_refused(world: World) -> None:
    """A sandbox account never becomes a production account with its keys and connections."""
    with refused("an account keeps its merchant and environment"):
        update("keyvault_account", {"environment": "production"}, id=world.sandbox.pk)


def test_triggers_connection_moved_to_the_other_environment_is_refused(world: World) -> None:
    """A test-mode connection cannot reach production through a change of its account."""
    with refused("a sandbox connection is in test mode, a production connection in live mode"):
        update(
            "keyvault_providerconnection",
            {"account_id": world.production.pk, "provider": "moved"},
            account_id=world.sandbox.pk,
        )


def test_triggers_connection_of_a_missing_account_is_refused(world: World) -> None:
    """PostgreSQL defers a foreign key to the end of the transaction; the rule about modes is checked immediately."""
    defer_foreign_keys()
    with refused("a sandbox connection is in test mode, a production connection in live mode"):
        insert_copy("keyvault_providerconnection", {"id": None, "account_id": 999_999}, mode="live")


@pytest.mark.parametrize("state", ["active", "suspended"])
@pytest.mark.parametrize("dead", ["deactivated", "compromised", "destroyed"])
def test_triggers_dead_key_to_any_living_state_is_refused(world: World, dead: str, state: str) -> None:
    """A revoked, compromised or destroyed key never verifies again, whichever program writes."""
    stamps = {"compromised_at": world.key.created_at, "destroyed_at": world.key.created_at}
    update("keyvault_key", {"state": dead, **stamps}, key_id=world.dead_key.key_id)
    with refused("a terminated key never verifies again"):
        update("keyvault_key", {"state": state, "suspended_at": world.key.created_at}, key_id=world.dead_key.key_id)


@pytest.mark.parametrize("days", [-1, 1, None])
def test_triggers_expiry_of_a_key_changed_is_refused(world: World, days: int | None) -> None:
    """A key's expiry is fixed when the key is issued; it cannot be moved or removed."""
    assert world.key.expires_at is not None
    expires_at = None if days is None else world.key.expires_at + timedelta(days=days)
    with refused("a key keeps its credential and expiry"):
        update("keyvault_key", {"expires_at": expires_at}, key_id=world.key.key_id)


def test_triggers_expiry_given_to_a_key_without_one_is_refused(world: World) -> None:
    """A key issued without expiry cannot be ended by adding one."""
    assert world.other_key.expires_at is None
    with refused("a key keeps its credential and expiry"):
        update("keyvault_key", {"expires_at": "2099-01-01 00:00:00+00:00"}, key_id=world.other_key.key_id)


def test_triggers_two_active_keys_of_a_credential_are_accepted(world: World) -> None:
    """The rule about a third key must permit the overlap of a rotation."""
    _copy_key(world, "second000000key0", state="active")
    assert Key.objects.filter(credential=world.key.credential, state="active").count() == 2


# ---------------------------------------------------------------------------------------------------- four eyes


def test_triggers_approval_by_the_requesters_second_login_is_refused(world: World) -> None:
    """Persons are compared, not logins: a second login of the requester is the same person."""
    with refused("the requester cannot approve the request"):
        _approve("keyvault_issuanceapproval", world, approver_id=_row_of("tam-too").pk, person=world.tam_too.person)


def test_triggers_second_approval_of_one_person_is_refused(world: World) -> None:
    """One person counts once, also under a second login."""
    again = make_operator("approver-too", person=world.approver.person)
    _approve("keyvault_issuanceapproval", world)
    with refused("issuanceapproval is append-only"):
        _approve("keyvault_issuanceapproval", world, approver_id=_row_of(again.username).pk)


def test_triggers_approval_in_the_name_of_another_is_refused(world: World) -> None:
    """The requester cannot insert an approval in the name of a person who did not give it."""
    with refused("an approval names the person of the approving operator"):
        _approve("keyvault_issuanceapproval", world, approver_id=_row_of("tam").pk, person=world.approver.person)


def test_triggers_login_moved_to_another_person_is_refused(world: World) -> None:
    """The comparison of persons depends on each login staying with its person."""
    with refused("an operator keeps the user name and, once it has a scope, the person"):
        update("keyvault_operator", {"person": "per_somebody"}, username="tam-too")


@pytest.mark.parametrize("state", ["approved", "issued", "collected"])
def test_triggers_approved_state_without_approvals_is_refused(world: World, state: str) -> None:
    """States that require approvals cannot be written without them."""
    row = read_row("keyvault_issuancerequest", issuance_request_id=world.issued.pk)
    filled = {name: row[name] for name in ("key_id", "credential_id", "issued_at")}
    changes = {"state": state, "collected_at": row["issued_at"], **filled}
    with refused("the request has too few approvals"):
        update("keyvault_issuancerequest", changes, issuance_request_id=world.pending.pk)


def test_triggers_approved_state_with_its_approval_is_accepted(world: World) -> None:
    """The rule about approvals must permit an approved request."""
    _approve("keyvault_issuanceapproval", world)
    update("keyvault_issuancerequest", {"state": "approved"}, issuance_request_id=world.pending.pk)


def test_triggers_one_approval_where_two_are_needed_is_refused(world: World) -> None:
    """The required number of approvals is the one at the time of the request."""
    request_id = fresh_id()
    insert_copy(
        "keyvault_issuancerequest",
        {"issuance_request_id": request_id, "approvals_needed": 2},
        issuance_request_id=world.pending.pk,
    )
    _approve("keyvault_issuanceapproval", world, request_id=request_id)
    with refused("the request has too few approvals"):
        update("keyvault_issuancerequest", {"state": "approved"}, issuance_request_id=request_id)


@pytest.mark.parametrize(
    "changes",
    [
        {"approvals_needed": 0},
        {"requester_person": "per_nobody"},
        {"plan_digest": "0" * 64},
        {"label": "another"},
        {"kind": "public"},
        {"delivery": "show_once"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_triggers_request_changed_after_it_was_asked_is_refused(world: World, changes: Row) -> None:
    """No part of a request changes after it was made: neither its content, nor its requester, nor its required
    approvals.
    """
    with refused("the content of a request is immutable"):
        update("keyvault_issuancerequest", changes, issuance_request_id=world.pending.pk)


def test_triggers_requested_expiry_changed_afterwards_is_refused(world: World) -> None:
    """The lifetime of the key is part of the approved request, even when it has none."""
    with refused("the content of a request is immutable"):
        update("keyvault_issuancerequest", {"expires_in_days": 3650}, issuance_request_id=world.pending.pk)
    with refused("the content of a request is immutable"):
        update("keyvault_issuancerequest", {"expires_in_days": None}, issuance_request_id=world.issued.pk)


def test_triggers_plan_of_a_rotation_changed_afterwards_is_refused(world: World) -> None:
    """The engine uses the approved plan, whose periods cannot be shortened in the table."""
    with refused("the content of a request is immutable"):
        update("rotation_rotation", {"plan": '{"quiet_seconds": 0}'}, rotation_id=world.scheduled.pk)


def test_triggers_request_in_production_without_approvals_needed_is_refused(world: World) -> None:
    """Production requires at least one second person; sandbox may require none."""
    changes = {"issuance_request_id": fresh_id(), "approvals_needed": 0}
    with refused("a request in production or by a service requires a second person"):
        insert_copy("keyvault_issuancerequest", changes, issuance_request_id=world.pending.pk)
    sandbox = {"account_id": world.sandbox.pk, "account_environment": "sandbox"}
    insert_copy("keyvault_issuancerequest", changes | sandbox, issuance_request_id=world.pending.pk)


def test_triggers_request_for_a_missing_account_without_approvals_is_refused(world: World) -> None:
    """A missing account does not count as sandbox: the rule is checked before the deferred foreign key."""
    defer_foreign_keys()
    changes = {"issuance_request_id": fresh_id(), "approvals_needed": 0, "account_id": 999_999}
    with refused("an issuance request has the environment of its account"):
        insert_copy("keyvault_issuancerequest", changes, issuance_request_id=world.pending.pk)


def test_triggers_orm_approval_by_the_requester_is_refused(world: World) -> None:
    """The rule also holds for Django's own writes that bypass `RecordedModel`."""
    approval = IssuanceApproval(
        request=world.pending,
        approver=_row_of("tam"),
        person=world.tam.person,
        plan_digest=world.pending.plan_digest,
        created_at=world.pending.created_at,
    )
    with refused("the requester cannot approve the request"):
        approval.save_base(force_insert=True)


# ------------------------------------------------------------------------------------------------ recipient keys


def test_triggers_recipient_key_applied_at_once_by_one_person_is_refused(world: World) -> None:
    """A recipient key applies earlier with the approvals of two persons, never with that of one."""
    at_once = {"applies_at": world.recipient.created_at}
    with refused(MESSAGES["recipientkey_stays"]):
        _change_recipient(world, **at_once)
    admin = _row_of("admin")
    _approve("keyvault_recipientkeyapproval", world, approver_id=admin.pk, person=admin.person)
    _change_recipient(world, **at_once)


def test_triggers_recipient_key_delayed_further_is_refused(world: World) -> None:
    """The merchant's recipient key cannot be kept from applying, except by withdrawing it."""
    with refused(MESSAGES["recipientkey_stays"]):
        _change_recipient(world, applies_at=world.recipient.applies_at + timedelta(days=1))


@pytest.mark.parametrize(
    ("created", "applies"),
    [
        (timedelta(0), timedelta(microseconds=1)),
        (timedelta(0), timedelta(hours=23, minutes=59)),
        (timedelta(days=-1, minutes=-1), timedelta(days=1)),
    ],
)
def test_triggers_recipient_key_in_production_set_to_apply_within_24_hours_is_refused(
    world: World, created: timedelta, applies: timedelta
) -> None:
    """Neither a shorter delay nor an earlier time of the request lets a recipient key apply immediately."""
    at = world.recipient.created_at + created
    with refused(MESSAGES["recipientkey_delayed"]):
        _copy_recipient(world, created_at=at, applies_at=at + applies)
    _copy_recipient(world)


@pytest.mark.parametrize("needed", [0, 1])
def test_triggers_recipient_key_in_production_that_needs_fewer_persons_is_refused(world: World, needed: int) -> None:
    with refused(MESSAGES["recipientkey_delayed"]):
        _copy_recipient(world, approvals_needed=needed)
    with refused(MESSAGES["recipientkey_stays"]):
        _change_recipient(world, approvals_needed=needed)


def test_triggers_recipient_key_said_to_be_of_the_sandbox_is_refused(world: World) -> None:
    """The delay of production cannot be avoided by naming the other environment or its account."""
    at_once = {"applies_at": world.recipient.created_at, "account_environment": "sandbox"}
    for changes in (at_once, {**at_once, "account_id": world.sandbox.pk}):
        with refused(MESSAGES["recipientkey_of_account"]):
            _copy_recipient(world, **changes)


@pytest.mark.parametrize("withdrawn_at", [None, "2099-01-01 00:00:00+00:00"])
def test_triggers_withdrawn_recipient_key_given_another_time_is_refused(world: World, withdrawn_at: str | None) -> None:
    with refused("a withdrawn recipient key stays withdrawn"):
        _revive_recipient(world, withdrawn_at)


def test_triggers_recipient_key_approved_by_one_person_twice_is_refused(world: World) -> None:
    """One person counts once, also under a second login."""
    again = _row_of(make_operator("approver-too", person=world.approver.person).username)
    with refused("recipientkeyapproval is append-only"):
        _approve("keyvault_recipientkeyapproval", world, approver_id=again.pk)


# -------------------------------------------------------------------------------------- installation of the rules


def test_triggers_after_migrate_all_are_in_force() -> None:
    """The rules in force are exactly the declared ones: none is missing and none is left from an older release."""
    assert list_triggers(connection) == expected_triggers(connection.vendor)


def test_triggers_dropped_rule_is_reported_missing() -> None:
    """A comparison of the two lists, as in /readyz, shows each dropped rule."""
    execute("DROP TRIGGER kv_key_no_revival" + (" ON keyvault_key" if connection.vendor == "postgresql" else ""))
    assert expected_triggers(connection.vendor) - list_triggers(connection) == {"key_no_revival"}


@pytest.mark.postgres
def test_triggers_disabled_rule_is_reported_missing() -> None:
    execute("ALTER TABLE keyvault_key DISABLE TRIGGER kv_key_no_revival")
    assert expected_triggers("postgresql") - list_triggers(connection) == {"key_no_revival"}


def test_triggers_installed_twice_are_unchanged() -> None:
    ensure_triggers(connection)
    ensure_triggers(connection)
    assert list_triggers(connection) == expected_triggers(connection.vendor)


def test_triggers_removed_and_reinstalled_are_enforced(world: World) -> None:
    settle_foreign_keys()
    drop_triggers(connection)
    assert list_triggers(connection) == set()
    ensure_triggers(connection)
    with refused("a terminated key never verifies again"):
        update("keyvault_key", {"state": "active"}, key_id=world.dead_key.key_id)
