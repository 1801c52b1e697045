"""Each test of the contract, once for every backend."""

from pathlib import Path

import pytest

from keyvault.backends.base import SecretBackend

from .stores import BACKENDS


@pytest.fixture(params=BACKENDS)
def backend_name(request: pytest.FixtureRequest) -> str:
    name = request.param
    assert isinstance(name, str)
    return name


@pytest.fixture
def backend(backend_name: str, tmp_path: Path) -> SecretBackend:
    """An empty backend on the test's own folder."""
    return BACKENDS[backend_name](tmp_path)
