"""Every service writes exactly its audit entries and change rows, in its own transaction, or nothing at all."""

import getpass
import importlib
import inspect
import json
import os
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from io import BytesIO

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from django.conf import settings
from django.db import IntegrityError, transaction

import keyvault.services
from keyvault.access.decision import Grant
from keyvault.access.endpoints import EndpointDraft
from keyvault.access.limits import Limit
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST, WORKER, Channel
from keyvault.access.roles import Role
from keyvault.access.scopes import EVERYWHERE, NOWHERE, AccessScope
from keyvault.backends.base import BackendDeniedError
from keyvault.domain.canonical import JsonValue
from keyvault.domain.checkpoints import CheckpointMark
from keyvault.domain.digests import PepperSet
from keyvault.domain.errors import KeyvaultError, PermissionMissingError, StateConflictError
from keyvault.domain.issuance import COLLECT_WITHIN, Delivery
from keyvault.domain.keys import KeyKind
from keyvault.domain.keystring import StringScope
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.plaintext import Plaintext
from keyvault.domain.revocation import RevocationReason
from keyvault.domain.revocation_log import Ended
from keyvault.models import (
    Account,
    AuditChain,
    AuditEntry,
    BreakGlass,
    CatalogEndpoint,
    Change,
    ConsoleSession,
    IssuanceRequest,
    Key,
    Material,
    Merchant,
    Notice,
    Operator,
    OperatorChange,
    PepperVersion,
    ProviderConnection,
    RecipientKey,
    WebhookEndpoint,
)
from keyvault.models.keys import OriginHeader
from keyvault.services import access_review, offboarding, operator_changes
from keyvault.services.approvals import break_glass, inbox
from keyvault.services.audit import export, rollback
from keyvault.services.backups import restore
from keyvault.services.catalog import endpoints
from keyvault.services.issuance import collection, requests
from keyvault.services.keys import credentials, lifecycle, recipient_keys
from keyvault.services.limits import overrides
from keyvault.services.merchants import client_configuration, merchants, orders
from keyvault.services.operators import operators
from keyvault.services.pepper_rotation import propagation, rotation
from keyvault.services.recording import notifications, revocation_log
from keyvault.services.recording import transaction as recording
from keyvault.services.recording.authorization import operator_principal
from keyvault.services.revocations import log_export, log_opening, replay
from keyvault.services.secrets import provider_connections, stored_copies
from keyvault.services.sessions import invitations, second_factors, sessions, sign_in
from keyvault.services.tokens import customer_tokens, service_tokens
from keyvault.services.webhooks import endpoints as webhook_endpoints
from keyvault.services.work import leases
from tests.domain.minting import mint
from tests.domain.test_recipient_keys import public_text
from tests.factories import (
    PASSWORD,
    SANDBOX,
    approve,
    grant,
    issue,
    issue_request,
    make_merchant,
    make_operator,
    make_token,
    now,
    on_host,
    renew_revocation_log,
    request_key,
)
from tests.services.conftest import Scene
from tests.services.rows import changed_tables, disable_triggers, dump_tables, last_body, last_ids, written_since
from tests.services.sessions.test_sessions import start_session
from tests.services.tokens.test_customer_tokens import holder_of, token_of

pytestmark = [pytest.mark.database, pytest.mark.django_db]

LOG = {"keyvault_auditchain", "keyvault_auditentry", "keyvault_change"}


@dataclass(frozen=True)
class Action:
    """A service call under test.

    `prepare` sets the scene and returns the call; the rest is what the call must write.
    """

    prepare: Callable[[Scene], Callable[[], object]]
    events: list[str]
    changes: list[str]


def _admin_grant(scene: Scene, *permissions: P) -> Grant:
    return grant(scene.admin, permissions[0], scene.sandbox)


def _worker_grant(scene: Scene) -> Grant:
    return grant(WORKER, P.ISSUANCE_EXECUTE, scene.sandbox)


def _staged(scene: Scene) -> Key:
    key, _ = issue(scene.sandbox)
    return lifecycle.stage_key(_worker_grant(scene), key.credential, expires_in_days=None)[0]


def _suspended(scene: Scene) -> Key:
    key, _ = issue(scene.sandbox)
    lifecycle.suspend_key(_admin_grant(scene, P.KEYS_SUSPEND), key)
    return key


def _stage(scene: Scene) -> Callable[[], object]:
    key, _ = issue(scene.sandbox)
    return lambda: lifecycle.stage_key(_worker_grant(scene), key.credential, expires_in_days=None)


def _activate(scene: Scene) -> Callable[[], object]:
    key = _staged(scene)
    return lambda: lifecycle.activate_key(_worker_grant(scene), key)


def _note_stored(scene: Scene) -> Callable[[], object]:
    key = _staged(scene)
    return lambda: lifecycle.note_stored(_worker_grant(scene), key, 2)


def _discard(scene: Scene) -> Callable[[], object]:
    key = _staged(scene)
    return lambda: lifecycle.discard_key(_worker_grant(scene), key)


def _suspend(scene: Scene) -> Callable[[], object]:
    key, _ = issue(scene.sandbox)
    return lambda: lifecycle.suspend_key(_admin_grant(scene, P.KEYS_SUSPEND), key)


def _resume(scene: Scene) -> Callable[[], object]:
    key = _suspended(scene)
    return lambda: lifecycle.resume_key(_admin_grant(scene, P.KEYS_RESUME), key)


def _revoke(scene: Scene) -> Callable[[], object]:
    key, _ = issue(scene.sandbox)
    return lambda: lifecycle.revoke_key(_admin_grant(scene, P.KEYS_REVOKE), key, RevocationReason.SUPERSEDED)


def _report(scene: Scene) -> Callable[[], object]:
    key, _ = issue(scene.sandbox)
    return lambda: lifecycle.report_compromise(_admin_grant(scene, P.KEYS_REPORT_COMPROMISE), key)


def _expire(scene: Scene) -> Callable[[], object]:
    key, _ = issue(scene.sandbox, expires_in_days=1)
    assert key.expires_at is not None
    return lambda: lifecycle.expire_key(grant(WORKER, P.ISSUANCE_EXECUTE, scene.sandbox, at=key.expires_at), key)


def _revoke_own(scene: Scene) -> Callable[[], object]:
    key, _ = issue(scene.sandbox)
    return lambda: lifecycle.revoke_own_key(grant(holder_of(key), P.KEYS_REVOKE_SELF, scene.sandbox), key)


def _reapply_revocation(scene: Scene) -> Callable[[], object]:
    key, _ = issue(scene.sandbox)
    allowed = grant(HOST, P.REVOCATIONS_REPLAY, scene.sandbox)
    return lambda: lifecycle.reapply_revocation(allowed, key, RevocationReason.SUPERSEDED)


def _replay(scene: Scene) -> Callable[[], object]:
    key, _ = issue(scene.sandbox)
    renew_revocation_log(settings.REVOCATION_LOG)
    revocation_log.append_lines([Ended(1, now(), "key", key.key_id, "deactivated", "superseded")])
    return lambda: replay.replay_revocations(grant(HOST, P.REVOCATIONS_REPLAY))


def _record_restore(scene: Scene) -> Callable[[], object]:
    manifest = {"at": "2026-01-01T00:00:00Z", "change_sequence": 1}
    return lambda: restore.record_restore(grant(HOST, P.INSTALLATION_MAINTAIN), manifest)


