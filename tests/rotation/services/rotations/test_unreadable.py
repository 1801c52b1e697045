"""A plan that this release cannot read stalls its own rotation, is reported once, and delays no other."""

from typing import Any

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.domain.environments import Environment
from keyvault.models import Notice
from keyvault.services.recording.authorization import authorize
from keyvault.services.usage.recorder import UsageLog
from rotation.domain.policy import UnreadablePlanError
from rotation.models import Rotation
from rotation.services.rotations import engine
from rotation.services.rotations.interventions import abort_rotation, may_be_confirmed
from rotation.services.rotations.reports import describe, get_rotation
from tests.admin.desk import address, browser, text_of
from tests.clocks import Clock
from tests.rotation import scene
from tests.rotation.steps import begun, damage, run_due

pytestmark = pytest.mark.django_db

DAMAGES: dict[str, dict[str, Any]] = {
    "a field of a newer release": {"skip_weekends": True},
    "a time zone that is not known here": {"window": {"time_zone": "Mars/Olympus"}},
    "a value of a newer release": {"proof": "telepathy"},
    "no time": {"deadline": "soon"},
    "a number for a list": {"channels": 7},
}


def alarms(rotation: Rotation) -> list[str]:
    return [str(notice.kind) for notice in Notice.objects.filter(subject=rotation.rotation_id, is_alarm=True)]


@pytest.mark.database
@pytest.mark.postgres_once
@pytest.mark.parametrize("changes", DAMAGES.values(), ids=DAMAGES)
def test_rotation_with_an_unreadable_plan_stalls_and_the_others_continue(
    clock: Clock, verifier: UsageLog, changes: dict[str, Any]
) -> None:
    broken, sound = damage(begun(clock), changes), begun(clock)
    for _ in range(3):
        run_due(clock)
        clock.tick(80)
    assert get_rotation(sound.rotation_id).state == "awaiting_proof"
    stalled = get_rotation(broken.rotation_id)
    assert (stalled.state, stalled.stalled_from) == ("stalled", "scheduled")
    assert stalled.why.startswith("The plan cannot be read by this release")
    assert alarms(broken) == ["rotation.stalled"]


def test_rotation_before_approval_with_an_unreadable_plan_raises_one_alarm(clock: Clock, verifier: UsageLog) -> None:
    """The rotation cannot stall from there, so it stays unchanged with an alarm."""
    key, _ = scene.first_key(clock(), environment=Environment.PRODUCTION)
    overrides = {"quiet_seconds": 3_600, "quarantine_seconds": 600}
    broken = damage(scene.rotate(key.credential, clock(), **overrides), {"skip_weekends": True})
    for _ in range(4):
        run_due(clock)
        clock.tick(80)
    assert get_rotation(broken.rotation_id).state == "awaiting_approval"
    assert alarms(broken) == ["rotation.blocked"]
    client = browser(scene.approver())
    page = text_of(client.get(address("rotation_rotation_change", broken.pk)))
    assert "Waiting for a release that can read its plan." in page
    approve = address("rotation_rotation_approve", broken.pk)
    assert approve not in page
    assert client.get(approve).status_code == 409


def test_fault_while_stalling_keeps_the_tick_and_the_lease(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: a fault in one rotation leaves the others their turns."""
    broken, sound = damage(begun(clock), {"skip_weekends": True}), begun(clock)

    def fail(*args: object) -> None:
        raise TypeError("unforeseen")

    monkeypatch.setattr(engine, "_stall", fail)
    assert run_due(clock) == 2
    assert get_rotation(sound.rotation_id).state == "awaiting_proof"
    monkeypatch.undo()
    clock.tick(80)
    run_due(clock)
    assert get_rotation(broken.rotation_id).state == "stalled"


def test_rotation_with_an_unreadable_plan_is_shown_and_abortable(clock: Clock, verifier: UsageLog) -> None:
    """API and console show it, and an operator may abort it before delivery."""
    broken = damage(begun(clock), {"skip_weekends": True})
    answer = describe(broken, clock())
    assert answer["plan"] == broken.plan
    assert answer["waiting_for"] == "a release that can read its plan"
    assert not may_be_confirmed(broken)
    with pytest.raises(UnreadablePlanError, match="skip_weekends"):
        _ = broken.approved_plan
    run_due(clock)
    client = browser(scene.tam())
    for url in (address("rotation_rotation_change", broken.pk), address("rotation_rotation_changelist")):
        assert client.get(url).status_code == 200
    assert "skip_weekends" in text_of(client.get(address("rotation_rotation_change", broken.pk)))
    grant = authorize(scene.tam(), P.ROTATIONS_WRITE, broken.credential.account, now=clock())
    assert abort_rotation(grant, get_rotation(broken.rotation_id), "made by a newer release").state == "cancelled"
