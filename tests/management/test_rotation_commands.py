"""Commands that request rotations and intervene in them."""

from typing import Any

import pytest
from django.core.management import CommandError
from django.test import override_settings

from keyvault.models import BreakGlass, Operator
from keyvault.models.usage import UseOutcome
from keyvault.services.usage.recorder import UsageLog
from rotation.models import Rotation
from rotation.services.rotations.engine import advance_rotation
from tests.rotation import scene

from .test_commands import issue, run, run_text
from .test_commands import seeded as seeded

pytestmark = pytest.mark.django_db


def requested(*arguments: str, environment: str = "sandbox") -> str:
    asked = run("rotate_key", "--credential", issue(environment)["credential_id"], "--requested-by", "tam", *arguments)
    rotation_id: str = asked["rotation_id"]
    advance_rotation(rotation_id)
    return rotation_id


@pytest.mark.database
def test_rotate_key_accepts_every_plan_option(seeded: Any) -> None:
    rotation_id = requested(
        *("--proof", "both", "--proof-count", "3", "--proof-sources", "2", "--soak-seconds", "5"),
        *("--quiet-seconds", "60", "--quarantine-seconds", "60", "--expires-in-days", "90", "--reason", "yearly"),
        *("--at-deadline", "revoke", "--reinstatement", "never", "--deadline", "2027-01-15T09:00:00+01:00"),
    )
    plan = run("show_rotation", rotation_id)["plan"]
    assert (plan["proof"], plan["proof_sources"], plan["at_deadline"], plan["reinstatement"]) == (
        "both",
        2,
        "revoke",
        "never",
    )
    assert plan["deadline"] == "2027-01-15T08:00:00Z"


@pytest.mark.parametrize("arguments", [("--deadline", "soon"), ("--webhook",), ("--retire-at", "2027-01-01")])
def test_rotate_key_with_an_infeasible_plan_names_the_option(seeded: Any, arguments: tuple[str, ...]) -> None:
    with pytest.raises(CommandError, match=r"/(deadline|channels|retire_at): "):
        requested(*arguments)


def test_rotate_key_by_bypass_starts_in_production_and_is_recorded(seeded: Any) -> None:
    credential_id = issue("production")["credential_id"]
    arguments = ("rotate_key", "--credential", credential_id, "--requested-by", "admin", "--bypass")
    with pytest.raises(CommandError, match="needs a reason"):
        run(*arguments, " ")
    asked = run(*arguments, "the key is on a forum")
    assert asked["state"] == "scheduled"
    act = BreakGlass.objects.get(event="rotation.bypassed", subject=asked["rotation_id"])
    assert act.requester_person == act.person == Operator.objects.get(username="admin").person


def test_rotate_key_that_takes_two_approvals_leaves_them_to_the_console(seeded: Any) -> None:
    credential_id = issue("production")["credential_id"]
    arguments = ("rotate_key", "--credential", credential_id, "--requested-by", "tam")
    with override_settings(APPROVALS_NEEDED={"sandbox": 0, "production": 2}):
        with pytest.raises(CommandError, match="requires 2 approvals"):
            run(*arguments, "--approved-by", "approver")
        rotation = Rotation.objects.get()
        assert (rotation.state, rotation.approvals.count()) == ("awaiting_approval", 0)
        run("abort_rotation", rotation.pk, "--by", "tam", "--reason", "again, without it")
        assert run(*arguments)["state"] == "awaiting_approval"


def test_rotation_is_aborted_before_delivery_and_rolled_back_afterwards(seeded: Any) -> None:
    waiting = requested("--not-before", "2027-06-01")
    assert run("abort_rotation", waiting, "--by", "tam", "--reason", "too early")["state"] == "cancelled"
    delivered = requested("--proof", "ack")
    assert run("abort_rotation", delivered, "--by", "tam", "--reason", "a mistake")["state"] == "rolling_back"
    with pytest.raises(CommandError, match="can no longer be ended"):
        run("abort_rotation", delivered, "--by", "tam", "--reason", "again")
    with pytest.raises(CommandError, match="permission_missing"):
        run("abort_rotation", delivered, "--by", "auditor", "--reason", "again")


def test_rotation_is_extended_and_resumed_only_when_stalled(seeded: Any) -> None:
    rotation_id = requested("--proof", "ack")
    run("extend_rotation", rotation_id, "--by", "tam", "--deadline", "2028-01-01")
    assert run("show_rotation", rotation_id)["deadline"] == "2028-01-01T00:00:00Z"
    with pytest.raises(CommandError, match="current deadline"):
        run("extend_rotation", rotation_id, "--by", "tam", "--deadline", "2027-12-31")
    with pytest.raises(CommandError, match="Only a stalled"):
        run("resume_rotation", rotation_id, "--by", "tam")


