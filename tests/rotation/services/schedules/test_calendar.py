"""The rotation calendar: every scheduled credential with its next date and reason; reading it writes nothing."""

import io
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.test.utils import CaptureQueriesContext

from keyvault.access.permissions import Permission as P
from keyvault.access.scopes import EVERYWHERE, AccessScope
from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind
from keyvault.models import Credential, Key
from keyvault.services.merchants.merchants import suspend_account
from keyvault.services.recording.authorization import authorize
from rotation.domain.plan_fields import PlanOverrides, Proof
from rotation.domain.windows import Window
from rotation.models import Rotation, ScheduledCredential
from rotation.services.rotations.requests import reject_rotation
from rotation.services.schedules import calendar as schedule_calendar
from rotation.services.schedules import candidates
from rotation.services.schedules.calendar import DateState, ScheduledDate, count_days, list_next
from rotation.services.schedules.candidates import RETRY_DELAY
from rotation.services.schedules.starting import begin_due
from tests.clocks import Clock
from tests.plans import copy_row, explain
from tests.rotation import scene
from tests.rotation.services.schedules.test_schedules import NIGHTS, calendar, damage, save
from tests.services.rows import disable_triggers

pytestmark = pytest.mark.django_db

SANDBOX, PRODUCTION = Environment.SANDBOX, Environment.PRODUCTION
DAY = timedelta(days=1)
YEAR = timedelta(days=366)


def dates(now: datetime, ahead: timedelta = YEAR, **where: Any) -> dict[str, ScheduledDate]:
    """Return the scheduled dates by label."""
    return {date.label: date for date in list_next(now, now + ahead, **where).dates}


@pytest.mark.database
def test_calendar_lists_the_next_date_of_each_credential_in_order(clock: Clock) -> None:
    scene.issue(scene.account(), clock(), label="second")
    scene.issue(scene.account("globex"), clock() - 10 * DAY, label="first")
    scene.issue(scene.account(), clock(), kind=KeyKind.PUBLIC, label="public")
    scene.issue(scene.account(environment=PRODUCTION), clock(), label="elsewhere")
    save(SANDBOX, clock(), lead_days=5)
    first, second = list_next(clock(), clock() + YEAR).dates
    assert (first.label, first.merchant_id, first.state) == ("first", "globex", DateState.PLANNED)
    assert (second.due_at, second.begins_at) == (clock() + 90 * DAY, clock() + 90 * DAY)
    assert (second.ask_at, second.why) == (clock() + 85 * DAY, "")
    assert list(dates(clock(), 85 * DAY)) == ["first"]
    assert list(dates(clock(), scope=EVERYWHERE.narrowed_to("acme", None))) == ["second"]
    assert dates(clock(), scope=EVERYWHERE.narrowed_to(None, PRODUCTION)) == {}


@pytest.mark.database
def test_calendar_writes_nothing(clock: Clock) -> None:
    """Reading writes no row and opens no write transaction."""
    for label in "abc":
        scene.issue(scene.account(), clock() - 100 * DAY, label=label)
    save(SANDBOX, clock())
    with CaptureQueriesContext(connection) as queries:
        assert len(list_next(clock(), clock() + YEAR).dates) == 3
    wrote = [
        query["sql"]
        for query in queries.captured_queries
        if not query["sql"].lstrip("(").startswith(("SELECT", "DECLARE"))
    ]
    assert wrote == []
    assert not Rotation.objects.exists()


def test_calendar_shows_the_opening_that_applies(clock: Clock) -> None:
    scene.issue(scene.account(), clock(), label="a")
    due_at = clock() + 90 * DAY
    frozen = calendar("freeze", clock(), (due_at - DAY, due_at + 3 * DAY))
    save(SANDBOX, clock(), window=NIGHTS, calendar=frozen)
    date = dates(clock())["a"]
    assert date.due_at == due_at
    assert date.begins_at is not None
    assert due_at - 4 * DAY < date.begins_at < due_at - DAY
    assert NIGHTS.next_opening(date.begins_at) == date.begins_at


def test_calendar_equals_what_begin_due_starts(clock: Clock) -> None:
    for number in range(5):
        scene.issue(scene.account(), clock() - number * DAY, label=f"n{number}")
    save(SANDBOX, clock(), cryptoperiod_days=40, jitter_days=20, lead_days=2, window=NIGHTS)
    promised = {date.credential_id: date for date in list_next(clock(), clock() + YEAR).dates}
    for hours in range(0, 45 * 24, 3):
        begin_due(clock() + timedelta(hours=hours))
    begun = {row.credential_id: row for row in Rotation.objects.all()}
    assert begun.keys() == promised.keys()
    for credential_id, date in promised.items():
        assert date.ask_at is not None
        assert begun[credential_id].approved_plan.not_before == date.begins_at
        assert timedelta(0) <= begun[credential_id].created_at - date.ask_at < timedelta(hours=3)


