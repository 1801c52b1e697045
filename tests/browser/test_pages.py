"""Every page of the console: accessible in light and dark, within its policy for contents, on a phone, by keyboard."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.test import RequestFactory
from playwright.sync_api import Browser, Page, ViewportSize, expect

from keyvault.admin.framework.plain_pages import error_page
from tests.admin.desk import list_routes
from tests.browser.pages import name_page, walk_pages
from tests.browser.service import Service, fill, running_service

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

AXE = (Path(__file__).parent / "axe" / "axe.min.js").read_text()

DESK = ViewportSize(width=1280, height=800)
PHONE = ViewportSize(width=390, height=844)

LISTEN = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) =>
    window.violations.push(event.violatedDirective + " " + event.blockedURI + " " + event.sample));
"""
"""Runs before each page's own scripts."""

FIND_NEW = """
(known) => {
    const names = (element) => element.getAttributeNames().filter((name) => !name.startsWith("data-"));
    const look = (element) => [element.tagName, element.type, element.role, ...element.classList, ...names(element)];
    const found = new Map();
    for (const element of document.querySelectorAll("html, html *:not(head *, svg *)")) {
        const both = [element.parentElement ?? element, element].map((each) => look(each).join(" ")).join(" > ");
        if (!known.includes(both) && !found.has(both)) found.set(both, element);
    }
    window.fresh = [...found.values()];
    return [...found.keys()];
}
"""
"""Finds elements that look like none before, by tag, type, role, classes and names of attributes, with the parent's."""

SERIOUS = {"serious", "critical"}

SECOND_FACTORS = [f"/admin/account/second-factors/{page}" for page in ("", "totp/", "passkey/")]

NOT_WALKED = {
    "the page that does not exist, which is walked": ["/admin/(?PID.*)$"],
    "answers with JSON": [f"/admin/choices/{name}/" for name in ("actors", "calendars", "credentials", "merchants")],
    "redirects": [
        "/admin/account/second-factors/ID/remove/",
        "/admin/environment/",
        "/admin/login/sso/",
        "/admin/login/sso/callback/",
    ],
    "a download": [
        "/admin/audit/export/log/",
        "/admin/audit/export/public-keys/",
        "/admin/keyvault/operator/access-review/export/",
    ],
    "its form is on the page of the row, where the approver sees it": [
        f"/admin/{row}/ID/{action}/"
        for row in (
            "keyvault/issuancerequest",
            "keyvault/operatorchange",
            "rotation/campaign",
            "rotation/rotation",
            "rotation/standingapproval",
        )
        for action in ("approve", "reject")
    ]
    + ["/admin/keyvault/recipientkey/ID/approve/", "/admin/rotation/retirement/ID/approve/"],
    "no row of the month can be resumed; the form has no field": [
        "/admin/keyvault/account/ID/resume/",
        "/admin/keyvault/catalogendpoint/ID/restore/",
        "/admin/keyvault/key/ID/resume/",
        "/admin/keyvault/merchant/ID/resume/",
        "/admin/keyvault/webhookendpoint/ID/enable/",
        "/admin/rotation/campaign/ID/resume/",
        "/admin/rotation/rotation/ID/release/",
        "/admin/rotation/rotation/ID/resume/",
        "/admin/rotation/rotationschedule/ID/enable/",
    ],
    "no row of the month has its state; other forms have the same fields": [
        "/admin/keyvault/breakglass/ID/confirm/",
        "/admin/keyvault/breakglass/ID/disown/",
        "/admin/keyvault/consolesession/ID/end/",
        "/admin/keyvault/credential/ID/reissue/",
        "/admin/keyvault/operator/ID/same-person/",
    ],
}
"""Routes that are not walked, by the reason."""


@dataclass
class Inspector:
    """Inspects each page that is open. `wrong`: what it has found. `names`: the pages, as `name_page` names them."""

    wrong: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    _looks: list[str] = field(default_factory=list)

    def inspect(self, page: Page) -> None:
        """Look for violations of the policy, sideways scrolling, and issues that axe finds.

        Axe is slow, so it inspects only elements, with what they contain, that look like none on earlier pages.
        """
        width = page.evaluate("() => document.documentElement.scrollWidth")
        found = [f"scrolls sideways: {width} px"] if width > PHONE["width"] else []
        found += page.evaluate("() => window.violations")
        if looks := page.evaluate(FIND_NEW, self._looks):
            self._looks += looks
            page.set_viewport_size(DESK)
            page.evaluate(AXE)
            found += _find_issues(page, {})
            page.emulate_media(color_scheme="dark")
            # Only colors differ in the dark.
            found += [f"in dark {each}" for each in _find_issues(page, {"runOnly": ["color-contrast"]})]
            page.emulate_media(color_scheme="light")
            page.set_viewport_size(PHONE)
        path = urlsplit(page.url).path
        self.names.add(name_page(path))
        self.wrong += [f"{path} ({page.title()}): {each}" for each in found]


