"""The plan of a rotation, its defaults per environment, and its validation. PURE."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from keyvault.domain.canonical import JsonValue, canonical_digest
from keyvault.domain.environments import Environment
from keyvault.domain.errors import Fault, StateConflictError
from keyvault.domain.keys import KeyKind
from rotation.domain.windows import Window


class Proof(StrEnum):
    """How the replacement is proved to be in use. `confirmation`: an operator confirms it for the merchant."""

    ACK = "ack"
    TRAFFIC = "traffic"
    BOTH = "both"
    CONFIRMATION = "confirmation"


class AtDeadline(StrEnum):
    """What happens at the deadline while the predecessor is in use. An unproved rotation always stalls."""

    STALL = "stall"
    REVOKE = "revoke"


class Reinstatement(StrEnum):
    """How often an attempt by a known source reinstates the quarantined predecessor."""

    ONCE = "once"
    NEVER = "never"


class DeliveryChannel(StrEnum):
    """Where the replacement is written, or announced, before it counts as delivered."""

    SECRET_BACKEND = "secret_backend"  # noqa: S105  a name
    WEBHOOK = "webhook"


PLAN_UNREADABLE = "The plan cannot be read by this release"


class UnreadablePlanError(StateConflictError):
    """A stored plan has a field or value that this release does not know, or lacks a required one."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is approved; an approval is bound to its digest.

    Proof by traffic: `proof_count` authentications from `proof_sources` distinct sources, the first of them at least
    `soak_seconds` ago. `is_dormant`: the predecessor had no traffic, so an acknowledgement or an operator's
    confirmation suffices, whatever `proof` says. `deadline` None: for a public key's rotation only. `retire_at`: the
    approved date on which a public predecessor is taken out of service. Times are aware UTC.
    """

    credential_id: str
    predecessor_key_id: str
    reason: str
    not_before: datetime
    deadline: datetime | None
    proof: Proof
    proof_count: int
    proof_sources: int
    soak_seconds: int
    quiet_seconds: int
    quarantine_seconds: int
    expires_in_days: int | None = None
    predecessor_may_expire: bool = False
    is_dormant: bool = False
    at_deadline: AtDeadline = AtDeadline.STALL
    reinstatement: Reinstatement = Reinstatement.ONCE
    channels: tuple[DeliveryChannel, ...] = (DeliveryChannel.SECRET_BACKEND,)
    window: Window | None = None
    retire_at: datetime | None = None

    def as_shown(self) -> dict[str, JsonValue]:
        """Return every field as a JSON value."""
        values: dict[str, JsonValue] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, datetime):
                value = value.isoformat()
            elif isinstance(value, Window):
                value = value.as_json()
            elif isinstance(value, tuple):
                value = [str(item) for item in value]
            elif isinstance(value, StrEnum):
                value = value.value
            values[each.name] = value
        return values

    def as_json(self) -> dict[str, JsonValue]:
        """Return what is stored and digested.

        Fields added after version 1 are omitted at their default, so plans approved before them keep their digest.
        """
        shown = self.as_shown()
        omitted = {
            each.name
            for each in fields(self)
            if each.name in _OPTIONAL_FIELDS and getattr(self, each.name) == each.default
        }
        return {name: value for name, value in shown.items() if name not in omitted}

    @classmethod
    def from_json(cls, values: Mapping[str, object]) -> "Plan":
        """Read what `as_json` wrote. Callers compare the digest before they rely on the plan."""
        read: dict[str, Any] = dict(values)
        for name in ("not_before", "deadline", "retire_at"):
            if read.get(name) is not None:
                read[name] = datetime.fromisoformat(str(read[name]))
        read["proof"] = Proof(read["proof"])
        if "at_deadline" in read:
            read["at_deadline"] = AtDeadline(read["at_deadline"])
        if "reinstatement" in read:
            read["reinstatement"] = Reinstatement(read["reinstatement"])
        if "channels" in read:
            read["channels"] = tuple(DeliveryChannel(channel) for channel in read["channels"])
        if read.get("window") is not None:
            read["window"] = Window.from_json(read["window"])
        return cls(**read)

    def digest(self) -> str:
        return canonical_digest({"what": "rotation", **self.as_json()})


_OPTIONAL_FIELDS = frozenset({"is_dormant", "at_deadline", "reinstatement", "channels", "window", "retire_at"})


@dataclass(frozen=True, slots=True)
class Defaults:
    """An environment's defaults and the minimum values (`least_*`) of a plan there."""

    proof_count: int
    proof_sources: int
    soak_seconds: int
    quiet_seconds: int
    quarantine_seconds: int
    deadline_seconds: int
    least_quiet_seconds: int
    least_quarantine_seconds: int


DEFAULTS = {
    Environment.SANDBOX: Defaults(
        proof_count=5,
        proof_sources=1,
        soak_seconds=0,
        quiet_seconds=3_600,
        quarantine_seconds=600,
        deadline_seconds=7 * 86_400,
        least_quiet_seconds=1,
        least_quarantine_seconds=1,
    ),
    Environment.PRODUCTION: Defaults(
        proof_count=100,
        proof_sources=2,
        soak_seconds=600,
        quiet_seconds=7 * 86_400,
        quarantine_seconds=86_400,
        deadline_seconds=45 * 86_400,
        least_quiet_seconds=3_600,
        least_quarantine_seconds=600,
    ),
}