def _accept_loss(scene: Scene) -> Callable[[], object]:
    issue(scene.sandbox)
    settings.REVOCATION_LOG.unlink()
    return lambda: log_opening.accept_loss(
        grant(HOST, P.REVOCATIONS_REPLAY), scene.admin, scene.approver, "the disk is gone"
    )


def _add_export(scene: Scene) -> Callable[[], object]:
    issue(scene.sandbox)
    path = settings.REVOCATION_LOG.with_name("export-of-a-test")
    path.unlink(missing_ok=True)
    log_export.write_export(path, now())
    file = BytesIO(path.read_bytes())
    path.unlink()
    settings.REVOCATION_LOG.unlink()
    return lambda: log_export.add_export(grant(HOST, P.REVOCATIONS_REPLAY), file)


def _accept_rollback(scene: Scene) -> Callable[[], object]:
    revocation_log.append_lines([CheckpointMark("service", 7, "00" * 32, now())])
    allowed = grant(HOST, P.REVOCATIONS_REPLAY)
    return lambda: rollback.accept_rollback(allowed, scene.admin, scene.approver, "restored a backup")


def _create_order(scene: Scene) -> Callable[[], object]:
    key, _ = issue(scene.sandbox)
    allowed = grant(holder_of(key), P.ORDERS_CREATE, scene.sandbox)
    return lambda: orders.create_order(allowed, scene.sandbox, amount_minor=1, currency="EUR")


def _issue_customer_token(scene: Scene) -> Callable[[], object]:
    key, _ = issue(scene.sandbox)
    return lambda: token_of(key)


def _revoke_customer_token(scene: Scene) -> Callable[[], object]:
    key, _ = issue(scene.sandbox)
    token, _ = token_of(key)
    allowed = grant(holder_of(key), P.CUSTOMER_TOKENS_WRITE, scene.sandbox)
    return lambda: customer_tokens.revoke_customer_token(allowed, scene.sandbox, token.token_id)


def _with_account(call: Callable[[Grant, Account], None]) -> Callable[[Scene], Callable[[], object]]:
    return lambda scene: lambda: call(grant(scene.admin, P.MERCHANTS_WRITE, scene.sandbox), scene.sandbox)


def _destroy(scene: Scene) -> Callable[[], object]:
    key, _ = issue(scene.sandbox)
    lifecycle.revoke_key(_admin_grant(scene, P.KEYS_REVOKE), key, RevocationReason.SUPERSEDED)
    return lambda: stored_copies.destroy_string(_worker_grant(scene), key)


def _read_public(scene: Scene) -> Callable[[], object]:
    key, _ = issue(scene.sandbox, kind=KeyKind.PUBLIC)
    return lambda: stored_copies.read_public_string(_admin_grant(scene, P.KEYS_READ), key)


def _settle(scene: Scene) -> Callable[[], object]:
    key, _ = issue(scene.sandbox)
    lifecycle.suspend_key(_admin_grant(scene, P.KEYS_SUSPEND), key)
    at = now()
    lease = leases.claim(stored_copies.copy_subject(key), at)
    assert lease is not None
    with recording.recorded(_worker_grant(scene), P.ISSUANCE_EXECUTE, "test.hidden", account=scene.sandbox):
        key.compare_and_swap(material=Material.DELETE_DUE)
    # At the same time, the renewal of the lease changes nothing.
    return lambda: stored_copies.settle_string(_worker_grant(scene), key, lease, lambda: at)


def _report_refusal(scene: Scene) -> Callable[[], object]:
    error = BackendDeniedError("refused", status=403)
    return lambda: stored_copies.report_refusal(_worker_grant(scene), scene.sandbox, "destroying copies", error)


def _forget_path(scene: Scene) -> Callable[[], object]:
    key, _ = issue(scene.sandbox)
    offboarding.offboard_merchant(grant(scene.responder, P.MERCHANTS_OFFBOARD), scene.merchant, "contract ended")
    stored_copies.destroy_string(_worker_grant(scene), Key.objects.get(pk=key.pk))
    return lambda: offboarding.forget_path(_worker_grant(scene), key.credential)


def _host(permission: P) -> Grant:
    return grant(HOST, permission)


def _with_merchant(call: Callable[[Grant, Merchant], None]) -> Callable[[Scene], Callable[[], object]]:
    return lambda scene: lambda: call(_host(P.MERCHANTS_WRITE), scene.merchant)


def _resume_merchant(scene: Scene) -> Callable[[], object]:
    merchants.suspend_merchant(_host(P.MERCHANTS_WRITE), scene.merchant)
    return lambda: merchants.resume_merchant(_host(P.MERCHANTS_WRITE), scene.merchant)


def _suspend_account(scene: Scene) -> Callable[[], object]:
    return lambda: merchants.suspend_account(grant(scene.admin, P.MERCHANTS_WRITE, scene.sandbox), scene.sandbox)


def _resume_account(scene: Scene) -> Callable[[], object]:
    _suspend_account(scene)()
    return lambda: merchants.resume_account(grant(scene.admin, P.MERCHANTS_WRITE, scene.sandbox), scene.sandbox)


def _create_token(scene: Scene) -> Callable[[], object]:
    return lambda: service_tokens.create_service_token(
        grant(scene.admin, P.TOKENS_WRITE), name="x", scope=StringScope.ALL, permissions=[P.KEYS_READ]
    )


def _revoke_token(scene: Scene) -> Callable[[], object]:
    token, _ = make_token()
    return lambda: service_tokens.revoke_service_token(grant(scene.admin, P.TOKENS_WRITE), token)


def _rotate_token(scene: Scene) -> Callable[[], object]:
    token, _ = make_token()
    return lambda: service_tokens.rotate_service_token(grant(scene.admin, P.TOKENS_WRITE), token, 24)


def _create_operator(scene: Scene) -> Callable[[], object]:
    return lambda: operators.create_operator(
        _host(P.OPERATORS_ENROLL),
        username="new",
        roles=[Role.AUDITOR],
        scope=EVERYWHERE,
        password=Plaintext(PASSWORD),
    )


def _with_factor(
    call: Callable[[Operator], object],
) -> Callable[[Scene], Callable[[], object]]:
    """Call with an operator that has an authenticator app and a passkey."""

    def prepare(scene: Scene) -> Callable[[], object]:
        row = Operator.objects.get(username="tam")
        invitations.prepare_sign_in(_host(P.OPERATORS_ENROLL), row)
        second_factors.add_second_factor(
            grant(scene.tam, P.SESSIONS_WRITE), row, second_factors.NewFactor(second_factors.PASSKEY, {"name": "key"})
        )
        return lambda: call(row)

    return prepare


def _remove_factor(row: Operator) -> None:
    first = second_factors.list_second_factors(row)[0]
    second_factors.remove_second_factor(grant(operator_principal(row), P.SESSIONS_WRITE), row, first.pk)


def _add_codes(row: Operator) -> None:
    factor, _ = second_factors.new_recovery_codes()
    second_factors.add_second_factor(grant(operator_principal(row), P.SESSIONS_WRITE), row, factor)


def _invite(scene: Scene) -> Callable[[], object]:
    return lambda: invitations.invite(_host(P.OPERATORS_ENROLL), Operator.objects.get(username="tam"))


