"""What operators do in the console, from one end to the other."""

import json
import re

import pytest
from playwright.sync_api import Dialog, Page, expect

from tests.browser.service import WAIT_MS, Service
from tests.faults.programs import until

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

KEY = re.compile(r"kv_prv_(?:sbx|prd)_[0-9A-Za-z]{65}")

expect.set_options(timeout=WAIT_MS)


def request_key(page: Page, environment: str, label: str) -> str:
    """Request a private key that is shown once, and return the address of the request."""
    page.goto("/admin/keyvault/issuancerequest/new/request/")
    page.locator("[name=merchant]").fill("acme")
    page.locator("select[name=environment]").select_option(environment)
    page.locator("[name=kind]").select_option("private")
    page.locator("[name=label]").fill(label)
    page.locator("[name=delivery]").select_option("show_once")
    page.locator("main form button[type=submit]").click()
    page.wait_for_url(re.compile(r"/issuancerequest/req_"))
    return page.url


def act(service: Service, page: Page, operator: str, label: str) -> None:
    """Open an action from the page of a row and confirm it."""
    page.get_by_role("link", name=re.compile(f"^{label}")).first.click()
    service.give_code(page, operator)
    page.locator("main form button[type=submit]").first.click()


def collect(service: Service, page: Page, operator: str, label: str) -> str:
    """Collect a key, and return the string that the page shows."""
    act(service, page, operator, label)
    if "second-factor" in page.url:
        service.give_code(page, operator)
        page.locator("[name=second_factor_code]").press("Enter")
        page.locator("main form button[type=submit]").first.click()
    page.get_by_role("heading", level=1).wait_for()
    found = KEY.search(page.content())
    assert found is not None
    return found[0]


def test_production_key_takes_two_persons_and_is_collected_once(service: Service) -> None:
    """Guarantee: the requester cannot approve, another person does, and the key is shown to the requester once.

    The page of the request follows, and keeps the reader's focus and place.
    """
    with service.page("tam") as mine:
        url = request_key(mine, "production", "browser-test")
        expect(mine.locator("main")).to_contain_text("A second person must approve it")
        assert mine.get_by_role("button", name="Approve", exact=True).count() == 0
        mine.set_viewport_size({"width": 1280, "height": 300})
        mine.get_by_role("button", name="copy").first.focus()
        mine.evaluate("() => { window.focused = document.activeElement; window.scrollTo(0, 60); }")
        with service.page("approver") as other:
            other.goto(url)
            expect(other.get_by_role("button", name="Reject", exact=True)).to_be_visible()
            service.give_code(other, "approver")
            other.get_by_role("button", name="Approve", exact=True).click()
            expect(other.locator("body")).to_contain_text("Approved. The worker issues the key now.")
        # The page updates by itself when the worker has made the key.
        mine.get_by_role("link", name=re.compile("^Collect")).wait_for()
        assert mine.evaluate("() => [document.activeElement === window.focused, window.scrollY]") == [True, 60]
        collect(service, mine, "tam", "Collect")
        mine.goto(url)
        assert mine.get_by_role("link", name=re.compile("^Collect")).count() == 0
        assert KEY.search(mine.content()) is None


def test_secret_is_masked_until_it_is_revealed_and_is_left_with_a_warning(service: Service) -> None:
    """Guarantee: a value shown once is masked, can be copied, and is left without a warning only once it is stored."""
    with service.page("tam", permissions=["clipboard-read", "clipboard-write"]) as page:
        warnings: list[str] = []

        def stay(dialog: Dialog) -> None:
            warnings.append(dialog.type)
            dialog.dismiss()

        page.on("dialog", stay)
        url = request_key(page, "sandbox", "browser-secret")
        page.get_by_role("link", name=re.compile("^Collect")).wait_for()
        key, shown = collect(service, page, "tam", "Collect"), page.locator("[data-secret] code")
        expect(shown).not_to_contain_text("kv_")
        page.get_by_role("button", name="Copy").click()
        page.get_by_role("button", name="copied").wait_for()
        assert page.evaluate("navigator.clipboard.readText()") == key
        page.get_by_role("button", name="Reveal").click()
        expect(shown).to_have_text(key)
        page.get_by_role("button", name="Hide").click()
        expect(shown).not_to_contain_text("kv_")
        with page.expect_event("dialog"):
            page.get_by_role("link", name="Merchants").click(no_wait_after=True)
        expect(page.locator("[data-secret]")).to_be_visible()
        page.get_by_role("link", name="I have stored it").click()
        expect(page.locator("[data-secret]")).to_have_count(0)
        assert (page.url, warnings) == (url, ["beforeunload"])


