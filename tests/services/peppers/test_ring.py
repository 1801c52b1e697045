"""The pepper ring: created once, stable, and refused when a pepper is missing or differs."""

import base64
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import IntegrityError as DatabaseIntegrityError

from keyvault.backends.base import Mount
from keyvault.domain.digests import PEPPER_BYTES, PepperSet
from keyvault.domain.errors import IntegrityError
from keyvault.domain.plaintext import Plaintext
from keyvault.models import AuditEntry, PepperVersion
from keyvault.services.peppers import ring
from keyvault.services.peppers.installation import ensure_installation
from keyvault.services.peppers.ring import ensure_peppers, load_peppers, pepper_health
from keyvault.services.recording import transaction
from keyvault.services.secrets.backend import secret_backend
from tests.factories import account, forget_keystore, have_peppers, issue, make_merchant, now, own_keystore
from tests.services.keys.test_lifecycle import verdict
from tests.services.racing import race
from tests.services.rows import disable_triggers

pytestmark = pytest.mark.django_db


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A separate keystore that the test may damage."""
    with own_keystore(tmp_path):
        yield tmp_path


def swap_keystore(folder: Path, material: Mapping[PepperSet, str]) -> None:
    """Replace the keystore by one with other peppers, as after a wrong restore."""
    for file in folder.iterdir():
        file.unlink()
    forget_keystore()
    for pepper_set, text in material.items():
        secret_backend().put(Mount.PEPPERS, pepper_set, Plaintext(text), {}, expected_version=0)
    forget_keystore()


def stored(pepper_set: PepperSet) -> str:
    return secret_backend().read(Mount.PEPPERS, pepper_set).secret.reveal()


@pytest.mark.database
def test_peppers_of_a_first_run_are_separate_per_set(folder: Path) -> None:
    """Each environment and the service tokens get a separate pepper of 256 random bits."""
    have_peppers()
    peppers = {pepper_set: load_peppers(pepper_set) for pepper_set in PepperSet}
    material = {loaded.versions[1] for loaded in peppers.values()}
    assert len(material) == len(PepperSet)
    assert {len(pepper) for pepper in material} == {PEPPER_BYTES}
    assert PepperVersion.objects.count() == len(PepperSet)


def test_peppers_ensured_again_are_unchanged(folder: Path) -> None:
    """A second start creates nothing."""
    have_peppers()
    before = {pepper_set: load_peppers(pepper_set).versions for pepper_set in PepperSet}
    entries = AuditEntry.objects.count()
    forget_keystore()
    have_peppers()
    assert {pepper_set: load_peppers(pepper_set).versions for pepper_set in PepperSet} == before
    assert AuditEntry.objects.count() == entries


def test_peppers_are_stored_in_the_backend_and_not_in_the_database(folder: Path) -> None:
    """The database holds only a check value, which reveals nothing of the pepper."""
    have_peppers()
    for row in PepperVersion.objects.all():
        pepper = load_peppers(PepperSet(row.pepper_set)).versions[row.number]
        assert len(bytes(row.check_value)) == 16
        assert bytes(row.check_value) not in pepper


@pytest.mark.database
def test_peppers_of_a_swapped_keystore_are_refused(folder: Path) -> None:
    """The process detects a foreign keystore before it verifies any key."""
    have_peppers()
    swap_keystore(folder, dict.fromkeys(PepperSet, base64.b64encode(bytes(range(32))).decode()))
    for pepper_set in PepperSet:
        with pytest.raises(IntegrityError, match="differs from the one that the keys were hashed with"):
            load_peppers(pepper_set)
    with pytest.raises(IntegrityError):
        ensure_peppers(now())
    assert set(pepper_health().values()) == {False}


@pytest.mark.database
def test_peppers_of_a_lost_keystore_are_reported_missing(folder: Path) -> None:
    """New peppers would invalidate every key, so the error names what to restore."""
    have_peppers()
    for file in folder.iterdir():
        file.unlink()
    forget_keystore()
    with pytest.raises(IntegrityError, match="missing from the secret backend"):
        ensure_peppers(now())
    assert set(pepper_health().values()) == {False}


def test_peppers_exchanged_between_sets_are_refused(folder: Path) -> None:
    have_peppers()
    sandbox, production, service = stored(PepperSet.SANDBOX), stored(PepperSet.PRODUCTION), stored(PepperSet.SERVICE)
    exchanged = {PepperSet.SANDBOX: production, PepperSet.PRODUCTION: sandbox, PepperSet.SERVICE: service}
    swap_keystore(folder, exchanged)
    assert pepper_health() == {PepperSet.SANDBOX: False, PepperSet.PRODUCTION: False, PepperSet.SERVICE: True}


def test_peppers_of_a_keystore_without_its_master_key_are_refused(folder: Path) -> None:
    """Data sealed under another master key is never opened with a new one."""
    have_peppers()
    (folder / "master.key").unlink()
    forget_keystore()
    with pytest.raises(ImproperlyConfigured, match="is missing"):
        load_peppers(PepperSet.SANDBOX)


@pytest.mark.database
def test_peppers_of_a_first_run_killed_before_its_row_are_adopted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between keystore and row: the next run adopts the stored pepper and creates no other."""

    def die(**_: object) -> None:
        raise OSError("power cut")

    ensure_installation(now())
    with monkeypatch.context() as patch:
        patch.setattr(transaction, "append_entries", die)
        with pytest.raises(OSError, match="power cut"):
            ensure_peppers(now())
    assert not PepperVersion.objects.exists()
    orphaned = stored(PepperSet.SANDBOX)
    forget_keystore()
    have_peppers()
    assert stored(PepperSet.SANDBOX) == orphaned
    assert len(secret_backend().versions(Mount.PEPPERS, PepperSet.SANDBOX)) == 1


@pytest.mark.database
@pytest.mark.django_db(transaction=True)
def test_peppers_of_concurrent_first_runs_are_the_same(tmp_path: Path) -> None:
    """Processes that start for the first time together create one pepper per set."""
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir(mode=0o700)
        with own_keystore(folder):
            outcomes = race(*[lambda: ensure_peppers(now())] * 4)
            assert outcomes == [None] * 4
            assert PepperVersion.objects.count() == len(PepperSet)
            assert {len(secret_backend().versions(Mount.PEPPERS, name)) for name in PepperSet} == {1}
            forget_keystore()
            assert set(pepper_health().values()) == {True}
        _forget_rows()


def _forget_rows() -> None:
    disable_triggers()
    PepperVersion.objects.all()._raw_delete("default")


@pytest.mark.database
def test_peppers_before_the_set_up_are_missing(folder: Path) -> None:
    with pytest.raises(IntegrityError, match="was not set up"):
        load_peppers(PepperSet.SANDBOX)
    assert set(pepper_health().values()) == {False}


def test_peppers_in_memory_verify_without_the_backend(folder: Path) -> None:
    """Verification never calls the secret backend."""
    have_peppers()
    make_merchant("acme")
    _, text = issue(account())
    shutil.rmtree(folder)
    secret_backend.cache_clear()
    assert verdict(text) is None


@pytest.mark.database
def test_pepper_version_created_twice_is_refused(folder: Path) -> None:
    have_peppers()
    ring._make_first(PepperSet.SANDBOX, now())
    assert PepperVersion.objects.filter(pepper_set=PepperSet.SANDBOX).count() == 1
    with pytest.raises(DatabaseIntegrityError):
        PepperVersion(pepper_set="sandbox", number=1, check_value=b"x", created_at=now()).save_base(force_insert=True)