def _reset_password(scene: Scene) -> Callable[[], object]:
    row = Operator.objects.get(username="tam")
    return lambda: operators.reset_password(_host(P.OPERATORS_ENROLL), row, Plaintext("another long pass phrase"))


def _end_operator_sessions(scene: Scene) -> Callable[[], object]:
    row = Operator.objects.get(username="tam")
    return partial(operators.end_operator_sessions, _host(P.OPERATORS_WRITE), row)


def _disable_operator(scene: Scene) -> Callable[[], object]:
    row = Operator.objects.get(username="tam")
    return partial(operators.disable_operator, _host(P.OPERATORS_WRITE), row)


def _set_roles(scene: Scene) -> Callable[[], object]:
    row = Operator.objects.get(username="tam")
    return partial(operators.set_roles, _host(P.OPERATORS_WRITE), row, [Role.AUDITOR, Role.APPROVER])


def _set_scope(scene: Scene) -> Callable[[], object]:
    row = Operator.objects.get(username="tam")
    return partial(operators.set_scope, _host(P.OPERATORS_WRITE), row, AccessScope(frozenset({"acme"})))


def _link_person(scene: Scene) -> Callable[[], object]:
    make_operator("new", Role.AUDITOR, scope=NOWHERE)
    new, tam = (Operator.objects.get(username=name) for name in ("new", "tam"))
    return partial(operators.link_person, grant(scene.admin, P.OPERATORS_WRITE), new, tam)


def _enroll_operator(scene: Scene) -> Callable[[], object]:
    allowed = _host(P.OPERATORS_ENROLL)
    return partial(operator_changes.enroll_operator, allowed, username="new", roles=[Role.AUDITOR], scope=EVERYWHERE)


def _change_scope(scene: Scene) -> Callable[[], object]:
    make_operator("new", Role.AUDITOR, scope=NOWHERE)
    row = Operator.objects.get(username="new")
    return partial(operator_changes.change_scope, grant(scene.admin, P.OPERATORS_WRITE), row, EVERYWHERE, "why")


def _change_roles(scene: Scene) -> Callable[[], object]:
    row = Operator.objects.get(username="tam")
    return partial(operator_changes.change_roles, grant(scene.admin, P.OPERATORS_WRITE), row, [Role.APPROVER], "why")


def _request_factor_reset(scene: Scene) -> Callable[[], object]:
    row = Operator.objects.get(username="tam")
    return partial(operator_changes.request_factor_reset, grant(scene.admin, P.OPERATORS_WRITE), row, "lost")


def _end_session(scene: Scene) -> Callable[[], object]:
    _, row = start_session(scene.tam)
    return partial(sessions.end_session, grant(scene.tam, P.SESSIONS_WRITE), row)


def _end_other_sessions(scene: Scene) -> Callable[[], object]:
    start_session(scene.tam)
    _, row = start_session(scene.tam)
    return partial(sessions.end_other_sessions, grant(scene.tam, P.SESSIONS_WRITE), row)


def _with_change(
    decide: Callable[[Grant, OperatorChange], object], permission: P, by: str = "approver"
) -> Callable[[Scene], Callable[[], object]]:
    def prepare(scene: Scene) -> Callable[[], object]:
        change = _request_factor_reset(scene)()
        assert isinstance(change, OperatorChange)
        return lambda: decide(grant(getattr(scene, by), permission), change)

    return prepare


def _request(scene: Scene) -> Callable[[], object]:
    return lambda: request_key(scene.production, by=scene.tam)


def _approve(scene: Scene) -> Callable[[], object]:
    request = request_key(scene.production)
    return lambda: approve(request)


def _reject(scene: Scene) -> Callable[[], object]:
    request = request_key(scene.production)
    return lambda: requests.reject_issuance(grant(scene.approver, P.ISSUANCE_REJECT, scene.production), request, "no")


def _withdraw(scene: Scene) -> Callable[[], object]:
    request = request_key(scene.production)
    return lambda: requests.withdraw_issuance(grant(scene.tam, P.ISSUANCE_WITHDRAW, scene.production), request)


def _end_request(scene: Scene) -> Callable[[], object]:
    request = request_key(scene.production)
    return lambda: requests.end_issuance(grant(scene.admin, P.MERCHANTS_OFFBOARD, scene.production), request, "gone")


def _offboard(scene: Scene) -> Callable[[], object]:
    return lambda: offboarding.offboard_merchant(grant(scene.admin, P.MERCHANTS_OFFBOARD), scene.merchant, "gone")


def _expire_request(scene: Scene) -> Callable[[], object]:
    request = request_key(scene.production)
    allowed = grant(WORKER, P.ISSUANCE_EXECUTE, scene.production, at=request.expires_at)
    return lambda: requests.expire_issuance(allowed, request)


def _collect(scene: Scene) -> Callable[[], object]:
    request = request_key(scene.production, delivery=Delivery.SHOW_ONCE)
    issue_request(approve(request))
    return lambda: requests.collect_key(grant(scene.tam, P.ISSUANCE_COLLECT, scene.production), request)


def _record_collection(scene: Scene) -> Callable[[], object]:
    request = request_key(scene.sandbox, delivery=Delivery.SHOW_ONCE)
    issue_request(request)

    def call() -> None:
        with collection.record_collection(grant(scene.tam, P.ISSUANCE_COLLECT, scene.sandbox), request):
            pass

    return call


def _discard_uncollected(scene: Scene) -> Callable[[], object]:
    request = request_key(scene.sandbox, delivery=Delivery.SHOW_ONCE)
    issue_request(request)
    allowed = grant(WORKER, P.ISSUANCE_EXECUTE, scene.sandbox, at=now() + COLLECT_WITHIN)
    return lambda: collection.discard_uncollected(allowed, request)


DRAFT = EndpointDraft("payouts.list", "GET", "/payouts", frozenset({KeyKind.PRIVATE}))


def _with_endpoint(call: Callable[[Grant, CatalogEndpoint], object]) -> Callable[[Scene], Callable[[], object]]:
    def prepare(scene: Scene) -> Callable[[], object]:
        allowed = grant(scene.admin, P.CATALOG_WRITE)
        row = endpoints.add_endpoint(allowed, DRAFT)
        return lambda: call(allowed, row)

    return prepare


def _restore_endpoint(scene: Scene) -> Callable[[], object]:
    allowed = grant(scene.admin, P.CATALOG_WRITE)
    row = endpoints.add_endpoint(allowed, DRAFT)
    endpoints.withdraw_endpoint(allowed, row)
    return lambda: endpoints.restore_endpoint(allowed, row)


def _set_account_limit(scene: Scene) -> Callable[[], object]:
    allowed = grant(scene.admin, P.LIMITS_WRITE, scene.sandbox)
    return lambda: overrides.set_account_limit(allowed, scene.sandbox, Limit(5, 1))


def _set_endpoint_limit(scene: Scene) -> Callable[[], object]:
    allowed = grant(scene.admin, P.LIMITS_WRITE)
    return lambda: overrides.set_endpoint_limit(allowed, SANDBOX, "orders.create", Limit(5, 1))