def issue_key(service: Service, label: str) -> tuple[str, str]:
    """Issue a private sandbox key, and use it. Return the path of its credential and the key."""
    account = ("--merchant", "acme", "--environment", "sandbox", "--kind", "private", "--requested-by", "tam")
    issued = json.loads(service.manage("issue_key", *account, "--label", label, "--reveal", "--json"))
    assert service.verify(issued["key"])["allowed"]
    return f"/admin/keyvault/credential/{issued['credential_id']}/", issued["key"]


def rotate(page: Page, credential: str, **periods: str) -> str:
    """Rotate the credential as `tam`. Return the rotation's address once the replacement can be collected.

    Args:
        periods: numbers of the plan by field; by default one use proves the replacement and all periods are short.
    """
    page.goto(credential)
    page.get_by_role("link", name="Rotate", exact=True).first.click()
    page.locator("[name=reason]").fill("browser test")
    for summary in page.locator("main details > summary").all():
        summary.click()
    for name, value in ({"proof_count": "1", "quiet_seconds": "1", "quarantine_seconds": "1"} | periods).items():
        page.locator(f"[name={name}]").fill(value)
    page.locator("main form button[type=submit]").click()
    page.wait_for_url(re.compile("/rotation/rot_"))
    page.get_by_role("link", name=re.compile("^Collect")).first.wait_for()
    return page.url


def collect_replacement(service: Service, rotation: str) -> str:
    """Collect the replacement on the host, which waits for no code of a second factor."""
    options = ("--rotation", rotation.split("/")[-2], "--by", "tam", "--reveal", "--json")
    return str(json.loads(service.manage("collect_key", *options))["key"])


def test_rotation_is_watched_to_its_end_without_reloading(service: Service) -> None:
    """Guarantee: the page of a rotation follows it from request to completion by itself."""
    with service.page("tam") as page:
        credential, old = issue_key(service, "watched")
        rotation = rotate(page, credential)
        new = collect(service, page, "tam", "Collect")
        page.goto(rotation)
        page.evaluate("() => { window.loadedOnce = true; }")
        assert service.verify(new)["allowed"]
        expect(page.locator(".banner")).to_contain_text("Completed")
        assert page.evaluate("() => window.loadedOnce === true")
        assert service.verify(old)["code"] == "key_revoked"
        assert service.verify(new)["allowed"]


def test_key_that_is_used_in_quarantine_is_reinstated_with_an_alarm(service: Service) -> None:
    """Guarantee: the merchant's forgotten client works again by itself, and an alarm and the page say why."""
    with service.page("tam") as page:
        credential, old = issue_key(service, "forgotten")
        rotation = rotate(page, credential, quiet_seconds="5", quarantine_seconds="600")
        new = collect_replacement(service, rotation)
        assert service.verify(new)["allowed"]
        status = page.locator(".heading")
        expect(status).to_contain_text("Quarantine", ignore_case=True)
        # The worker suspends and reinstates the key. The server follows within its staleness bound.
        until("the old key to be suspended", lambda: service.verify(old)["code"] == "key_not_active", WAIT_MS / 1000)
        # First, before the key is silent again: the second quarantine does not end by a use.
        until("the old key to be reinstated", lambda: service.verify(old)["allowed"], WAIT_MS / 1000)
        expect(page.locator("main")).to_contain_text("The old key was used in quarantine and reinstated")
        page.goto("/admin/")
        alarm = page.locator("main").get_by_role("link", name=re.compile("quarantine", re.IGNORECASE)).first
        alarm.click()
        expect(page.locator("main")).to_contain_text(rotation.rstrip("/").rpartition("/")[2])


def test_stalled_rotation_is_repaired_and_completes(service: Service) -> None:
    """Guarantee: the page of a stalled rotation says why, leads to what repairs it, and resumes the rotation."""
    with service.page("tam") as page:
        credential, old = issue_key(service, "stalling")
        rotation = rotate(page, credential)
        new = collect_replacement(service, rotation)
        with service.page("admin") as other:
            other.goto(f"/admin/keyvault/key/{new.split('_')[3][:16]}/")
            act(service, other, "admin", "Suspend")
            expect(page.locator(".banner")).to_contain_text("the replacement was suspended by an operator")
            other.goto(rotation)
            other.locator(".banner").get_by_role("link", name="Replacement").click()
            act(service, other, "admin", "Resume")
            other.locator(".heading", has_text=re.compile("active", re.IGNORECASE)).wait_for()
        page.locator(".banner").get_by_role("link", name="Resume").click()
        page.locator("main form button[type=submit]").first.click()
        page.wait_for_url(rotation)
        assert service.verify(new)["allowed"]
        expect(page.locator(".banner")).to_contain_text("Completed")
        assert service.verify(old)["code"] == "key_revoked"


