"""Silence by source: a client that calls every day must not hide one that calls once a month."""

from dataclasses import dataclass, field

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.domain.environments import Environment
from keyvault.models.usage import UseOutcome
from keyvault.services.keys.lifecycle import get_key
from keyvault.services.recording.authorization import authorize
from keyvault.services.usage.recorder import UsageLog
from rotation.domain.events import RotationState as S
from rotation.domain.plan_fields import PlanOverrides
from rotation.models import Rotation
from rotation.services.rotations.engine import advance_rotation
from rotation.services.rotations.reports import get_rotation
from rotation.services.rotations.requests import approve_rotation, request_rotation
from tests.rotation import scene
from tests.rotation.scene import Clock

pytestmark = [pytest.mark.database, pytest.mark.django_db]

DAY = 86_400
SHOP, MONTH_END = ("192.0.2.1", "198.51.100.1"), "203.0.113.7"
"""Addresses of the shop's two sites, which call every day, and of the job that calls every 30 days."""


@dataclass
class Fleet:
    """A production key with daily clients and a monthly one, on the test's clock."""

    clock: Clock
    verifier: UsageLog
    old: str = ""
    new: str = ""
    day: int = 0
    rotation_id: str = ""
    shop_key: str = ""
    job_key: str = ""
    refused: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        key, _ = scene.issue(scene.account(environment=Environment.PRODUCTION), self.clock())
        self.credential = key.credential
        self.old = self.shop_key = self.job_key = key.key_id

    def call(self, key_id: str, source: str, user_agent: str, count: int = 1) -> None:
        key = get_key(key_id)
        assert key is not None
        if key.state != "active":
            self.refused.append(f"day {self.day}: {user_agent}")
        outcome = UseOutcome.ALLOWED if key.state == "active" else UseOutcome.REFUSED
        for _ in range(count):
            self.verifier.note(key_id, source=source, user_agent=user_agent, endpoint="orders.create", outcome=outcome)

    def live(self, days: int, job_every: int = 30) -> Rotation | None:
        """Let days pass: each begins with the calls of that day, and the engine takes a turn after them."""
        for _ in range(days):
            for source in SHOP:
                self.call(self.shop_key, source, "shop/1.2")
            if self.day % job_every == 0:
                self.call(self.job_key, MONTH_END, "month-end/3")
            self.turn()
            self.day += 1
            self.clock.tick(DAY)
        self.turn()
        return get_rotation(self.rotation_id) if self.rotation_id else None

    def turn(self) -> None:
        self.verifier.flush()
        if self.rotation_id:
            advance_rotation(self.rotation_id, self.clock)

    def begin(self, **wish: object) -> Rotation:
        """Request the rotation, have it approved, and deliver the replacement."""
        place, now = self.credential.account, self.clock()
        overrides = PlanOverrides(**wish)  # type: ignore[arg-type]  # the test's own values
        rotation = request_rotation(
            authorize(scene.tam(), P.ROTATIONS_WRITE, place, now=now), self.credential, overrides
        )
        self.rotation_id = rotation.rotation_id
        grant = authorize(
            scene.approver(), P.ROTATIONS_APPROVE, place, now=now, requester_person=rotation.requester_person
        )
        approve_rotation(grant, rotation, rotation.plan_digest)
        self.turn()
        rotation = get_rotation(self.rotation_id)
        assert rotation.state == S.AWAITING_PROOF
        self.new = rotation.replacement_id or ""
        return rotation

    def switch_shop(self) -> Rotation:
        """Move the daily clients to the replacement, with traffic that proves it."""
        self.shop_key = self.new
        for _ in range(20):
            for source in SHOP:
                self.call(self.new, source, "shop/1.2", 5)
            self.clock.tick(60)
            self.turn()
        rotation = get_rotation(self.rotation_id)
        assert rotation.state == S.OVERLAP
        return rotation


@pytest.fixture
def fleet(clock: Clock, verifier: UsageLog) -> Fleet:
    return Fleet(clock, verifier)


@pytest.mark.xfail(strict=True, reason="silence is judged by the key's longest gap, all of its sources together")
def test_silence_of_a_daily_client_does_not_hide_a_monthly_one(fleet: Fleet) -> None:
    """With the defaults of production, the month-end job still finds its key 30 days after its last call."""
    fleet.live(91)
    fleet.begin()
    fleet.switch_shop()
    rotation = fleet.live(30)
    assert fleet.refused == []
    assert rotation is not None
    assert rotation.state == S.OVERLAP