def _restrict(scene: Scene) -> Callable[[], object]:
    key, _ = issue(scene.sandbox)
    allowed = grant(scene.admin, P.CREDENTIALS_RESTRICT, scene.sandbox)
    return lambda: credentials.restrict_credential(allowed, key.credential, ["192.0.2.0/24"], OriginHeader.REFUSE)


def _set_recipient(scene: Scene) -> Callable[[], RecipientKey]:
    """Prepare to replace a recipient key that does not apply yet, which withdraws it."""
    key, _ = issue(scene.production)
    allowed = grant(holder_of(key), P.RECIPIENTS_WRITE, scene.production)
    first, second = (public_text(X25519PrivateKey.generate()) for _ in range(2))
    recipient_keys.set_recipient_key(allowed, key, first)
    return lambda: recipient_keys.set_recipient_key(allowed, key, second)


def _approve_recipient(scene: Scene) -> Callable[[], object]:
    """Prepare the second of two approvals, with which the recipient key applies."""
    recipient = _set_recipient(scene)()
    digest = recipient.plan_digest
    first, second = (grant(by, P.RECIPIENTS_APPROVE, scene.production) for by in (scene.approver, scene.admin))
    recipient_keys.approve_recipient_key(first, recipient, digest)
    return lambda: recipient_keys.approve_recipient_key(second, recipient, digest)


def _withdraw_recipient(scene: Scene) -> Callable[[], object]:
    recipient = _set_recipient(scene)()
    allowed = grant(scene.responder, P.RECIPIENTS_WITHDRAW, scene.production)
    return lambda: recipient_keys.withdraw_recipient_key(allowed, recipient, "not the merchant's")


def _review(scene: Scene) -> Callable[[], object]:
    _collect(scene)()
    bypass = BreakGlass.objects.get()
    allowed = grant(scene.approver, P.BREAK_GLASS_REVIEW, requester_person=bypass.person)
    return lambda: break_glass.review_break_glass(allowed, bypass)


def _disown(scene: Scene) -> Callable[[], object]:
    approve(request_key(scene.production), by=on_host(scene.approver))
    allowed = grant(scene.approver, P.BREAK_GLASS_REVIEW)
    return lambda: break_glass.disown_approval(allowed, BreakGlass.objects.get())


def _webhook(scene: Scene) -> WebhookEndpoint:
    allowed = grant(scene.tam, P.WEBHOOKS_WRITE, scene.sandbox)
    return webhook_endpoints.add_endpoint(allowed, scene.sandbox, "https://acme.example/hooks")[0]


def _to_reseal(scene: Scene) -> tuple[Grant, WebhookEndpoint]:
    endpoint = _webhook(scene)
    return grant(WORKER, P.KEYS_REHASH, scene.sandbox), endpoint


def _host_pepper_grant() -> Grant:
    return grant(HOST, P.PEPPERS_WRITE)


def _pepper(number: int, **columns: object) -> PepperVersion:
    """Create a version in use since yesterday that the backend never had."""
    yesterday = now() - timedelta(days=1)
    row = PepperVersion(
        pepper_set=PepperSet.SANDBOX,
        number=number,
        check_value=bytes(16),
        created_at=yesterday,
        **{"hashes_from_at": yesterday, **columns},
    )
    with recording.recorded(_host_pepper_grant(), P.PEPPERS_WRITE, "test.rotated"):
        row.save()
    return row


def _with_webhook(call: Callable[[Grant, WebhookEndpoint], object]) -> Callable[[Scene], Callable[[], object]]:
    def prepare(scene: Scene) -> Callable[[], object]:
        endpoint = _webhook(scene)
        return lambda: call(grant(scene.tam, P.WEBHOOKS_WRITE, scene.sandbox), endpoint)

    return prepare


def _enable_webhook(scene: Scene) -> Callable[[], object]:
    endpoint, allowed = _webhook(scene), grant(scene.tam, P.WEBHOOKS_WRITE, scene.sandbox)
    webhook_endpoints.disable_endpoint(allowed, endpoint, "moved")
    return lambda: webhook_endpoints.enable_endpoint(allowed, endpoint)


def _connection(scene: Scene) -> ProviderConnection:
    allowed = grant(scene.tam, P.CONNECTIONS_WRITE, scene.sandbox)
    return provider_connections.set_connection(allowed, scene.sandbox, "stripe", Plaintext("sk_test_1"))


def _with_connection(
    call: Callable[[Grant, ProviderConnection], object], *, is_removed: bool = False, by_worker: bool = False
) -> Callable[[Scene], Callable[[], object]]:
    def prepare(scene: Scene) -> Callable[[], object]:
        connection = _connection(scene)
        allowed = grant(scene.tam, P.CONNECTIONS_WRITE, scene.sandbox)
        if is_removed:
            provider_connections.remove_connection(allowed, connection)
        return lambda: call(grant(WORKER, P.BACKEND_RECONCILE, scene.sandbox) if by_worker else allowed, connection)

    return prepare


def _marking(scene: Scene, place: Account | None = None) -> Grant:
    return grant(scene.approver, P.NOTICES_MARK, place)


def _with_alarm(scene: Scene, call: Callable[[Notice], object]) -> Callable[[], object]:
    with recording.recorded(_worker_grant(scene), P.ISSUANCE_EXECUTE, "key.revoked", account=scene.sandbox):
        alarm = notifications.announce(_worker_grant(scene), NoticeKind.ROTATION_STALLED, scene.sandbox, "rot_x")
    return lambda: call(alarm)


def _export(scene: Scene) -> Callable[[], object]:
    return lambda: export.begin_export(grant(scene.admin, P.AUDIT_READ), ["sandbox"], now(), EVERYWHERE)


def _export_review(scene: Scene) -> Callable[[], object]:
    return lambda: access_review.begin_review_export(grant(scene.admin, P.OPERATORS_READ))


