"""A process that serves one environment (KEYVAULT_ENVIRONMENTS): the other's peppers are never even read."""

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
from rotation.services.rotations.engine import advance_rotation, list_due
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

pytestmark = [pytest.mark.database, pytest.mark.django_db]

OTHER = {Environment.SANDBOX: Environment.PRODUCTION, Environment.PRODUCTION: Environment.SANDBOX}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with own_keystore(tmp_path):
        yield tmp_path


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The peppers that anybody asks the backend for."""
    asked: set[str] = set()
    real = LocalKeystore.read

    def note_and_read(self: LocalKeystore, mount: Mount, path: str, version: int | None = None) -> StoredSecret:
        if mount is Mount.PEPPERS:
            asked.add(path)
        return real(self, mount, path, version)

    monkeypatch.setattr(LocalKeystore, "read", note_and_read)
    return asked


@pytest.fixture(params=list(Environment))
def served(request: pytest.FixtureRequest) -> Environment:
    environment: Environment = request.param
    return environment


@pytest.fixture
def pinned(folder: Path, reads: set[str], served: Environment) -> Iterator[None]:
    """A fresh process, pinned to the one environment, on what was set up for both."""
    have_peppers()
    forget_keystore()
    reads.clear()
    with override_settings(ENVIRONMENTS=(served.value,)):
        yield


def test_pinned_process_refuses_the_other_peppers_before_anything_is_read(
    pinned: None, reads: set[str], served: Environment
) -> None:
    """Not even a fault in our code gets at the other environment's peppers: they never come into this memory."""
    with pytest.raises(NotFoundError, match=f"does not serve {OTHER[served]}"):
        load_peppers(PEPPER_SET[OTHER[served]])
    assert reads == set()
    for pepper_set in (PEPPER_SET[served], PepperSet.SERVICE):
        assert load_peppers(pepper_set).pepper_set is pepper_set
    assert reads == {served.value, "service"}


def test_pinned_process_is_healthy_with_its_own(pinned: None, reads: set[str], served: Environment) -> None:
    """Health and set-up look at what is served, and at nothing else."""
    assert pepper_health() == {PEPPER_SET[served]: True, PepperSet.SERVICE: True}
    ensure_peppers(now())
    assert reads == {served.value, "service"}


@pytest.mark.django_db(transaction=True)
def test_pinned_process_starts_with_its_own(pinned: None, reads: set[str], served: Environment) -> None:
    require_ready()
    assert reads == {served.value, "service"}


def test_pinned_process_tells_readyz_about_its_own_only(pinned: None, reads: set[str], served: Environment) -> None:
    response = Client().get("/readyz")
    assert response.json() == {
        "status": "ready",
        "checks": {"database": "ok", f"peppers_{served}": "ok", "peppers_service": "ok"},
    }
    assert reads == {served.value, "service"}


def test_pinned_first_run_makes_its_own_peppers_only(folder: Path, reads: set[str], served: Environment) -> None:
    """The other environment's are made where that is served, be it with another backend."""
    with override_settings(ENVIRONMENTS=(served.value,)):
        ensure_peppers(now())
    made = set(PepperVersion.objects.values_list("pepper_set", flat=True))
    assert made == {served.value, "service"}
    assert reads == made


def test_process_of_both_environments_serves_every_set() -> None:
    assert list_served_sets() == list(PepperSet)


def test_pinned_process_judges_its_own_keys_and_no_others(folder: Path, reads: set[str], served: Environment) -> None:
    """Asked about a key of the other environment it says that it does not serve it: 404 and no verdict."""
    make_merchant("acme")
    texts = {environment: issue(account("acme", environment))[1] for environment in Environment}
    token = make_token()[1].reveal()
    forget_keystore()
    reads.clear()
    with pytest.MonkeyPatch.context() as patch, override_settings(ENVIRONMENTS=(served.value,)):
        patch.setattr(UsageLog, "start", lambda self: None)
        answers = {
            environment: Client().post(
                "/v1/keys/verify",
                {"key": text.reveal(), "environment": environment.value, "endpoint": "orders.create"},
                content_type="application/json",
                headers={"Authorization": f"Bearer {token}"},
            )
            for environment, text in texts.items()
        }
    assert answers[served].json()["allowed"] is True
    refused = answers[OTHER[served]]
    assert (refused.status_code, refused.json()["code"]) == (404, "not_found")
    assert reads == {served.value, "service"}


def test_pinned_process_takes_no_request_for_the_other_environment(served: Environment) -> None:
    """Nobody waits for a key that no worker of this process makes."""
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
    """Neither collected nor shown again: the other environment's strings are not even read, and none is used up."""
    make_merchant("acme")
    tam = the_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER)
    place = account("acme", OTHER[served])
    key, text = issue(place, kind=kind, delivery=Delivery.SHOW_ONCE)
    request = get_request(IssuanceRequest.objects.get(key=key).request_id)
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
            read_public_string(key)
    assert read == []
    assert collect_key(grant(tam, P.ISSUANCE_COLLECT, place), request).reveal() == text.reveal()


def test_pinned_worker_takes_up_only_its_rotations(served: Environment) -> None:
    """The other environment's rotations are left to its workers, without a failure noted or a lease taken."""
    clock = scene.Clock(now())
    rotations = {}
    for environment in Environment:
        key, _ = scene.issue(scene.account(environment=environment), clock())
        wish = {"quiet_seconds": 3_600, "quarantine_seconds": 600} if environment == "production" else {}
        rotations[environment] = scene.rotate(key.credential, clock(), **wish).rotation_id
    assert set(list_due(clock())) == set(rotations.values())
    with override_settings(ENVIRONMENTS=(served.value,)):
        assert list_due(clock()) == [rotations[served]]
        assert advance_rotation(rotations[OTHER[served]], clock) is None
        assert not WorkLease.objects.filter(subject__startswith="rotation:").exists()
        assert advance_rotation(rotations[served], clock) is not None
    assert advance_rotation(rotations[OTHER[served]], clock) is not None
