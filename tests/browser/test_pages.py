"""Every page of the console: accessible in light and dark, within its policy for contents, on a phone, by keyboard."""

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

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


def list_pages(page: Page) -> list[str]:
    """Return the pages of the menu, their tabs, one row of each list, and one form of each page."""
    page.goto("/admin/")
    found = ["/admin/", *_links(page, ".menu a")]
    for path in list(found):
        page.goto(path)
        found += _links(page, ".tabs a")
    for path in dict.fromkeys(found):
        page.goto(path)
        found += [*_links(page, "main table a")[:1], *_links(page, "main a.button")[:2]]
    return list({_ID.sub("/ID/", path.partition("?")[0]): path for path in reversed(found)}.values())


_ID = re.compile(r"/[^/]*[0-9][^/]*/")
"""Part of a path that names a row: one page of each kind is enough."""


def _links(page: Page, selector: str) -> list[str]:
    paths = [str(each.get_attribute("href")) for each in page.locator(selector).all()]
    return [path.partition("#")[0] for path in paths if path.startswith("/admin/") and "logout" not in path]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_is_accessible(service: Service, scheme: Any) -> None:
    """Guarantee: axe finds no serious or critical issue on any page."""
    wrong: list[str] = []
    # The policy would refuse the test's own script: it is off here, and has its own test.
    # Only colors differ in the dark.
    rules = {"resultTypes": ["violations"]} | ({"runOnly": ["color-contrast"]} if scheme == "dark" else {})
    with service.page("admin", color_scheme=scheme, bypass_csp=True) as page:
        paths = list_pages(page)
        assert len(paths) > 25
        for path in paths:
            page.goto(path)
            page.evaluate(AXE)
            answer = page.evaluate("(rules) => axe.run(document, rules)", rules)
            wrong += [
                f"{path} {each['id']}: {each['nodes'][0]['html'][:120]}"
                for each in answer["violations"]
                if each["impact"] in SERIOUS
            ]
    assert wrong == []


def test_every_page_keeps_its_content_security_policy(service: Service) -> None:
    """Guarantee: no page breaks its policy."""
    wrong: list[str] = []
    with service.page("admin") as page:
        paths = list_pages(page)
        page.add_init_script(LISTEN)
        for path in paths:
            page.goto(path)
            wrong += [f"{path} {each}" for each in page.evaluate("() => window.violations")]
    assert wrong == []


def test_every_page_fits_a_phone(service: Service) -> None:
    """Guarantee: no page scrolls sideways at 390 px, and the menu opens there."""
    with service.page("admin", viewport=PHONE) as page:
        wide = []
        for path in list_pages(page):
            page.goto(path)
            width = page.evaluate("() => document.documentElement.scrollWidth")
            if width > PHONE["width"]:
                wide.append(f"{path} {width}")
        assert wide == []
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