def test_denial_is_explained_by_its_request_id_or_key_id(service: Service) -> None:
    """Guarantee: the search and one box explain a denial: verdict, the rule that failed, an answer for the merchant."""
    refused = service.verify(f"{service.key[:-1]}{'0' if service.key[-1] != '0' else '1'}")
    assert not refused["allowed"]
    with service.page("responder", permissions=["clipboard-read", "clipboard-write"]) as page:
        page.goto("/admin/")
        page.get_by_role("searchbox").fill(refused["request_id"])
        page.get_by_role("searchbox").press("Enter")
        expect(page.locator("main")).to_contain_text(refused["code"])

        def explain(subject: str) -> None:
            page.goto("/admin/explain/")
            page.get_by_label("Request id or key id").fill(subject)
            page.get_by_role("button", name="Explain", exact=True).click()

        explain(refused["request_id"])
        expect(page.locator(".banner")).to_contain_text("denied")
        expect(page.locator(".checks li", has_text="(Failed)")).to_contain_text("Not met.")
        page.get_by_role("button", name="Copy answer for the merchant").click()
        page.get_by_role("button", name="copied").wait_for()
        answer = page.evaluate("navigator.clipboard.readText()")
        assert refused["request_id"] in answer
        assert refused["code"] in answer
        explain(service.key.split("_")[3][:16])
        expect(page.locator(".banner")).to_contain_text("The key itself is accepted.")
        explain(service.key)
        expect(page.get_by_role("alert")).to_contain_text("The input contains")
        assert service.key[-20:] not in page.content()


def test_expired_session_keeps_what_was_typed(service: Service) -> None:
    """Guarantee: a form that is sent after the session ended is kept, and sent once after a sign-in in a new tab."""
    context = service.new_context()
    page = context.new_page()
    service.sign_in(page, "admin")
    page.goto("/admin/keyvault/merchant/new/create/")
    page.locator("[name=merchant_id]").fill("late")
    page.locator("[name=name]").fill("Typed before the session ended")
    context.clear_cookies(name=re.compile("session"))
    page.get_by_role("button", name="Create merchant").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Your session has expired")
    expect(page.locator("main")).to_contain_text("Typed before the session ended")
    with page.expect_popup() as opened:
        page.get_by_role("link", name="Sign in").click()
    service.sign_in(opened.value, "admin")
    opened.value.close()
    # The sign-in has renewed the token of forms, which this one takes over.
    page.get_by_role("button", name="Send again").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Typed before the session ended")
    page.goto("/admin/keyvault/merchant/?q=late")
    expect(page.locator("#changelist tbody tr")).to_have_count(1)
    context.close()


def tab_to(page: Page, name: str, role: str = "button") -> None:
    """Press Tab until the link, button or field of this name has the focus, which is visible at every stop."""
    wanted = page.get_by_role(role, name=name, exact=True).first  # type: ignore[arg-type]  # a role of ARIA
    wanted.wait_for()
    for _ in range(80):
        page.keyboard.press("Tab")
        assert page.evaluate(FOCUS_IS_VISIBLE), page.evaluate("() => document.activeElement.outerHTML")
        if wanted.evaluate("(element) => element === document.activeElement"):
            return
    raise AssertionError(f"Tab does not reach {name}")


FOCUS_IS_VISIBLE = """
() => {
    const style = getComputedStyle(document.activeElement);
    return style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0 || style.boxShadow !== "none";
}
"""


def test_key_is_requested_and_approved_by_keyboard_only(service: Service) -> None:
    """Guarantee: sign-in, the request of a key and its approval need no mouse, and the focus is always visible."""
    context = service.new_context()
    page = context.new_page()
    password, _ = service.operators["tam"]
    page.goto("/admin/")
    for name, text in (("User name", "tam"), ("Password", password)):
        page.get_by_label(name).focus()
        page.keyboard.insert_text(text)
    page.keyboard.press("Enter")
    page.locator("[name=second_factor_code]").wait_for()
    service.give_code(page, "tam")
    page.keyboard.press("Enter")
    tab_to(page, "Request a key", "link")
    page.keyboard.press("Enter")
    page.wait_for_url("**/new/request/**")
    for name, text in (("merchant", "acme"), ("environment", "p"), ("label", "keyboard")):
        page.locator(f"main [name={name}]").focus()
        page.keyboard.type(text)
    tab_to(page, "Submit request")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"/issuancerequest/req_"))
    with service.page("approver") as other:
        other.goto("/admin/")
        other.keyboard.press("/")
        other.keyboard.type(page.url.split("/")[-2])
        other.keyboard.press("Enter")
        other.wait_for_url(page.url)
        service.give_code(other, "approver")
        tab_to(other, "Approve")
        other.keyboard.press("Enter")
        expect(other.locator("body")).to_contain_text("Approved. The worker issues the key now.")
    context.close()


