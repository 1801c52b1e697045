"""Every act leaves exactly its entries and its change rows, in its own transaction, or nothing at all."""

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

import pytest
from django.conf import settings
from django.db import IntegrityError, transaction

import keyvault.services
from keyvault.access.decision import Grant
from keyvault.access.endpoints import EndpointDraft
from keyvault.access.limits import Limit
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST, WORKER, Channel
from keyvault.access.roles import Role
from keyvault.backends.base import BackendDeniedError
from keyvault.domain.canonical import JsonValue
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
    IssuanceRequest,
    Key,
    Material,
    Merchant,
    Notice,
    Operator,
    PepperVersion,
    ProviderConnection,
    WebhookEndpoint,
)
from keyvault.models.keys import OriginHeader
from keyvault.services import offboarding
from keyvault.services.approvals import break_glass, inbox
from keyvault.services.catalog import endpoints
from keyvault.services.issuance import collection, requests
from keyvault.services.keys import credentials, lifecycle
from keyvault.services.limits import overrides
from keyvault.services.merchants import client_configuration, merchants, operators, orders
from keyvault.services.pepper_rotation import propagation, rotation
from keyvault.services.recording import notifications, revocation_log
from keyvault.services.recording import transaction as recording
from keyvault.services.recording.authorization import operator_principal
from keyvault.services.revocations import log_opening, replay
from keyvault.services.secrets import provider_connections, stored_copies
from keyvault.services.sessions import sign_in
from keyvault.services.tokens import customer_tokens, service_tokens
from keyvault.services.webhooks import endpoints as webhook_endpoints
from keyvault.services.work import leases
from tests.domain.minting import mint
from tests.factories import (
    PASSWORD,
    SANDBOX,
    approve,
    grant,
    issue,
    issue_request,
    make_merchant,
    make_token,
    now,
    renew_journal,
    request_key,
)
from tests.services.conftest import Scene
from tests.services.rows import changed_tables, disable_triggers, dump_tables, last_body, last_ids, written_since
from tests.services.tokens.test_customer_tokens import holder_of, token_of

pytestmark = [pytest.mark.database, pytest.mark.django_db]

LOG = {"keyvault_auditchain", "keyvault_auditentry", "keyvault_change"}


@dataclass(frozen=True)
class Act:
    """`prepare` sets the scene and returns the act itself; the rest is what the act leaves behind."""

    prepare: Callable[[Scene], Callable[[], object]]
    events: list[str]
    changes: list[str]


def _stopped(scene: Scene, *permissions: P) -> Grant:
    return grant(scene.admin, permissions[0], scene.sandbox)


def _engine(scene: Scene) -> Grant:
    return grant(WORKER, P.ISSUANCE_EXECUTE, scene.sandbox)


def _staged(scene: Scene) -> Key:
    key, _ = issue(scene.sandbox)
    return lifecycle.stage_key(_engine(scene), key.credential, expires_in_days=None)[0]


def _suspended(scene: Scene) -> Key:
    key, _ = issue(scene.sandbox)
    lifecycle.suspend_key(_stopped(scene, P.KEYS_SUSPEND), key)
    return key


def _stage(scene: Scene) -> Callable[[], object]:
    key, _ = issue(scene.sandbox)
    return lambda: lifecycle.stage_key(_engine(scene), key.credential, expires_in_days=None)


def _activate(scene: Scene) -> Callable[[], object]:
    key = _staged(scene)
    return lambda: lifecycle.activate_key(_engine(scene), key)


def _note_stored(scene: Scene) -> Callable[[], object]:
    key = _staged(scene)
    return lambda: lifecycle.note_stored(_engine(scene), key, 2)


def _burn(scene: Scene) -> Callable[[], object]:
    key = _staged(scene)
    return lambda: lifecycle.discard_key(_engine(scene), key)


def _suspend(scene: Scene) -> Callable[[], object]:
    key, _ = issue(scene.sandbox)
    return lambda: lifecycle.suspend_key(_stopped(scene, P.KEYS_SUSPEND), key)


def _resume(scene: Scene) -> Callable[[], object]:
    key = _suspended(scene)
    return lambda: lifecycle.resume_key(_stopped(scene, P.KEYS_RESUME), key)


def _revoke(scene: Scene) -> Callable[[], object]:
    key, _ = issue(scene.sandbox)
    return lambda: lifecycle.revoke_key(_stopped(scene, P.KEYS_REVOKE), key, RevocationReason.SUPERSEDED)


