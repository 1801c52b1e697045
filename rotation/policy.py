"""What a rotation is asked to do: the plan, its defaults by environment, and whether it can be met. PURE."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from keyvault.domain.canonical import JsonValue, canonical_digest
from keyvault.domain.environments import Environment
from keyvault.domain.errors import Fault


class Proof(StrEnum):
    """How the replacement is known to be in use."""

    ACK = "ack"
    TRAFFIC = "traffic"


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is approved; an approval is bound to its digest.

    Proof by traffic: `proof_count` authentications from `proof_sources` distinct sources, the first of them
    `soak_seconds` ago. Times are aware UTC.
    """

    credential_id: str
    predecessor_key_id: str
    reason: str
    not_before: datetime
    deadline: datetime
    proof: Proof
    proof_count: int
    proof_sources: int
    soak_seconds: int
    quiet_seconds: int
    quarantine_seconds: int
    expires_in_days: int | None = None
    predecessor_may_expire: bool = False

    def as_json(self) -> dict[str, JsonValue]:
        values = asdict(self)
        return values | {
            "proof": self.proof.value,
            "not_before": self.not_before.isoformat(),
            "deadline": self.deadline.isoformat(),
        }

    @classmethod
    def from_json(cls, values: dict[str, object]) -> "Plan":
        return cls(
            **{  # type: ignore[arg-type]  # what as_json wrote; the digest is compared before it is used
                **values,
                "proof": Proof(str(values["proof"])),
                "not_before": datetime.fromisoformat(str(values["not_before"])),
                "deadline": datetime.fromisoformat(str(values["deadline"])),
            }
        )

    def digest(self) -> str:
        return canonical_digest({"what": "rotation", **self.as_json()})


@dataclass(frozen=True, slots=True)
class Defaults:
    """An environment's defaults, and the least that a plan may ask for there."""

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
"""No plan begins or ends later than that from now."""


def find_far_faults(times: Mapping[str, datetime | None], now: datetime) -> Iterator[Fault]:
    """Which of these times are too far away to plan with; asked before anything is computed from them."""
    for name, at in times.items():
        if at is not None and not now - FARTHEST <= at <= now + FARTHEST:
            yield Fault(f"/{name}", f"within {FARTHEST.days} days from now")


def default_quiet_seconds(environment: Environment, longest_gap_seconds: int) -> int:
    """In production at least twice the longest gap seen on the predecessor: a weekly job must not pass for silence."""
    quiet = DEFAULTS[environment].quiet_seconds
    return max(quiet, 2 * longest_gap_seconds) if environment is Environment.PRODUCTION else quiet


def find_faults(
    plan: Plan, environment: Environment, predecessor_expires_at: datetime | None, now: datetime
) -> Iterator[Fault]:
    """Why this plan cannot be met; nothing when it can."""
    least = DEFAULTS[environment]
    for name, value, floor in (
        ("quiet_seconds", plan.quiet_seconds, least.least_quiet_seconds),
        ("quarantine_seconds", plan.quarantine_seconds, least.least_quarantine_seconds),
        ("proof_count", plan.proof_count, 1),
        ("proof_sources", plan.proof_sources, 1),
        ("soak_seconds", plan.soak_seconds, 0),
    ):
        if not floor <= value <= LONGEST_SECONDS:
            yield Fault(f"/{name}", f"{environment} takes {floor} to {LONGEST_SECONDS}")
    if any(value > LONGEST_SECONDS for value in (plan.quiet_seconds, plan.soak_seconds)):
        return  # Said above; and no clock goes that far.
    needed = plan.soak_seconds + plan.quiet_seconds
    if plan.deadline < max(now, plan.not_before) + timedelta(seconds=needed):
        yield Fault("/deadline", f"soak and quiet period need {needed} seconds, which is past the deadline")
    if (
        plan.expires_in_days is not None
        and max(now, plan.not_before) + timedelta(days=plan.expires_in_days) < plan.deadline
    ):
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