ACTIONS: dict[str, Action] = {
    "access_review.begin_review_export": Action(_export_review, ["access_review.exported"], []),
    "audit.export.begin_export": Action(_export, ["audit.exported"], []),
    "catalog.endpoints.add_endpoint": Action(
        lambda scene: lambda: endpoints.add_endpoint(grant(scene.admin, P.CATALOG_WRITE), DRAFT),
        ["endpoint.added"],
        ["endpoint"],
    ),
    "catalog.endpoints.change_endpoint": Action(
        _with_endpoint(lambda allowed, row: endpoints.change_endpoint(allowed, row, replace(DRAFT, summary="All"))),
        ["endpoint.changed"],
        ["endpoint"],
    ),
    "catalog.endpoints.withdraw_endpoint": Action(
        _with_endpoint(endpoints.withdraw_endpoint), ["endpoint.withdrawn"], ["endpoint"]
    ),
    "catalog.endpoints.restore_endpoint": Action(_restore_endpoint, ["endpoint.restored"], ["endpoint"]),
    "limits.overrides.set_account_limit": Action(_set_account_limit, ["limit.set"], ["account"]),
    "limits.overrides.set_endpoint_limit": Action(_set_endpoint_limit, ["limit.set"], ["limit"]),
    "keys.credentials.restrict_credential": Action(_restrict, ["credential.restricted"], ["credential"]),
    "keys.lifecycle.stage_key": Action(_stage, ["key.staged"], ["key"]),
    "keys.lifecycle.activate_key": Action(_activate, ["key.activated"], ["key"]),
    "keys.lifecycle.note_stored": Action(_note_stored, ["key.stored"], ["key"]),
    "keys.lifecycle.discard_key": Action(_discard, ["key.burned"], ["key"]),
    "keys.lifecycle.suspend_key": Action(_suspend, ["key.suspended"], ["key"]),
    "keys.lifecycle.resume_key": Action(_resume, ["key.resumed"], ["key"]),
    "keys.lifecycle.revoke_key": Action(_revoke, ["key.revoked"], ["key"]),
    "keys.lifecycle.report_compromise": Action(_report, ["key.compromised"], ["key"]),
    "keys.lifecycle.expire_key": Action(_expire, ["key.expired"], ["key"]),
    "keys.lifecycle.revoke_own_key": Action(_revoke_own, ["key.compromised"], ["key"]),
    "keys.recipient_keys.set_recipient_key": Action(_set_recipient, ["recipient_key.set"], []),
    "keys.recipient_keys.approve_recipient_key": Action(_approve_recipient, ["recipient_key.approved"], []),
    "keys.recipient_keys.withdraw_recipient_key": Action(_withdraw_recipient, ["recipient_key.withdrawn"], []),
    "merchants.orders.create_order": Action(_create_order, ["order.created"], []),
    "tokens.customer_tokens.issue_customer_token": Action(
        _issue_customer_token, ["customer_token.issued"], ["customer_token"]
    ),
    "keys.lifecycle.reapply_revocation": Action(_reapply_revocation, ["key.revocation_replayed"], ["key"]),
    "audit.rollback.accept_rollback": Action(_accept_rollback, ["audit.rollback_accepted"], []),
    "backups.restore.record_restore": Action(_record_restore, ["backup.restored"], []),
    "revocations.log_export.add_export": Action(_add_export, ["journal.rebuilt"], []),
    "revocations.log_opening.accept_loss": Action(_accept_loss, ["journal.loss_accepted"], []),
    "revocations.replay.replay_revocations": Action(_replay, ["key.revocation_replayed"], ["key"]),
    "tokens.customer_tokens.revoke_customer_token": Action(
        _revoke_customer_token, ["customer_token.revoked"], ["customer_token"]
    ),
    "merchants.client_configuration.set_client_configuration": Action(
        _with_account(lambda grant, account: client_configuration.set_client_configuration(grant, account, {"a": 1})),
        ["account.client_configuration_set"],
        ["account"],
    ),
    "merchants.client_configuration.set_allowed_origins": Action(
        _with_account(lambda grant, account: client_configuration.set_allowed_origins(grant, account, ["https://a"])),
        ["account.origins_set"],
        ["account"],
    ),
    "merchants.client_configuration.set_customer_token_bound": Action(
        _with_account(lambda grant, account: client_configuration.set_customer_token_bound(grant, account, 60)),
        ["account.customer_token_bound_set"],
        ["account"],
    ),
    "secrets.stored_copies.read_public_string": Action(_read_public, ["key.shown"], []),
    "secrets.stored_copies.destroy_string": Action(_destroy, ["key.material_destroyed"], ["key"]),
    "secrets.stored_copies.settle_string": Action(_settle, ["key.material_deleted"], ["key"]),
    "secrets.stored_copies.report_refusal": Action(_report_refusal, ["backend.refused"], []),
    "offboarding.forget_path": Action(_forget_path, ["credential.forgotten"], ["credential"]),
    "merchants.merchants.create_merchant": Action(
        lambda _: lambda: make_merchant("globex"), ["merchant.created"], ["merchant", "account", "account"]
    ),
    "merchants.merchants.suspend_merchant": Action(
        _with_merchant(merchants.suspend_merchant), ["merchant.suspended"], ["merchant"]
    ),
    "merchants.merchants.resume_merchant": Action(_resume_merchant, ["merchant.resumed"], ["merchant"]),
    "merchants.merchants.suspend_account": Action(_suspend_account, ["account.suspended"], ["account"]),
    "merchants.merchants.resume_account": Action(_resume_account, ["account.resumed"], ["account"]),
    "tokens.service_tokens.create_service_token": Action(_create_token, ["service_token.created"], ["service_token"]),
    "tokens.service_tokens.rotate_service_token": Action(
        _rotate_token, ["service_token.rotated"], ["service_token", "service_token"]
    ),
    "tokens.service_tokens.revoke_service_token": Action(_revoke_token, ["service_token.revoked"], ["service_token"]),
    "offboarding.offboard_merchant": Action(
        _offboard, ["merchant.offboarding_began", "merchant.offboarded"], ["merchant"]
    ),
    "operators.operators.set_scope": Action(_set_scope, ["operator.scope_changed"], []),
    "operators.operators.create_operator": Action(_create_operator, ["operator.created"], []),
    "operators.operators.reset_password": Action(_reset_password, ["operator.password_reset"], []),
    "operators.operators.end_operator_sessions": Action(_end_operator_sessions, ["operator.sessions_ended"], []),
    "operators.operators.disable_operator": Action(_disable_operator, ["operator.disabled"], []),
    "operators.operators.set_roles": Action(_set_roles, ["operator.roles_changed"], []),
    "operators.operators.link_person": Action(_link_person, ["operator.person_linked"], []),
    "operator_changes.enroll_operator": Action(_enroll_operator, ["operator.created"], []),
    "operator_changes.change_scope": Action(_change_scope, ["operator_change.requested"], []),
    "operator_changes.change_roles": Action(_change_roles, ["operator_change.requested"], []),
    "operator_changes.request_factor_reset": Action(_request_factor_reset, ["operator_change.requested"], []),
    "operator_changes.approve_change": Action(
        _with_change(
            lambda allowed, change: operator_changes.approve_change(allowed, change, change.plan_digest),
            P.OPERATORS_APPROVE,
        ),
        ["operator_change.approved", "operator.second_factors_reset"],
        [],
    ),
    "operator_changes.reject_change": Action(
        _with_change(
            lambda allowed, change: operator_changes.reject_change(allowed, change, "no"), P.OPERATORS_APPROVE
        ),
        ["operator_change.rejected"],
        [],
    ),
    "operator_changes.withdraw_change": Action(
        _with_change(operator_changes.withdraw_change, P.OPERATORS_WRITE, "admin"), ["operator_change.withdrawn"], []
    ),
    "sessions.sessions.end_session": Action(_end_session, ["session.ended"], []),
    "sessions.sessions.end_other_sessions": Action(_end_other_sessions, ["session.others_ended"], []),
    "sessions.invitations.invite": Action(_invite, ["operator.invited"], []),
    "sessions.invitations.prepare_sign_in": Action(
        _with_factor(lambda row: invitations.prepare_sign_in(_host(P.OPERATORS_ENROLL), row)),
        ["operator.sign_in_prepared"],
        [],
    ),
    "sessions.second_factors.add_second_factor": Action(_with_factor(_add_codes), ["operator.second_factor_added"], []),
    "sessions.second_factors.remove_second_factor": Action(
        _with_factor(_remove_factor), ["operator.second_factor_removed"], []
    ),
    "sessions.second_factors.reset_second_factors": Action(
        _with_factor(lambda row: second_factors.reset_second_factors(_host(P.OPERATORS_WRITE), row)),
        ["operator.second_factors_reset"],
        [],
    ),
    "sessions.sign_in.sign_out": Action(
        lambda scene: partial(sign_in.sign_out, grant(scene.tam, P.SESSIONS_WRITE)), ["operator.signed_out"], []
    ),
    "issuance.requests.request_issuance": Action(_request, ["issuance.requested"], []),
    "issuance.requests.approve_issuance": Action(_approve, ["issuance.approved"], []),
    "issuance.requests.reject_issuance": Action(_reject, ["issuance.rejected"], []),
    "issuance.requests.withdraw_issuance": Action(_withdraw, ["issuance.withdrawn"], []),
    "issuance.requests.end_issuance": Action(_end_request, ["issuance.withdrawn"], []),
    "issuance.requests.expire_issuance": Action(_expire_request, ["issuance.expired"], []),
    "issuance.requests.collect_key": Action(_collect, ["issuance.collected"], ["key"]),
    "issuance.collection.record_collection": Action(_record_collection, ["issuance.collected"], ["key"]),
    "issuance.collection.discard_uncollected": Action(_discard_uncollected, ["issuance.burned", "key.burned"], ["key"]),
    "approvals.break_glass.review_break_glass": Action(_review, ["break_glass.reviewed"], []),
    "approvals.break_glass.disown_approval": Action(_disown, ["break_glass.disowned"], []),
    "webhooks.endpoints.add_endpoint": Action(
        lambda scene: lambda: _webhook(scene),
        ["webhook_endpoint.added"],
        [],
    ),
    "webhooks.endpoints.rotate_secret": Action(
        _with_webhook(webhook_endpoints.rotate_secret), ["webhook_endpoint.secret_rotated"], []
    ),
    "webhooks.endpoints.disable_endpoint": Action(
        _with_webhook(lambda allowed, row: webhook_endpoints.disable_endpoint(allowed, row, "moved")),
        ["webhook_endpoint.disabled"],
        [],
    ),
    "webhooks.endpoints.enable_endpoint": Action(_enable_webhook, ["webhook_endpoint.enabled"], []),
    "webhooks.endpoints.send_test": Action(_with_webhook(webhook_endpoints.send_test), ["webhook_endpoint.tested"], []),
    "secrets.provider_connections.set_connection": Action(
        lambda scene: lambda: _connection(scene), ["connection.added", "connection.stored"], []
    ),
    "secrets.provider_connections.replace_connection": Action(
        _with_connection(
            lambda allowed, row: provider_connections.replace_connection(allowed, row, Plaintext("sk_test_2"))
        ),
        ["connection.write_began", "connection.stored"],
        [],
    ),
    "secrets.provider_connections.remove_connection": Action(
        _with_connection(provider_connections.remove_connection), ["connection.removed"], []
    ),
    "secrets.provider_connections.settle_connection": Action(
        _with_connection(provider_connections.settle_connection, by_worker=True), ["connection.settled"], []
    ),
    "secrets.provider_connections.forget_connection": Action(
        _with_connection(provider_connections.forget_connection, is_removed=True, by_worker=True),
        ["connection.forgotten"],
        [],
    ),
    "approvals.inbox.mark_seen": Action(
        lambda scene: _with_alarm(scene, lambda row: inbox.mark_seen(_marking(scene, scene.sandbox), row)),
        ["notice.seen"],
        [],
    ),
    "approvals.inbox.mark_all_seen": Action(
        lambda scene: _with_alarm(scene, lambda row: inbox.mark_all_seen(_marking(scene), now())),
        ["notice.all_seen"],
        [],
    ),
    "webhooks.endpoints.reseal_secrets": Action(
        lambda scene: partial(webhook_endpoints.reseal_secrets, *_to_reseal(scene)), ["webhook_endpoint.resealed"], []
    ),
    "pepper_rotation.rotation.rotate_pepper": Action(
        lambda _: lambda: rotation.rotate_pepper(_host_pepper_grant(), PepperSet.SANDBOX), ["pepper.rotated"], []
    ),
    "pepper_rotation.propagation.begin_hashing": Action(
        lambda scene: (
            row := _pepper(2, hashes_from_at=None),
            partial(propagation.begin_hashing, grant(WORKER, P.KEYS_REHASH), row),
        )[1],
        ["pepper.in_use"],
        [],
    ),
    "pepper_rotation.rotation.retire_pepper": Action(
        lambda _: (_pepper(2), lambda: rotation.retire_pepper(_host_pepper_grant(), PepperSet.SANDBOX, 1))[1],
        ["pepper.retired"],
        [],
    ),
    "pepper_rotation.rotation.destroy_pepper": Action(
        lambda _: (
            _pepper(99, retired_at=now() - rotation.KEPT_AFTER_RETIREMENT),
            partial(rotation.destroy_pepper, _host_pepper_grant(), PepperSet.SANDBOX, 99),
        )[1],
        ["pepper.destroyed"],
        [],
    ),
}
"""Every public service that takes a grant, with what it must write."""