def _report(scene: Scene) -> Callable[[], object]:
    key, _ = issue(scene.sandbox)
    return lambda: lifecycle.report_compromise(_stopped(scene, P.KEYS_REPORT_COMPROMISE), key)


def _expire(scene: Scene) -> Callable[[], object]:
    key, _ = issue(scene.sandbox, expires_in_days=1)
    assert key.expires_at is not None
    return lambda: lifecycle.expire_key(grant(WORKER, P.ISSUANCE_EXECUTE, scene.sandbox, at=key.expires_at), key)


def _revoke_own(scene: Scene) -> Callable[[], object]:
    key, _ = issue(scene.sandbox)
    return lambda: lifecycle.revoke_own_key(grant(holder_of(key), P.KEYS_REVOKE_SELF, scene.sandbox), key)


def _end_again(scene: Scene) -> Callable[[], object]:
    key, _ = issue(scene.sandbox)
    allowed = grant(HOST, P.REVOCATIONS_REPLAY, scene.sandbox)
    return lambda: lifecycle.reapply_revocation(allowed, key, RevocationReason.SUPERSEDED)


def _replay(scene: Scene) -> Callable[[], object]:
    key, _ = issue(scene.sandbox)
    renew_journal(settings.JOURNAL)
    revocation_log.append_lines([Ended(1, now(), "key", key.key_id, "deactivated", "superseded")])
    return lambda: replay.replay_revocations(grant(HOST, P.REVOCATIONS_REPLAY))


def _accept_loss(scene: Scene) -> Callable[[], object]:
    issue(scene.sandbox)
    settings.JOURNAL.unlink()
    return lambda: log_opening.accept_loss(grant(HOST, P.REVOCATIONS_REPLAY), scene.admin, "the disk is gone")


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


def _for_browsers(act: Callable[[Grant, Account], None]) -> Callable[[Scene], Callable[[], object]]:
    return lambda scene: lambda: act(grant(scene.admin, P.MERCHANTS_WRITE, scene.sandbox), scene.sandbox)


def _destroy(scene: Scene) -> Callable[[], object]:
    key, _ = issue(scene.sandbox)
    lifecycle.revoke_key(_stopped(scene, P.KEYS_REVOKE), key, RevocationReason.SUPERSEDED)
    return lambda: stored_copies.destroy_string(_engine(scene), key)


def _settle(scene: Scene) -> Callable[[], object]:
    key, _ = issue(scene.sandbox)
    lifecycle.suspend_key(_stopped(scene, P.KEYS_SUSPEND), key)
    lease = leases.claim(stored_copies.copy_subject(key), now())
    assert lease is not None
    with recording.recorded(_engine(scene), P.ISSUANCE_EXECUTE, "test.hidden", account=scene.sandbox):
        key.compare_and_swap(material=Material.DELETE_DUE)
    return lambda: stored_copies.settle_string(_engine(scene), key, lease)


def _refused(scene: Scene) -> Callable[[], object]:
    error = BackendDeniedError("refused", status=403)
    return lambda: stored_copies.report_refusal(_engine(scene), scene.sandbox, "destroying copies", error)


def _forget_path(scene: Scene) -> Callable[[], object]:
    key, _ = issue(scene.sandbox)
    offboarding.offboard_merchant(grant(scene.responder, P.MERCHANTS_OFFBOARD), scene.merchant, "contract ended")
    stored_copies.destroy_string(_engine(scene), Key.objects.get(pk=key.pk))
    return lambda: offboarding.forget_path(_engine(scene), key.credential)


def _host(permission: P) -> Grant:
    return grant(HOST, permission)


def _merchant_act(act: Callable[[Grant, Merchant], None]) -> Callable[[Scene], Callable[[], object]]:
    return lambda scene: lambda: act(_host(P.MERCHANTS_WRITE), scene.merchant)


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
        _host(P.OPERATORS_WRITE), username="new", roles=[Role.AUDITOR], password=Plaintext(PASSWORD)
    )


def _reset_password(scene: Scene) -> Callable[[], object]:
    row = Operator.objects.get(username="tam")
    return lambda: operators.reset_password(_host(P.OPERATORS_WRITE), row, Plaintext("another long pass phrase"))


def _disable_operator(scene: Scene) -> Callable[[], object]:
    row = Operator.objects.get(username="tam")
    return partial(operators.disable_operator, _host(P.OPERATORS_WRITE), row)


