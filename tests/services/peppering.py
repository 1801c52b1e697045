"""Pepper rotations for tests: in a keystore of the test's own, and in force at once."""

from datetime import timedelta

import pytest

from keyvault.access.permissions import Permission
from keyvault.access.principals import HOST, WORKER
from keyvault.domain.digests import PepperSet
from keyvault.models import PepperVersion
from keyvault.services.keys.rehashing import pending_rehashes
from keyvault.services.pepper_rotation import propagation, rotation
from keyvault.services.peppers.ring import load_peppers
from tests.factories import grant, now


def hasten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new version makes digests from the moment that it is there."""
    monkeypatch.setattr(propagation, "PROPAGATION", timedelta(0))
    monkeypatch.setattr(rotation, "PROPAGATION", timedelta(0))


def rotate(pepper_set: PepperSet = PepperSet.SANDBOX) -> PepperVersion:
    """A new version, which this process has loaded, and which is in use where nothing stands in its way."""
    row = rotation.rotate_pepper(grant(HOST, Permission.PEPPERS_WRITE), pepper_set)
    load_peppers.refresh()
    take_into_use(row)
    return row


def take_into_use(row: PepperVersion) -> None:
    """What the worker does, as far as it may."""
    at = now()
    if propagation.is_loaded_everywhere(row, at):
        propagation.begin_hashing(grant(WORKER, Permission.KEYS_REHASH, at=at), row)
        load_peppers.refresh()


def retire(pepper_set: PepperSet, number: int) -> PepperVersion:
    """Retired, and let go of by this process; the secret backend has it still."""
    row = rotation.retire_pepper(grant(HOST, Permission.PEPPERS_WRITE), pepper_set, number)
    load_peppers.refresh()
    return row


def destroy(pepper_set: PepperSet, number: int) -> PepperVersion:
    """A retired one, when its time has come."""
    later = now() + rotation.KEPT_AFTER_RETIREMENT
    return rotation.destroy_pepper(grant(HOST, Permission.PEPPERS_WRITE, at=later), pepper_set, number)


def rehash() -> None:
    """What the thread that reports usage does next."""
    pending_rehashes.write(now())