CHANGING_OPERATORS = ("operator_changes.", "operators.", "sessions.invitations.", "sessions.second_factors.")

WITHOUT_OWN_ENTRY = {
    "issuance.collection.read_handover": "reads and seals, writes nothing",
    "operators.operators.require_another_person": "decides, writes nothing",
    "recording.transaction.recorded": "the block itself",
    "approvals.four_eyes.approving_operator": "decides, writes nothing",
    "approvals.four_eyes.record_approval": "inside the block of the approval",
    "approvals.four_eyes.note_command_line_approval": "inside the block of the approval",
    "approvals.break_glass.note_break_glass": "inside the block of the bypass",
    "recording.revocation_log.announce_failure": "inside the block that detected it",
    "secrets.stored_copies.announce_missing": "inside the block that detected it",
    "recording.notifications.announce": "inside the block of its cause",
    "recording.notifications.announce_to": "inside the block of its cause",
}

TESTED_WITH_FILES = {
    "audit.signing_keys.rotate_signing_keys": "tests/services/audit/test_checkpoints.py",
    "backups.backup.make_backup": "tests/services/backups/test_backup_drill.py",
    "secrets.master_key.rotate_master_key": "tests/services/secrets/test_master_key.py",
    "sessions.session_key.rotate_session_key": "tests/services/sessions/test_session_key.py",
}
"""Services that change files of an installation: the test that counts their entries."""


def public_services() -> Iterator[str]:
    """Yield every public function of the services whose first parameter is a grant."""
    prefix = "keyvault.services."
    for module_info in pkgutil.walk_packages(keyvault.services.__path__, prefix):
        module = importlib.import_module(module_info.name)
        for name, function in inspect.getmembers(module, inspect.isfunction):
            parameters = list(inspect.signature(inspect.unwrap(function)).parameters.values())
            if function.__module__ != module.__name__ or name.startswith("_") or not parameters:
                continue
            if parameters[0].annotation in {Grant, "Grant"}:
                yield f"{module_info.name.removeprefix(prefix)}.{name}"


def test_services_with_a_grant_are_all_listed() -> None:
    """A new service is tested here, or listed with the reason why it writes no entry of its own."""
    assert set(public_services()) == set(ACTIONS) | set(WITHOUT_OWN_ENTRY) | set(TESTED_WITH_FILES)