def test_dormant_credential_is_confirmed_with_a_reason(seeded: Any) -> None:
    rotation_id = requested()
    with pytest.raises(CommandError, match="who informed you"):
        run("confirm_rotation", rotation_id, "--by", "tam", "--reason", " ")
    run("confirm_rotation", rotation_id, "--by", "tam", "--reason", "Ada of Acme, by telephone")
    advance_rotation(rotation_id)
    assert run("show_rotation", rotation_id)["confirmed_at"] is not None


def test_key_in_quarantine_is_held_and_released_by_those_who_may_suspend_and_resume(seeded: Any) -> None:
    rotation_id = requested("--proof", "ack")
    with pytest.raises(CommandError, match="no key in quarantine"):
        run("hold_quarantine", rotation_id, "--by", "tam", "--reason", "the merchant investigates")
    with pytest.raises(CommandError, match="permission_missing"):
        run("hold_quarantine", rotation_id, "--by", "auditor", "--reason", "the merchant investigates")
    with pytest.raises(CommandError, match="No operator holds"):
        run("release_quarantine", rotation_id, "--by", "admin")
    with pytest.raises(CommandError, match="permission_missing"):
        run("release_quarantine", rotation_id, "--by", "tam")
    assert run("show_rotation", rotation_id)["held_at"] is None


def test_source_is_waived_with_a_reason(seeded: Any) -> None:
    rotation_id = requested("--proof", "ack")
    options = ("--source", "192.0.2.0/24 test", "--by", "tam", "--reason")
    with pytest.raises(CommandError, match="a source of the key"):
        run("waive_source", rotation_id, *options, "it has ended")
    key_id = run("show_rotation", rotation_id)["predecessor_key_id"]
    scene.use(UsageLog(), key_id)
    with pytest.raises(CommandError, match="reason"):
        run("waive_source", rotation_id, *options, " ")
    run("waive_source", rotation_id, *options, "it has ended")
    evidence = run("show_rotation", rotation_id)["evidence"]
    waivers = [each["seen"] for each in evidence if each["kind"] == "source_waived"]
    assert waivers == [{"source": "192.0.2.0/24 test", "key_id": key_id, "by": "operator:tam", "why": "it has ended"}]


def test_show_rotation_prints_text_of_clients_without_controls(seeded: Any) -> None:
    """Guarantee: a client that has a key can neither forge a line of the output nor control the operator's terminal."""
    rotation_id = requested("--proof", "ack")
    key_id = run("show_rotation", rotation_id)["predecessor_key_id"]
    log = UsageLog()
    agent = "shop/1 é\nstate: completed\x1b[2J\x9b1A\x1b]0;x\x07"
    log.note(key_id, source="192.0.2.1", user_agent=agent, endpoint="orders.create", outcome=UseOutcome.ALLOWED)
    log.flush()
    lines = run_text("show_rotation", rotation_id).splitlines()
    assert all(line.isprintable() for line in lines)
    assert [line for line in lines if line.startswith("state: ")] == ["state: awaiting_proof"]
    assert any("shop/1 é\\nstate: completed\\x1b[2J\\x9b1A\\x1b]0;x\\x07" in line for line in lines)


def test_retirement_date_is_set_for_public_keys_only(seeded: Any) -> None:
    arguments = ["--merchant", "acme", "--environment", "production", "--kind", "public"]
    issued = run("issue_key", *arguments, "--requested-by", "tam", "--approved-by", "approver")
    people = ("--requested-by", "tam", "--approved-by", "approver")
    rotation_id = run("rotate_key", "--credential", issued["credential_id"], *people)["rotation_id"]
    with pytest.raises(CommandError, match="second person"):
        run("retire_key", rotation_id, "--at", "2027-12-01", "--requested-by", "tam")
    answer = run("retire_key", rotation_id, "--at", "2027-12-01", *people)
    assert answer == {"rotation_id": rotation_id, "retire_at": "2027-12-01T00:00:00Z", "approved": True}
    act = BreakGlass.objects.get(event="rotation.retirement_approved")
    assert act.requester_person == Operator.objects.get(username="tam").person, "the requester may not review it"
    with pytest.raises(CommandError, match="public key"):
        run("retire_key", requested(), "--at", "2027-12-01", *people)