def test_calendar_names_the_obstacle(clock: Clock) -> None:
    """A rotation that cannot start is listed with the reason, whatever the requested dates."""
    scene.issue(scene.account(), clock() - 91 * DAY, label="expires", expires_in_days=92)
    stopped = scene.account("stopped")
    scene.issue(stopped, clock(), label="suspended")
    suspend_account(authorize(scene.admin(), P.MERCHANTS_WRITE, stopped, now=clock()), stopped)
    scene.issue(scene.account(), clock() - 91 * DAY, label="missed")
    save(SANDBOX, clock(), overrides=PlanOverrides(quiet_seconds=3 * 86_400))
    found = dates(clock(), DAY)
    assert found["suspended"].state is found["expires"].state is DateState.NOT_SCHEDULABLE
    assert found["suspended"].why == "the account is suspended"
    assert found["expires"].why.startswith("deadline: ")
    assert found["missed"].state is DateState.OVERDUE
    assert found["missed"].begins_at == clock()
    assert list(found)[-1] == "missed"
    assert found["expires"].begins_at is None


def test_calendar_with_an_unreadable_schedule_lists_it_beside_the_others(clock: Clock) -> None:
    scene.issue(scene.account(), clock(), label="ours")
    scene.issue(scene.account("globex"), clock(), label="theirs")
    save(SANDBOX, clock())
    damage(save(scene.account(), clock()), window={"time_zone": "Mars/Olympus"})
    found = dates(clock())
    assert found["theirs"].state is DateState.PLANNED
    assert found["ours"].state is DateState.NOT_SCHEDULABLE
    assert found["ours"].why.startswith("The schedule cannot be read by this release: /time_zone")


def test_calendar_of_open_rotations_links_them(clock: Clock) -> None:
    scene.issue(scene.account(), clock() - 91 * DAY, label="open")
    scene.issue(scene.account(environment=PRODUCTION), clock() - 91 * DAY, label="awaited")
    save(SANDBOX, clock())
    save(PRODUCTION, clock())
    begin_due(clock())
    found = dates(clock())
    assert {label: date.state for label, date in found.items()} == {
        "open": DateState.OPEN,
        "awaited": DateState.AWAITING_APPROVAL,
    }
    assert {date.rotation_id for date in found.values()} == set(Rotation.objects.values_list("pk", flat=True))
    assert found["open"].why == "its rotation is open: scheduled"


def test_calendar_of_a_rejected_rotation_names_the_next_request(clock: Clock) -> None:
    place = scene.account(environment=PRODUCTION)
    scene.issue(place, clock() - 91 * DAY, label="a")
    save(PRODUCTION, clock())
    begin_due(clock())
    row = Rotation.objects.select_related("credential__account").get()
    grant = authorize(scene.approver(), P.ROTATIONS_APPROVE, place, now=clock(), requester_person=row.requester_person)
    reject_rotation(grant, row, "not now")
    date = dates(clock())["a"]
    assert (date.state, date.ask_at) == (DateState.PLANNED, clock() + RETRY_DELAY)
    assert "rejected" in date.why


@pytest.mark.database
def test_calendar_of_many_keys_needs_a_constant_number_of_queries(clock: Clock) -> None:
    for number in range(8):
        scene.issue(scene.account(), clock(), label=f"n{number}")
    save(SANDBOX, clock(), window=Window("UTC", (0,), 0, 60))
    with CaptureQueriesContext(connection) as queries:
        assert len(list_next(clock(), clock() + YEAR).dates) == 8
    assert len(queries) <= 8 + len(Environment)


@pytest.mark.parametrize("scope", [EVERYWHERE, EVERYWHERE.narrowed_to("acme", None)], ids=str)
def test_calendar_of_many_keys_has_pages(clock: Clock, monkeypatch: pytest.MonkeyPatch, scope: AccessScope) -> None:
    """Each date is on one page, the earliest first; all of them may begin with the same window."""
    monkeypatch.setattr(candidates, "MAX_LISTED", 2)
    for environment in (SANDBOX, PRODUCTION):
        for label in "abc":
            scene.issue(scene.account(environment=environment), clock(), label=label)
        save(environment, clock(), window=NIGHTS)
    begin_due(clock())
    shown: list[list[ScheduledDate]] = []
    after = None
    while not shown or after is not None:
        page = list_next(clock(), clock() + YEAR, scope, after)
        shown.append(page.dates)
        after = page.after
    ids = [date.credential_id for page in shown for date in page]
    assert ([len(page) for page in shown], len(set(ids))) == ([2, 2, 2], 6)
    times = [date.ask_at for page in shown for date in page if date.ask_at is not None]
    assert times == sorted(times)
    assert list_next(clock(), clock() + DAY, scope).dates == []


