"""Offboarding: ends everything of one merchant, also after interruptions and outages, and nothing of others."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER, OperatorPrincipal
from keyvault.access.roles import Role
from keyvault.backends.base import BackendUnavailableError
from keyvault.backends.local import LocalKeystore
from keyvault.domain.environments import Environment
from keyvault.domain.errors import ErrorCode, PermissionMissingError, StateConflictError
from keyvault.domain.keys import DEAD_STATES
from keyvault.models import (
    AuditEntry,
    CustomerToken,
    IssuanceRequest,
    Key,
    Material,
    Merchant,
    Notice,
    ServiceToken,
    WebhookEndpoint,
    WorkLease,
)
from keyvault.services import maintenance, offboarding
from keyvault.services.keys import lifecycle
from keyvault.services.merchants import merchants
from keyvault.services.offboarding import Offboarding, count_assets, offboard_merchant
from keyvault.services.recording.audit_chain import verify_audit
from keyvault.services.recording.transaction import recorded
from tests.factories import (
    PRODUCTION,
    SANDBOX,
    account,
    grant,
    issue,
    issue_request,
    make_merchant,
    make_operator,
    make_token,
    now,
    request_key,
)
from tests.services.keys.test_lifecycle import verdict
from tests.services.tokens.test_customer_tokens import token_of

from .conftest import Scene
from .rows import dump_tables, events_of, last_body

pytestmark = pytest.mark.django_db


def offboard(scene: Scene, by: OperatorPrincipal | None = None) -> Offboarding:
    return offboard_merchant(grant(by or scene.responder, P.MERCHANTS_OFFBOARD), scene.merchant, "contract ended")


def add_endpoint(scene: Scene, url: str = "https://hooks.example/1") -> WebhookEndpoint:
    endpoint = WebhookEndpoint(account=scene.sandbox, url=url, secret=b"sealed", created_at=now())
    with recorded(
        grant(scene.admin, P.MERCHANTS_WRITE, scene.sandbox), P.MERCHANTS_WRITE, "t.x", account=scene.sandbox
    ):
        endpoint.save()
    return endpoint


def create_assets(scene: Scene) -> list[tuple[Key, Any, Environment]]:
    """Create assets of every kind in both environments: three keys (one suspended), tokens, requests, an endpoint."""
    created = [
        (*issue(scene.sandbox), SANDBOX),
        (*issue(scene.sandbox), SANDBOX),
        (*issue(scene.production), PRODUCTION),
    ]
    lifecycle.suspend_key(grant(scene.admin, P.KEYS_SUSPEND, scene.sandbox), created[1][0])
    token_of(created[0][0])
    token_of(created[0][0], customer_id="bob")
    request_key(scene.production, label="pending")
    request_key(scene.sandbox, label="approved")
    add_endpoint(scene)
    make_token(name="for acme alone", merchants=["acme"])
    return created


def break_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(*_: object, **__: object) -> None:
        raise BackendUnavailableError("The backend is sealed.")

    for name in ("put", "read", "versions", "destroy"):
        monkeypatch.setattr(LocalKeystore, name, unavailable)


def forbid_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    def send(*_: object, **__: object) -> None:
        raise AssertionError("a message was sent")

    monkeypatch.setattr("celery.app.task.Task.apply_async", send)
    monkeypatch.setattr("celery.app.base.Celery.send_task", send)


@pytest.mark.database
def test_offboarding_ends_everything_in_both_environments_and_counts_it(scene: Scene) -> None:
    """One responder alone ends every key, token, request and endpoint; the result counts them by environment."""
    created = create_assets(scene)
    done = offboard(scene)
    assert done.ended.as_json() == {
        "production": {
            "keys": 1,
            "customer_tokens": 0,
            "issuance_requests": 1,
            "webhook_endpoints": 0,
            "connections": 0,
        },
        "sandbox": {"keys": 2, "customer_tokens": 2, "issuance_requests": 1, "webhook_endpoints": 1, "connections": 0},
        "service_tokens": 1,
    }
    assert not done.left
    for _, text, environment in created:
        assert verdict(text, environment=environment) is ErrorCode.KEY_REVOKED
    assert set(Key.objects.values_list("state", "reason")) == {("deactivated", "cessation_of_operation")}
    assert not CustomerToken.objects.filter(revoked_at=None).exists()
    assert set(IssuanceRequest.objects.filter(key=None).values_list("state", flat=True)) == {"withdrawn"}
    assert WebhookEndpoint.objects.get().disabled_why == "the merchant was offboarded"
    assert ServiceToken.objects.get().revoked_at is not None
    assert Merchant.objects.get().status == "offboarded"


def test_offboarding_writes_an_entry_per_key_and_one_with_the_counts(scene: Scene) -> None:
    create_assets(scene)
    offboard(scene)
    assert events_of("account:acme/sandbox").count("key.revoked") == 2
    assert events_of("account:acme/production").count("key.revoked") == 1
    assert events_of("platform")[-3:] == ["merchant.offboarding_began", "service_token.revoked", "merchant.offboarded"]
    details = last_body("merchant.offboarded")["details"]
    assert (details["why"], details["ended"]["sandbox"]["keys"]) == ("contract ended", 2)
    assert details["left"]["production"] == dict.fromkeys(details["left"]["production"], 0)
    assert verify_audit().first_broken is None


def test_offboarding_sends_a_notice_per_key_and_no_alarm(scene: Scene) -> None:
    """A credential without a usable key is intended here."""
    create_assets(scene)
    alarms = Notice.objects.filter(is_alarm=True)
    before = alarms.count()  # one of them had its only key suspended
    offboard(scene)
    assert Notice.objects.filter(kind="key.revoked").count() == 3
    assert alarms.count() == before


def test_offboarding_does_not_affect_other_merchants(scene: Scene) -> None:
    """Other merchants' keys, and tokens for several merchants, stay."""
    create_assets(scene)
    make_merchant("globex")
    key, text = issue(account("globex"))
    token_of(key)
    both, _ = make_token(name="both", merchants=["acme", "globex"])
    unrestricted, _ = make_token(name="all")
    offboard(scene)
    assert verdict(text) is None
    assert CustomerToken.objects.filter(account__merchant="globex", revoked_at=None).count() == 1
    assert set(ServiceToken.objects.filter(revoked_at=None)) == {both, unrestricted}


