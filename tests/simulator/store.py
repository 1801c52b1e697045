"""The rows of the service, in memory: credentials, their keys, the uses of each key by source, and rotations."""

from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from keyvault.domain.environments import Environment
from keyvault.domain.keys import DEAD_STATES, KeyKind, KeyState
from rotation.domain.cryptoperiods import Terms
from rotation.domain.events import RotationState
from rotation.domain.policy import Plan
from rotation.domain.states import CLOSED, Wait

LAST_EVENTS = 40
"""Events of a credential that a failure prints."""


@dataclass(slots=True, eq=False)
class StoredSource:
    """The uses of a key by one source, as the table of sources keeps them."""

    first_minute: int
    last_minute: int
    last_at: datetime
    longest_gap_minutes: int = 0

    def add(self, first_minute: int, last_minute: int, at: datetime) -> None:
        """Add uses in every minute from the first to the last one."""
        inner = 1 if last_minute > first_minute else 0
        self.longest_gap_minutes = max(self.longest_gap_minutes, first_minute - self.last_minute, inner)
        self.first_minute = min(self.first_minute, first_minute)
        self.last_minute = max(self.last_minute, last_minute)
        self.last_at = max(self.last_at, at)


@dataclass(slots=True, eq=False)
class StoredKey:
    """One key. `ended_by`: who suspended or ended it. `attempts`: the last attempt by source while it is suspended."""

    key_id: str
    activated_at: datetime
    accepted_at: datetime
    expires_at: datetime | None = None
    state: KeyState = KeyState.ACTIVE
    ended_by: str = ""
    is_expired: bool = False
    is_delivered: bool = False
    has_copy: bool = False
    sources: dict[str, StoredSource] = field(default_factory=dict)
    attempts: dict[str, datetime] = field(default_factory=dict)
    last_used_at: datetime | None = None
    first_used_at: datetime | None = None
    count: int = 0
    minutes: int = 0

    def is_past(self, now: datetime) -> bool:
        return self.expires_at is not None and now >= self.expires_at

    def is_usable(self, now: datetime) -> bool:
        return self.state is KeyState.ACTIVE and not self.is_past(now)

    @property
    def is_dead(self) -> bool:
        return self.state in DEAD_STATES

    def add_uses(self, source: str, first_at: datetime, last_at: datetime, count: int) -> None:
        """Add reported uses, at least one in each minute from the first to the last one."""
        first, last = minute_of(first_at), minute_of(last_at)
        row = self.sources.get(source)
        if row is None:
            self.sources[source] = StoredSource(first, last, last_at, 1 if last > first else 0)
        else:
            row.add(first, last, last_at)
        is_new_minute = self.last_used_at is None or minute_of(self.last_used_at) < last
        self.minutes += last - first + 1 if is_new_minute else 0
        self.count += count
        self.first_used_at = first_at if self.first_used_at is None else min(self.first_used_at, first_at)
        self.last_used_at = last_at if self.last_used_at is None else max(self.last_used_at, last_at)


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MINUTE = timedelta(minutes=1)


def minute_of(at: datetime) -> int:
    return (at - _EPOCH) // _MINUTE


@dataclass(slots=True, eq=False)
class StoredRotation:
    """One rotation: the columns that the engine reads, its lease, and the simulator's notes about it.

    `turned_at`: its last complete turn. `alarmed_at`: the last alarm. `tried_at`: the first attempt in quarantine of a
    consumer that the plan could have known of.
    """

    rotation_id: str
    credential: "StoredCredential"
    plan: Plan
    predecessor: StoredKey
    state: RotationState
    entered_at: datetime
    turned_at: datetime
    approval_expires_at: datetime
    deadline: datetime | None
    retire_at: datetime | None = None
    replacement: StoredKey | None = None
    stalled_from: RotationState | None = None
    why: str = ""
    version: int = 0
    has_approval: bool = False
    delivered_at: datetime | None = None
    notified_at: datetime | None = None
    notification_failed: bool = False
    acknowledged_at: datetime | None = None
    confirmed_at: datetime | None = None
    used_at: datetime | None = None
    quarantined_at: datetime | None = None
    reinstated_at: datetime | None = None
    silence_waived: bool = False
    written_back_at: datetime | None = None
    waived: set[str] = field(default_factory=set)
    token: int = 0
    leased_until: datetime | None = None
    attempts: int = 0
    due_at: datetime | None = None
    wait: Wait | None = None
    alarmed_at: datetime | None = None
    tried_at: datetime | None = None

    @property
    def is_closed(self) -> bool:
        return self.state in CLOSED

    @property
    def stage(self) -> RotationState:
        is_stalled = self.state is RotationState.STALLED and self.stalled_from is not None
        return self.stalled_from if is_stalled and self.stalled_from is not None else self.state

    @property
    def rolls_back(self) -> bool:
        return self.stage is RotationState.ROLLING_BACK

    @property
    def retiring(self) -> StoredKey | None:
        return self.replacement if self.state is RotationState.ROLLING_BACK else self.predecessor


@dataclass(slots=True, eq=False)
class StoredCredential:
    """One credential. `in_backend`: the key that the merchant reads from the secret backend."""

    credential_id: str
    number: int
    environment: Environment
    kind: KeyKind
    terms: Terms
    in_backend: StoredKey
    in_backend_since: datetime
    keys: list[StoredKey]
    rotations: list[StoredRotation] = field(default_factory=list)
    has_left: bool = False
    events: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_EVENTS))

    @property
    def open_rotation(self) -> StoredRotation | None:
        latest = self.rotations[-1] if self.rotations else None
        return None if latest is None or latest.is_closed else latest

    def count_verifying(self, now: datetime) -> int:
        return sum(key.is_usable(now) for key in self.keys)

    def count_in_hand(self, now: datetime) -> int:
        """Count the usable keys that were delivered and accepted."""
        return sum(key.is_delivered and key.accepted_at <= now and key.is_usable(now) for key in self.keys)
