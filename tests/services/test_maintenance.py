"""What falls due by itself: found in the rows, done one by one, safe to be done twice."""

from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from django.test import override_settings

from keyvault.access.permissions import Permission as P
from keyvault.backends.base import BackendDeniedError, BackendUnavailableError, Health, Mount
from keyvault.backends.local import LocalKeystore
from keyvault.domain.environments import Environment
from keyvault.domain.errors import IntegrityError
from keyvault.domain.issuance import COLLECT_WITHIN, REQUEST_LIFETIME, Delivery
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.plaintext import Plaintext
from keyvault.domain.revocation import RevocationReason
from keyvault.models import IssuanceRequest, Key, Material, Notice
from keyvault.models.idempotency import IdempotentRequest
from keyvault.services import idempotency, maintenance
from keyvault.services.issuance import requests
from keyvault.services.keys import lifecycle
from keyvault.services.secrets import stored_copies
from keyvault.services.secrets.backend import secret_backend
from keyvault.services.verification import refusals
from keyvault.services.work import leases
from keyvault.tasks import issue_approved, run_maintenance, watch_backend
from tests.factories import PRODUCTION, SANDBOX, account, approve, grant, issue, issue_request, now, request_key
from tests.services.conftest import Scene, make_scene
from tests.services.rows import last_ids, written_since

pytestmark = [pytest.mark.database, pytest.mark.django_db]

LONG_AGO = datetime(2026, 1, 1, tzinfo=UTC)


def states(rows: Any) -> list[str]:
    return sorted(rows.values_list("state", flat=True))


def revoked(scene: Scene) -> Key:
    key, _ = issue(scene.sandbox)
    lifecycle.revoke_key(grant(scene.admin, P.KEYS_REVOKE, scene.sandbox), key, RevocationReason.SUPERSEDED)
    return key


def test_upkeep_issues_every_approved_request_and_no_other(scene: Scene) -> None:
    """A message only says "look": what is due is in the rows, and a second look finds nothing."""
    for _ in range(3):
        request_key(scene.sandbox)
    approve(request_key(scene.production))
    request_key(scene.production)
    issue_approved()
    assert states(IssuanceRequest.objects) == ["issued"] * 4 + ["pending"]
    assert states(Key.objects) == ["active"] * 4
    before = last_ids()
    issue_approved()
    assert written_since(before) == ([], [])


