"""The merchants' side: consumers that use the keys by their habits and move to a replacement, or forget to."""

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from random import Random

from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind
from rotation.domain.cryptoperiods import Terms
from rotation.domain.windows import Window
from tests.simulator.store import StoredCredential, StoredKey

DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Habit:
    """How a consumer uses its key: a run of some minutes every `every`, give or take `jitter` of that.

    `weight`: its share of the fleet. `moves_in_part`: whether its hosts may move one by one.
    """

    name: str
    every: timedelta
    minutes: int
    calls: int
    weight: int
    jitter: float = 0.1
    moves_in_part: bool = False


HABITS = (
    Habit("daily", DAY, 12, 60, 18, moves_in_part=True),
    Habit("weekly", 7 * DAY, 30, 200, 30, jitter=0.05),
    Habit("monthly", 30 * DAY, 45, 300, 27, jitter=0.05),
    Habit("two-minutes-a-month", 30 * DAY, 2, 20, 20, jitter=0.05),
    Habit("yearly", 365 * DAY, 120, 500, 5, jitter=0.01),
)
BURST = HABITS[3]

HISTORY = 400 * DAY
"""Retention of the uses of a key in the service."""


@dataclass(slots=True, eq=False)
class ConsumerHost:
    """One host of a consumer: the key that it holds, and how long after a delivery it reads the replacement.

    `lag` None: it is forgotten and moves only when a person sees to it.
    """

    key: StoredKey
    lag: timedelta | None


@dataclass(slots=True)
class KnownUse:
    """One consumer's use of one key: the truth that the invariants judge by.

    `used_at`: its last use, also one that was lost with a verifier. The other fields are what
    verifiers have reported to the service.
    """

    used_at: datetime
    reported_at: datetime
    run: int
    runs: int = 1
    longest_gap: timedelta = timedelta()

    def add(self, first_at: datetime, last_at: datetime, run: int) -> None:
        if run != self.run:
            self.runs += 1
            self.run = run
            self.longest_gap = max(self.longest_gap, first_at - self.reported_at)
        self.reported_at = max(self.reported_at, last_at)
        self.used_at = max(self.used_at, last_at)


@dataclass(slots=True, eq=False)
class Consumer:
    """One source of a credential's uses. `known`: its uses by key id. `is_new`: it begins when a rotation does."""

    source: str
    credential: StoredCredential
    habit: Habit
    hosts: list[ConsumerHost]
    known: dict[str, KnownUse] = field(default_factory=dict)
    runs: int = 0
    is_new: bool = False

    def note_use(self, key: StoredKey, at: datetime) -> None:
        """Note a use that a verifier has allowed and not yet reported."""
        if (known := self.known.get(key.key_id)) is not None:
            known.used_at = max(known.used_at, at)

    def add(self, uses: "Uses") -> None:
        """Add reported uses to the known ones."""
        known = self.known.get(uses.key.key_id)
        if known is None:
            self.known[uses.key.key_id] = KnownUse(uses.last_at, uses.last_at, uses.run)
        else:
            known.add(uses.first_at, uses.last_at, uses.run)


@dataclass(frozen=True, slots=True)
class Uses:
    """The uses of one key by one consumer, one or more in each minute, in its run of this number."""

    consumer: Consumer
    key: StoredKey
    first_at: datetime
    last_at: datetime
    count: int
    run: int

    def report(self) -> None:
        """Write the uses to the service's tables, and to the truth."""
        self.key.add_uses(self.consumer.source, self.first_at, self.last_at, self.count)
        self.consumer.add(self)


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """What the fleet is made of.

    `forgotten`: the share of hosts that no person moves. `pauses`: the share of runs after which a consumer pauses for
    several times its habit. `new`: the share of consumers whose first run is shortly before the first rotation.
    `races`: how often a person acts on a key while a worker is about to take one away. `sandbox`: the share of
    credentials in the sandbox.
    """

    credentials: int = 2_000
    forgotten: float = 0.08
    pauses: float = 0.005
    new: float = 0.15
    races: float = 0.05
    sandbox: float = 0.1


