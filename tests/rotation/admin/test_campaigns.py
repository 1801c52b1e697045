"""Campaigns in the console: requested, approved as shown, tracked by a progress bar, paused, resumed."""

import re
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models import QuerySet
from django.test.utils import CaptureQueriesContext

from keyvault.access.principals import OperatorPrincipal
from keyvault.domain.environments import Environment
from keyvault.models import Account, Key, KeyUse
from rotation.domain.events import RotationState as S
from rotation.domain.pacing import Pace
from rotation.domain.plan_fields import Proof
from rotation.models import Campaign, CampaignState, Rotation
from rotation.services.campaigns.campaigns import get_campaign
from rotation.services.campaigns.runner import tick
from tests.admin.desk import Desk, address, browser, hidden, set_up_desk, text_of
from tests.clocks import Clock
from tests.factories import account, issue, make_merchant, now
from tests.rotation.campaigning import asked, become, oldest
from tests.services.rows import disable_triggers

C = CampaignState
MAX_QUERIES = 12
SANDBOX, PRODUCTION = Environment.SANDBOX, Environment.PRODUCTION

FIELDS = {
    "environment": "sandbox",
    "merchants": ["acme"],
    "older_than_days": "",
    "per_minute": "20",
    "concurrency": "5",
    "halt_on_stall": "on",
    "halt_at_failed_percent": "15",
    "proof": "ack",
    "quiet_seconds": "2h",
    "quarantine_seconds": "90",
    "expires_in_days": "",
    "reason": "yearly",
}


@pytest.fixture
def desk(db: None) -> Desk:
    return set_up_desk()


@pytest.fixture
def clock() -> Clock:
    return Clock(now())


def many(count: int, clock: Clock, environment: Environment = SANDBOX) -> list[Account]:
    """Create accounts with one key each."""
    accounts = []
    for number in range(count):
        make_merchant(f"merchant-{number}")
        accounts.append(account(f"merchant-{number}", environment))
        issue(accounts[-1], at=clock.now)
    return accounts


def page_of(operator: OperatorPrincipal, row: Campaign) -> str:
    return text_of(browser(operator).get(address("rotation_campaign_change", row.pk)))


def submit(operator: OperatorPrincipal, act: str, row: Campaign, **fields: str) -> Any:
    """Submit the action as its page offers it, with the form's hidden fields."""
    client, where = browser(operator), address(f"rotation_campaign_{act}", row.pk)
    shown = client.get(where)
    unseen = {name: hidden(shown, name) for name in ("version", "plan_digest") if f'name="{name}"' in text_of(shown)}
    return client.post(where, {**unseen, **fields})


def test_campaign_requested_has_the_plan_and_pace_of_the_form(desk: Desk, clock: Clock) -> None:
    issue(desk.sandbox)
    many(1, clock)
    client = browser(desk.tam)
    answer = client.post(address("rotation_campaign_request"), FIELDS)
    row = Campaign.objects.get()
    assert answer["Location"] == address("rotation_campaign_change", row.pk)
    assert (row.state, row.reason, row.selection["merchants"]) == (C.RUNNING, "yearly", ["acme"])
    assert Pace.from_json(row.pace) == Pace(20, 5, halt_on_stall=True, halt_at_failed_percent=15)
    overrides = {"reason": "yearly", "proof": Proof.ACK, "quiet_seconds": 7_200, "quarantine_seconds": 90}
    assert row.overrides == overrides
    assert row.members.count() == 1


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("merchants", "unknown", "Unknown merchants: unknown."),
        ("per_minute", "0", "greater than or equal to 1"),
        ("concurrency", "many", "Enter a whole number"),
        ("halt_at_failed_percent", "101", "less than or equal to 100"),
        ("older_than_days", "30", "No active private key matches."),
        ("quiet_seconds", "0", "0 seconds is out of range. Use 1 second to 366 days in sandbox."),
        ("reason", "", "This field is required"),
    ],
)
def test_campaign_requested_with_an_invalid_field_shows_the_error(
    desk: Desk, field: str, value: str, message: str
) -> None:
    issue(desk.sandbox)
    answer = browser(desk.tam).post(address("rotation_campaign_request"), {**FIELDS, field: value})
    assert answer.status_code in {400, 409, 422}
    assert message in text_of(answer)
    assert not Campaign.objects.exists()


def test_campaign_in_production_waits_on_the_front_page_of_whoever_may_approve(desk: Desk, clock: Clock) -> None:
    many(2, clock, PRODUCTION)
    asked(clock, environment=PRODUCTION, by=desk.admin)
    assert "Campaigns to approve" in text_of(browser(desk.approver).get("/admin/"))


def test_campaign_to_decide_shows_how_many_of_its_keys_are_in_use(desk: Desk, clock: Clock) -> None:
    """Guarantee: the approver sees the use of the keys that the campaign replaces, by one bounded query."""
    places = many(4, clock, PRODUCTION)
    for place, ago in zip(places[:3], (0, 5, 40), strict=True):
        KeyUse.objects.create(
            key=Key.objects.get(credential__account=place),
            first_at=now() - timedelta(days=50),
            last_at=now() - timedelta(days=ago),
        )
    row = asked(clock, environment=PRODUCTION, by=desk.tam)
    client, url = browser(desk.approver), address("rotation_campaign_change", row.pk)
    client.get(url)
    with CaptureQueriesContext(connection) as made:
        page = text_of(client.get(url))
    assert "1 of 4 keys in the last 24 hours, 2 in the last 30 days, 1 never used" in page
    assert sum("SAVEPOINT" not in each["sql"] for each in made.captured_queries) <= MAX_QUERIES
    assert "data-live" not in page