@pytest.mark.database
def test_offboarding_needs_neither_backend_nor_broker(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """With both down every key is denied; the copies are destroyed when the backend is back."""
    created = create_assets(scene)
    with monkeypatch.context() as outage:
        break_backend(outage)
        forbid_messages(outage)
        assert not offboard(scene).left
        for _, text, environment in created:
            assert verdict(text, environment=environment) is ErrorCode.KEY_REVOKED
        maintenance.destroy_due()
        assert set(Key.objects.values_list("material", flat=True)) == {Material.DESTROY_DUE}
    maintenance.destroy_due()
    assert set(Key.objects.values_list("material", flat=True)) == {Material.DESTROYED}


@pytest.mark.database
@pytest.mark.parametrize(
    ("through", "after"),
    [
        *(("revoke_key", done) for done in range(3)),
        *(("end_issuance", done) for done in range(2)),
        ("_disable", 0),
        ("_revoke_token", 0),
        ("count_assets", 0),
    ],
)
def test_offboarding_interrupted_denies_all_and_is_finished_by_the_next_run(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, through: str, after: int
) -> None:
    """Killed anywhere, no key verifies any more; the next run ends only what was left."""
    created = create_assets(scene)
    real: Callable[..., Any] = getattr(offboarding, through)
    calls: list[object] = []

    def die_after(*arguments: Any) -> Any:
        if len(calls) >= after:
            raise KeyboardInterrupt
        calls.append(arguments)
        return real(*arguments)

    with monkeypatch.context() as killed:
        killed.setattr(offboarding, through, die_after)
        with pytest.raises(KeyboardInterrupt):
            offboard(scene)
    for _, text, environment in created:
        assert verdict(text, environment=environment) is not None
    again = offboard(scene)
    assert not again.left
    assert not Key.objects.exclude(state__in=DEAD_STATES).exists()
    assert events_of("platform").count("merchant.offboarding_began") == 1
    assert AuditEntry.objects.filter(event="key.revoked").count() == 3


@pytest.mark.database
def test_offboarding_twice_ends_nothing_more(scene: Scene) -> None:
    create_assets(scene)
    offboard(scene)
    before = dump_tables()
    again = offboard(scene)
    assert not again.ended
    assert not again.left
    after = dump_tables()
    changed = {table for table in after if before[table] != after[table]}
    assert changed == {"keyvault_auditchain", "keyvault_auditentry"}


def test_offboarding_of_more_than_a_batch_ends_all(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch has its own transaction."""
    monkeypatch.setattr(offboarding, "_BATCH", 2)
    key, _ = issue(scene.sandbox)
    for number in range(5):
        token_of(key, customer_id=f"customer-{number}")
    for _ in range(4):
        issue(scene.sandbox)
    done = offboard(scene)
    held = done.ended.accounts[SANDBOX]
    assert (held.keys, held.customer_tokens) == (5, 5)
    assert events_of("account:acme/sandbox").count("customer_token.revoked") == 3


def test_offboarding_of_a_row_that_is_busy_counts_it_as_left(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that cannot be ended does not stop the others."""
    create_assets(scene)

    def in_use(*_: object) -> None:
        raise StateConflictError("Somebody else changed this meanwhile.")

    with monkeypatch.context() as busy:
        busy.setattr(offboarding, "_disable", in_use)
        done = offboard(scene)
    assert done.left.format_counts() == "production: nothing; sandbox: 1 webhook endpoint"
    assert done.ended.accounts[SANDBOX].keys == 2
    assert not offboard(scene).left


def test_offboarding_without_the_permission_is_refused(scene: Scene) -> None:
    """Account managers, approvers and auditors may not; a grant for one account does not suffice."""
    create_assets(scene)
    for operator in (scene.tam, scene.approver, make_operator("auditor", Role.AUDITOR)):
        with pytest.raises(PermissionMissingError):
            grant(operator, P.MERCHANTS_OFFBOARD)
    for wrong in (grant(scene.admin, P.MERCHANTS_WRITE), grant(scene.admin, P.MERCHANTS_OFFBOARD, scene.sandbox)):
        with pytest.raises(PermissionMissingError):
            offboard_merchant(wrong, scene.merchant, "no")
    assert Merchant.objects.get().status == "active"
    assert count_assets(scene.merchant, now()).accounts[SANDBOX].keys == 2


# ------------------------------------------------------------------------------------------------ permanence


def test_offboarded_merchant_is_never_active_again(scene: Scene) -> None:
    """Neither the merchant nor an account can be resumed or suspended."""
    offboard(scene)
    allowed = grant(scene.admin, P.MERCHANTS_WRITE)
    for action in (merchants.resume_merchant, merchants.suspend_merchant):
        with pytest.raises(StateConflictError, match="was offboarded"):
            action(allowed, scene.merchant)
    place = account("acme")
    for change in (merchants.resume_account, merchants.suspend_account):
        with pytest.raises(StateConflictError, match="was offboarded"):
            change(grant(scene.admin, P.MERCHANTS_WRITE, place), place)
    assert Merchant.objects.get().status == "offboarded"


@pytest.mark.database
def test_offboarded_merchant_gets_no_key(scene: Scene) -> None:
    """Neither a new request nor a worker in progress activates one."""
    approved = request_key(scene.sandbox)
    key, _ = issue(scene.sandbox)
    staged, _ = lifecycle.stage_key(
        grant(WORKER, P.ISSUANCE_EXECUTE, scene.sandbox), key.credential, expires_in_days=None
    )
    suspended, _ = issue(scene.sandbox)
    lifecycle.suspend_key(grant(scene.admin, P.KEYS_SUSPEND, scene.sandbox), suspended)
    stale_request = IssuanceRequest.objects.select_related("account__merchant").get(pk=approved.pk)
    with pytest.MonkeyPatch.context() as killed:
        killed.setattr(offboarding, "_end_account", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            offboard(scene)
    with pytest.raises(StateConflictError, match="was offboarded"):
        request_key(scene.sandbox)
    with pytest.raises(StateConflictError, match="was offboarded"):
        issue_request(stale_request)
    with pytest.raises(StateConflictError, match="was offboarded"):
        lifecycle.activate_key(grant(WORKER, P.ISSUANCE_EXECUTE, scene.sandbox), staged)
    with pytest.raises(StateConflictError, match="was offboarded"):
        lifecycle.resume_key(grant(scene.admin, P.KEYS_RESUME, scene.sandbox), suspended)
    assert not offboard(scene).left


@pytest.mark.database
def test_offboarded_merchant_s_staged_keys_are_destroyed_by_the_worker(scene: Scene) -> None:
    """A staged key never becomes active and ends with its request."""
    request = request_key(scene.sandbox)
    with pytest.MonkeyPatch.context() as killed:
        killed.setattr(
            "keyvault.services.issuance.requests.store_string",
            lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt),
        )
        with pytest.raises(KeyboardInterrupt):
            issue_request(request)
    assert Key.objects.get().state == "pre_activation"
    assert not offboard(scene).left
    WorkLease.objects.update(until=None, due_at=None)  # the worker's lease has expired
    maintenance.destroy_due()
    assert Key.objects.get().state == "destroyed"


def test_offboarded_merchant_s_expired_customer_tokens_are_not_counted(scene: Scene) -> None:
    key, _ = issue(scene.sandbox)
    token, _ = token_of(key, ttl_seconds=1)
    assert count_assets(scene.merchant, token.expires_at - timedelta(seconds=1)).accounts[SANDBOX].customer_tokens == 1
    assert count_assets(scene.merchant, token.expires_at).accounts[SANDBOX].customer_tokens == 0
