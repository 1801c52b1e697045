"""Plans of simulated rotations, by the product's fields, defaults and checks."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from random import Random

from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind
from keyvault.domain.timestamps import format_timestamp
from rotation.domain.plan_fields import (
    AtDeadline,
    DeliveryChannel,
    PlanOverrides,
    Proof,
    Reinstatement,
    default_of,
    with_defaults,
)
from rotation.domain.policy import Plan, default_deadline_seconds, find_faults
from rotation.domain.silence import find_fitting_deadline
from tests.simulator.evidence import find_source_gap
from tests.simulator.rules import Rules
from tests.simulator.store import StoredCredential, StoredKey

LATEST = timedelta(days=2 * 366 - 1)


def plan_rotation(
    credential: StoredCredential, key: StoredKey, rules: Rules, random: Random, now: datetime
) -> Plan | None:
    """Plan a rotation of the credential's one key; None: the product refuses the plan."""
    environment, kind = credential.environment, credential.kind
    overrides = choose_overrides(credential, key, random)
    values = with_defaults(overrides, environment)
    values["not_before"] = now
    values["window"] = credential.terms.window
    if kind is not KeyKind.PUBLIC:
        gaps = [gap or 0 for gap in _gaps(credential, key, rules).values()]
        seconds = default_deadline_seconds(environment, values["quiet_seconds"], max(gaps, default=0))
        values["deadline"] = now + min(timedelta(seconds=seconds), LATEST)
    plan = Plan(
        credential_id=credential.credential_id,
        predecessor_key_id=key.key_id,
        is_dormant=kind is not KeyKind.PUBLIC and key.last_used_at is None,
        **values,
    )
    late = dict(_list_late(plan, credential, key, rules, now))
    fitting = [at for at in late.values() if at is not None]
    if fitting and random.random() < 0.5:
        plan = replace(plan, deadline=min(max(fitting), now + LATEST))
        late = dict(_list_late(plan, credential, key, rules, now))
    shown = {name: format_timestamp(at) for name, at in late.items()}
    plan = replace(plan, late_sources=shown or None)
    return None if any(find_faults(plan, environment, kind, key.expires_at, now)) else plan


def plan_reissue(credential: StoredCredential, key: StoredKey, now: datetime) -> Plan:
    """Plan a replacement for a credential without a usable key."""
    is_public = credential.kind is KeyKind.PUBLIC
    environment = credential.environment
    overrides = PlanOverrides(
        proof=Proof.CONFIRMATION if is_public else Proof.TRAFFIC,
        not_before=now,
        deadline=None if is_public else now + timedelta(seconds=default_of("deadline", environment)),
        predecessor_may_expire=True,
    )
    values = with_defaults(overrides, environment)
    return Plan(credential_id=credential.credential_id, predecessor_key_id=key.key_id, **values)


def choose_overrides(credential: StoredCredential, key: StoredKey, random: Random) -> PlanOverrides:
    """Draw what the requester asks for."""
    is_public = credential.kind is KeyKind.PUBLIC
    sources = max(1, min(len(key.sources), default_of("proof_sources", credential.environment)))
    # A client of a few calls a month does not prove a key by traffic before the deadline.
    is_busy = any("daily" in name or "weekly" in name for name in key.sources)
    proofs = (Proof.TRAFFIC, Proof.TRAFFIC, Proof.BOTH) if is_busy else (Proof.ACK,)
    return PlanOverrides(
        proof=Proof.CONFIRMATION if is_public else random.choice(proofs),
        proof_sources=sources,
        quarantine_seconds=random.choice((None, None, 7 * 86_400)),
        at_deadline=AtDeadline.REVOKE if not is_public and random.random() < 0.03 else AtDeadline.STALL,
        reinstatement=Reinstatement.NEVER if not is_public and random.random() < 0.03 else Reinstatement.ONCE,
        predecessor_may_expire=key.expires_at is not None,
        expires_in_days=random.choice((None,) * 9 + (700,)),
        channels=(DeliveryChannel.SECRET_BACKEND, *((DeliveryChannel.WEBHOOK,) if random.random() < 0.1 else ())),
    )


def _gaps(credential: StoredCredential, key: StoredKey, rules: Rules) -> dict[str, int | None]:
    if credential.kind is KeyKind.PUBLIC or credential.environment is not Environment.PRODUCTION:
        return {}
    return {name: find_source_gap(key, name, credential, None, rules.occasion) for name in key.sources}


def _list_late(
    plan: Plan, credential: StoredCredential, key: StoredKey, rules: Rules, now: datetime
) -> Iterator[tuple[str, datetime | None]]:
    """Yield the sources that cannot be silent by the deadline, each with a deadline that would fit."""
    if plan.deadline is None:
        return
    begins_at = now if plan.window is None else plan.window.next_opening(now) or now
    begins_at += timedelta(seconds=plan.soak_seconds)
    for name, gap in _gaps(credential, key, rules).items():
        used_at = key.sources[name].last_at
        fitting = find_fitting_deadline(used_at, gap, plan.quiet_seconds, begins_at, plan.deadline)
        if fitting != plan.deadline:
            yield name, fitting
