"""The runs of the consumers: each host uses the key that it holds, and moves when it reads a newer one."""

from datetime import timedelta
from typing import TYPE_CHECKING

from keyvault.domain.keys import KeyState
from tests.simulator.fleet import Consumer, ConsumerHost, Uses, next_gap
from tests.simulator.store import StoredCredential, StoredKey

if TYPE_CHECKING:
    from tests.simulator.simulation import Simulation

MINUTE = timedelta(minutes=1)
_RETRY_SECONDS = 600.0


class ConsumerTraffic:
    """Drives every consumer. A run is two steps: its first minute and the rest, between which a key may end."""

    def __init__(self, simulation: "Simulation") -> None:
        self._world, self._random = simulation, simulation.random

    def start_new(self, credential: StoredCredential) -> None:
        """Start consumers that the service has not seen before: their first run is shortly before a delivery."""
        for consumer in self._world.fleet.consumers_of(credential):
            if consumer.is_new:
                consumer.is_new = False
                for host in consumer.hosts:
                    host.key = credential.in_backend
                self._schedule(consumer, timedelta(days=self._random.uniform(0, 2)))

    def start(self, consumer: Consumer) -> None:
        habit, now = consumer.habit, self._world.clock.now
        last_at = max((known.used_at for known in consumer.known.values()), default=now)
        if not consumer.is_new:
            self._schedule(consumer, max(timedelta(), last_at + next_gap(habit, self._random) - now))

    def _schedule(self, consumer: Consumer, gap: timedelta) -> None:
        self._world.scheduler.at(self._world.clock.now + gap, lambda: self._begin(consumer))

    def _begin(self, consumer: Consumer) -> None:
        world, habit = self._world, consumer.habit
        world.touch(consumer.credential, "consumer")
        if consumer.credential.has_left:
            return
        consumer.runs += 1
        for host in consumer.hosts:
            self._move(consumer, host)
            self._use(consumer, host, minutes=1, calls=habit.calls // habit.minutes)
        world.scheduler.after((habit.minutes - 1) * 60.0, lambda: self._finish(consumer))
        gap = next_gap(habit, self._random)
        if self._random.random() < world.options.pauses:
            gap *= self._random.uniform(3, 40)
        self._schedule(consumer, gap)

    def _finish(self, consumer: Consumer) -> None:
        habit = consumer.habit
        self._world.touch(consumer.credential, "consumer")
        for host in consumer.hosts:
            self._use(consumer, host, minutes=habit.minutes - 1, calls=habit.calls - habit.calls // habit.minutes)

    def _move(self, consumer: Consumer, host: ConsumerHost) -> None:
        """Let the host read the newest key, if it was delivered longer ago than its lag."""
        credential = consumer.credential
        if host.lag is not None and self._world.clock.now >= credential.in_backend_since + host.lag:
            self._hold(consumer, host, credential.in_backend)

    def _hold(self, consumer: Consumer, host: ConsumerHost, key: StoredKey) -> None:
        if host.key is not key:
            self._world.note(consumer.credential, f"{consumer.source} holds {key.key_id}")
            host.key = key

    def _use(self, consumer: Consumer, host: ConsumerHost, *, minutes: int, calls: int, is_retry: bool = False) -> None:
        """Use the key in the last `minutes`."""
        world, key = self._world, host.key
        verifier = self._random.choice(world.verifiers.verifiers)
        if key.is_usable(world.clock.now) and key.accepted_at <= world.clock.now:
            at = verifier.clock()
            consumer.note_use(key, at)
            uses = Uses(consumer, key, at - (minutes - 1) * MINUTE, at, max(calls, minutes), consumer.runs)
            world.record_uses(uses, verifier)
            return
        world.step.note_refusal(consumer, key)
        world.counts[f"refusals with a key {key.state} by {key.ended_by}"] += 1
        if key.state is KeyState.SUSPENDED:
            world.record_attempt(consumer, key, verifier)
        if is_retry:
            # A person gives the host the newest key.
            world.scheduler.after(self._random.uniform(1, 72) * 3_600, lambda: self._repair(consumer, host))
        else:
            world.scheduler.after(_RETRY_SECONDS, lambda: self._retry(consumer, host))

    def _retry(self, consumer: Consumer, host: ConsumerHost) -> None:
        self._world.touch(consumer.credential, "consumer")
        self._move(consumer, host)
        self._use(consumer, host, minutes=1, calls=1, is_retry=True)

    def _repair(self, consumer: Consumer, host: ConsumerHost) -> None:
        self._world.touch(consumer.credential, "merchant")
        self._hold(consumer, host, consumer.credential.in_backend)
