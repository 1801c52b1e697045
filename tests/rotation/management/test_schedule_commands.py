"""Schedules and their standing approvals on the command line."""

from datetime import timedelta
from typing import Any

import pytest
from django.core.management import CommandError
from django.db import connection
from django.test.utils import CaptureQueriesContext

from keyvault.access.permissions import Permission as P
from keyvault.domain.environments import Environment
from keyvault.models import BreakGlass
from keyvault.services.recording.authorization import authorize
from rotation.models import RotationSchedule, StandingApproval
from rotation.services.schedules.schedules import save_calendar
from tests.factories import now
from tests.management.test_commands import run
from tests.rotation import scene

pytestmark = pytest.mark.django_db

ACME = ("--environment", "production", "--merchant", "acme")
NIGHTS = '{"time_zone": "Europe/Berlin", "weekdays": [0, 1], "opens": "22:00", "closes": "04:00"}'


@pytest.fixture(autouse=True)
def people() -> None:
    scene.tam()
    scene.approver()
    scene.account()


def set_schedule(*arguments: str, scope: tuple[str, ...] = ACME) -> dict[str, Any]:
    return dict(run("set_schedule", *scope, *arguments, "--by", "tam"))


@pytest.mark.database
def test_set_schedule_creates_one_and_keeps_what_is_omitted() -> None:
    grant = authorize(scene.tam(), P.SCHEDULES_WRITE, now=now())
    save_calendar(grant, "freeze", [])
    made = set_schedule(
        *("--cryptoperiod-days", "90", "--lead-days", "7", "--window", NIGHTS, "--calendar", "freeze"),
        *("--quiet-seconds", "86400", "--reason", "quarterly"),
    )
    assert (made["scope"], made["state"], made["author"]) == ("acme/production", "enabled", "tam")
    assert made["overrides"] == {"quiet_seconds": 86_400, "reason": "quarterly"}
    changed = set_schedule("--cryptoperiod-days", "60", "--soak-seconds", "0", "--no-calendar")
    assert (changed["cryptoperiod_days"], changed["lead_days"], changed["calendar"]) == (60, 7, None)
    assert changed["window"] == made["window"]
    assert changed["overrides"] == {"quiet_seconds": 86_400, "reason": "quarterly", "soak_seconds": 0}
    assert set_schedule("--no-window")["window"] is None
    assert run("list_schedules")["schedules"] == run("list_schedules", "--environment", "production")["schedules"]
    assert [each["scope"] for each in run("list_schedules")["schedules"]] == ["acme/production"]


@pytest.mark.database
def test_list_schedules_reads_any_number_of_them_with_the_same_queries() -> None:
    """Standing approvals and their approvals are read together, and not schedule by schedule."""
    counts = []
    for scope in (ACME, ("--environment", "production")):
        set_schedule("--cryptoperiod-days", "30", scope=scope)
        run("request_standing_approval", *scope, "--requested-by", "tam")
        with CaptureQueriesContext(connection) as queries:
            listed = run("list_schedules")["schedules"]
        assert all(len(each["standing_approvals"]) == 1 for each in listed)
        counts.append(len(queries))
    assert counts[0] == counts[1]


def test_set_schedule_for_one_credential_or_an_environment() -> None:
    key, _ = scene.issue(scene.account(), now())
    scope = ("--environment", "sandbox", "--credential", key.credential_id)
    assert set_schedule("--cryptoperiod-days", "30", scope=scope)["credential"] == key.credential_id
    assert set_schedule("--cryptoperiod-days", "30", scope=("--environment", "sandbox"))["scope"] == "sandbox"
    assert RotationSchedule.objects.count() == 2


@pytest.mark.parametrize(
    ("arguments", "because"),
    [
        ((), "needs --cryptoperiod-days"),
        (("--cryptoperiod-days", "0"), "/cryptoperiod_days"),
        (("--cryptoperiod-days", "30", "--calendar", "none"), "no blackout calendar none"),
        (("--cryptoperiod-days", "30", "--window", "nightly"), "not JSON"),
        (("--cryptoperiod-days", "30", "--window", '{"time_zone": "Mars"}'), "/time_zone"),
    ],
)
def test_set_schedule_with_an_invalid_option_names_it(arguments: tuple[str, ...], because: str) -> None:
    with pytest.raises(CommandError, match=because):
        set_schedule(*arguments)
    assert not RotationSchedule.objects.exists()


