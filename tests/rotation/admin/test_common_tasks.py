"""The five commonest tasks of each role: at most MAX_CLICKS from the overview, by what links and buttons say."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.domain.issuance import Delivery
from keyvault.services.issuance.requests import collect_key
from keyvault.services.usage.recorder import UsageLog
from rotation.domain.plan_fields import PlanOverrides
from rotation.services.rotations.requests import request_rotation
from tests.admin.desk import Desk, browser, make_refusal, set_up_desk
from tests.admin.visitor import Visitor
from tests.clocks import Clock
from tests.factories import approve, grant, issue, issue_request, now, request_key
from tests.rotation.steps import quarantined

pytestmark = pytest.mark.django_db

MAX_CLICKS = 3
"""Links, buttons and searches. Typing, and choosing in a form, counts as none."""


@dataclass(frozen=True)
class Ids:
    """What tasks name: a key, another one that leaked, as a whole, and a request that was denied."""

    key: str
    leaked: str
    denied: str


@pytest.fixture
def clock() -> Clock:
    return Clock(now())


@pytest.fixture
def desk(clock: Clock, verifier: UsageLog) -> Desk:
    """A common day: an old key in quarantine, a replacement to collect, requests to approve, a break-glass access."""
    desk = set_up_desk()
    quarantined(clock, verifier)
    shown = request_key(desk.production, label="reports", delivery=Delivery.SHOW_ONCE, by=desk.tam)
    approve(shown, by=desk.approver)
    issue_request(shown)
    shown.refresh_from_db()
    collect_key(grant(desk.tam, P.ISSUANCE_COLLECT, desk.production), shown)
    other, _ = issue(desk.production, label="warehouse", by=desk.tam)
    request_rotation(grant(desk.tam, P.ROTATIONS_WRITE, desk.production), other.credential, PlanOverrides())
    for label in ("loyalty", "returns", "stores"):
        request_key(desk.production, label=label, by=desk.tam)
    issue_request(request_key(desk.sandbox, label="billing", delivery=Delivery.SHOW_ONCE, by=desk.tam))
    return desk


@pytest.fixture
def ids(desk: Desk) -> Ids:
    key, _ = issue(desk.production, label="storefront", by=desk.tam)
    _, leaked = issue(desk.production, label="mobile", by=desk.tam)
    return Ids(key.key_id, leaked.reveal(), make_refusal().request_id)


@dataclass(frozen=True)
class Click:
    """A link or button by its text; `typed`: fields of its form. Without a text: a search, for what was typed."""

    text: str
    typed: Mapping[str, str]


def click(text: str, **typed: str) -> Click:
    return Click(text, typed)


def search(words: str) -> Click:
    return Click("", {"words": words})


FIND_MERCHANT = ("find a merchant by name", [search("Acme")], "Credentials in production")

TASKS: dict[str, list[tuple[str, list[Click], str]]] = {
    "tam": [
        FIND_MERCHANT,
        (
            "request a key for a merchant",
            [search("acme"), click("Request a key"), click("Submit request", environment="production", label="shop")],
            "A second person must approve it",
        ),
        (
            "collect a key",
            [click("Collect: acme/sandbox · billing"), click("Collect key"), click("Collect key")],
            "This value is shown only once",
        ),
        (
            "rotate a key",
            [search("storefront"), click("Rotate"), click("Submit request", reason="yearly")],
            "A second person must approve it",
        ),
        ("see who still uses an old key", [click("acme · checkout")], "Who still uses the old key"),
    ],
    "approver": [
        FIND_MERCHANT,
        (
            "approve a key",
            [click("Review: acme/production · loyalty"), click("Approve")],
            "Approved. The worker issues the key now.",
        ),
        (
            "reject a rotation",
            [click("Review: acme/production · warehouse"), click("Reject", why="not now")],
            "Rotation rejected.",
        ),
        (
            "approve all requests for keys",
            [click("Approvals"), click("Review all: Key requests to approve"), click("Approve 2 requests")],
            "2 requests approved",
        ),
        (
            "review a break-glass access",
            [click("Review: acme/production · Key collected"), click("Mark as reviewed"), click("Mark as reviewed")],
            "reviewed",
        ),
    ],
    "responder": [
        ("find why a request was denied", [search("{denied}")], "Rules applied, in order"),
        (
            "revoke leaked keys",
            [
                click("Incidents"),
                click("Find keys", secret_text="X-Api-Key: {leaked}"),
                click("Revoke 1 key now", reason="leaked"),
            ],
            "1 key revoked.",
        ),
        (
            "hold a key in quarantine",
            [click("acme · checkout"), click("Hold suspended"), click("Hold suspended", why="the merchant called")],
            "Held. The rotation waits",
        ),
        (
            "suspend a key",
            [search("{key}"), click("Suspend"), click("Suspend")],
            "suspended",
        ),
        ("see who uses a key", [search("{key}")], "Who uses the key"),
    ],
    "auditor": [
        ("find what happened to a key", [click("Audit log"), click("Search", q="{key}")], "Key activated"),
        ("see whether the log is intact", [click("Audit log")], "checkpoint"),
        (
            "export the log with its signatures",
            [click("Audit log"), click("Export"), click("Download log")],
            "checkpoint",
        ),
        ("see who may do what", [click("Operators"), click("Access review")], "tam"),
        ("see which emergency accesses were used", [click("Audit log"), click("Break-glass actions")], "tam"),
    ],
}
"""Tasks by the operator who has the role: what they want, the clicks, and a text of the page at the end."""


@pytest.mark.parametrize("operator", TASKS)
def test_common_tasks_take_few_clicks(desk: Desk, ids: Ids, operator: str) -> None:
    """Guarantee: each role does its five commonest tasks with few clicks."""
    assert len(TASKS[operator]) == 5
    counts = {}
    for wants, clicks, finds in TASKS[operator]:
        visitor = Visitor(browser(getattr(desk, operator)))
        for each in clicks:
            typed = {name: text.format(**asdict(ids)) for name, text in each.typed.items()}
            if each.text:
                visitor.click(each.text.format(**asdict(ids)), **typed)
            else:
                visitor.search(**typed)
        assert finds in visitor.text, wants
        counts[wants] = visitor.clicks
    assert {wants: count for wants, count in counts.items() if count > MAX_CLICKS} == {}
