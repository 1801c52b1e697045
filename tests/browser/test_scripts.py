"""The console's scripts while a response is late or fails: the test answers their requests and moves their clock."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.template.loader import render_to_string
from playwright.sync_api import Page, Route, expect

from tests.browser.service import WAIT_MS, Service

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

expect.set_options(timeout=WAIT_MS)

HOLD = """
window.held = [];
window.fetch = (url, { signal } = {}) => new Promise((resolve, reject) => {
    const answer = (body) => resolve(
        { ok: true, status: 200, headers: new Headers(), json: async () => body, text: async () => body });
    window.held.push({ words: new URL(url, location.href).searchParams.get("q"), answer, fail: reject });
    signal?.addEventListener("abort", () => reject(signal.reason));
});
"""
"""Runs before the page's own scripts. Requests wait until the test answers them."""

ANSWER = "([index, labels]) => held[index].answer({ choices: labels.map((label) => ({ value: label, label })) })"

ROLES = "(list) => [...list.children].map((child) => child.role)"

SENT = "() => held.map((request) => request.words)"

UPDATE = "(text) => held.pop().answer(text)"

FOCUSED = """
() => {
    const rows = [...document.querySelectorAll("#live a")].map((link) => link.getAttribute("href"));
    const open = [...document.querySelectorAll("#live details[open] summary")].map((summary) => summary.textContent);
    return [rows, document.activeElement.getAttribute("href"), open];
}
"""
"""Returns the addresses of the links, the one that has the focus, and what is open."""

SEND_TWICE = """
async () => {
    const prevented = [];
    window.addEventListener("submit", (event) => {
        prevented.push(event.defaultPrevented);
        event.preventDefault();
    });
    window.webauthnJSON = { get: async () => ({}) };
    for (const _ of [1, 2]) {
        document.querySelector("[data-passkey]").click();
        await new Promise((resolve) => setTimeout(resolve));
    }
    return prevented;
}
"""
"""Presses the button of a passkey twice. Returns whether each submission was prevented."""

REFRESH_MS = 5_000
"""Interval between two updates of the overview."""

DELAY_MS = 150
"""How long the combobox waits until it asks for what was typed."""


@contextmanager
def held_page(service: Service, path: str) -> Iterator[Page]:
    with service.page("admin") as page:
        # Time passes only where a test says so.
        page.clock.install(time=0)
        page.clock.pause_at(1)
        page.add_init_script(HOLD)
        page.goto(path)
        yield page


def test_combobox_is_open_only_while_its_field_is_used(service: Service) -> None:
    """A late response opens no list of a field that was left, and a newer request closes no list."""
    with held_page(service, "/admin/keyvault/issuancerequest/new/request/") as page:
        field, options = page.get_by_role("combobox").first, page.get_by_role("listbox").first

        def write(text: str) -> None:
            field.press_sequentially(text)
            page.clock.run_for(DELAY_MS)

        def answer(index: int, *labels: str) -> None:
            page.evaluate(ANSWER, [index, labels])

        def leave() -> Any:
            field.blur()
            page.clock.run_for(DELAY_MS)
            return page.evaluate(SENT)

        write("a")
        answer(0, "acme")
        expect(options).to_be_visible()
        assert options.evaluate(ROLES) == ["option"]
        write("c")
        write("m")
        assert page.evaluate(SENT) == ["a", "ac", "acm"]
        assert options.is_visible(), "the request that the newest one replaced closed the list"
        answer(2, "acme")
        field.press_sequentially("e")
        options.get_by_role("option").click()
        page.clock.run_for(DELAY_MS)
        assert page.evaluate(SENT) == ["a", "ac", "acm"], "asked again after the choice"
        assert field.input_value() == "acme"
        field.press_sequentially("x")
        assert leave() == ["a", "ac", "acm"], "asked after the field was left"
        field.focus()
        write("y")
        assert leave() == ["a", "ac", "acm", "acmexy"]
        answer(3, "acme")
        assert not options.is_visible(), "opened after the field was left"
        for text, act, status in (
            ("1", 'answer({ choices: [{ value: "a", label: "a" }] })', "1 choice."),
            ("2", "answer({ choices: [] })", "Nothing matches."),
            ("3", "fail(new TypeError())", "Choices cannot be loaded. Type the id."),
        ):
            write(text)
            page.evaluate(f"() => held.at(-1).{act}")
            assert page.locator(".combobox [role=status]").first.inner_text() == status
            assert options.is_visible() == (text == "1")
        page.keyboard.press("Escape")
        assert page.locator(".combobox [role=status]").first.inner_text() == ""


def test_update_keeps_the_focus_on_the_row_that_had_it(service: Service) -> None:
    """Guarantee: a row that appears, moves or disappears moves neither the focus nor what is open to another row."""
    updates = ["one two", "new one two", "one new two", "one two new", "two new", "old two"]
    with held_page(service, "/admin/") as page:

        def update(rows: str, row: str) -> Any:
            page.clock.run_for(REFRESH_MS)
            lines = "\n".join(row.format(name) for name in rows.split())
            page.evaluate(UPDATE, f"<ul>\n{lines}\n</ul>")
            return page.evaluate(FOCUSED)

        for row, opens in (
            ('<li><a href="{0}">Review</a><details><summary>{0}</summary></details></li>', ["two"]),
            ('<a href="{0}">Review</a>', []),
        ):
            update(updates[0], row)
            page.locator("#live [href=two]").focus()
            for summary in page.locator("#live summary", has_text="two").all():
                summary.evaluate("(element) => { element.parentElement.open = true; }")
            for rows in updates:
                assert update(rows, row) == [rows.split(), "two", opens]
            assert update("old new", row) == [["old", "new"], None, []]


def test_page_waits_for_its_update_and_announces_that_updates_fail(service: Service) -> None:
    """A page that is shown again during an update asks only once, and its status was there before its text."""
    with held_page(service, "/admin/") as page:
        assert page.locator("[role=status]").all_inner_texts() == [""]
        page.clock.run_for(REFRESH_MS)
        page.evaluate("() => document.dispatchEvent(new Event('visibilitychange'))")
        assert page.evaluate("() => held.length") == 1
        page.evaluate("() => { held[0].fail(new Error()); window.before = document.querySelector('[role=status]'); }")
        expect(page.get_by_role("status")).to_contain_text("Updates are interrupted")
        assert page.evaluate("() => before.isConnected")
        page.clock.run_for(REFRESH_MS)
        assert page.evaluate("() => held.length") == 2
        page.evaluate(UPDATE, "")
        assert page.locator("[role=status]").all_inner_texts() == [""]


def test_form_with_a_passkey_is_sent_once(service: Service) -> None:
    options = {"passkey_options": {}, "passkey_call": "get", "passkey_label": "Use a passkey"}
    block = render_to_string("console/block_passkey.html", options)

    def add_passkey(route: Route) -> None:
        """Show the form as to an operator who has a passkey."""
        response = route.fetch()
        route.fulfill(response=response, body=response.text().replace('<fieldset class="card">', f"{block}<fieldset>"))

    with service.page("admin") as page:
        page.route("**/merchant/new/create/", add_passkey)
        page.goto("/admin/keyvault/merchant/new/create/")
        assert page.evaluate(SEND_TWICE) == [False, True]