def approve_together(service: Service, page: Page, *names: str) -> None:
    """Choose requests on the page of approvals, review them, and approve them with one second factor."""
    page.goto("/admin/approvals/")
    for name in names:
        page.get_by_role("checkbox", name=name).check()
    page.get_by_role("button", name="Review the chosen requests").click()
    service.give_code(page, "approver")
    page.get_by_role("button", name=re.compile("^Approve")).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(re.compile(f"^{len(names)} requests? approved"))


def test_requests_are_approved_together_and_then_a_campaign_over_their_keys(service: Service) -> None:
    """Guarantee: another person approves two requests in one form, and then the campaign that rotates their keys."""
    with service.page("tam") as mine, service.page("approver") as other:
        urls = [request_key(mine, "production", label) for label in ("bulk-one", "bulk-two")]
        approve_together(service, other, "acme/production · bulk-one", "acme/production · bulk-two")
        for url in urls:
            mine.goto(url)
            mine.get_by_role("link", name=re.compile("^Collect")).wait_for()
        mine.goto("/admin/rotation/campaign/new/request/")
        mine.locator("main [name=environment]").select_option("production")
        mine.locator("[name=reason]").fill("bulk test")
        mine.locator("main form button[type=submit]").click()
        mine.wait_for_url(re.compile("/campaign/cmp_"))
        expect(mine.locator(".banner")).to_contain_text("Awaiting the approval of another person")
        approve_together(service, other, "production · bulk test")
        mine.reload()
        expect(mine.locator(".banner")).to_contain_text("Running")
        act(service, mine, "tam", "Cancel campaign")
        expect(mine.locator(".banner")).to_contain_text("Closed")


ISSUE_KEYS = """
from keyvault.management.json_command import call
account = ("--merchant", "globex", "--environment", "sandbox", "--kind", "private", "--requested-by", "tam")
for number in range(21):
    print(call("issue_key", *account, "--label", f"leaked-{number}", "--reveal")["key"])
"""


def test_leaked_keys_are_revoked_at_the_leak_desk(service: Service) -> None:
    """Guarantee: more than 20 keys are revoked only with their number typed, and the receipt shows who confirmed."""
    keys = KEY.findall(service.manage("shell", "--no-imports", "-c", ISSUE_KEYS))
    assert len(keys) == 21
    assert service.verify(keys[0])["allowed"]
    with service.page("responder") as page:
        page.goto("/admin/incidents/")
        page.locator("[name=secret_text]").fill("\n".join(f"GET /orders X-Api-Key: {key}" for key in keys))
        page.get_by_role("button", name="Find keys").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("21 keys to revoke")
        assert KEY.search(page.content()) is None
        revoke = page.get_by_role("button", name="Revoke 21 keys now")
        service.give_code(page, "responder")
        revoke.click()
        expect(page.locator("main")).to_contain_text("Nothing was revoked")
        assert service.verify(keys[0])["allowed"]
        page.locator("[name=count]").fill("21")
        page.locator("[name=replace]").uncheck()
        service.give_code(page, "responder")
        revoke.click()
        expect(page.locator(".banner")).to_contain_text("21 keys revoked. All verifiers confirmed.")
        expect(page.locator("main table").first.locator("tbody tr")).to_have_count(21)
        assert {service.verify(key)["code"] for key in keys} == {"key_revoked"}
        report_and_replace(service, page)


def report_and_replace(service: Service, page: Page) -> None:
    """Revoke one key with a replacement: the receipt follows the verifiers and the rotation by itself."""
    _, key = issue_key(service, "leaked-alone")
    page.goto("/admin/incidents/")
    page.locator("[name=secret_text]").fill(key)
    page.get_by_role("button", name="Find keys").click()
    service.give_code(page, "responder")
    page.get_by_role("button", name="Revoke 1 key now").click()
    page.wait_for_url("**/incidents/receipt/")
    page.evaluate("() => { window.loadedOnce = true; }")
    expect(page.locator(".banner")).to_contain_text("1 key revoked. All verifiers confirmed.")
    row = page.get_by_role("region", name="Keys").locator("tbody tr")
    expect(row.get_by_role("link", name="rotation")).to_be_visible()
    expect(row).to_contain_text("completed")
    assert page.evaluate("() => window.loadedOnce === true")
