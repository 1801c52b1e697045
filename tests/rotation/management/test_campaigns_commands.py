"""Campaigns on the command line: asked for, approved, watched; one JSON object, exit 1 when it came to a halt."""

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
from rotation.models import Campaign, CampaignState
from rotation.services.campaigns.runner import tick
from tests.factories import make_operator, now
from tests.rotation.campaigning import asked, become, fresh, issued
from tests.rotation.scene import Clock, approver, tam

pytestmark = [pytest.mark.database, pytest.mark.django_db]

C = CampaignState


@pytest.fixture
def clock() -> Clock:
    """The commands look at the real one."""
    return Clock(now())


def run(*words: str) -> Any:
    output = io.StringIO()
    call_command(*words, "--json", stdout=output)
    (line,) = output.getvalue().splitlines()
    return json.loads(line)


def test_rotate_campaign_in_sandbox_runs_with_the_pace_and_plan_given(clock: Clock) -> None:
    issued(clock, 3)
    tam()
    told = run(
        *("rotate_campaign", "--environment", "sandbox", "--merchant", "merchant-0", "--merchant", "merchant-2"),
        *("--per-minute", "7", "--concurrency", "2", "--no-halt-on-stall", "--halt-at-failed-percent", "25"),
        *("--proof", "ack", "--quiet-seconds", "5", "--quarantine-seconds", "6", "--requested-by", "tam"),
    )
    assert (told["state"], told["progress"]["members"]) == ("running", 2)
    assert told["pace"] == {
        "per_minute": 7,
        "concurrency": 2,
        "halt_on_stall": False,
        "halt_at_failed_percent": 25,
    }
    assert told["wish"] == {
        "reason": "requested on the command line",
        "proof": "ack",
        "quiet_seconds": 5,
        "quarantine_seconds": 6,
    }
    assert run("show_campaign", told["campaign_id"])["selection"]["merchants"] == ["merchant-0", "merchant-2"]


def test_rotate_campaign_in_production_waits_or_is_approved_by_whom_it_names(clock: Clock) -> None:
    """An approval on a command line stays in sight until it is reviewed."""
    issued(clock, 1, Environment.PRODUCTION)
    asker, _ = tam(), approver()
    words = ("rotate_campaign", "--environment", "production", "--requested-by", "tam")
    assert run(*words)["state"] == "awaiting_approval"
    told = run(*words, "--approved-by", "approver")
    assert (told["state"], told["approvals"]) == ("running", ["approver"])
    act = BreakGlass.objects.get()
    assert (act.subject, act.requester_person) == (told["campaign_id"], asker.person)


def test_rotate_campaign_with_a_refused_approval_is_cancelled(clock: Clock) -> None:
    """One person under two names is still one."""
    issued(clock, 1, Environment.PRODUCTION)
    make_operator("boss", Role.KEY_ADMINISTRATOR)
    with pytest.raises(CommandError, match="second person"):
        run("rotate_campaign", "--environment", "production", "--requested-by", "boss", "--approved-by", "boss")
    assert Campaign.objects.get().state == C.CANCELLED


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--merchant", "nobody"), "/merchants: there is no merchant nobody"),
        (("--per-minute", "0"), "/per_minute: 1 to 600"),
        (("--older-than-days", "30"), "left out: 1 too young"),
        (("--requested-by", "nobody"), "There is no operator nobody"),
    ],
)
def test_rotate_campaign_that_cannot_be_says_why(clock: Clock, words: tuple[str, ...], said: str) -> None:
    issued(clock, 1)
    tam()
    with pytest.raises(CommandError) as refused:
        run("rotate_campaign", "--environment", "sandbox", "--requested-by", "tam", *words)
    assert said in str(refused.value)


def test_show_campaign_that_is_not_there_is_refused() -> None:
    with pytest.raises(CommandError, match="not_found"):
        run("show_campaign", "cmp_nothing")


def test_show_campaign_in_words_says_the_progress(clock: Clock) -> None:
    issued(clock, 2)
    output = io.StringIO()
    call_command("show_campaign", asked(clock).pk, stdout=output)
    assert "progress: members 2, waiting 2" in output.getvalue()


def test_watch_shows_bars_until_the_campaign_has_ended(clock: Clock) -> None:
    issued(clock, 2)
    campaign = asked(clock)
    screen = io.StringIO()

    def meanwhile() -> None:
        tick(clock.tick(5))
        for rotation in campaign.rotations.filter(state=S.SCHEDULED):
            become(rotation, S.COMPLETED, clock)

    told = watch_campaign(campaign.pk, Console(file=screen, width=120), meanwhile)
    assert (told["state"], told["percent_ended"]) == ("completed", 100)
    assert "2/2" in screen.getvalue()


def test_watch_interrupted_leaves_the_campaign_as_it_is(clock: Clock) -> None:
    issued(clock, 1)
    campaign = asked(clock)

    def interrupted() -> None:
        raise KeyboardInterrupt

    told = watch_campaign(campaign.pk, Console(file=io.StringIO()), interrupted)
    assert told["state"] == fresh(campaign).state == "running"


def test_watch_to_a_halt_answers_and_exits_with_one(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script goes no further; what it was told stands on standard output all the same."""
    issued(clock, 2)
    campaign = asked(clock)

    def meanwhile() -> None:
        tick(clock.tick(5))
        for rotation in campaign.rotations.filter(state=S.SCHEDULED)[:1]:
            become(rotation, S.STALLED, clock)

    monkeypatch.setattr(campaign_watch.watch_campaign, "__defaults__", (meanwhile,))
    output = io.StringIO()
    with pytest.raises(CommandError, match="the campaign is halted: a rotation stalled"):
        call_command("show_campaign", campaign.pk, "--watch", "--json", stdout=output)
    assert json.loads(output.getvalue())["state"] == "halted"
    assert "stalled" in capsys.readouterr().err