def _set_roles(scene: Scene) -> Callable[[], object]:
    row = Operator.objects.get(username="tam")
    return partial(operators.set_roles, _host(P.OPERATORS_WRITE), row, [Role.AUDITOR, Role.APPROVER])


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

    def act() -> None:
        with collection.record_collection(grant(scene.tam, P.ISSUANCE_COLLECT, scene.sandbox), request):
            pass

    return act


def _burn_uncollected(scene: Scene) -> Callable[[], object]:
    request = request_key(scene.sandbox, delivery=Delivery.SHOW_ONCE)
    issue_request(request)
    allowed = grant(WORKER, P.ISSUANCE_EXECUTE, scene.sandbox, at=now() + COLLECT_WITHIN)
    return lambda: collection.discard_uncollected(allowed, request)


WISH = EndpointDraft("payouts.list", "GET", "/payouts", frozenset({KeyKind.PRIVATE}))


def _with_endpoint(act: Callable[[Grant, CatalogEndpoint], object]) -> Callable[[Scene], Callable[[], object]]:
    def prepare(scene: Scene) -> Callable[[], object]:
        allowed = grant(scene.admin, P.CATALOG_WRITE)
        row = endpoints.add_endpoint(allowed, WISH)
        return lambda: act(allowed, row)

    return prepare


def _restore_endpoint(scene: Scene) -> Callable[[], object]:
    allowed = grant(scene.admin, P.CATALOG_WRITE)
    row = endpoints.add_endpoint(allowed, WISH)
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


def _review(scene: Scene) -> Callable[[], object]:
    _collect(scene)()
    act = BreakGlass.objects.get()
    allowed = grant(scene.approver, P.BREAK_GLASS_REVIEW, requester_person=act.person)
    return lambda: break_glass.review_break_glass(allowed, act)


def _webhook(scene: Scene) -> WebhookEndpoint:
    allowed = grant(scene.tam, P.WEBHOOKS_WRITE, scene.sandbox)
    return webhook_endpoints.add_endpoint(allowed, scene.sandbox, "https://acme.example/hooks")[0]


def _to_reseal(scene: Scene) -> tuple[Grant, WebhookEndpoint]:
    endpoint = _webhook(scene)
    return grant(WORKER, P.KEYS_REHASH, scene.sandbox), endpoint


def _keeping() -> Grant:
    return grant(HOST, P.PEPPERS_WRITE)


def _pepper(number: int, **columns: object) -> PepperVersion:
    """A version that is hashed with since yesterday, and that the backend never had."""
    yesterday = now() - timedelta(days=1)
    row = PepperVersion(
        pepper_set=PepperSet.SANDBOX,
        number=number,
        check_value=bytes(16),
        created_at=yesterday,
        **{"hashes_from_at": yesterday, **columns},
    )
    with recording.recorded(_keeping(), P.PEPPERS_WRITE, "test.rotated"):
        row.save()
    return row


def _with_webhook(act: Callable[[Grant, WebhookEndpoint], object]) -> Callable[[Scene], Callable[[], object]]:
    def prepare(scene: Scene) -> Callable[[], object]:
        endpoint = _webhook(scene)
        return lambda: act(grant(scene.tam, P.WEBHOOKS_WRITE, scene.sandbox), endpoint)

    return prepare


def _enable_webhook(scene: Scene) -> Callable[[], object]:
    endpoint, allowed = _webhook(scene), grant(scene.tam, P.WEBHOOKS_WRITE, scene.sandbox)
    webhook_endpoints.disable_endpoint(allowed, endpoint, "moved")
    return lambda: webhook_endpoints.enable_endpoint(allowed, endpoint)


def _connection(scene: Scene) -> ProviderConnection:
    allowed = grant(scene.tam, P.CONNECTIONS_WRITE, scene.sandbox)
    return provider_connections.set_connection(allowed, scene.sandbox, "stripe", Plaintext("sk_test_1"))


def _with_connection(
    act: Callable[[Grant, ProviderConnection], object], *, is_removed: bool = False, by_worker: bool = False
) -> Callable[[Scene], Callable[[], object]]:
    def prepare(scene: Scene) -> Callable[[], object]:
        connection = _connection(scene)
        allowed = grant(scene.tam, P.CONNECTIONS_WRITE, scene.sandbox)
        if is_removed:
            provider_connections.remove_connection(allowed, connection)
        return lambda: act(grant(WORKER, P.BACKEND_RECONCILE, scene.sandbox) if by_worker else allowed, connection)

    return prepare


