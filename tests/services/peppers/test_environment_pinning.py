"""A process pinned to one environment (KEYVAULT_ENVIRONMENTS) never reads the other environment's peppers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from django.test import Client, override_settings

from keyvault.access.permissions import Permission as P
from keyvault.access.roles import Role
from keyvault.backends.base import Mount, StoredSecret
from keyvault.backends.local import LocalKeystore
from keyvault.domain.digests import PEPPER_SET, PepperSet
from keyvault.domain.environments import Environment
from keyvault.domain.errors import NotFoundError
from keyvault.domain.issuance import Delivery
from keyvault.domain.keys import KeyKind
from keyvault.models import IssuanceRequest, PepperVersion, WorkLease
from keyvault.services.issuance.requests import collect_key, get_request
from keyvault.services.peppers.ring import ensure_peppers, list_served_sets, load_peppers, pepper_health
from keyvault.services.secrets.stored_copies import read_public_string
from keyvault.services.startup.startup_checks import require_ready
from keyvault.services.usage.recorder import UsageLog
from rotation.services.rotations.engine import advance_rotation
from rotation.services.rotations.reports import subject_of
from tests.clocks import Clock
from tests.factories import (
    account,
    forget_keystore,
    grant,
    have_peppers,
    issue,
    make_merchant,
    make_token,
    now,
    own_keystore,
    request_key,
    the_operator,
)
from tests.rotation import scene
from tests.rotation.steps import list_due, run_due

pytestmark = pytest.mark.django_db

OTHER = {Environment.SANDBOX: Environment.PRODUCTION, Environment.PRODUCTION: Environment.SANDBOX}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with own_keystore(tmp_path):
        yield tmp_path


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The paths of the peppers read from the backend."""
    paths: set[str] = set()
    real = LocalKeystore.read

    def note_and_read(self: LocalKeystore, mount: Mount, path: str, version: int | None = None) -> StoredSecret:
        if mount is Mount.PEPPERS:
            paths.add(path)
        return real(self, mount, path, version)

    monkeypatch.setattr(LocalKeystore, "read", note_and_read)
    return paths


@pytest.fixture(params=list(Environment))
def served(request: pytest.FixtureRequest) -> Environment:
    environment: Environment = request.param
    return environment


@pytest.fixture
def pinned(folder: Path, reads: set[str], served: Environment) -> Iterator[None]:
    """A fresh process pinned to one environment, over a set-up for both."""
    have_peppers()
    forget_keystore()
    reads.clear()
    with override_settings(ENVIRONMENTS=(served.value,)):
        yield


@pytest.mark.database
def test_pinned_process_refuses_the_other_peppers_without_reading_them(
    pinned: None, reads: set[str], served: Environment
) -> None:
    """Even a bug in the process cannot reach the other environment's peppers, because they are never in its memory."""
    with pytest.raises(NotFoundError, match=f"does not serve {OTHER[served]}"):
        load_peppers(PEPPER_SET[OTHER[served]])
    assert reads == set()
    for pepper_set in (PEPPER_SET[served], PepperSet.SERVICE):
        assert load_peppers(pepper_set).pepper_set is pepper_set
    assert reads == {served.value, "service"}


def test_pinned_process_checks_only_its_own_peppers(pinned: None, reads: set[str], served: Environment) -> None:
    assert pepper_health() == {PEPPER_SET[served]: True, PepperSet.SERVICE: True}
    ensure_peppers(now())
    assert reads == {served.value, "service"}


@pytest.mark.database
@pytest.mark.django_db(transaction=True)
def test_pinned_process_starts_with_its_own_peppers(pinned: None, reads: set[str], served: Environment) -> None:
    require_ready()
    assert reads == {served.value, "service"}


def test_pinned_process_reports_only_its_own_peppers_on_readyz(
    pinned: None, reads: set[str], served: Environment
) -> None:
    response = Client().get("/readyz")
    assert response.json() == {
        "status": "ready",
        "checks": {"database": "ok", "disk": "ok", f"peppers_{served}": "ok", "peppers_service": "ok"},
    }
    assert reads == {served.value, "service"}


