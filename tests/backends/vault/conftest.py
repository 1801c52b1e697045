"""A client and a backend on the fake, with a clock that tests move."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from keyvault.backends.vault.breaker import Breaker
from keyvault.backends.vault.client import VaultClient, VaultServer
from keyvault.backends.vault.kv import VaultBackend
from keyvault.backends.vault.logins import AppRoleLogin, Login
from tests.backends.conftest import fake as fake
from tests.backends.conftest import lay_fake
from tests.backends.stores import open_vault

from .fake import FakeVault

ROLE = "kv-reader-sandbox"
IMPATIENT = (2.0, 0.3)
"""Seconds to connect and to read, for who is kept waiting on purpose. Nobody else may depend on how fast this is."""

PATIENT = (10.0, 30.0)


@dataclass
class Clock:
    """Monotonic seconds, here and on the fake."""

    fake: FakeVault
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.fake.later(seconds)


@pytest.fixture
def clock(fake: FakeVault) -> Clock:
    return Clock(fake)


@pytest.fixture
def logins(fake: FakeVault, tmp_path: Path) -> Path:
    """The folder of the logins of every role on the fake."""
    lay_fake(fake, tmp_path)
    return tmp_path / "logins"


@pytest.fixture
def store(logins: Path) -> VaultBackend:
    return open_vault(logins.parent)


@pytest.fixture
def client(fake: FakeVault, logins: Path, clock: Clock) -> VaultClient:
    return make_client(fake, AppRoleLogin(logins, ROLE), clock)


def make_client(fake: FakeVault, login: Login, clock: Clock, timeout: tuple[float, float] = PATIENT) -> VaultClient:
    return VaultClient(VaultServer(fake.address, timeout=timeout), login, ROLE, Breaker(clock), clock)