def _marking(scene: Scene, place: Account | None = None) -> Grant:
    return grant(scene.approver, P.NOTICES_MARK, place)


def _with_alarm(scene: Scene, act: Callable[[Notice], object]) -> Callable[[], object]:
    with recording.recorded(_engine(scene), P.ISSUANCE_EXECUTE, "key.revoked", account=scene.sandbox):
        alarm = notifications.announce(_engine(scene), NoticeKind.ROTATION_STALLED, scene.sandbox, "rot_x")
    return lambda: act(alarm)


ACTS: dict[str, Act] = {
    "catalog.endpoints.add_endpoint": Act(
        lambda scene: lambda: endpoints.add_endpoint(grant(scene.admin, P.CATALOG_WRITE), WISH),
        ["endpoint.added"],
        ["endpoint"],
    ),
    "catalog.endpoints.change_endpoint": Act(
        _with_endpoint(lambda allowed, row: endpoints.change_endpoint(allowed, row, replace(WISH, summary="All"))),
        ["endpoint.changed"],
        ["endpoint"],
    ),
    "catalog.endpoints.withdraw_endpoint": Act(
        _with_endpoint(endpoints.withdraw_endpoint), ["endpoint.withdrawn"], ["endpoint"]
    ),
    "catalog.endpoints.restore_endpoint": Act(_restore_endpoint, ["endpoint.restored"], ["endpoint"]),
    "limits.overrides.set_account_limit": Act(_set_account_limit, ["limit.set"], ["account"]),
    "limits.overrides.set_endpoint_limit": Act(_set_endpoint_limit, ["limit.set"], ["limit"]),
    "keys.credentials.restrict_credential": Act(_restrict, ["credential.restricted"], ["credential"]),
    "keys.lifecycle.stage_key": Act(_stage, ["key.staged"], ["key"]),
    "keys.lifecycle.activate_key": Act(_activate, ["key.activated"], ["key"]),
    "keys.lifecycle.note_stored": Act(_note_stored, ["key.stored"], ["key"]),
    "keys.lifecycle.discard_key": Act(_burn, ["key.burned"], ["key"]),
    "keys.lifecycle.suspend_key": Act(_suspend, ["key.suspended"], ["key"]),
    "keys.lifecycle.resume_key": Act(_resume, ["key.resumed"], ["key"]),
    "keys.lifecycle.revoke_key": Act(_revoke, ["key.revoked"], ["key"]),
    "keys.lifecycle.report_compromise": Act(_report, ["key.compromised"], ["key"]),
    "keys.lifecycle.expire_key": Act(_expire, ["key.expired"], ["key"]),
    "keys.lifecycle.revoke_own_key": Act(_revoke_own, ["key.compromised"], ["key"]),
    "merchants.orders.create_order": Act(_create_order, ["order.created"], []),
    "tokens.customer_tokens.issue_customer_token": Act(
        _issue_customer_token, ["customer_token.issued"], ["customer_token"]
    ),
    "keys.lifecycle.reapply_revocation": Act(_end_again, ["key.revocation_replayed"], ["key"]),
    "revocations.log_opening.accept_loss": Act(_accept_loss, ["journal.loss_accepted"], []),
    "revocations.replay.replay_revocations": Act(_replay, ["key.revocation_replayed"], ["key"]),
    "tokens.customer_tokens.revoke_customer_token": Act(
        _revoke_customer_token, ["customer_token.revoked"], ["customer_token"]
    ),
    "merchants.client_configuration.set_client_configuration": Act(
        _for_browsers(lambda grant, account: client_configuration.set_client_configuration(grant, account, {"a": 1})),
        ["account.client_configuration_set"],
        ["account"],
    ),
    "merchants.client_configuration.set_allowed_origins": Act(
        _for_browsers(lambda grant, account: client_configuration.set_allowed_origins(grant, account, ["https://a"])),
        ["account.origins_set"],
        ["account"],
    ),
    "merchants.client_configuration.set_customer_token_bound": Act(
        _for_browsers(lambda grant, account: client_configuration.set_customer_token_bound(grant, account, 60)),
        ["account.customer_token_bound_set"],
        ["account"],
    ),
    "secrets.stored_copies.destroy_string": Act(_destroy, ["key.material_destroyed"], ["key"]),
    "secrets.stored_copies.settle_string": Act(_settle, ["key.material_deleted"], ["key"]),
    "secrets.stored_copies.report_refusal": Act(_refused, ["backend.refused"], []),
    "offboarding.forget_path": Act(_forget_path, ["credential.forgotten"], ["credential"]),
    "merchants.merchants.create_merchant": Act(
        lambda _: lambda: make_merchant("globex"), ["merchant.created"], ["merchant", "account", "account"]
    ),
    "merchants.merchants.suspend_merchant": Act(
        _merchant_act(merchants.suspend_merchant), ["merchant.suspended"], ["merchant"]
    ),
    "merchants.merchants.resume_merchant": Act(_resume_merchant, ["merchant.resumed"], ["merchant"]),
    "merchants.merchants.suspend_account": Act(_suspend_account, ["account.suspended"], ["account"]),
    "merchants.merchants.resume_account": Act(_resume_account, ["account.resumed"], ["account"]),
    "tokens.service_tokens.create_service_token": Act(_create_token, ["service_token.created"], ["service_token"]),
    "tokens.service_tokens.rotate_service_token": Act(
        _rotate_token, ["service_token.rotated"], ["service_token", "service_token"]
    ),
    "tokens.service_tokens.revoke_service_token": Act(_revoke_token, ["service_token.revoked"], ["service_token"]),
    "offboarding.offboard_merchant": Act(
        _offboard, ["merchant.offboarding_began", "merchant.offboarded"], ["merchant"]
    ),
    "merchants.operators.create_operator": Act(_create_operator, ["operator.created"], []),
    "merchants.operators.reset_password": Act(_reset_password, ["operator.password_reset"], []),
    "merchants.operators.disable_operator": Act(_disable_operator, ["operator.disabled"], []),
    "merchants.operators.set_roles": Act(_set_roles, ["operator.roles_changed"], []),
    "sessions.sign_in.sign_out": Act(
        lambda scene: partial(sign_in.sign_out, grant(scene.tam, P.SESSIONS_WRITE)), ["operator.signed_out"], []
    ),
    "issuance.requests.request_issuance": Act(_request, ["issuance.requested"], []),
    "issuance.requests.approve_issuance": Act(_approve, ["issuance.approved"], []),
    "issuance.requests.reject_issuance": Act(_reject, ["issuance.rejected"], []),
    "issuance.requests.withdraw_issuance": Act(_withdraw, ["issuance.withdrawn"], []),
    "issuance.requests.end_issuance": Act(_end_request, ["issuance.withdrawn"], []),
    "issuance.requests.expire_issuance": Act(_expire_request, ["issuance.expired"], []),
    "issuance.requests.collect_key": Act(_collect, ["issuance.collected"], ["key"]),
    "issuance.collection.record_collection": Act(_record_collection, ["issuance.collected"], ["key"]),
    "issuance.collection.discard_uncollected": Act(_burn_uncollected, ["issuance.burned", "key.burned"], ["key"]),
    "approvals.break_glass.review_break_glass": Act(_review, ["break_glass.reviewed"], []),
    "webhooks.endpoints.add_endpoint": Act(
        lambda scene: lambda: _webhook(scene),
        ["webhook_endpoint.added"],
        [],
    ),
    "webhooks.endpoints.rotate_secret": Act(
        _with_webhook(webhook_endpoints.rotate_secret), ["webhook_endpoint.secret_rotated"], []
    ),
    "webhooks.endpoints.disable_endpoint": Act(
        _with_webhook(lambda allowed, row: webhook_endpoints.disable_endpoint(allowed, row, "moved")),
        ["webhook_endpoint.disabled"],
        [],
    ),
    "webhooks.endpoints.enable_endpoint": Act(_enable_webhook, ["webhook_endpoint.enabled"], []),
    "webhooks.endpoints.send_test": Act(_with_webhook(webhook_endpoints.send_test), ["webhook_endpoint.tested"], []),
    "secrets.provider_connections.set_connection": Act(
        lambda scene: lambda: _connection(scene), ["connection.added", "connection.stored"], []
    ),
    "secrets.provider_connections.replace_connection": Act(
        _with_connection(
            lambda allowed, row: provider_connections.replace_connection(allowed, row, Plaintext("sk_test_2"))
        ),
        ["connection.write_began", "connection.stored"],
        [],
    ),
    "secrets.provider_connections.remove_connection": Act(
        _with_connection(provider_connections.remove_connection), ["connection.removed"], []
    ),
    "secrets.provider_connections.settle_connection": Act(
        _with_connection(provider_connections.settle_connection, by_worker=True), ["connection.settled"], []
    ),
    "secrets.provider_connections.forget_connection": Act(
        _with_connection(provider_connections.forget_connection, is_removed=True, by_worker=True),
        ["connection.forgotten"],
        [],
    ),
    "approvals.inbox.mark_seen": Act(
        lambda scene: _with_alarm(scene, lambda row: inbox.mark_seen(_marking(scene, scene.sandbox), row)),
        ["notice.seen"],
        [],
    ),
    "approvals.inbox.mark_all_seen": Act(
        lambda scene: _with_alarm(scene, lambda row: inbox.mark_all_seen(_marking(scene), now())),
        ["notice.all_seen"],
        [],
    ),
    "webhooks.endpoints.reseal_secrets": Act(
        lambda scene: partial(webhook_endpoints.reseal_secrets, *_to_reseal(scene)), ["webhook_endpoint.resealed"], []
    ),
    "pepper_rotation.rotation.rotate_pepper": Act(
        lambda _: lambda: rotation.rotate_pepper(_keeping(), PepperSet.SANDBOX), ["pepper.rotated"], []
    ),
    "pepper_rotation.propagation.begin_hashing": Act(
        lambda scene: (
            row := _pepper(2, hashes_from_at=None),
            partial(propagation.begin_hashing, grant(WORKER, P.KEYS_REHASH), row),
        )[1],
        ["pepper.in_use"],
        [],
    ),
    "pepper_rotation.rotation.retire_pepper": Act(
        lambda _: (_pepper(2), lambda: rotation.retire_pepper(_keeping(), PepperSet.SANDBOX, 1))[1],
        ["pepper.retired"],
        [],
    ),
    "pepper_rotation.rotation.destroy_pepper": Act(
        lambda _: (
            _pepper(99, retired_at=now() - rotation.KEPT_AFTER_RETIREMENT),
            partial(rotation.destroy_pepper, _keeping(), PepperSet.SANDBOX, 99),
        )[1],
        ["pepper.destroyed"],
        [],
    ),
}
"""Every public service that takes a grant."""