@pytest.mark.database
def test_calendar_counts_the_requests_of_each_day_up_to_a_maximum(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: a day counts the scope's rotations that are requested on it, by one query, at most one too many."""
    for label in "abc":
        scene.issue(scene.account(), clock(), label=label)
    scene.issue(scene.account("globex"), clock() + DAY, label="later")
    save(SANDBOX, clock())
    begin_due(clock())
    first = (clock() + 90 * DAY).date()
    with CaptureQueriesContext(connection) as queries:
        assert count_days(first, 3) == [3, 1, 0]
    assert len(queries) == 1
    assert count_days(first, 2, EVERYWHERE.narrowed_to("globex", None)) == [0, 1]
    only_sandbox = AccessScope(environments=frozenset({SANDBOX}))
    assert count_days(first, 2, only_sandbox.narrowed_to(None, PRODUCTION)) == [0, 0]
    monkeypatch.setattr(schedule_calendar, "MAX_COUNTED", 1)
    assert count_days(first, 2) == [2, 1]


def test_calendar_tells_that_more_credentials_have_no_date(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "MAX_LISTED", 2)
    for label in "abc":
        scene.issue(scene.account(), clock(), label=label)
    save(SANDBOX, clock())
    begin_due(clock())
    assert not list_next(clock(), clock() + YEAR).has_more_undated
    ScheduledCredential.objects.update(ask_at=None)
    page = list_next(clock(), clock() + YEAR)
    assert (len(page.dates), page.after, page.has_more_undated) == (2, None, True)


@pytest.mark.postgres
def test_calendar_of_a_merchant_reads_the_rows_of_its_accounts_in_order(clock: Clock) -> None:
    """Guarantee: the cost for a scope of some merchants does not grow with the credentials, not even with theirs."""
    for merchant in ("acme", "globex"):
        scene.issue(scene.account(merchant), clock())
    save(SANDBOX, clock())
    begin_due(clock())
    disable_triggers()
    copy_row(Credential, credential_id="'crd_' || n")
    copy_row(ScheduledCredential, credential="'crd_' || n", ask_at="now() + n * interval '1 minute'")
    until, scope = clock() + YEAR, EVERYWHERE.narrowed_to("globex", SANDBOX)
    plans = [plan for plan in explain(lambda: candidates.list_candidates(scope, until)) if "ask_at <=" in plan]
    assert len(plans) == 1
    assert "scheduled_of_account" in plans[0]
    assert "Sort" not in plans[0]


# --- the command ----------------------------------------------------------------------------------------------


def output_of(*arguments: str) -> str:
    out = io.StringIO()
    call_command("list_schedule_dates", *arguments, stdout=out)
    return out.getvalue()


def test_command_prints_the_calendar_or_one_json_object() -> None:
    now = datetime.now(UTC)
    key, _ = scene.issue(scene.account(), now - 80 * DAY, label="till")
    scene.issue(scene.account("globex"), now - 100 * DAY, label="late")
    save(SANDBOX, now, overrides=PlanOverrides(proof=Proof.ACK))
    text = output_of("--days", "30")
    (line,) = (line for line in text.splitlines() if key.credential_id in line)
    assert line.split()[2:] == ["acme/sandbox", key.credential_id, "till", "planned"]
    assert "overdue" in text
    answer = json.loads(output_of("--json", "--merchant", "acme"))
    (date,) = answer["dates"]
    assert (date["credential_id"], date["state"], date["environment"]) == (key.credential_id, "planned", "sandbox")
    assert datetime.fromisoformat(date["begins_at"]) == Key.objects.get(pk=key.pk).activated_at + 90 * DAY
    assert "No scheduled key" in output_of("--environment", "production")


def test_command_tells_that_there_are_more_dates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "MAX_LISTED", 1)
    for label in "ab":
        scene.issue(scene.account(), datetime.now(UTC), label=label)
    save(SANDBOX, datetime.now(UTC))
    begin_due(datetime.now(UTC))
    assert "Choose an environment or a merchant" in output_of()
    assert json.loads(output_of("--json"))["has_more"] is True


@pytest.mark.parametrize("days", ["0", "733", "soon", "-1"])
def test_command_with_invalid_days_is_refused(days: str) -> None:
    with pytest.raises(CommandError):
        output_of("--days", days)


def test_command_of_an_unknown_environment_is_refused() -> None:
    with pytest.raises(CommandError):
        output_of("--environment", "staging")
