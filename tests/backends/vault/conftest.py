"""A client and a backend on the fake, with a clock that tests advance."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from keyvault.backends.vault.breaker import Breaker
from keyvault.backends.vault.client import VaultClient, VaultServer
from keyvault.backends.vault.kv import VaultBackend
from keyvault.backends.vault.logins import AppRoleLogin, Login
from tests.backends.conftest import fake as fake
from tests.backends.conftest import write_fake_logins
from tests.backends.stores import open_vault

from .fake import FakeVault

ROLE = "kv-reader-sandbox"
SHORT_TIMEOUTS = (2.0, 0.3)
"""Connect and read timeouts in seconds, for tests that let them expire. No other test may depend on this speed."""

LONG_TIMEOUTS = (10.0, 30.0)


@dataclass
class VaultClock:
    """Monotonic seconds, here and on the fake."""

    fake: FakeVault
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.fake.advance(seconds)


@pytest.fixture
def clock(fake: FakeVault) -> VaultClock:
    return VaultClock(fake)


@pytest.fixture
def logins(fake: FakeVault, tmp_path: Path) -> Path:
    """Return the folder with a login of every role on the fake."""
    write_fake_logins(fake, tmp_path)
    return tmp_path / "logins"


@pytest.fixture
def store(logins: Path) -> VaultBackend:
    return open_vault(logins.parent)


@pytest.fixture
def client(fake: FakeVault, logins: Path, clock: VaultClock) -> VaultClient:
    return make_client(fake, AppRoleLogin(logins, ROLE), clock)


def make_client(
    fake: FakeVault, login: Login, clock: VaultClock, timeout: tuple[float, float] = LONG_TIMEOUTS
) -> VaultClient:
    return VaultClient(VaultServer(fake.address, timeout=timeout), login, ROLE, Breaker(clock), clock)