INSIDE_ANOTHER = {
    "issuance.collection.read_handover": "reads and seals, writes nothing",
    "recording.transaction.recorded": "the block itself",
    "approvals.four_eyes.approving_operator": "decides, writes nothing",
    "approvals.four_eyes.note_command_line_approval": "inside the block of the approval",
    "approvals.break_glass.note_break_glass": "inside the block of the act",
    "recording.revocation_log.announce_failure": "inside the block of what found it out",
    "secrets.stored_copies.announce_missing": "inside the block of what found it out",
    "recording.notifications.announce": "inside the block of what happened",
    "recording.notifications.announce_to": "inside the block of what happened",
}


def public_acts() -> Iterator[str]:
    """Every public function of the services whose first parameter is a grant."""
    prefix = "keyvault.services."
    for module_info in pkgutil.walk_packages(keyvault.services.__path__, prefix):
        module = importlib.import_module(module_info.name)
        for name, function in inspect.getmembers(module, inspect.isfunction):
            parameters = list(inspect.signature(inspect.unwrap(function)).parameters.values())
            if function.__module__ != module.__name__ or name.startswith("_") or not parameters:
                continue
            if parameters[0].annotation in {Grant, "Grant"}:
                yield f"{module_info.name.removeprefix(prefix)}.{name}"


