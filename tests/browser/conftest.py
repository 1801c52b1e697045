"""One browser and one service for all tests of this folder that a process runs."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.browser.service import Service, running_browser, running_service
from tests.environment import required_servers
from tests.servers.throwaway import MissingServerError


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    try:
        with running_browser() as running:
            yield running
    except MissingServerError as missing:
        if "chromium" in required_servers():
            pytest.fail(f"KEYVAULT_REQUIRE names chromium: {missing.reason}", pytrace=False)
        pytest.skip(missing.reason)


@pytest.fixture(scope="session")
def service(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running_service(tmp_path_factory.mktemp("browser"), chromium) as running:
        yield running
