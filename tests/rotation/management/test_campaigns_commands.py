"""Campaigns on the command line: requested, approved, watched; one JSON object, exit 1 for a halted campaign."""

import io
import json
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from rich.console import Console

from keyvault.access.roles import Role
from keyvault.domain.environments import Environment
from keyvault.models import BreakGlass
from rotation.domain.events import RotationState as S
from rotation.management import campaign_watch
from rotation.management.campaign_watch import watch_campaign
from rotation.models import Campaign, CampaignState, Rotation
from rotation.services.campaigns.runner import tick
from tests.clocks import Clock
from tests.factories import make_operator, now
from tests.rotation.campaigning import approved, asked, become, fresh, issued
from tests.rotation.scene import approver, tam

pytestmark = pytest.mark.django_db

C = CampaignState


@pytest.fixture
def clock() -> Clock:
    """Start at the real time, which the commands use."""
    return Clock(now())


def run(*arguments: str) -> Any:
    output = io.StringIO()
    call_command(*arguments, "--json", stdout=output)
    (line,) = output.getvalue().splitlines()
    return json.loads(line)


@pytest.mark.database
def test_rotate_campaign_in_sandbox_runs_with_the_pace_and_plan_given(clock: Clock) -> None:
    issued(clock, 3)
    tam()
    answer = run(
        *("rotate_campaign", "--environment", "sandbox", "--merchant", "merchant-0", "--merchant", "merchant-2"),
        *("--per-minute", "7", "--concurrency", "2", "--no-halt-on-stall", "--halt-at-failed-percent", "25"),
        *("--proof", "ack", "--quiet-seconds", "5", "--quarantine-seconds", "6", "--requested-by", "tam"),
    )
    assert (answer["state"], answer["progress"]["members"]) == ("running", 2)
    assert answer["pace"] == {
        "per_minute": 7,
        "concurrency": 2,
        "halt_on_stall": False,
        "halt_at_failed_percent": 25,
    }
    assert answer["overrides"] == {
        "reason": "requested on the command line",
        "proof": "ack",
        "quiet_seconds": 5,
        "quarantine_seconds": 6,
    }
    assert run("show_campaign", answer["campaign_id"])["selection"]["merchants"] == ["merchant-0", "merchant-2"]


def test_rotate_campaign_in_production_awaits_or_names_its_approver(clock: Clock) -> None:
    """A command-line approval stays unreviewed until a second person reviews it."""
    issued(clock, 1, Environment.PRODUCTION)
    asker, _ = tam(), approver()
    arguments = ("rotate_campaign", "--environment", "production", "--requested-by", "tam")
    assert run(*arguments)["state"] == "awaiting_approval"
    answer = run(*arguments, "--approved-by", "approver")
    assert (answer["state"], answer["approvals"]) == ("running", ["approver"])
    act = BreakGlass.objects.get()
    assert (act.subject, act.requester_person) == (answer["campaign_id"], asker.person)


def test_rotate_campaign_in_the_name_of_another_is_noted_when_it_is_approved(clock: Clock) -> None:
    """The approver in the console may be the person who entered the command."""
    issued(clock, 1, Environment.PRODUCTION)
    asker, approving = tam(), approver()
    answer = run("rotate_campaign", "--environment", "production", "--requested-by", "tam")
    approved(clock, Campaign.objects.get(pk=answer["campaign_id"]))
    act = BreakGlass.objects.get()
    assert (act.subject, act.excluded_persons.split()) == (answer["campaign_id"], [asker.person, approving.person])
    assert act.is_claimed is False
    clock.tick(5)
    tick(clock)
    rotation = Rotation.objects.get()
    assert (rotation.state, rotation.is_requester_claimed) == (S.SCHEDULED, False)


def test_rotate_campaign_with_a_refused_approval_is_canceled(clock: Clock) -> None:
    """One person under two names is still one."""
    issued(clock, 1, Environment.PRODUCTION)
    make_operator("boss", Role.KEY_ADMINISTRATOR)
    with pytest.raises(CommandError, match="second person"):
        run("rotate_campaign", "--environment", "production", "--requested-by", "boss", "--approved-by", "boss")
    assert Campaign.objects.get().state == C.CANCELLED


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--merchant", "nobody"), "/merchants: there is no merchant nobody"),
        (("--per-minute", "0"), "/per_minute: 1 to 600"),
        (("--older-than-days", "30"), "No active private key matches."),
        (("--requested-by", "nobody"), "There is no operator nobody"),
    ],
)
def test_rotate_campaign_that_is_infeasible_names_the_reason(
    clock: Clock, arguments: tuple[str, ...], message: str
) -> None:
    issued(clock, 1)
    tam()
    with pytest.raises(CommandError) as refused:
        run("rotate_campaign", "--environment", "sandbox", "--requested-by", "tam", *arguments)
    assert message in str(refused.value)


def test_show_campaign_with_an_unknown_id_is_refused() -> None:
    with pytest.raises(CommandError, match="not_found"):
        run("show_campaign", "cmp_nothing")


def test_show_campaign_as_text_shows_the_progress(clock: Clock) -> None:
    issued(clock, 2)
    output = io.StringIO()
    call_command("show_campaign", asked(clock).pk, stdout=output)
    assert "progress: members 2, waiting 2" in output.getvalue()


def test_watch_shows_bars_until_the_campaign_has_ended(clock: Clock) -> None:
    issued(clock, 2)
    campaign = asked(clock)
    screen = io.StringIO()

    def meanwhile() -> None:
        clock.tick(5)
        tick(clock)
        for rotation in campaign.rotations.filter(state=S.SCHEDULED):
            become(rotation, S.COMPLETED, clock)

    answer = watch_campaign(campaign.pk, Console(file=screen, width=120), meanwhile)
    assert (answer["state"], answer["percent_ended"]) == ("completed", 100)
    assert "2/2" in screen.getvalue()


@pytest.mark.database
def test_watch_interrupted_leaves_the_campaign_unchanged(clock: Clock) -> None:
    issued(clock, 1)
    campaign = asked(clock)

    def interrupted() -> None:
        raise KeyboardInterrupt

    answer = watch_campaign(campaign.pk, Console(file=io.StringIO()), interrupted)
    assert answer["state"] == fresh(campaign).state == "running"


def test_watch_to_a_halt_answers_and_exits_with_one(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script stops there; the answer is on standard output nevertheless."""
    issued(clock, 2)
    campaign = asked(clock)

    def meanwhile() -> None:
        clock.tick(5)
        tick(clock)
        for rotation in campaign.rotations.filter(state=S.SCHEDULED)[:1]:
            become(rotation, S.STALLED, clock)

    monkeypatch.setattr(campaign_watch.watch_campaign, "__defaults__", (meanwhile,))
    output = io.StringIO()
    with pytest.raises(CommandError, match="the campaign is halted: a rotation stalled"):
        call_command("show_campaign", campaign.pk, "--watch", "--json", stdout=output)
    assert json.loads(output.getvalue())["state"] == "halted"
    assert "stalled" in capsys.readouterr().err
