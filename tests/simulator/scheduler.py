"""The order of events in a simulation."""

from collections.abc import Callable
from datetime import datetime, timedelta
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Any

from tests.simulator.clock import VirtualClock

Action = Callable[[], None]
Planned = list[Any]
"""When, the draw, the number, and the action; None: it was canceled."""


class Scheduler:
    """Run actions by virtual time; a seeded draw orders those of the same moment."""

    def __init__(self, clock: VirtualClock, random: Random) -> None:
        self._clock, self._random = clock, random
        self._queue: list[Planned] = []
        self._number = count()

    def at(self, when: datetime, action: Action) -> Planned:
        planned: Planned = [max(when, self._clock.now), self._random.random(), next(self._number), action]
        heappush(self._queue, planned)
        return planned

    def after(self, seconds: float, action: Action) -> Planned:
        return self.at(self._clock.now + timedelta(seconds=seconds), action)

    def cancel(self, planned: Planned) -> None:
        planned[3] = None

    def run_next(self) -> None:
        action = None
        while action is None:
            when, _, _, action = heappop(self._queue)
        self._clock.advance_to(max(when, self._clock.now))
        action()
