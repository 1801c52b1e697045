"""Campaigns: rotations of many credentials, begun at the product's pace."""

from collections import Counter
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from rotation.domain.pacing import TICK_SECONDS, UNPROVED, Pace, judge_halt, tally_of
from rotation.domain.states import CLOSED
from tests.simulator.store import StoredCredential, StoredRotation

if TYPE_CHECKING:
    from tests.simulator.simulation import Simulation

_IDLE_SECONDS = 3_600.0
"""Time to the next tick while every slot is held, instead of the product's few seconds: a proof takes days."""


class SimulatedCampaign:
    """One approved campaign. `begun`: its rotations, each with the time of its request."""

    def __init__(self, simulation: "Simulation", members: list[StoredCredential], pace: Pace) -> None:
        self._world, self._waiting, self.pace = simulation, members, pace
        self.begun: list[tuple[datetime, StoredRotation]] = []

    def tick(self) -> None:
        """Begin as many rotations as the pace allows; end when a rotation stalled or too many failed."""
        world, now = self._world, self._world.clock.now
        world.touch(None, "campaign")
        if judge_halt(self.pace, tally_of(Counter(rotation.state for _, rotation in self.begun))) is not None:
            world.counts["campaigns halted"] += 1
            return
        allowed = world.rules.count_to_begin(
            self.pace, unproved=self.count_unproved(), begun_in_last_minute=self.count_recent(now)
        )
        for credential in self._waiting[:allowed]:
            world.touch(credential, "campaign")
            rotation = world.people.begin(credential)
            if rotation is not None:
                self.begun.append((now, rotation))
        world.step.campaign = self if allowed else None
        del self._waiting[:allowed]
        if self._waiting:
            world.scheduler.after(TICK_SECONDS if self.count_recent(now) else _IDLE_SECONDS, self.tick)

    def count_recent(self, now: datetime) -> int:
        return sum(at > now - timedelta(seconds=60) for at, _ in self.begun)

    def count_unproved(self) -> int:
        return sum(rotation.state in UNPROVED for _, rotation in self.begun if rotation.state not in CLOSED)