def _find_issues(page: Page, rules: dict[str, Any]) -> list[str]:
    options = {"resultTypes": ["violations"], "preload": False} | rules
    answer = page.evaluate("(options) => axe.run({include: window.fresh}, options)", options)
    return [
        f"{each['id']}: {each['nodes'][0]['html'][:120]}" for each in answer["violations"] if each["impact"] in SERIOUS
    ]


@dataclass(frozen=True)
class Filled:
    """A service with the data of a month. `shown`: paths of pages that show it, by name."""

    service: Service
    shown: dict[str, str]

    @contextmanager
    def page(self, operator: str) -> Iterator[Page]:
        with self.service.page(operator, viewport=PHONE) as page:
            page.add_init_script(LISTEN)
            yield page


@pytest.fixture
def filled(chromium: Browser, tmp_path: Path) -> Iterator[Filled]:
    shown = fill(tmp_path / "data")
    with running_service(tmp_path, chromium) as running:
        yield Filled(running, shown)


@pytest.mark.timeout(900)
def test_every_page_is_accessible_keeps_its_policy_and_fits_a_phone(filled: Filled) -> None:
    """Guarantee: axe finds no serious or critical issue on any page, in light or dark; no page breaks its policy for
    contents, or scrolls sideways at 390 px.
    """
    inspector = Inspector()
    walk_to_pages(filled, inspector)
    for act in (request_without_data, fail, explain, collect, approve_all, revoke_leaked_key, enroll_and_sign_in):
        act(filled, inspector)
    assert inspector.wrong == []
    routes = {re.sub("<[^>]+>", "ID", path) for _, path in list_routes()}
    assert routes - inspector.names == {path for paths in NOT_WALKED.values() for path in paths}


def walk_to_pages(filled: Filled, inspector: Inspector) -> None:
    """Open every page that an operator finds by links, and those that forms lead to by GET."""
    seen: set[str] = set()
    shown = filled.shown
    pages = {
        # The second factor is recent for five minutes.
        "admin": [
            *SECOND_FACTORS,
            *shown.values(),
            "/admin/search/?q=a",
            "/admin/search/?q=nothing",
            "/admin/no/such/page/",
        ],
        "tam": [shown["request-pending"], shown["request-issued"], shown["schedule"], "/admin/keyvault/auditentry/"],
        "approver": [shown["request-pending"], shown["rotation-pending"]],
        "responder": [shown["key-active"]],
        "auditor": ["/admin/"],
    }
    for operator, paths in pages.items():
        with filled.page(operator) as page:
            for _ in walk_pages(page, paths, seen):
                inspector.inspect(page)


def request_without_data(filled: Filled, inspector: Inspector) -> None:
    with filled.page("tam") as page:
        page.goto("/admin/keyvault/issuancerequest/new/request/")
        page.get_by_role("button", name="Submit request").click()
        page.get_by_text("Correct the errors below.").wait_for()
        inspector.inspect(page)


def fail(filled: Filled, inspector: Inspector) -> None:
    """Open the page of an internal error, which no request causes: the browser gets it from the test."""
    response = error_page(RequestFactory().get("/admin/"), "Something went wrong", "Check your change.", 500, "R" * 22)
    headers = {name: text for name, text in response.items() if name != "Content-Length"}
    with filled.page("tam") as page:
        page.route("**/admin/fails/", lambda route: route.fulfill(status=500, headers=headers, body=response.content))
        page.goto("/admin/fails/")
        inspector.inspect(page)


def explain(filled: Filled, inspector: Inspector) -> None:
    with filled.page("tam") as page:
        for subject in (filled.shown["key-active"].split("/")[-2], filled.service.key[:32]):
            page.goto("/admin/explain/")
            page.get_by_label("Request id or key id").fill(subject)
            page.get_by_role("button", name="Explain", exact=True).click()
            page.locator("main .note, main .banner").first.wait_for()
            inspector.inspect(page)