@pytest.mark.parametrize("name", ACTIONS)
def test_service_writes_exactly_its_entries_and_change_rows(scene: Scene, name: str) -> None:
    """No change without an audit entry, and no altered verdict without a change row."""
    call = ACTIONS[name].prepare(scene)
    before = last_ids()
    call()
    events, changes = written_since(before)
    assert events == ACTIONS[name].events
    assert [kind for kind, _ in changes] == ACTIONS[name].changes


@pytest.mark.parametrize("name", [name for name in ACTIONS if name.startswith(CHANGING_OPERATORS)])
def test_service_that_changes_an_operator_ends_its_sessions(scene: Scene, name: str) -> None:
    """A session that the operator's new version has ended is not listed as open, and the entry names it."""
    call = ACTIONS[name].prepare(scene)
    before = last_ids()
    row = Operator.objects.get(username="tam")
    _, session = start_session(scene.tam)
    call()
    is_changed = Operator.objects.get(username="tam").version != row.version
    details = [json.loads(bytes(entry.body))["details"] for entry in AuditEntry.objects.filter(pk__gt=before[0])]
    ended = [each["sessions_ended"] for each in details if "sessions_ended" in each]
    assert ConsoleSession.objects.filter(pk=session.pk).exists() is not is_changed
    assert ended == ([1] if is_changed else [])


