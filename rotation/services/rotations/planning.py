"""Build and validate a plan from a request's overrides and the environment's defaults."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import NamedTuple, TypeVar

from django.db.models import Exists, OuterRef, QuerySet

from keyvault.domain.environments import Environment
from keyvault.domain.errors import Fault, RequestInvalidError, StateConflictError
from keyvault.domain.free_text import clean_text
from keyvault.domain.keys import KeyKind, KeyState
from keyvault.domain.sources import MAX_NAME_LENGTH
from keyvault.domain.timestamps import format_timestamp
from keyvault.models import Credential, Key, KeyUse, WebhookEndpoint
from keyvault.models.usage import HAS_TRAFFIC
from keyvault.services.usage.reports import SourceUse, find_sources, has_traffic
from rotation.domain.plan_fields import (
    FIELDS,
    DeliveryChannel,
    PlanOverrides,
    default_of,
    default_proof,
    find_value_faults,
    has_excess,
    with_defaults,
)
from rotation.domain.policy import Plan, default_deadline_seconds, find_faults
from rotation.domain.silence import find_fitting_deadline
from rotation.services.rotations.facts import find_gap

_Key = TypeVar("_Key", bound=Key)


def plan_rotation(credential: Credential, overrides: PlanOverrides, now: datetime) -> Plan:
    """Plan a rotation of the credential's one usable key.

    Raises StateConflictError when it has none, has two, or must not get another one; RequestInvalidError, listing each
    reason why the plan cannot be met.
    """
    faults = list(find_value_faults(overrides, credential.environment, now))
    if faults:
        raise RequestInvalidError(_REFUSED, faults)
    predecessor, is_used, has_endpoint = _find_predecessor_and_facts(credential)
    sources = find_sources(predecessor.key_id)
    plan = _build_plan(credential, predecessor, sources, overrides, now, is_used=is_used)
    plan = replace(plan, late_sources=dict(_late_sources(plan, sources, credential.environment, now)) or None)
    kind = KeyKind(credential.kind)
    faults = list(find_faults(plan, credential.environment, kind, predecessor.expires_at, now))
    faults += [*_endpoint_faults(plan, has_endpoint=has_endpoint), *_waiver_faults(plan, sources)]
    if faults:
        raise RequestInvalidError(_REFUSED, faults)
    return plan


_REFUSED = "The plan cannot be met."


def find_predecessor(credential: Credential) -> Key:
    """Find the one active key. Raises StateConflictError when there is none, or when there are two."""
    key: Key = _only_active(credential.keys.all())
    return key


class _Predecessor(NamedTuple):
    """The key to replace. `is_used`: it has traffic. `has_endpoint`: its account has an enabled webhook endpoint."""

    key: Key
    is_used: bool
    has_endpoint: bool


def _find_predecessor_and_facts(credential: Credential) -> _Predecessor:
    """Find the key of `find_predecessor`, and the facts that a plan depends on, in one query."""
    enabled = WebhookEndpoint.objects.filter(account=OuterRef("credential__account"), disabled_at__isnull=True)
    used = KeyUse.objects.filter(HAS_TRAFFIC, key=OuterRef("pk"))
    key = _only_active(credential.keys.annotate(is_used=Exists(used), has_endpoint=Exists(enabled)))
    return _Predecessor(key, key.is_used, key.has_endpoint)


def _only_active(keys: QuerySet[_Key]) -> _Key:
    active = list(keys.select_related("credential__account").filter(state=KeyState.ACTIVE))
    if not active:
        raise StateConflictError("The credential has no usable key to replace; reissue it.")
    if len(active) > 1:
        raise StateConflictError("Two keys of the credential verify already; revoke one of them first.")
    return active[0]


def plan_reissue(credential: Credential, predecessor: Key, reason: str, now: datetime) -> Plan:
    """Plan a reissue for a credential without a usable key; no old key has to become silent."""
    is_public = credential.kind == KeyKind.PUBLIC
    seconds = default_of("deadline", credential.environment)
    overrides = PlanOverrides(
        reason=reason,
        proof=default_proof(KeyKind(credential.kind)),
        deadline=None if is_public else now + timedelta(seconds=seconds),
        predecessor_may_expire=True,
    )
    is_used = has_traffic(predecessor.key_id)
    return _build_plan(credential, predecessor, find_sources(predecessor.key_id), overrides, now, is_used=is_used)


@dataclass(frozen=True, slots=True)
class KeyOutline:
    """Facts of the key to retire that a plan depends on. `gap_seconds`: the longest gap of its sources."""

    key_id: str
    expires_at: datetime | None
    is_used: bool
    gap_seconds: int = 0


def find_outline_faults(
    credential: Credential, key: KeyOutline, overrides: PlanOverrides, now: datetime, *, has_endpoint: bool
) -> list[Fault]:
    """Return each reason why the plan for a private key cannot be met, without a query.

    `has_endpoint`: the account has an enabled webhook endpoint. Waived sources are not checked.
    """
    plan = _make_plan(credential, key, overrides, now)
    faults = find_faults(plan, credential.environment, KeyKind.PRIVATE, key.expires_at, now)
    return [*faults, *_endpoint_faults(plan, has_endpoint=has_endpoint)]


def _build_plan(
    credential: Credential,
    predecessor: Key,
    sources: Mapping[str, SourceUse],
    overrides: PlanOverrides,
    now: datetime,
    *,
    is_used: bool,
) -> Plan:
    gaps = [
        find_gap(source, credential.environment, None) or 0
        for source in sources.values()
        if source.name not in overrides.waived_sources
    ]
    key = KeyOutline(predecessor.key_id, predecessor.expires_at, is_used, max(gaps, default=0))
    return _make_plan(credential, key, overrides, now)


def _make_plan(credential: Credential, key: KeyOutline, overrides: PlanOverrides, now: datetime) -> Plan:
    environment, is_public = credential.environment, credential.kind == KeyKind.PUBLIC
    values = with_defaults(overrides, environment)
    values["reason"] = clean_text(overrides.reason, FIELDS["reason"].most)
    values["not_before"] = not_before = overrides.not_before or now
    values["proof"] = overrides.proof or default_proof(KeyKind(credential.kind))
    if overrides.deadline is None and not is_public:
        seconds = default_deadline_seconds(environment, values["quiet_seconds"], key.gap_seconds)
        values["deadline"] = _latest(key, overrides, not_before, seconds)
    return Plan(
        credential_id=credential.credential_id,
        predecessor_key_id=key.key_id,
        is_dormant=not is_public and not key.is_used,
        **values,
    )


MAX_LATE_SOURCES = 50
"""Maximum sources that a plan lists, the latest first."""


def _late_sources(
    plan: Plan, sources: Mapping[str, SourceUse], environment: Environment, now: datetime
) -> Iterator[tuple[str, str | None]]:
    """Yield the sources whose silence cannot be complete by the deadline, each with a deadline that would fit."""
    if plan.deadline is None or has_excess(plan):
        return
    begins_at = plan.find_opening(now) or max(now, plan.not_before)
    begins_at += timedelta(seconds=plan.soak_seconds)
    found = 0
    for source in sources.values():
        if source.name in plan.waived_sources:
            continue
        gap_seconds = find_gap(source, environment, None)
        fitting = find_fitting_deadline(source.seen_at, gap_seconds, plan.quiet_seconds, begins_at, plan.deadline)
        if fitting != plan.deadline and found < MAX_LATE_SOURCES:
            found += 1
            yield source.name, format_timestamp(fitting)


def _latest(key: KeyOutline, overrides: PlanOverrides, not_before: datetime, seconds: int) -> datetime:
    latest = not_before + timedelta(seconds=seconds)
    if key.expires_at is not None and not overrides.predecessor_may_expire:
        latest = min(latest, key.expires_at)
    return latest


def _waiver_faults(plan: Plan, sources: Collection[str]) -> list[Fault]:
    """Check that each waived source has used the key."""
    unknown = [name for name in plan.waived_sources if name not in sources]
    detail = "{!r} has not used the old key. Use the name of a source that did, or omit it."
    return [Fault("/waived_sources", detail.format(clean_text(name, MAX_NAME_LENGTH))) for name in unknown]


def _endpoint_faults(plan: Plan, *, has_endpoint: bool) -> list[Fault]:
    """Check that a webhook has an enabled endpoint."""
    if has_endpoint or DeliveryChannel.WEBHOOK not in plan.channels:
        return []
    return [Fault("/channels", "the account has no enabled webhook endpoint; add one, or omit webhook")]
