"""Helpers that rotate, use, retire and destroy peppers without waiting for propagation."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from keyvault.access.permissions import Permission
from keyvault.access.principals import HOST, WORKER
from keyvault.domain.digests import PepperSet
from keyvault.models import PepperVersion
from keyvault.services.keys.rehashing import pending_rehashes
from keyvault.services.pepper_rotation import propagation, rotation
from keyvault.services.peppers.ring import load_peppers
from tests.factories import grant, now, own_keystore


def skip_propagation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the propagation delay to zero, so that a new pepper version is used immediately."""
    monkeypatch.setattr(propagation, "PROPAGATION", timedelta(0))
    monkeypatch.setattr(rotation, "PROPAGATION", timedelta(0))


@contextmanager
def isolated_peppers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give the test its own keystore, no propagation delay and an empty queue of re-hashes."""
    skip_propagation(monkeypatch)
    with own_keystore(folder):
        pending_rehashes.forget()
        yield
        pending_rehashes.forget()


def rotate(pepper_set: PepperSet = PepperSet.SANDBOX) -> PepperVersion:
    """Create a pepper version, load it in this process, and use it for hashing if every process has loaded it."""
    row = rotation.rotate_pepper(grant(HOST, Permission.PEPPERS_WRITE), pepper_set)
    load_peppers.refresh()
    begin_hashing_if_loaded(row)
    return row


def begin_hashing_if_loaded(row: PepperVersion) -> None:
    """Run the worker's step that puts a loaded version into use."""
    at = now()
    if propagation.is_loaded_everywhere(row, at):
        propagation.begin_hashing(grant(WORKER, Permission.KEYS_REHASH, at=at), row)
        load_peppers.refresh()


def retire(pepper_set: PepperSet, number: int) -> PepperVersion:
    """Retire a version and unload it from this process; the secret backend keeps it."""
    row = rotation.retire_pepper(grant(HOST, Permission.PEPPERS_WRITE), pepper_set, number)
    load_peppers.refresh()
    return row


def destroy(pepper_set: PepperSet, number: int) -> PepperVersion:
    """Destroy a retired version after its retention period."""
    later = now() + rotation.KEPT_AFTER_RETIREMENT
    return rotation.destroy_pepper(grant(HOST, Permission.PEPPERS_WRITE, at=later), pepper_set, number)


def rehash() -> None:
    """Write the pending re-hashes, as the usage reporting thread does."""
    pending_rehashes.write(now())