def test_pinned_first_run_creates_only_its_own_peppers(folder: Path, reads: set[str], served: Environment) -> None:
    """The other environment's peppers are created where it is served, possibly in another backend."""
    with override_settings(ENVIRONMENTS=(served.value,)):
        ensure_peppers(now())
    created = set(PepperVersion.objects.values_list("pepper_set", flat=True))
    assert created == {served.value, "service"}
    assert reads == created


def test_process_of_both_environments_serves_every_set() -> None:
    assert list_served_sets() == list(PepperSet)


def test_pinned_process_refuses_to_verify_keys_of_the_other_environment(
    folder: Path, reads: set[str], served: Environment
) -> None:
    """The reply is 404 without a verdict."""
    make_merchant("acme")
    texts = {environment: issue(account("acme", environment))[1] for environment in Environment}
    token = make_token()[1].reveal()
    forget_keystore()
    reads.clear()
    with pytest.MonkeyPatch.context() as patch, override_settings(ENVIRONMENTS=(served.value,)):
        patch.setattr(UsageLog, "start", lambda self: None)
        replies = {
            environment: Client().post(
                "/v1/keys/verify",
                {"key": text.reveal(), "environment": environment.value, "endpoint": "orders.create"},
                content_type="application/json",
                headers={"Authorization": f"Bearer {token}"},
            )
            for environment, text in texts.items()
        }
    assert replies[served].json()["allowed"] is True
    refused = replies[OTHER[served]]
    assert (refused.status_code, refused.json()["code"]) == (404, "not_found")
    assert reads == {served.value, "service"}


def test_pinned_process_refuses_requests_for_the_other_environment(served: Environment) -> None:
    """No worker of this process would issue that key."""
    make_merchant("acme")
    with override_settings(ENVIRONMENTS=(served.value,)):
        with pytest.raises(NotFoundError, match=f"does not serve {OTHER[served]}"):
            request_key(account("acme", OTHER[served]))
        assert request_key(account("acme", served)).account.environment == served
    assert IssuanceRequest.objects.count() == 1


@pytest.mark.parametrize("kind", list(KeyKind))
def test_pinned_process_shows_no_key_of_the_other_environment(
    served: Environment, kind: KeyKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The strings are not read, and a show-once string is not used up."""
    make_merchant("acme")
    tam = the_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER)
    place = account("acme", OTHER[served])
    key, text = issue(place, kind=kind, delivery=Delivery.SHOW_ONCE)
    request = get_request(IssuanceRequest.objects.get(key=key).issuance_request_id)
    assert request is not None
    read: list[str] = []
    real = LocalKeystore.read

    def note_and_read(self: LocalKeystore, mount: Mount, path: str, version: int | None = None) -> StoredSecret:
        read.append(mount)
        return real(self, mount, path, version)

    monkeypatch.setattr(LocalKeystore, "read", note_and_read)
    with override_settings(ENVIRONMENTS=(served.value,)):
        with pytest.raises(NotFoundError, match=f"does not serve {OTHER[served]}"):
            collect_key(grant(tam, P.ISSUANCE_COLLECT, place), request)
        with pytest.raises(NotFoundError, match=f"does not serve {OTHER[served]}"):
            read_public_string(grant(tam, P.KEYS_READ, place), key)
    assert read == []
    assert collect_key(grant(tam, P.ISSUANCE_COLLECT, place), request).reveal() == text.reveal()


@pytest.mark.database
def test_pinned_worker_advances_only_its_rotations(served: Environment) -> None:
    """The other environment's rotations get neither a lease nor a recorded failure."""
    clock = Clock(now())
    rotations = {}
    for environment in Environment:
        key, _ = scene.first_key(clock(), environment=environment)
        overrides = {"quiet_seconds": 3_600, "quarantine_seconds": 600} if environment == "production" else {}
        rotations[environment] = scene.rotate(key.credential, clock(), **overrides).rotation_id
    assert set(list_due(clock)) == set(rotations.values())
    with override_settings(ENVIRONMENTS=(served.value,)):
        assert run_due(clock) == 1
        other = WorkLease.objects.get(subject=subject_of(rotations[OTHER[served]]))
        assert (other.due_at, other.attempts, other.last_error) == (clock(), 0, "")
        assert advance_rotation(rotations[OTHER[served]], clock) is None
        assert advance_rotation(rotations[served], clock) is not None
    assert list_due(clock) == [rotations[OTHER[served]]]
    assert advance_rotation(rotations[OTHER[served]], clock) is not None