@pytest.mark.postgres_once
@pytest.mark.parametrize("name", ACTIONS)
def test_service_whose_entry_cannot_be_written_changes_nothing(
    scene: Scene, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The audit entry and the change share one transaction."""
    call = ACTIONS[name].prepare(scene)
    before = dump_tables()

    def fail(**_: object) -> None:
        raise OSError("the log is full")

    monkeypatch.setattr(recording, "append_entries", fail)
    with pytest.raises(OSError, match="the log is full"):
        call()
    assert changed_tables(before, dump_tables()) == set()


@pytest.mark.postgres_once
@pytest.mark.parametrize("name", [name for name, action in ACTIONS.items() if action.changes])
def test_service_whose_change_row_cannot_be_written_changes_nothing(
    scene: Scene, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No verdict changes without a notification to the caches."""
    call = ACTIONS[name].prepare(scene)
    before = dump_tables()

    def fail(**_: object) -> None:
        raise OSError("the feed is full")

    monkeypatch.setattr(Change.objects, "create", fail)
    with pytest.raises(OSError, match="the feed is full"):
        call()
    assert changed_tables(before, dump_tables()) == set()


def test_issuance_by_the_worker_writes_the_entries_of_its_two_transactions(scene: Scene) -> None:
    """First the digest, then the key; each transaction's cause comes first in its entries."""
    request = request_key(scene.sandbox)
    before = last_ids()
    key = issue_request(request)
    events, changes = written_since(before)
    assert events == ["issuance.staged", "key.staged", "issuance.issued", "key.stored", "key.activated"]
    assert changes == [("credential", key.credential_id), ("key", key.key_id), ("key", key.key_id)]


# ---------------------------------------------------------------------------------------------- the recorded block


def _suspension(scene: Scene, key: Key) -> Callable[[], object]:
    return lambda: lifecycle.suspend_key(grant(scene.admin, P.KEYS_SUSPEND, scene.sandbox), key)


def test_recorded_with_a_grant_for_another_permission_is_refused(scene: Scene) -> None:
    key, _ = issue(scene.sandbox)
    with pytest.raises(PermissionMissingError):
        lifecycle.revoke_key(grant(scene.admin, P.KEYS_SUSPEND, scene.sandbox), key, RevocationReason.SUPERSEDED)
    assert Key.objects.get(pk=key.pk).state == "active"


@pytest.mark.parametrize("place", ["other merchant", "other environment", "platform"])
def test_recorded_with_a_grant_for_another_place_is_refused(scene: Scene, place: str) -> None:
    """A grant for one account, or for the platform, opens no other account, not even of the same merchant."""
    key, _ = issue(scene.sandbox)
    make_merchant("globex")
    elsewhere = {
        "other merchant": merchants.find_account("globex", "sandbox"),
        "other environment": scene.production,
        "platform": None,
    }[place]
    with pytest.raises(PermissionMissingError):
        lifecycle.revoke_key(grant(scene.admin, P.KEYS_REVOKE, elsewhere), key, RevocationReason.SUPERSEDED)
    assert Key.objects.get(pk=key.pk).state == "active"


def test_recorded_on_the_platform_with_a_grant_for_an_account_is_refused(scene: Scene) -> None:
    with pytest.raises(PermissionMissingError):
        merchants.suspend_merchant(grant(HOST, P.MERCHANTS_WRITE, scene.sandbox), scene.merchant)
    assert Merchant.objects.get(pk="acme").status == "active"


@pytest.mark.parametrize("within", [AccessScope(frozenset({"globex"})), AccessScope(None, frozenset({SANDBOX}))])
def test_recorded_on_more_than_the_grant_is_within_is_refused(scene: Scene, within: AccessScope) -> None:
    """A grant for some accounts changes nothing that also concerns others."""
    allowed = grant(HOST, P.MERCHANTS_WRITE, within=within)
    with pytest.raises(PermissionMissingError, match="outside your scope"):
        merchants.suspend_merchant(allowed, scene.merchant)
    with pytest.raises(PermissionMissingError, match="outside your scope"):
        merchants.create_merchant(allowed, merchant_id="globex", name="Globex")
    assert list(Merchant.objects.values_list("pk", "status")) == [("acme", "active")]


def test_recorded_with_one_of_several_permissions_is_accepted(scene: Scene) -> None:
    key, _ = issue(scene.sandbox)
    lifecycle.discard_key(grant(WORKER, P.ISSUANCE_EXECUTE, scene.sandbox), key)
    assert Key.objects.get(pk=key.pk).state == "deactivated"


def test_recorded_entry_names_actor_channel_and_host_user(scene: Scene) -> None:
    """The command line proves no identity, so the entry names the host user too."""
    row = Operator.objects.get(username="admin")
    shell = operator_principal(row, Channel.COMMAND_LINE, "root")
    key, _ = issue(scene.sandbox)
    lifecycle.suspend_key(grant(shell, P.KEYS_SUSPEND, scene.sandbox), key)
    body = last_body("key.suspended")
    assert (body["actor"], body["channel"], body["details"]["host_user"]) == ("operator:admin", "command_line", "root")
    assert body["details"]["key_id"] == key.key_id


def test_recorded_action_of_the_host_names_its_user(scene: Scene) -> None:
    """The host principal stands for no operator; the log names the host user."""
    make_merchant("globex")
    assert last_body("merchant.created")["details"]["host_user"] == getpass.getuser()
    issue(scene.sandbox)
    assert "host_user" not in last_body("issuance.issued")["details"], "the worker has no host user"


def test_recorded_action_of_a_host_user_without_a_name_records_the_uid(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container the user may have no name."""

    def fail() -> str:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(getpass, "getuser", fail)
    make_merchant("globex")
    assert last_body("merchant.created")["details"]["host_user"] == f"uid {os.getuid()}"


def test_recorded_details_are_redacted_at_every_depth(scene: Scene) -> None:
    """The log is permanent, so a key string is masked before it is written."""
    shown = mint(seed="shown by mistake")
    allowed = grant(scene.admin, P.KEYS_SUSPEND, scene.sandbox)
    nested: JsonValue = {"inner": [1, None, {shown: f"see {shown}"}], "flag": True}
    with recording.recorded(allowed, P.KEYS_SUSPEND, "test.redacted", account=scene.sandbox, why=shown, nested=nested):
        pass
    masked = f"{shown[:27]}***"
    assert last_body("test.redacted")["details"] == {
        "why": masked,
        "nested": {"inner": [1, None, {masked: f"see {masked}"}], "flag": True},
    }


def test_recorded_rejection_reason_is_redacted(scene: Scene) -> None:
    shown = mint(seed="shown by mistake")
    request = request_key(scene.production)
    requests.reject_issuance(grant(scene.approver, P.ISSUANCE_REJECT, scene.production), request, f"leaked: {shown}")
    assert last_body("issuance.rejected")["details"]["why"] == f"leaked: {shown[:27]}***"
    assert shown[27:] not in repr(dump_tables())


def test_recorded_sequence_equals_that_of_its_change_row(scene: Scene) -> None:
    """The caller of a revocation gets the sequence that verifiers will confirm."""
    key, _ = issue(scene.sandbox)
    record = lifecycle.revoke_key(grant(scene.admin, P.KEYS_REVOKE, scene.sandbox), key, RevocationReason.SUPERSEDED)
    assert record.sequence == Change.objects.latest("sequence").sequence
    assert lifecycle.last_sequence(key) == record.sequence


def _suspend_and_fail(grant_: Grant, event: str, key: Key) -> None:
    with recording.recorded(grant_, P.KEYS_SUSPEND, event, account=key.credential.account):
        lifecycle.suspend_key(grant_, key)
        raise OSError("too late")


def test_recorded_nested_block_that_is_rolled_back_leaves_no_entry(scene: Scene) -> None:
    """Only the inner block's entry is missing."""
    key, _ = issue(scene.sandbox)
    other, _ = issue(scene.sandbox)
    allowed = grant(scene.admin, P.KEYS_SUSPEND, scene.sandbox)
    before = last_ids()
    with recording.recorded(allowed, P.KEYS_SUSPEND, "test.outer", account=scene.sandbox):
        with pytest.raises(OSError, match="too late"):
            _suspend_and_fail(allowed, "test.inner", key)
        lifecycle.suspend_key(allowed, other)
    assert written_since(before) == (["test.outer", "key.suspended"], [("key", other.key_id)])
    assert Key.objects.get(pk=key.pk).state == "active"


def test_recorded_outer_block_that_is_rolled_back_leaves_nothing(scene: Scene) -> None:
    """Rows, change rows and entries of the inner block are rolled back too."""
    key, _ = issue(scene.sandbox)
    before = dump_tables()
    with pytest.raises(OSError, match="too late"):
        _suspend_and_fail(grant(scene.admin, P.KEYS_SUSPEND, scene.sandbox), "test.outer", key)
    assert changed_tables(before, dump_tables()) == set()


def test_recorded_block_after_a_failed_one_writes_its_entry(scene: Scene) -> None:
    """A failure leaves no open unit that would swallow the next entry."""
    key, _ = issue(scene.sandbox)
    with pytest.raises(StateConflictError):
        lifecycle.expire_key(grant(WORKER, P.ISSUANCE_EXECUTE, scene.sandbox), key)
    with (
        pytest.raises(OSError, match="x"),
        recording.recorded(grant(HOST, P.MERCHANTS_WRITE), P.MERCHANTS_WRITE, "test.failed"),
    ):
        raise OSError("x")
    before = last_ids()
    lifecycle.suspend_key(grant(scene.admin, P.KEYS_SUSPEND, scene.sandbox), key)
    assert written_since(before)[0] == ["key.suspended"]


def test_recorded_blocks_on_two_accounts_write_to_both_chains(scene: Scene) -> None:
    first = grant(scene.admin, P.KEYS_SUSPEND, scene.sandbox)
    second = grant(scene.admin, P.KEYS_SUSPEND, scene.production)
    with (
        recording.recorded(first, P.KEYS_SUSPEND, "test.first", account=scene.sandbox),
        recording.recorded(second, P.KEYS_SUSPEND, "test.second", account=scene.production),
    ):
        pass
    chains = AuditEntry.objects.filter(event__startswith="test.").values_list("chain_id", "event")
    assert set(chains) == {("account:acme/sandbox", "test.first"), ("account:acme/production", "test.second")}


def test_recorded_together_commits_all_or_none_and_each_entry_has_the_shared_details(scene: Scene) -> None:
    """Guarantee: blocks that are recorded together commit or fail together, and the entry of each names why."""
    first, second = issue(scene.sandbox)[0], issue(scene.production)[0]
    before, ids = dump_tables(), last_ids()
    with pytest.raises(OSError, match="too late"), recording.recorded_together(batch="one"):
        _suspend_and_fail(grant(scene.admin, P.KEYS_SUSPEND, scene.sandbox), "test.failed", first)
    assert changed_tables(before, dump_tables()) == set()
    with recording.recorded_together(batch="two"):
        for key, place in ((Key.objects.get(pk=first.pk), scene.sandbox), (second, scene.production)):
            lifecycle.suspend_key(grant(scene.admin, P.KEYS_SUSPEND, place), key)
    events, changes = written_since(ids)
    assert (events, changes) == (["key.suspended"] * 2, [("key", first.key_id), ("key", second.key_id)])
    entries = AuditEntry.objects.filter(event="key.suspended")
    assert [json.loads(bytes(entry.body))["details"]["batch"] for entry in entries] == ["two", "two"]


def test_recorded_on_an_account_without_its_chain_changes_nothing(scene: Scene) -> None:
    """A missing chain is damage; no new one is begun."""
    key, _ = issue(scene.sandbox)
    disable_triggers()
    AuditEntry.objects.filter(chain_id="account:acme/sandbox").delete()
    AuditChain.objects.filter(name="account:acme/sandbox").delete()
    with pytest.raises(KeyvaultError, match="The audit log is damaged"):
        lifecycle.suspend_key(grant(scene.admin, P.KEYS_SUSPEND, scene.sandbox), key)
    assert Key.objects.get(pk=key.pk).state == "active"


def test_recorded_details_with_a_plaintext_are_refused(scene: Scene) -> None:
    with (
        pytest.raises(TypeError),
        recording.recorded(
            grant(HOST, P.MERCHANTS_WRITE),
            P.MERCHANTS_WRITE,
            "test.secret",
            secret=Plaintext("x"),  # type: ignore[arg-type]  # tries what the types forbid
        ),
    ):
        pass
    assert not AuditEntry.objects.filter(event="test.secret").exists()


def test_recorded_block_with_a_failing_write_is_rolled_back(scene: Scene) -> None:
    request = request_key(scene.production)
    allowed = grant(scene.tam, P.ISSUANCE_WITHDRAW, scene.production)
    with (
        pytest.raises(IntegrityError),
        transaction.atomic(),
        recording.recorded(allowed, P.ISSUANCE_WITHDRAW, "test.x", account=scene.production),
    ):
        request.compare_and_swap(state="nonsense")
    assert IssuanceRequest.objects.get(pk=request.pk).state == "pending"
    assert leases.claim("still usable", now()) is not None
    assert json.loads(bytes(AuditEntry.objects.latest("id").body))["event"] != "test.x"
