"""What falls due by itself: found in the rows, done one by one, safe to be done twice."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.backends.base import BackendUnavailableError, Mount
from keyvault.domain.errors import IntegrityError
from keyvault.domain.issuance import REQUEST_LIFETIME
from keyvault.domain.revocation import RevocationReason
from keyvault.models import IssuanceRequest, Key, Material
from keyvault.services import issuance, keys, material, upkeep
from keyvault.services.secret_backends import secret_backend
from keyvault.tasks import issue_approved, run_upkeep
from tests.factories import PRODUCTION, account, approve, grant, issue, now, request_key

from .conftest import Scene
from .rows import last_ids, written_since

pytestmark = [pytest.mark.database, pytest.mark.django_db]

LONG_AGO = datetime(2026, 1, 1, tzinfo=UTC)


def states(rows: Any) -> list[str]:
    return sorted(rows.values_list("state", flat=True))


def revoked(scene: Scene) -> Key:
    key, _ = issue(scene.sandbox)
    keys.revoke_key(grant(scene.admin, P.KEYS_REVOKE, scene.sandbox), key, RevocationReason.SUPERSEDED)
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
    real = material.store_string

    def trouble(key: Key, *args: Any, **options: Any) -> int:
        if options["purpose"] == first.pk:
            raise BackendUnavailableError("sealed")
        return real(key, *args, **options)

    monkeypatch.setattr(issuance, "store_string", trouble)
    assert upkeep.issue_due() == 1
    assert IssuanceRequest.objects.get(pk=first.pk).state == "approved"
    assert IssuanceRequest.objects.get(pk=second.pk).state == "issued"


def test_upkeep_expires_requests_past_their_time_and_no_others(scene: Scene) -> None:
    old = request_key(scene.production, at=now() - REQUEST_LIFETIME)
    young = request_key(scene.production, at=now() - REQUEST_LIFETIME + timedelta(minutes=1))
    run_upkeep()
    assert IssuanceRequest.objects.get(pk=old.pk).state == "expired"
    assert IssuanceRequest.objects.get(pk=young.pk).state == "pending"


def test_upkeep_expires_keys_past_their_time_and_no_others(scene: Scene) -> None:
    """Active and suspended keys past their expiry are recorded as expired, once; others stay."""
    active, _ = issue(scene.sandbox, expires_in_days=1, at=LONG_AGO)
    suspended, _ = issue(scene.sandbox, expires_in_days=1, at=LONG_AGO)
    keys.suspend_key(grant(scene.admin, P.KEYS_SUSPEND, scene.sandbox), suspended)
    lasting, _ = issue(scene.sandbox, expires_in_days=3650, at=LONG_AGO)
    unlimited, _ = issue(scene.sandbox, at=LONG_AGO)
    before = last_ids()
    upkeep.expire_due()
    upkeep.expire_due()
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
    run_upkeep()
    row = Key.objects.get(pk=dead.pk)
    assert row.material == Material.DESTROYED
    versions = secret_backend().versions(Mount.SANDBOX, row.credential.backend_path)
    assert [version.state for version in versions] == ["destroyed"]
    assert Key.objects.get(pk=alive.pk).material == Material.HELD
    before = last_ids()
    run_upkeep()
    assert written_since(before) == ([], [])


def test_upkeep_killed_between_destroying_and_saying_so_says_so_later(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Destroying twice is the same as once: a death in between costs nothing."""
    key = revoked(scene)

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(material, "recorded", die)
        with pytest.raises(KeyboardInterrupt):
            upkeep.destroy_due()
    assert Key.objects.get(pk=key.pk).material == Material.DESTROY_DUE
    upkeep.destroy_due()
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
        upkeep.destroy_due()
    assert Key.objects.get(pk=first.pk).material == Material.DESTROY_DUE
    assert Key.objects.get(pk=second.pk).material == Material.DESTROYED


def test_upkeep_meeting_somebody_faster_goes_on(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another worker or an operator did meanwhile is no reason to leave the rest undone."""
    for _ in range(2):
        issue(scene.sandbox, expires_in_days=1, at=LONG_AGO)
    real = keys.list_expired

    def stale(at: datetime) -> list[Key]:
        found = real(at)
        other = keys.get_key(found[0].key_id)
        assert other is not None
        keys.suspend_key(grant(scene.admin, P.KEYS_SUSPEND, scene.sandbox), other)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(keys, "list_expired", stale)
        upkeep.expire_due()
    assert states(Key.objects) == ["deactivated", "suspended"]
    upkeep.expire_due()
    assert states(Key.objects) == ["deactivated", "deactivated"]


def test_upkeep_damage_is_put_off_for_a_person_and_the_rest_goes_on(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = request_key(scene.sandbox)
    request_key(account("acme", PRODUCTION))

    def damaged(*_: object, **__: object) -> None:
        raise IntegrityError("The audit log is damaged.", internal="chain is missing")

    with monkeypatch.context() as patch:
        patch.setattr(issuance, "store_string", damaged)
        assert upkeep.issue_one(first) is False
    assert "issuance will be tried again" in caplog.text