def test_pause_and_resume_schedule() -> None:
    with pytest.raises(CommandError, match="no schedule for acme/production"):
        run("pause_schedule", *ACME, "--by", "tam")
    set_schedule("--cryptoperiod-days", "30")
    assert run("pause_schedule", *ACME, "--by", "tam")["state"] == "disabled"
    with pytest.raises(CommandError, match="disabled already"):
        run("pause_schedule", *ACME, "--by", "tam")
    assert run("resume_schedule", *ACME, "--by", "tam")["state"] == "enabled"


def test_standing_approval_is_requested_listed_and_approved() -> None:
    set_schedule("--cryptoperiod-days", "30")
    asked = run("request_standing_approval", *ACME, "--days", "30", "--requested-by", "tam")
    assert (asked["state"], asked["approvals"]) == ("awaiting_approval", 0)
    (listed,) = run("list_schedules")["schedules"]
    assert listed["standing_approvals"] == [asked]
    identity = asked["standing_approval_id"]
    with pytest.raises(CommandError):
        run("approve_standing_approval", identity, "--digest", asked["plan_digest"], "--by", "tam")
    with pytest.raises(CommandError, match="not what you were shown"):
        run("approve_standing_approval", identity, "--digest", "0" * 64, "--by", "approver")
    approved = run("approve_standing_approval", identity, "--digest", asked["plan_digest"], "--by", "approver")
    assert (approved["state"], approved["approvals"]) == ("approved", 1)
    assert BreakGlass.objects.get().subject == identity
    row = StandingApproval.objects.get()
    assert row.expires_at - row.created_at == timedelta(days=30)


def test_standing_approval_is_rejected_or_withdrawn_with_a_reason() -> None:
    set_schedule("--cryptoperiod-days", "30")
    requested = ("request_standing_approval", *ACME, "--requested-by", "tam")
    identity = run(*requested)["standing_approval_id"]
    reason = ("--reason", "the window is too long")
    with pytest.raises(CommandError, match="permission_missing"):
        run("reject_standing_approval", identity, "--by", "tam", *reason)
    assert run("reject_standing_approval", identity, "--by", "approver", *reason)["state"] == "rejected"
    approved = run(*requested, "--approved-by", "approver")["standing_approval_id"]
    assert run("withdraw_standing_approval", approved, "--by", "tam", *reason)["state"] == "withdrawn"
    assert StandingApproval.objects.get(pk=approved).why == "the window is too long"
    with pytest.raises(CommandError, match="has ended"):
        run("withdraw_standing_approval", approved, "--by", "tam", *reason)
    assert run("list_schedules")["schedules"][0]["standing_approvals"] == []


def test_set_calendar_creates_one_and_replaces_its_periods() -> None:
    periods = '[{"begins_at": "2030-12-20T00:00:00Z", "ends_at": "2031-01-02T00:00:00Z", "why": "holidays"}]'
    made = run("set_calendar", "freeze", "--periods", periods, "--by", "tam")
    assert [each["why"] for each in made["periods"]] == ["holidays"]
    assert set_schedule("--cryptoperiod-days", "90", "--calendar", "freeze")["calendar"]["periods"] == made["periods"]
    assert run("set_calendar", "freeze", "--periods", "[]", "--by", "tam")["periods"] == []


@pytest.mark.parametrize(
    ("periods", "because"),
    [("never", "not JSON"), ('[{"begins_at": "tomorrow"}]', "/periods"), ("{}", "/periods")],
)
def test_set_calendar_with_invalid_periods_names_them(periods: str, because: str) -> None:
    with pytest.raises(CommandError, match=because):
        run("set_calendar", "freeze", "--periods", periods, "--by", "tam")


def test_standing_approval_that_the_named_approver_may_not_give_is_withdrawn() -> None:
    set_schedule("--cryptoperiod-days", "30")
    both = ("request_standing_approval", *ACME, "--requested-by", "tam", "--approved-by")
    with pytest.raises(CommandError):
        run(*both, "tam")
    assert StandingApproval.objects.get().state == "withdrawn"
    assert run(*both, "approver")["state"] == "approved"


def test_standing_approval_in_sandbox_is_refused() -> None:
    scope = ("--environment", Environment.SANDBOX.value)
    set_schedule("--cryptoperiod-days", "30", scope=scope)
    with pytest.raises(CommandError, match="need no approval"):
        run("request_standing_approval", *scope, "--requested-by", "tam")
