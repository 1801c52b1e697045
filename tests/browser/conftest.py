"""One service and one browser for all tests of this folder that a process runs."""

from collections.abc import Iterator

import pytest

from tests.browser.service import Service, running_service
from tests.environment import required_servers
from tests.servers.throwaway import MissingServerError


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    try:
        with running_service(tmp_path_factory.mktemp("browser")) as running:
            yield running
    except MissingServerError as missing:
        if "chromium" in required_servers():
            pytest.fail(f"KEYVAULT_REQUIRE names chromium: {missing.reason}", pytrace=False)
        pytest.skip(missing.reason)
