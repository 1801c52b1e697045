"""Every page of the console: accessible in light and dark, within its policy for contents, on a phone, by keyboard."""

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from tests.browser.pages import list_pages
from tests.browser.service import Service

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

AXE = (Path(__file__).parent / "axe" / "axe.min.js").read_text()

PHONE = {"width": 390, "height": 844}

LISTEN = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) =>
    window.violations.push(event.violatedDirective + " " + event.blockedURI + " " + event.sample));
"""
"""Runs before each page's own scripts."""

SERIOUS = {"serious", "critical"}


@pytest.fixture(scope="module")
def paths(service: Service) -> list[str]:
    with service.page("admin") as page:
        paths = list(list_pages(page).values())
    assert len(paths) > 25
    return paths


def test_every_page_is_accessible(service: Service, paths: list[str]) -> None:
    """Guarantee: axe finds no serious or critical issue on any page, in light or dark."""
    wrong: list[str] = []
    # The policy would refuse the test's own script: it is off here, and has its own test.
    with service.page("admin", color_scheme="light", bypass_csp=True) as page:
        for path in paths:
            page.emulate_media(color_scheme="light")
            page.goto(path)
            page.evaluate(AXE)
            wrong += [f"{path} in light: {each}" for each in _find_issues(page, {})]
            # Only colors differ in the dark.
            page.emulate_media(color_scheme="dark")
            wrong += [f"{path} in dark: {each}" for each in _find_issues(page, {"runOnly": ["color-contrast"]})]
    assert wrong == []


def _find_issues(page: Page, rules: dict[str, Any]) -> list[str]:
    answer = page.evaluate(
        "(rules) => axe.run(document, rules)", {"resultTypes": ["violations"], "preload": False} | rules
    )
    return [
        f"{each['id']}: {each['nodes'][0]['html'][:120]}" for each in answer["violations"] if each["impact"] in SERIOUS
    ]


def test_every_page_keeps_its_policy_and_fits_a_phone(service: Service, paths: list[str]) -> None:
    """Guarantee: no page breaks its policy for contents, or scrolls sideways at 390 px; the menu opens there."""
    wrong: list[str] = []
    with service.page("admin", viewport=PHONE) as page:
        page.add_init_script(LISTEN)
        for path in paths:
            page.goto(path)
            width = page.evaluate("() => document.documentElement.scrollWidth")
            wrong += [f"{path} {width} px"] if width > PHONE["width"] else []
            wrong += [f"{path} {each}" for each in page.evaluate("() => window.violations")]
        assert wrong == []
        page.goto("/admin/")
        page.locator("summary", has_text="Keyvault").first.click()
        page.locator(".menu-small").get_by_role("link", name="Merchants").click()
        page.get_by_role("heading", name="Merchants").wait_for()


def test_pages_work_without_scripts(service: Service) -> None:
    """Guarantee: the menu, search, a list, a page of a row and a form need no script."""
    with service.page("admin", java_script_enabled=False) as page:
        page.goto("/admin/")
        page.get_by_role("searchbox").fill("acme")
        page.get_by_role("searchbox").press("Enter")
        page.get_by_role("heading", name="Acme Stores").first.wait_for()
        page.goto("/admin/keyvault/merchant/new/create/")
        page.locator("[name=merchant_id]").fill("noscript")
        page.locator("[name=name]").fill("No Script")
        page.get_by_role("button", name="Create merchant").click()
        page.get_by_role("heading", name="No Script").wait_for()


def test_console_is_used_by_keyboard_only(service: Service) -> None:
    """Guarantee: the first Tab reaches the link to the contents, and `/` the search."""
    with service.page("admin") as page:
        page.goto("/admin/")
        page.keyboard.press("Tab")
        assert page.evaluate("() => document.activeElement.classList.contains('skip')")
        page.keyboard.press("Enter")
        page.keyboard.press("/")
        assert page.evaluate("() => document.activeElement.id") == "search"
        page.keyboard.type("acme")
        page.keyboard.press("Enter")
        page.wait_for_url(re.compile("/admin/(keyvault/merchant/acme|search)"))
