"""The plan of a rotation and its validation; `plan_fields` has its fields, bounds and defaults. PURE."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timedelta

from keyvault.domain.canonical import JsonValue, canonical_digest
from keyvault.domain.environments import Environment
from keyvault.domain.errors import Fault, StateConflictError
from keyvault.domain.keys import KeyKind
from keyvault.domain.timestamps import format_timestamp
from rotation.domain.plan_fields import (
    LONGEST_SECONDS,
    AtDeadline,
    DeliveryChannel,
    FieldType,
    Proof,
    Reinstatement,
    default_of,
    find_far_fault,
    find_value_faults,
    has_excess,
    read_json,
    to_json,
)
from rotation.domain.silence import GAPS
from rotation.domain.windows import Window

PLAN_UNREADABLE = "The plan cannot be read by this release"


class UnreadablePlanError(StateConflictError):
    """A stored plan has a field or value that this release does not know, or lacks a required one."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is approved; an approval is bound to its digest.

    Proof by traffic: `proof_count` authentications from `proof_sources` distinct sources, the first of them at least
    `soak_seconds` ago. `is_dormant`: the predecessor had no traffic, so an acknowledgement or an operator's
    confirmation suffices, whatever `proof` says. `deadline` None: for a public key's rotation only. `retire_at`: the
    approved date on which a public predecessor is taken out of service. `late_sources`: the sources that cannot be
    silent by the deadline, each with a deadline that would fit; None: no deadline does. Times are aware UTC.
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
    late_sources: Mapping[str, str | None] | None = None
    waived_sources: tuple[str, ...] = ()

    def as_shown(self) -> dict[str, JsonValue]:
        """Return every field as a JSON value."""
        return {each.name: to_json(getattr(self, each.name)) for each in fields(self)}

    def as_json(self) -> dict[str, JsonValue]:
        """Return what is stored and digested.

        A field is omitted at its default, so that plans approved before the field was added keep their digest.
        """
        shown = self.as_shown()
        omitted = {each.name for each in fields(self) if getattr(self, each.name) == each.default}
        return {name: value for name, value in shown.items() if name not in omitted}

    @classmethod
    def from_json(cls, values: Mapping[str, object]) -> "Plan":
        """Read what `as_json` wrote. Callers compare the digest before they rely on the plan."""
        return cls(**{name: read_json(name, value) for name, value in values.items()})

    def find_opening(self, now: datetime) -> datetime | None:
        """Return when its rotation may begin, now at the earliest; None: its window does not open any more."""
        begins_at = max(now, self.not_before)
        return begins_at if self.window is None else self.window.next_opening(begins_at)

    def digest(self) -> str:
        return canonical_digest({"what": "rotation", **self.as_json()})


APPROVAL_LIFETIME = timedelta(days=7)


def find_far_faults(times: Mapping[str, datetime | None], now: datetime) -> Iterator[Fault]:
    """Yield a fault for each time that is too far away. Call it before computing anything from the times."""
    for name, at in times.items():
        if at is not None and (detail := find_far_fault(at, now)) is not None:
            yield Fault(f"/{name}", detail)


REMINDERS = (25, 50, 75)
"""When a merchant is reminded of an unused replacement, in percent of the time to the deadline."""


def due_reminder(begun_at: datetime, deadline: datetime, reminded_percent: int, now: datetime) -> int | None:
    """Return the latest reminder that fell due since the last one, in percent; None: none did."""
    total = (deadline - begun_at).total_seconds()
    passed = 100 * (now - begun_at).total_seconds() / total if total > 0 else 100.0
    return max((percent for percent in REMINDERS if reminded_percent < percent <= passed), default=None)


def default_deadline_seconds(environment: Environment, quiet_seconds: int, longest_gap_seconds: int) -> int:
    """Return the distance of the default deadline from the start, in seconds.

    A source that calls once a month counts as silent only after two months, so the deadline is later by that time.
    """
    longest = max(quiet_seconds, min(GAPS * longest_gap_seconds, LONGEST_SECONDS))
    return default_of("deadline", environment) + max(0, longest - default_of("quiet_seconds", environment))


def find_faults(
    plan: Plan, environment: Environment, kind: KeyKind, predecessor_expires_at: datetime | None, now: datetime
) -> Iterator[Fault]:
    """Yield each reason why this plan cannot be met."""
    yield from _kind_faults(plan, kind, now)
    # The default deadline may be later than the latest that can be chosen; chosen times are checked before.
    yield from find_value_faults(plan, environment, now, frozenset(FieldType) - {FieldType.INSTANT})
    if has_excess(plan):
        return
    opens_at = plan.find_opening(now)
    if opens_at is None:
        yield Fault("/window", "the window never opens; change its weekdays or blackouts")
        return
    if plan.deadline is None:
        return
    needed = plan.soak_seconds + plan.quiet_seconds
    if plan.deadline < opens_at + timedelta(seconds=needed):
        is_late = opens_at > max(now, plan.not_before)
        late = f" from {format_timestamp(opens_at)}, when the window opens," if is_late else ""
        yield Fault("/deadline", f"soak and quiet period need {needed} seconds{late}, which is past the deadline")
    yield from find_expiry_faults(plan, plan.deadline, predecessor_expires_at, expiry_of_replacement(plan, opens_at))


def expiry_of_replacement(plan: Plan, made_at: datetime) -> datetime | None:
    """Return when a replacement that is made then expires; None: never."""
    return None if plan.expires_in_days is None else made_at + timedelta(days=plan.expires_in_days)


def find_expiry_faults(
    plan: Plan,
    deadline: datetime,
    predecessor_expires_at: datetime | None,
    replacement_expires_at: datetime | None,
) -> Iterator[Fault]:
    """Yield a fault for each key that would expire before the deadline, the planned one or a later one."""
    if replacement_expires_at is not None and replacement_expires_at < deadline:
        yield Fault("/expires_in_days", "the replacement would expire before the deadline; set an earlier deadline")
    if predecessor_expires_at is not None and predecessor_expires_at < deadline and not plan.predecessor_may_expire:
        yield Fault(
            "/deadline",
            f"the predecessor expires before it, at {format_timestamp(predecessor_expires_at)}; "
            "set an earlier deadline, or predecessor_may_expire in the plan",
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
        if plan.waived_sources:
            yield Fault("/waived_sources", "for private keys only; a public one is retired on its date")
        return
    if plan.deadline is None:
        yield Fault("/deadline", "a time; only a public key's rotation has no deadline")
    if plan.retire_at is not None:
        yield Fault("/retire_at", "for public keys only; a private one is retired by silence")
    if plan.proof is Proof.CONFIRMATION and not plan.is_dormant:
        yield Fault("/proof", "confirmation is for public keys and for credentials without traffic")
