"""The menu of pages whose test does not read it."""

import pytest

from keyvault.admin.framework.attention import MenuCounts


@pytest.fixture
def menu_counts() -> None:
    """What a test of the menu's counts requests, and a test of how many queries a page makes."""


@pytest.fixture(autouse=True)
def menu_without_counts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count nothing for the menu: after each POST that would take most of the time of a page."""
    if "menu_counts" not in request.fixturenames:
        monkeypatch.setattr(MenuCounts, "find", lambda self, request: {})
