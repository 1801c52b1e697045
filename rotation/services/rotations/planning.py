"""Build and validate a plan from a request's overrides and the environment's defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from keyvault.domain.canonical import JsonValue
from keyvault.domain.errors import Fault, RequestInvalidError, StateConflictError
from keyvault.domain.free_text import clean_text
from keyvault.domain.keys import KeyKind, KeyState
from keyvault.models import Credential, Key, KeyUse, WebhookEndpoint
from keyvault.services.usage.recorder import longest_gap_seconds
from rotation.domain.policy import (
    DEFAULTS,
    AtDeadline,
    DeliveryChannel,
    Plan,
    Proof,
    Reinstatement,
    default_quiet_seconds,
    find_far_faults,
    find_faults,
)
from rotation.domain.windows import Window


@dataclass(frozen=True, slots=True)
class PlanOverrides:
    """The requested values of a plan; None takes the environment's default."""

    reason: str = ""
    not_before: datetime | None = None
    deadline: datetime | None = None
    proof: Proof | None = None
    proof_count: int | None = None
    proof_sources: int | None = None
    soak_seconds: int | None = None
    quiet_seconds: int | None = None
    quarantine_seconds: int | None = None
    expires_in_days: int | None = None
    predecessor_may_expire: bool = False
    at_deadline: AtDeadline = AtDeadline.STALL
    reinstatement: Reinstatement = Reinstatement.ONCE
    channels: tuple[DeliveryChannel, ...] = (DeliveryChannel.SECRET_BACKEND,)
    window: Window | None = None
    retire_at: datetime | None = None

    def as_json(self) -> dict[str, JsonValue]:
        """Return the values that differ from the defaults, which a schedule or a campaign stores."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: _to_json(value) for name, value in values.items() if value != getattr(_DEFAULT, name)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "PlanOverrides":
        """Read what `as_json` wrote."""
        return cls(**{name: _READERS.get(name, lambda value: value)(value) for name, value in values.items()})


def _to_json(value: Any) -> JsonValue:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Window):
        return value.as_json()
    if isinstance(value, tuple):
        return [str(each) for each in value]
    return value.value if isinstance(value, StrEnum) else value


_DEFAULT = PlanOverrides()
_READERS: dict[str, Any] = {
    **dict.fromkeys(("not_before", "deadline", "retire_at"), datetime.fromisoformat),
    "proof": Proof,
    "at_deadline": AtDeadline,
    "reinstatement": Reinstatement,
    "channels": lambda channels: tuple(map(DeliveryChannel, channels)),
    "window": Window.from_json,
}


def plan_rotation(credential: Credential, overrides: PlanOverrides, now: datetime) -> Plan:
    """Plan a rotation of the credential's one usable key.

    Raises StateConflictError when it has none, has two, or must not get another one; RequestInvalidError, listing each
    reason why the plan cannot be met.
    """
    faults = list(
        find_far_faults({name: getattr(overrides, name) for name in ("not_before", "deadline", "retire_at")}, now)
    )
    if faults:
        raise RequestInvalidError(_REFUSED, faults)
    predecessor = find_predecessor(credential)
    plan = _build_plan(credential, predecessor, overrides, now)
    kind = KeyKind(credential.kind)
    faults = list(find_faults(plan, credential.environment, kind, predecessor.expires_at, now))
    faults += _channel_faults(plan, credential)
    if faults:
        raise RequestInvalidError(_REFUSED, faults)
    return plan


_REFUSED = "The plan cannot be met."


def find_predecessor(credential: Credential) -> Key:
    """Find the one active key. Raises StateConflictError when there is none, or when there are two."""
    active: list[Key] = list(credential.keys.select_related("credential__account").filter(state=KeyState.ACTIVE))
    if not active:
        raise StateConflictError("The credential has no usable key to replace; reissue it.")
    if len(active) > 1:
        raise StateConflictError("Two keys of the credential verify already; revoke one of them first.")
    return active[0]


def plan_reissue(credential: Credential, predecessor: Key, reason: str, now: datetime) -> Plan:
    """Plan a reissue for a credential without a usable key; no old key has to become silent."""
    is_public = credential.kind == KeyKind.PUBLIC
    defaults = DEFAULTS[credential.environment]
    overrides = PlanOverrides(
        reason=reason,
        proof=Proof.CONFIRMATION if is_public else Proof.TRAFFIC,
        deadline=None if is_public else now + timedelta(seconds=defaults.deadline_seconds),
        predecessor_may_expire=True,
    )
    return _build_plan(credential, predecessor, overrides, now)


def _build_plan(credential: Credential, predecessor: Key, overrides: PlanOverrides, now: datetime) -> Plan:
    defaults = DEFAULTS[credential.environment]
    not_before = overrides.not_before or now
    is_public = credential.kind == KeyKind.PUBLIC
    gap_seconds = 0 if overrides.quiet_seconds is not None else longest_gap_seconds(predecessor.key_id)
    quiet_seconds = _or(overrides.quiet_seconds, default_quiet_seconds(credential.environment, gap_seconds))
    # A key used once a month has a quiet period of two months; its rotation's deadline is later by as much.
    longest_seconds = defaults.deadline_seconds + max(0, quiet_seconds - defaults.quiet_seconds)
    return Plan(
        credential_id=credential.credential_id,
        predecessor_key_id=predecessor.key_id,
        reason=clean_text(overrides.reason, 300),
        not_before=not_before,
        deadline=overrides.deadline
        or (None if is_public else _latest(predecessor, overrides, not_before, longest_seconds)),
        proof=overrides.proof or (Proof.CONFIRMATION if is_public else Proof.TRAFFIC),
        proof_count=_or(overrides.proof_count, defaults.proof_count),
        proof_sources=_or(overrides.proof_sources, defaults.proof_sources),
        soak_seconds=_or(overrides.soak_seconds, defaults.soak_seconds),
        quiet_seconds=quiet_seconds,
        quarantine_seconds=_or(overrides.quarantine_seconds, defaults.quarantine_seconds),
        expires_in_days=overrides.expires_in_days,
        predecessor_may_expire=overrides.predecessor_may_expire,
        is_dormant=not is_public and not KeyUse.objects.filter(key=predecessor).exists(),
        at_deadline=overrides.at_deadline,
        reinstatement=overrides.reinstatement,
        channels=overrides.channels,
        window=overrides.window,
        retire_at=overrides.retire_at,
    )


def _latest(predecessor: Key, overrides: PlanOverrides, not_before: datetime, seconds: int) -> datetime:
    latest = not_before + timedelta(seconds=seconds)
    if predecessor.expires_at is not None and not overrides.predecessor_may_expire:
        latest = min(latest, predecessor.expires_at)
    return latest


def _channel_faults(plan: Plan, credential: Credential) -> list[Fault]:
    """Check the delivery channels: the secret backend is one of them, and a webhook has an enabled endpoint."""
    if DeliveryChannel.SECRET_BACKEND not in plan.channels:
        return [Fault("/channels", "secret_backend is required: the merchant reads the replacement there")]
    if DeliveryChannel.WEBHOOK not in plan.channels:
        return []
    if not WebhookEndpoint.objects.filter(account=credential.account, disabled_at__isnull=True).exists():
        return [Fault("/channels", "the account has no enabled webhook endpoint; add one, or omit webhook")]
    return []


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