APPROVAL_LIFETIME = timedelta(days=7)
LONGEST_SECONDS = 366 * 86_400
FARTHEST = timedelta(days=2 * 366)
"""Maximum distance of a plan's times from now."""


def find_far_faults(times: Mapping[str, datetime | None], now: datetime) -> Iterator[Fault]:
    """Yield a fault for each time that is too far away. Call it before computing anything from the times."""
    for name, at in times.items():
        if at is not None and not now - FARTHEST <= at <= now + FARTHEST:
            yield Fault(f"/{name}", f"a time in the next {FARTHEST.days} days")


REMINDERS = (25, 50, 75)
"""When a merchant is reminded of an unused replacement, in percent of the time to the deadline."""


def due_reminder(begun_at: datetime, deadline: datetime, reminded_percent: int, now: datetime) -> int | None:
    """Return the latest reminder that fell due since the last one, in percent; None: none did."""
    total = (deadline - begun_at).total_seconds()
    passed = 100 * (now - begun_at).total_seconds() / total if total > 0 else 100.0
    return max((percent for percent in REMINDERS if reminded_percent < percent <= passed), default=None)


def default_quiet_seconds(environment: Environment, longest_gap_seconds: int) -> int:
    """Return the default quiet period, in seconds.

    In production it is at least twice the longest gap seen on the predecessor, or a weekly job would count as silent.
    """
    quiet = DEFAULTS[environment].quiet_seconds
    wanted = max(quiet, 2 * longest_gap_seconds) if environment is Environment.PRODUCTION else quiet
    return min(wanted, LONGEST_SECONDS)


def find_faults(
    plan: Plan, environment: Environment, kind: KeyKind, predecessor_expires_at: datetime | None, now: datetime
) -> Iterator[Fault]:
    """Yield each reason why this plan cannot be met."""
    yield from _kind_faults(plan, kind, now)
    least = DEFAULTS[environment]
    for name, value, floor in (
        ("quiet_seconds", plan.quiet_seconds, least.least_quiet_seconds),
        ("quarantine_seconds", plan.quarantine_seconds, least.least_quarantine_seconds),
        ("proof_count", plan.proof_count, 1),
        ("proof_sources", plan.proof_sources, 1),
        ("soak_seconds", plan.soak_seconds, 0),
    ):
        if not floor <= value <= LONGEST_SECONDS:
            yield Fault(f"/{name}", f"{floor} to {LONGEST_SECONDS} in {environment}")
    if any(value > LONGEST_SECONDS for value in (plan.quiet_seconds, plan.soak_seconds)):
        return  # Reported above, and datetime arithmetic would overflow.
    begins_at = max(now, plan.not_before)
    opens_at = begins_at if plan.window is None else plan.window.next_opening(begins_at)
    if opens_at is None:
        yield Fault("/window", "the window never opens; change its weekdays or blackouts")
        return
    if plan.deadline is None:
        return
    needed = plan.soak_seconds + plan.quiet_seconds
    if plan.deadline < opens_at + timedelta(seconds=needed):
        late = "" if opens_at == begins_at else f" from {opens_at.isoformat()}, when the window opens,"
        yield Fault("/deadline", f"soak and quiet period need {needed} seconds{late}, which is past the deadline")
    if plan.expires_in_days is not None and opens_at + timedelta(days=plan.expires_in_days) < plan.deadline:
        yield Fault("/expires_in_days", "the replacement would expire before the deadline; set an earlier deadline")
    if (
        predecessor_expires_at is not None
        and predecessor_expires_at < plan.deadline
        and not plan.predecessor_may_expire
    ):
        yield Fault(
            "/deadline",
            f"the predecessor expires before it, at {predecessor_expires_at.isoformat()}; "
            "set an earlier deadline, or predecessor_may_expire",
        )


def _kind_faults(plan: Plan, kind: KeyKind, now: datetime) -> Iterator[Fault]:
    """Check proof, deadline and date against the key's kind.

    Shipped apps hold a public key: none can acknowledge with it, and traffic cannot prove that all have switched.
    """
    if kind is KeyKind.PUBLIC:
        if plan.proof is not Proof.CONFIRMATION:
            yield Fault("/proof", "a public key's replacement is proved by confirmation")
        if plan.deadline is not None:
            yield Fault("/deadline", "a public key's rotation has no deadline; set retire_at once the date is known")
        if plan.retire_at is not None and plan.retire_at <= now:
            yield Fault("/retire_at", "later than now")
        return
    if plan.deadline is None:
        yield Fault("/deadline", "a time; only a public key's rotation has no deadline")
    if plan.retire_at is not None:
        yield Fault("/retire_at", "for public keys only; a private one is retired by silence")
    if plan.proof is Proof.CONFIRMATION and not plan.is_dormant:
        yield Fault("/proof", "confirmation is for public keys and for credentials without traffic")