def collect(filled: Filled, inspector: Inspector) -> None:
    with filled.page("tam") as page:
        page.goto(f"{filled.shown['request-issued']}collect/")
        submit(filled, page, "tam", "Collect key")
        page.locator("[data-secret]").wait_for()
        inspector.inspect(page)
        page.get_by_role("link", name="I have stored it").click()


def approve_all(filled: Filled, inspector: Inspector) -> None:
    with filled.page("approver") as page:
        page.goto("/admin/approvals/")
        page.get_by_role("link", name=re.compile("^Review all ?: Key requests")).click()
        submit(filled, page, "approver", "Approve 2 requests")
        page.get_by_role("heading", name="2 requests approved").wait_for()
        inspector.inspect(page)


def revoke_leaked_key(filled: Filled, inspector: Inspector) -> None:
    with filled.page("responder") as page:
        page.goto("/admin/incidents/")
        page.locator("[name=secret_text]").fill(filled.service.key)
        page.get_by_role("button", name="Find keys").click()
        page.get_by_role("heading", name="1 key to revoke").wait_for()
        inspector.inspect(page)
        submit(filled, page, "responder", "Revoke 1 key now")
        page.get_by_text("1 key revoked.").wait_for()
        inspector.inspect(page)


def submit(filled: Filled, page: Page, operator: str, button: str) -> None:
    filled.service.give_code(page, operator)
    page.get_by_role("button", name=button).click()


def enroll_and_sign_in(filled: Filled, inspector: Inspector) -> None:
    """Open the pages of a new operator: invitation, second factors, a form that was sent too late, and the sign-in."""
    service, password = filled.service, "a password of nobody else"
    invited = json.loads(service.manage("invite_operator", "new", "--role", "auditor", "--json"))
    context = service.new_context(viewport=PHONE)
    page = context.new_page()
    page.add_init_script(LISTEN)
    page.goto(invited["enrolment_url"])
    inspector.inspect(page)
    page.locator("[name=password]").fill(password)
    page.locator("[name=password_again]").fill(password)
    service.operators["new"] = (password, page.locator(".totp code").inner_text())
    submit(filled, page, "new", "Finish with the app's code")
    page.get_by_role("heading", name="Recovery codes").wait_for()
    page.goto("/admin/account/second-factors/")
    page.get_by_role("button", name="Create new recovery codes").click()
    page.get_by_role("heading", name="Recovery codes").wait_for()
    inspector.inspect(page)
    page.goto("/admin/account/second-factors/")
    cookies = context.cookies()
    context.clear_cookies()
    page.get_by_role("button", name="Create new recovery codes").click()
    page.get_by_role("heading", name="Your session has expired").wait_for()
    inspector.inspect(page)
    context.add_cookies(cookies)  # type: ignore[arg-type]  # as they were
    page.goto("/admin/")
    page.locator(".who summary").click()
    page.get_by_role("button", name="Sign out").click()
    page.wait_for_url("**/logout/")
    inspector.inspect(page)
    page.goto("/admin/")
    for typed in ("wrong", password):
        page.get_by_label("User name").fill("new")
        page.get_by_label("Password").fill(typed)
        page.get_by_role("button", name="Sign in").click()
        if typed == "wrong":
            page.get_by_role("alert").wait_for()
            inspector.inspect(page)
    page.locator("[name=second_factor_code]").wait_for()
    inspector.inspect(page)
    context.close()


def test_menu_opens_on_a_phone(service: Service) -> None:
    with service.page("admin", viewport=PHONE) as page:
        page.goto("/admin/")
        page.locator("summary", has_text="Keyvault").first.click()
        page.locator(".menu-small").get_by_role("link", name="Merchants").click()
        page.get_by_role("heading", name="Merchants").wait_for()


def test_buttons_to_create_are_folded_on_a_phone(service: Service) -> None:
    with service.page("admin", viewport=PHONE) as page:
        page.goto("/admin/")
        request = page.locator("main").get_by_role("link", name="Request a key")
        expect(request).to_have_count(0)
        page.locator("main summary", has_text="Create…").click()
        expect(request).to_be_visible()
        page.set_viewport_size(DESK)
        expect(page.locator("main summary", has_text="Create…")).to_be_hidden()
        expect(request).to_be_visible()


def test_ids_in_lists_are_monospace(service: Service) -> None:
    with service.page("admin") as page:
        page.goto("/admin/keyvault/key/")
        fonts = [
            page.locator(f"#result_list td.field-{name}").first.evaluate("(cell) => getComputedStyle(cell).fontFamily")
            for name in ("key_id", "kind")
        ]
        assert ["monospace" in font for font in fonts] == [True, False]


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