def test_campaign_page_is_live_while_it_can_change(desk: Desk, clock: Clock) -> None:
    """Guarantee: also while it waits, is paused or halted, and while its rotations go on after its end."""
    many(2, clock)
    row = asked(clock, pace=Pace(per_minute=12))
    clock.tick(5)
    tick(clock)
    rows: QuerySet[Campaign] = QuerySet(Campaign)
    rotations: QuerySet[Rotation] = QuerySet(Rotation)
    disable_triggers()

    def is_live(state: C, closed_at: datetime | None = None) -> bool:
        rows.filter(pk=row.pk).update(state=state, closed_at=closed_at)
        return "data-live" in page_of(desk.auditor, row)

    assert all(is_live(state) for state in (C.AWAITING_APPROVAL, C.RUNNING, C.PAUSED, C.HALTED))
    assert is_live(C.CANCELLED, now())
    rotations.update(state=S.CANCELLED, closed_at=now())
    assert not is_live(C.CANCELLED, now())


def test_campaign_rejected_shows_the_requester_the_reason(desk: Desk, clock: Clock) -> None:
    many(1, clock, PRODUCTION)
    row = asked(clock, environment=PRODUCTION, by=desk.tam)
    assert submit(desk.approver, "reject", row, why="not this week").status_code == 302
    assert "Closed (not this week).</strong> 1 credential will not be rotated" in page_of(desk.tam, row)


def test_campaign_page_shows_progress_and_failed_members_first(desk: Desk, clock: Clock) -> None:
    many(5, clock)
    row = asked(clock, pace=Pace(per_minute=48, halt_on_stall=False, halt_at_failed_percent=None))
    clock.tick(5)
    tick(clock)
    become(oldest(row), S.OVERLAP, clock)
    stalled = oldest(row)
    become(stalled, S.STALLED, clock)
    page = page_of(desk.auditor, row)
    assert "1 of 5 replacements are proved in use" in page
    (shares,) = re.findall('aria-label="Credentials: ([^"]+)"', page)
    assert shares.startswith("1 proved, old key not retired yet, ")
    assert ", 1 stalled, " in f"{shares}, "
    rows = page.split("failed and stalled first")[-1].split("<tbody>")[1].split("</table>")[0].split("<tr>")[1:]
    assert stalled.rotation_id in rows[0]
    assert address("rotation_rotation_change", stalled.pk) in rows[0]
    assert "waiting" in rows[-1]
    assert 'http-equiv="refresh"' in page
    assert "style=" not in page


def test_campaign_halted_shows_the_remedy_and_resumes_with_a_reason(desk: Desk, clock: Clock) -> None:
    many(4, clock)
    row = asked(clock, pace=Pace(per_minute=24))
    clock.tick(5)
    tick(clock)
    become(oldest(row), S.STALLED, clock)
    clock.tick(5)
    tick(clock)
    page = page_of(desk.tam, row)
    assert "Halted: a rotation stalled.</strong> No more rotations start" in page
    assert "Halted campaigns" in text_of(browser(desk.tam).get("/admin/"))
    refused = submit(desk.tam, "resume", row, why="")
    assert refused.status_code >= 400
    assert "with a reason" in text_of(refused)
    assert submit(desk.tam, "resume", row, why="its backend is back").status_code == 302
    assert get_campaign(row.pk).state == C.RUNNING


def test_campaign_paused_and_canceled_by_a_responder(desk: Desk, clock: Clock) -> None:
    """An incident responder can stop a campaign without filling in anything."""
    many(3, clock)
    row = asked(clock, pace=Pace(per_minute=12))
    clock.tick(5)
    tick(clock)
    assert submit(desk.responder, "pause", row).status_code == 302
    assert "Paused.</strong> No more rotations start until an operator resumes it." in page_of(desk.responder, row)
    assert submit(desk.responder, "cancel", row).status_code == 302
    page = page_of(desk.responder, row)
    assert "2 credentials will not be rotated; rotations in progress continue." in page
    assert "not begun" in page


def test_campaign_actions_are_offered_by_permission_and_state(desk: Desk, clock: Clock) -> None:
    many(1, clock)
    row = asked(clock)
    assert address("rotation_campaign_pause", row.pk) in page_of(desk.tam, row)
    assert address("rotation_campaign_resume", row.pk) not in page_of(desk.tam, row)
    for act in ("pause", "cancel"):
        assert address(f"rotation_campaign_{act}", row.pk) not in page_of(desk.auditor, row)


def test_campaign_list_is_searchable_by_credential(desk: Desk, clock: Clock) -> None:
    many(2, clock)
    row = asked(clock)
    credential_id = row.members.order_by("pk")[0].credential_id
    found = text_of(browser(desk.auditor).get(f"{address('rotation_campaign_changelist')}?q={credential_id}"))
    assert address("rotation_campaign_change", row.pk) in found