class SimulatedFleet:
    """Make credentials with their consumers, and the uses of the time before the simulation."""

    def __init__(self, random: Random, options: FleetOptions, now: datetime) -> None:
        self._random, self._options, self._now = random, options, now
        self.consumers: list[list[Consumer]] = []
        self.credentials = [self._make(number) for number in range(options.credentials)]

    def consumers_of(self, credential: StoredCredential) -> list[Consumer]:
        return self.consumers[credential.number]

    def _make(self, number: int) -> StoredCredential:
        random = self._random
        environment = Environment.SANDBOX if random.random() < self._options.sandbox else Environment.PRODUCTION
        kind = KeyKind.PUBLIC if random.random() < 0.04 else KeyKind.PRIVATE
        age = random.randint(5, 390) * DAY
        expires_at = self._now + random.randint(60, 500) * DAY if random.random() < 0.1 else None
        key = StoredKey(f"key-{number}-0", self._now - age, self._now - age, expires_at, is_delivered=True)
        key.has_copy = True
        credential = StoredCredential(
            f"crd-{number}",
            number,
            environment,
            kind,
            self._choose_terms(),
            in_backend=key,
            in_backend_since=key.activated_at,
            keys=[key],
        )
        count = random.choices((0, 1, 2, 3), (3, 25, 47, 25))[0]
        habits = random.choices(HABITS, [habit.weight for habit in HABITS], k=count)
        consumers = [self._make_consumer(credential, habit, place) for place, habit in enumerate(habits)]
        self.consumers.append(consumers)
        for consumer in consumers:
            consumer.is_new = random.random() < self._options.new
            if not consumer.is_new:
                self._remember(consumer, key, age)
        return credential

    def _choose_terms(self) -> Terms:
        random = self._random
        window = None
        if random.random() < 0.3:
            zone = random.choice(("UTC", "Europe/Berlin", "America/New_York"))
            window = Window(zone, (0, 1, 2, 3, 4), 9 * 60, 17 * 60)
        return Terms(random.choice((90, 180, 365)), random.randint(0, 20), random.randint(0, 7), window)

    def _make_consumer(self, credential: StoredCredential, habit: Habit, place: int) -> Consumer:
        random = self._random
        key = credential.in_backend
        is_parted = random.random() < 0.3 and (habit.moves_in_part or habit is BURST)
        hosts = [ConsumerHost(key, self._choose_lag()) for _ in range(random.randint(2, 3) if is_parted else 1)]
        return Consumer(f"10.{credential.number}.{place}.0/24 {habit.name}", credential, habit, hosts)

    def _choose_lag(self) -> timedelta | None:
        chance = self._random.random()
        if chance < self._options.forgotten:
            return None
        is_prompt = self._random.random() < 0.8
        return timedelta(seconds=self._random.uniform(0, 3_600 if is_prompt else 14 * 86_400))

    def _remember(self, consumer: Consumer, key: StoredKey, age: timedelta) -> None:
        """Add the uses since the key was activated; those of the last 40 runs, because older ones change nothing."""
        habit, at = consumer.habit, self._now - self._random.random() * consumer.habit.every
        runs: list[datetime] = []
        while at > self._now - min(age, HISTORY) and len(runs) < 40:
            runs.append(at)
            at -= next_gap(habit, self._random)
        for run, begun_at in enumerate(reversed(runs), 1):
            consumer.runs = run
            self.remember(consumer, key, begun_at, begun_at + (habit.minutes - 1) * timedelta(minutes=1))

    def remember(self, consumer: Consumer, key: StoredKey, first_at: datetime, last_at: datetime) -> None:
        """Add one run of the time before the simulation."""
        Uses(consumer, key, first_at, last_at, consumer.habit.calls, consumer.runs).report()


def next_gap(habit: Habit, random: Random) -> timedelta:
    """Draw the time from one run to the next."""
    return habit.every * random.uniform(1 - habit.jitter, 1 + habit.jitter)