def test_services_every_act_is_listed_here() -> None:
    """A new service is shown to leave its entry, or somebody wrote down why it leaves none of its own."""
    assert set(public_acts()) == set(ACTS) | set(INSIDE_ANOTHER)


@pytest.mark.parametrize("name", ACTS)
def test_services_act_leaves_exactly_its_entry_and_its_change_rows(scene: Scene, name: str) -> None:
    """No act without its audit entry, and none that alters a verdict without its change row."""
    act = ACTS[name].prepare(scene)
    before = last_ids()
    act()
    events, changes = written_since(before)
    assert events == ACTS[name].events
    assert [kind for kind, _ in changes] == ACTS[name].changes


@pytest.mark.parametrize("name", ACTS)
def test_services_act_whose_entry_cannot_be_written_changes_nothing(
    scene: Scene, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The audit entry is in the transaction of the change: if it cannot be written, nothing changed."""
    act = ACTS[name].prepare(scene)
    before = dump_tables()

    def fail(**_: object) -> None:
        raise OSError("the log is full")

    monkeypatch.setattr(recording, "append_entry", fail)
    with pytest.raises(OSError, match="the log is full"):
        act()
    assert changed_tables(before, dump_tables()) == set()


@pytest.mark.parametrize("name", [name for name, act in ACTS.items() if act.changes])
def test_services_act_whose_change_row_cannot_be_written_changes_nothing(
    scene: Scene, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing alters a verdict unnoticed by whoever caches it: no change row, no change."""
    act = ACTS[name].prepare(scene)
    before = dump_tables()

    def fail(**_: object) -> None:
        raise OSError("the feed is full")

    monkeypatch.setattr(Change.objects, "create", fail)
    with pytest.raises(OSError, match="the feed is full"):
        act()
    assert changed_tables(before, dump_tables()) == set()


def test_issuance_by_the_worker_leaves_the_entries_of_its_two_transactions(scene: Scene) -> None:
    """First the digest, then the key: each with its entry and its change rows, what caused it first."""
    request = request_key(scene.sandbox)
    before = last_ids()
    key = issue_request(request)
    events, changes = written_since(before)
    assert events == ["issuance.staged", "key.staged", "issuance.issued", "key.stored", "key.activated"]
    assert changes == [("credential", key.credential_id), ("key", key.key_id), ("key", key.key_id)]


# ---------------------------------------------------------------------------------------------- the block itself


def _suspension(scene: Scene, key: Key) -> Callable[[], object]:
    return lambda: lifecycle.suspend_key(grant(scene.admin, P.KEYS_SUSPEND, scene.sandbox), key)


def test_recorded_with_a_grant_for_another_permission_is_refused(scene: Scene) -> None:
    """A grant opens the one thing that was asked for, never another."""
    key, _ = issue(scene.sandbox)
    with pytest.raises(PermissionMissingError):
        lifecycle.revoke_key(grant(scene.admin, P.KEYS_SUSPEND, scene.sandbox), key, RevocationReason.SUPERSEDED)
    assert Key.objects.get(pk=key.pk).state == "active"


@pytest.mark.parametrize("place", ["other merchant", "other environment", "platform"])
def test_recorded_with_a_grant_for_another_place_is_refused(scene: Scene, place: str) -> None:
    """A grant for one account opens no other, not even of the same merchant; nor does one for the platform."""
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
    """Who may do something for one account may not therefore do it for all."""
    with pytest.raises(PermissionMissingError):
        merchants.suspend_merchant(grant(HOST, P.MERCHANTS_WRITE, scene.sandbox), scene.merchant)
    assert Merchant.objects.get(pk="acme").status == "active"


def test_recorded_one_of_several_permissions_opens(scene: Scene) -> None:
    key, _ = issue(scene.sandbox)
    lifecycle.discard_key(grant(WORKER, P.ISSUANCE_EXECUTE, scene.sandbox), key)
    assert Key.objects.get(pk=key.pk).state == "deactivated"


def test_recorded_entry_names_actor_channel_and_host_user(scene: Scene) -> None:
    """A command line proves no identity, so the host's user stands beside the name that it gave."""
    row = Operator.objects.get(username="admin")
    shell = operator_principal(row, Channel.COMMAND_LINE, "root")
    key, _ = issue(scene.sandbox)
    lifecycle.suspend_key(grant(shell, P.KEYS_SUSPEND, scene.sandbox), key)
    body = last_body("key.suspended")
    assert (body["actor"], body["channel"], body["details"]["host_user"]) == ("operator:admin", "command_line", "root")
    assert body["details"]["key_id"] == key.key_id


def test_recorded_act_of_the_host_names_its_user(scene: Scene) -> None:
    """Whoever has a shell on the host acts in nobody's name; who it was is in the log."""
    make_merchant("globex")
    assert last_body("merchant.created")["details"]["host_user"] == getpass.getuser()
    issue(scene.sandbox)
    assert "host_user" not in last_body("issuance.issued")["details"], "our own worker has no shell"


def test_recorded_act_of_a_nameless_host_user_names_the_number(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container the user need not have a name, and the act does not fail for it."""

    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(getpass, "getuser", nameless)
    make_merchant("globex")
    assert last_body("merchant.created")["details"]["host_user"] == f"uid {os.getuid()}"


def test_recorded_details_hold_no_secret_however_deep(scene: Scene) -> None:
    """The log is kept for good: a key string in any text of any act is masked before it gets there."""
    shown = mint(seed="shown by mistake")
    allowed = grant(scene.admin, P.KEYS_SUSPEND, scene.sandbox)
    deep: JsonValue = {"inner": [1, None, {shown: f"see {shown}"}], "flag": True}
    with recording.recorded(allowed, P.KEYS_SUSPEND, "test.told", account=scene.sandbox, why=shown, deep=deep):
        pass
    masked = f"{shown[:27]}***"
    assert last_body("test.told")["details"] == {
        "why": masked,
        "deep": {"inner": [1, None, {masked: f"see {masked}"}], "flag": True},
    }


def test_recorded_rejection_holds_no_secret_of_its_reason(scene: Scene) -> None:
    shown = mint(seed="shown by mistake")
    request = request_key(scene.production)
    requests.reject_issuance(grant(scene.approver, P.ISSUANCE_REJECT, scene.production), request, f"leaked: {shown}")
    assert last_body("issuance.rejected")["details"]["why"] == f"leaked: {shown[:27]}***"
    assert shown[27:] not in repr(dump_tables())


def test_recorded_sequence_is_that_of_its_change_row(scene: Scene) -> None:
    """Whoever revokes is told the sequence that verifiers will confirm."""
    key, _ = issue(scene.sandbox)
    record = lifecycle.revoke_key(grant(scene.admin, P.KEYS_REVOKE, scene.sandbox), key, RevocationReason.SUPERSEDED)
    assert record.sequence == Change.objects.latest("sequence").sequence
    assert lifecycle.last_sequence(key) == record.sequence


def _suspend_and_fail(grant_: Grant, event: str, key: Key) -> None:
    with recording.recorded(grant_, P.KEYS_SUSPEND, event, account=key.credential.account):
        lifecycle.suspend_key(grant_, key)
        raise OSError("too late")


def test_recorded_nested_block_undone_leaves_no_entry_of_its_own(scene: Scene) -> None:
    """An entry says what happened: a part that was rolled back is not in the log, though the rest is."""
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


def test_recorded_outer_block_undone_leaves_nothing_of_the_inner_one(scene: Scene) -> None:
    """What a part did is undone with the whole: rows, change rows and entries."""
    key, _ = issue(scene.sandbox)
    before = dump_tables()
    with pytest.raises(OSError, match="too late"):
        _suspend_and_fail(grant(scene.admin, P.KEYS_SUSPEND, scene.sandbox), "test.outer", key)
    assert changed_tables(before, dump_tables()) == set()


def test_recorded_after_a_failed_block_the_next_one_starts_clean(scene: Scene) -> None:
    """A failure leaves no open unit behind into which the next act's entry would vanish."""
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


def test_recorded_on_two_accounts_writes_to_both_chains(scene: Scene) -> None:
    """Each account's chain tells what happened there, whichever transaction it happened in."""
    first = grant(scene.admin, P.KEYS_SUSPEND, scene.sandbox)
    second = grant(scene.admin, P.KEYS_SUSPEND, scene.production)
    with (
        recording.recorded(first, P.KEYS_SUSPEND, "test.first", account=scene.sandbox),
        recording.recorded(second, P.KEYS_SUSPEND, "test.second", account=scene.production),
    ):
        pass
    chains = AuditEntry.objects.filter(event__startswith="test.").values_list("chain_id", "event")
    assert set(chains) == {("account:acme/sandbox", "test.first"), ("account:acme/production", "test.second")}


def test_recorded_on_an_account_whose_chain_is_gone_changes_nothing(scene: Scene) -> None:
    """A chain that is missing is damage, not a reason to begin a new one."""
    key, _ = issue(scene.sandbox)
    disable_triggers()
    AuditEntry.objects.filter(chain_id="account:acme/sandbox").delete()
    AuditChain.objects.filter(name="account:acme/sandbox").delete()
    with pytest.raises(KeyvaultError, match="The audit log is damaged"):
        lifecycle.suspend_key(grant(scene.admin, P.KEYS_SUSPEND, scene.sandbox), key)
    assert Key.objects.get(pk=key.pk).state == "active"


def test_recorded_details_hold_no_plaintext(scene: Scene) -> None:
    """A secret given as a detail stops the write rather than being written down."""
    with (
        pytest.raises(TypeError),
        recording.recorded(
            grant(HOST, P.MERCHANTS_WRITE),
            P.MERCHANTS_WRITE,
            "test.secret",
            secret=Plaintext("x"),  # type: ignore[arg-type]  # what the types forbid is what is tried
        ),
    ):
        pass
    assert not AuditEntry.objects.filter(event="test.secret").exists()


def test_recorded_unrecorded_rows_in_the_block_of_a_failing_database_write_are_undone(scene: Scene) -> None:
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