def test_upkeep_one_request_s_trouble_is_not_the_next_one_s(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that cannot be issued now does not hold up the others."""
    first, second = request_key(scene.sandbox), request_key(scene.sandbox)
    real = stored_copies.store_string

    def trouble(key: Key, *args: Any, **options: Any) -> int:
        if options["purpose"] == first.pk:
            raise BackendUnavailableError("sealed")
        return real(key, *args, **options)

    monkeypatch.setattr(requests, "store_string", trouble)
    assert maintenance.issue_due() == 1
    assert IssuanceRequest.objects.get(pk=first.pk).state == "approved"
    assert IssuanceRequest.objects.get(pk=second.pk).state == "issued"


def test_upkeep_of_a_request_that_the_backend_refuses_alarms_once_and_issues_when_it_is_mended(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost by a policy that is too narrow, and nobody has to find out by waiting for a key."""
    request = request_key(scene.sandbox)

    def refuse(key: Key, *args: Any, **options: Any) -> int:
        raise BackendDeniedError("The secrets manager does not let us do that.", status=403)

    with monkeypatch.context() as refusing:
        refusing.setattr(requests, "store_string", refuse)
        for _ in range(3):
            assert not maintenance.issue_one(request)
            leases.wake(f"issuance:{request.pk}")
    told = Notice.objects.filter(kind=NoticeKind.BACKEND_DENIED)
    assert [(notice.subject, notice.is_alarm) for notice in told] == [("sandbox", True)]
    assert maintenance.issue_one(request)
    assert IssuanceRequest.objects.get(pk=request.pk).state == "issued"


def test_upkeep_tells_the_log_that_the_backend_is_not_ready(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watch_backend()
    assert caplog.records == []
    monkeypatch.setattr(LocalKeystore, "health", lambda backend: Health(False, "it is sealed"))
    watch_backend()
    assert [getattr(record, "why", "") for record in caplog.records] == ["it is sealed"]


def test_upkeep_expires_requests_past_their_time_and_no_others(scene: Scene) -> None:
    old = request_key(scene.production, at=now() - REQUEST_LIFETIME)
    young = request_key(scene.production, at=now() - REQUEST_LIFETIME + timedelta(minutes=1))
    run_maintenance()
    assert IssuanceRequest.objects.get(pk=old.pk).state == "expired"
    assert IssuanceRequest.objects.get(pk=young.pk).state == "pending"


def test_upkeep_expires_keys_past_their_time_and_no_others(scene: Scene) -> None:
    """Active and suspended keys past their expiry are recorded as expired, once; others stay."""
    active, _ = issue(scene.sandbox, expires_in_days=1, at=LONG_AGO)
    suspended, _ = issue(scene.sandbox, expires_in_days=1, at=LONG_AGO)
    lifecycle.suspend_key(grant(scene.admin, P.KEYS_SUSPEND, scene.sandbox), suspended)
    lasting, _ = issue(scene.sandbox, expires_in_days=3650, at=LONG_AGO)
    unlimited, _ = issue(scene.sandbox, at=LONG_AGO)
    before = last_ids()
    maintenance.expire_due()
    maintenance.expire_due()
    events, changes = written_since(before)
    assert events == ["key.expired", "key.expired"]
    assert {subject for _, subject in changes} == {active.key_id, suspended.key_id}
    for key in (active, suspended):
        row = Key.objects.get(pk=key.pk)
        assert (row.state, row.retirement, row.material) == ("deactivated", "expired", Material.DESTROY_DUE)
    assert {Key.objects.get(pk=key.pk).state for key in (lasting, unlimited)} == {"active"}


def test_upkeep_destroys_the_copies_of_dead_keys_and_no_others(scene: Scene) -> None:
    """A dead key's string is readable nowhere any more; a living one's stays."""
    dead, (alive, _) = revoked(scene), issue(scene.sandbox)
    run_maintenance()
    row = Key.objects.get(pk=dead.pk)
    assert row.material == Material.DESTROYED
    versions = secret_backend().versions(Mount.SANDBOX, row.credential.backend_path)
    assert [version.state for version in versions] == ["destroyed"]
    assert Key.objects.get(pk=alive.pk).material == Material.HELD
    before = last_ids()
    run_maintenance()
    assert written_since(before) == ([], [])


def test_upkeep_killed_between_destroying_and_saying_so_says_so_later(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Destroying twice is the same as once: a death in between costs nothing."""
    key = revoked(scene)

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stored_copies, "recorded", die)
        with pytest.raises(KeyboardInterrupt):
            maintenance.destroy_due()
    assert Key.objects.get(pk=key.pk).material == Material.DESTROY_DUE
    maintenance.destroy_due()
    assert Key.objects.get(pk=key.pk).material == Material.DESTROYED


def test_upkeep_backend_down_puts_off_and_goes_on(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Revoking needs no backend; destroying waits for it, row by row."""
    first, second = revoked(scene), revoked(scene)
    backend = secret_backend()
    real = backend.destroy

    def down_for_first(mount: Mount, path: str, version: int) -> None:
        if path == first.credential.backend_path:
            raise BackendUnavailableError("sealed")
        real(mount, path, version)

    with monkeypatch.context() as patch:
        patch.setattr(backend, "destroy", down_for_first)
        maintenance.destroy_due()
    assert Key.objects.get(pk=first.pk).material == Material.DESTROY_DUE
    assert Key.objects.get(pk=second.pk).material == Material.DESTROYED


def test_upkeep_meeting_somebody_faster_goes_on(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another worker or an operator did meanwhile is no reason to leave the rest undone."""
    for _ in range(2):
        issue(scene.sandbox, expires_in_days=1, at=LONG_AGO)
    real = lifecycle.list_expired

    def stale(at: datetime) -> list[Key]:
        found = real(at)
        other = lifecycle.get_key(found[0].key_id)
        assert other is not None
        lifecycle.suspend_key(grant(scene.admin, P.KEYS_SUSPEND, scene.sandbox), other)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(lifecycle, "list_expired", stale)
        maintenance.expire_due()
    assert states(Key.objects) == ["deactivated", "suspended"]
    maintenance.expire_due()
    assert states(Key.objects) == ["deactivated", "deactivated"]


def test_upkeep_damage_is_put_off_for_a_person_and_the_rest_goes_on(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = request_key(scene.sandbox)
    request_key(account("acme", PRODUCTION))

    def damaged(*_: object, **__: object) -> None:
        raise IntegrityError("The audit log is damaged.", internal="chain is missing")

    with monkeypatch.context() as patch:
        patch.setattr(requests, "store_string", damaged)
        assert maintenance.issue_one(first) is False
    assert "issuance will be retried" in caplog.text


@pytest.mark.parametrize("environment", list(Environment))
def test_upkeep_of_a_pinned_process_keeps_to_its_environment(scene: Scene, environment: Environment) -> None:
    """A process that serves one environment has no peppers of the other, and leaves its work to those that have."""
    for place in (scene.sandbox, scene.production):
        issue(place, expires_in_days=1, at=LONG_AGO)
        key, _ = issue(place)
        lifecycle.revoke_key(grant(scene.admin, P.KEYS_REVOKE, place), key, RevocationReason.SUPERSEDED)
        if place == scene.production:
            request_key(place, at=now() - REQUEST_LIFETIME)
            approve(request_key(place))
        else:
            request_key(place)
    with override_settings(ENVIRONMENTS=(environment,)):
        issue_approved()
        run_maintenance()
    served = IssuanceRequest.objects.filter(account__environment=environment)
    others = IssuanceRequest.objects.exclude(account__environment=environment)
    assert not served.filter(state__in=["approved", "pending"]).exists()
    assert others.filter(state__in=["approved", "pending"]).count() == (1 if environment is PRODUCTION else 2)
    dead = Key.objects.filter(state="deactivated")
    assert set(dead.filter(credential__account__environment=environment).values_list("material", flat=True)) == {
        Material.DESTROYED
    }
    left = Key.objects.exclude(credential__account__environment=environment)
    assert sorted(left.values_list("state", "material")) == [("active", "held"), ("deactivated", "destroy_due")]


def test_upkeep_forgets_what_is_kept_for_a_while_only(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sealed secrets are shredded and old answers go, by the sweep and without anybody asking for them."""
    key, text = issue(scene.sandbox)
    asked: dict[str, Any] = {"holder": "h", "endpoint": "e", "environment": SANDBOX, "key": "k", "body": b""}
    answer = idempotency.StoredResponse(201, {"key": None}, "key", Plaintext(text.reveal()), key.key_id)
    at = now() - idempotency.SEALED_FOR
    idempotency.run_once(**asked, now=at, prepare=lambda: lambda: answer)
    idempotency.run_once(**asked | {"key": "older"}, now=now() - idempotency.KEEP, prepare=lambda: lambda: answer)
    forgotten: list[datetime] = []
    monkeypatch.setattr(refusals, "forget_old", forgotten.append)
    run_maintenance()
    assert IdempotentRequest.objects.get().sealed is None
    assert len(forgotten) == 1


STEPS = ["expire_due", "discard_due", "destroy_due", "forget_due"]


@pytest.mark.parametrize("broken", STEPS)
def test_upkeep_step_that_fails_keeps_no_other_from_its_turn(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Keys end in time whatever else is broken, and what ends keys comes first; the task still fails, and says why."""
    done = []

    def step(name: str) -> None:
        done.append(name)
        if name == broken:
            raise ZeroDivisionError(name)

    for name in STEPS:
        monkeypatch.setattr(maintenance, name, partial(step, name))
    with pytest.raises(ZeroDivisionError, match=broken):
        run_maintenance()
    assert done == STEPS
    assert "Traceback" in caplog.text
    assert f"ZeroDivisionError: {broken}" in caplog.text


def test_upkeep_whose_steps_all_fail_tells_of_each_and_raises_the_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(name: str) -> None:
        raise ZeroDivisionError(name)

    for name in STEPS:
        monkeypatch.setattr(maintenance, name, partial(fail, name))
    with pytest.raises(ZeroDivisionError, match="expire_due"):
        run_maintenance()
    assert [name for name in STEPS if f"ZeroDivisionError: {name}" in caplog.text] == STEPS


@pytest.mark.django_db(transaction=True)
def test_upkeep_outside_of_any_transaction_does_all_of_its_steps() -> None:
    """As the worker runs it: what locks rows has a transaction of its own, which a test's would stand in for."""
    scene = make_scene()
    expiring, _ = issue(scene.sandbox, expires_in_days=1, at=LONG_AGO)
    uncollected = request_key(scene.sandbox, delivery=Delivery.SHOW_ONCE, at=now() - COLLECT_WITHIN)
    burned = issue_request(uncollected, at=now() - COLLECT_WITHIN)
    overdue = request_key(scene.production, at=now() - REQUEST_LIFETIME)
    asked: dict[str, Any] = {"holder": "h", "endpoint": "e", "environment": SANDBOX, "key": "k", "body": b""}
    answer = idempotency.StoredResponse(201, {"key": None}, "key", Plaintext("shown once"), burned.key_id)
    idempotency.run_once(**asked, now=now() - idempotency.SEALED_FOR, prepare=lambda: lambda: answer)
    run_maintenance()
    for key in (expiring, burned):
        row = Key.objects.get(pk=key.pk)
        assert (row.state, row.material) == ("deactivated", Material.DESTROYED)
    assert IssuanceRequest.objects.get(pk=uncollected.pk).state == "burned"
    assert IssuanceRequest.objects.get(pk=overdue.pk).state == "expired"
    assert IdempotentRequest.objects.get().sealed is None
