"""Begin the rotations that schedules request, and keep the time of each credential's next request current.

Each tick does a bounded amount of work and continues where the last one stopped. Several workers may run it.
"""

import logging
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import F

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER
from keyvault.domain.canonical import JsonValue
from keyvault.domain.errors import KeyvaultError, RequestInvalidError
from keyvault.domain.keys import KeyKind, KeyState
from keyvault.domain.notifications import NoticeKind
from keyvault.models import Credential, Key, Notice
from keyvault.services.recording.authorization import authorize
from keyvault.services.recording.notifications import announce
from keyvault.services.recording.transaction import recorded
from rotation.domain.cryptoperiods import delay_after
from rotation.domain.states import CLOSED
from rotation.models import (
    Rotation,
    RotationSchedule,
    ScheduleCheck,
    ScheduledCredential,
    ScheduleSweep,
    StandingApproval,
)
from rotation.services.rotations.requests import begin_rotation
from rotation.services.schedules.candidates import BATCH, Candidate, find_candidates, overrides_for
from rotation.services.schedules.date_marks import add_missing, mark_scopes
from rotation.services.schedules.expiries import announce_expiries
from rotation.services.schedules.schedules import find_alarm_account, find_unreadable, scope_of
from rotation.services.schedules.standing_approvals import find_standing_approval

_log = logging.getLogger(__name__)

MAX_BEGUN = 100
"""Maximum number of rotations begun per tick, so that a new schedule of a large environment starts gradually."""

MAX_TRIED = 300
"""Maximum number of credentials tried per tick."""

MAX_BATCHES = 10
"""Maximum number of batches of marked credentials that a tick reads; most were only changed, and are not due yet."""

MAX_SWEPT = 5_000
"""Number of credentials after which a tick leaves the remaining sweeps to the next one."""

_ALARM_AFTER = 8
"""Number of consecutive refusals of one credential that raise an alarm: the last of them comes after two hours."""

_MAX_SWEEPS = 100
"""Maximum number of sweeps that one tick continues, in turns."""

_MAX_CHECKED = 100
"""Maximum number of schedules checked per tick."""

_CHECK_AGAIN = timedelta(hours=1)
"""Interval between two checks of a schedule that this release can read; an unreadable one is checked by each tick."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A due credential that only this worker tries. `before`: the reason of its last refusal."""

    candidate: Candidate
    row: ScheduledCredential
    before: str


def begin_due(now: datetime, environments: Collection[str] | None = None) -> list[str]:
    """Begin the due rotations of the environments that this process serves; return their ids.

    `environments`: those of them in which to begin; None: all.

    Safe to run concurrently: a worker claims a credential before it tries, and a credential has one open rotation. A
    credential that is refused is logged once, shown in the calendar, and tried again after a delay that grows. An
    unreadable schedule begins nothing and raises one alarm.
    """
    served = [each for each in settings.ENVIRONMENTS if environments is None or each in environments]
    _check_schedules(now, served)
    announce_expiries(now, served)
    _sweep(now, served)
    begun: list[str] = []
    tried = 0
    for _ in range(MAX_BATCHES):
        room = min(MAX_TRIED - tried, MAX_BEGUN - len(begun))
        due = _list_due(now, served)
        claims = _claim_due(due, now, room)
        begun += [rotation_id for claim in claims if (rotation_id := _try(claim, now)) is not None]
        tried += len(claims)
        is_all = len(due) < BATCH and len(claims) < room
        if is_all or tried >= MAX_TRIED or len(begun) >= MAX_BEGUN:
            break
    return begun


def _list_due(now: datetime, environments: Collection[str]) -> list[ScheduledCredential]:
    """List the credentials that are due, the longest due first; one indexed query per environment."""
    rows: list[ScheduledCredential] = []
    for environment in environments:
        due = ScheduledCredential.objects.filter(environment=environment, ask_at__lte=now)
        rows += due.order_by("ask_at", "pk")[:BATCH]
    return sorted(rows, key=lambda row: (row.ask_at, row.pk))[:BATCH]


# --- dates ----------------------------------------------------------------------------------------------------


def _claim_due(rows: list[ScheduledCredential], now: datetime, max_claims: int) -> list[Claim]:
    """Compute the dates of due credentials, and claim up to `max_claims` of those that are still due.

    A claim moves the date ahead before the credential is tried, so that a worker that dies counts as refused. A row
    that another worker writes meanwhile stays as that worker leaves it, due or not.
    """
    before = {row.pk: _values_of(row) for row in rows}
    claims = _compute_dates(rows, now, max_claims)
    stored = _store([row for row in rows if before[row.pk] != _values_of(row)])
    return [claim for claim in claims if claim.row.pk in stored]


def _values_of(row: ScheduledCredential) -> tuple[datetime | None, int, str]:
    return row.ask_at, row.refusals, row.why


def _compute_dates(rows: list[ScheduledCredential], now: datetime, max_claims: int = 0) -> list[Claim]:
    """Set the dates from the current keys and schedules, and claim up to `max_claims` of those that are due."""
    candidates = find_candidates([row.pk for row in rows])
    unnoted = _note_faults(candidates.values(), now)
    claims: list[Claim] = []
    for row in rows:
        candidate = candidates.get(row.pk)
        ask_at = None if candidate is None else candidate.ask_at
        if candidate is not None and ask_at is not None and ask_at <= now and max_claims:
            if len(claims) == max_claims:
                continue
            claims.append(Claim(candidate, row, row.why))
            _back_off(row, now)
        elif candidate is not None and candidate.order.schedule.pk in unnoted:
            _back_off(row, now)
        else:
            row.ask_at, row.refusals, row.why = ask_at, 0, ""
    return claims


def _back_off(row: ScheduledCredential, now: datetime) -> None:
    row.refusals += 1
    row.ask_at = now + delay_after(row.refusals)


def _store(rows: list[ScheduledCredential]) -> set[str]:
    """Write the rows that are unchanged since they were read, and not locked; return their keys."""
    if not rows:
        return set()
    with transaction.atomic():
        found = ScheduledCredential.objects.filter(pk__in=[row.pk for row in rows]).order_by("pk")
        current = dict(found.select_for_update(skip_locked=True).values_list("pk", "revision"))
        unchanged = [row for row in rows if current.get(row.pk) == row.revision]
        for row in unchanged:
            row.revision += 1
        ScheduledCredential.objects.bulk_create(
            unchanged,
            update_conflicts=True,
            unique_fields=["credential"],
            update_fields=["ask_at", "refusals", "why", "revision"],
        )
    return {row.pk for row in unchanged}


def _settle(row: ScheduledCredential, **changes: Any) -> None:
    """Write the result of a claim, unless the credential has been marked since."""
    rows = ScheduledCredential.objects.filter(pk=row.pk, revision=row.revision)
    rows.update(**changes, revision=F("revision") + 1)


# --- sweeps ---------------------------------------------------------------------------------------------------


def _sweep(now: datetime, environments: Collection[str]) -> None:
    """Continue the pending sweeps in turns, so that a small one never waits for a large one."""
    rows = ScheduleSweep.objects.filter(environment__in=environments).select_related("account")
    pending, room = deque(rows.order_by("pk")[:_MAX_SWEEPS]), MAX_SWEPT
    while pending and room > 0:
        sweep = pending.popleft()
        done = _sweep_batch(sweep, now)
        room -= max(done, 1)
        if done == BATCH:
            pending.append(sweep)


def _sweep_batch(sweep: ScheduleSweep, now: datetime) -> int:
    """Compute the next dates of a sweep; return their number, less than BATCH at its end."""
    sweeps = ScheduleSweep.objects.filter(pk=sweep.pk, after=sweep.after)
    if not sweep.after:
        # The facts are read after this, so they include the changes that recorded these sweeps.
        same = ScheduleSweep.objects.filter(environment=sweep.environment, account=sweep.account, after="")
        same.exclude(pk=sweep.pk).delete()
    scope = {"account__environment": sweep.environment} if sweep.account is None else {"account": sweep.account}
    credentials = Credential.objects.filter(**scope, kind=KeyKind.PRIVATE, pk__gt=sweep.after)
    ids = list(credentials.order_by("pk").values_list("pk", flat=True)[:BATCH])
    found = ScheduledCredential.objects.filter(pk__in=ids)
    if found.count() < len(ids):
        add_missing(ids)
    rows = list(found)
    _compute_dates(rows, now)
    # Also the unchanged ones: a worker that read them before, and computes from older facts, then stores nothing.
    stored = _store(rows)
    for row in rows:
        if row.pk not in stored:
            _mark_overtaken(row, now)
    if len(ids) < BATCH:
        sweeps.delete()
    else:
        sweeps.update(after=ids[-1])
        sweep.after = ids[-1]
    return len(ids)


def _mark_overtaken(row: ScheduledCredential, now: datetime) -> None:
    """Make a credential due whose row another writer holds, or has written from facts that may be older.

    One row at a time: a statement that holds no other lock cannot be part of a deadlock.
    """
    ScheduledCredential.objects.filter(pk=row.pk).update(ask_at=now, revision=F("revision") + 1)


# --- unreadable schedules -------------------------------------------------------------------------------------


def _check_schedules(now: datetime, environments: Collection[str]) -> None:
    """Verify that this release can read the schedules: raise one alarm for a fault, and resume after it."""
    checks = ScheduleCheck.objects.filter(check_at__lte=now, schedule__is_enabled=True)
    served = checks.filter(schedule__environment__in=environments).select_related(
        "schedule__account__merchant", "schedule__credential__account__merchant", "schedule__calendar"
    )
    for check in served.order_by("check_at")[:_MAX_CHECKED]:
        fault = find_unreadable(check.schedule)
        if fault:
            _note_fault(check.schedule, fault, now)
        elif check.fault:
            _resume(check, now)
        ScheduleCheck.objects.filter(pk=check.pk).update(check_at=now if fault else now + _CHECK_AGAIN)


def _note_faults(candidates: Iterable[Candidate], now: datetime) -> set[int]:
    """Record the faults of the unreadable schedules of these credentials; return the schedules for which that failed.

    Their credentials must not wait without a date, since no check would resume them.
    """
    unreadable = {each.order.schedule.pk: each.order for each in candidates if each.order.fault}
    return {pk for pk, order in unreadable.items() if not _note_fault(order.schedule, order.fault, now)}


def _note_fault(schedule: RotationSchedule, fault: str, now: datetime) -> bool:
    """Record why the schedule cannot be read, and raise an alarm unless that is known.

    Return whether that succeeded.
    """
    why = fault[:300]
    account = find_alarm_account(schedule)
    payload: dict[str, JsonValue] = {"schedule_id": schedule.pk, "scope": str(scope_of(schedule)), "why": why}
    try:
        ScheduleCheck.objects.bulk_create([ScheduleCheck(schedule=schedule, check_at=now)], ignore_conflicts=True)
        with transaction.atomic():
            unknown = ScheduleCheck.objects.filter(pk=schedule.pk).exclude(fault=why)
            if not unknown.update(fault=why, check_at=now) or account is None:
                return True
            grant = authorize(WORKER, P.ROTATIONS_BEGIN, account, now=now)
            with recorded(grant, P.ROTATIONS_BEGIN, "schedule.stalled", account=account, **payload):
                announce(grant, NoticeKind.SCHEDULE_STALLED, account, str(schedule.pk), **payload)
    except Exception:  # noqa: BLE001  errors are isolated per schedule
        _log.exception("an unreadable schedule raised no alarm", extra={"schedule": str(schedule)})
        return False
    _log.error("schedule stalled", extra={"schedule": str(schedule), "why": why})
    return True


def _resume(check: ScheduleCheck, now: datetime) -> None:
    """Compute the dates of a schedule that can be read again."""
    schedule = check.schedule
    with transaction.atomic():
        if ScheduleCheck.objects.filter(pk=check.pk, fault=check.fault).update(fault=""):
            mark_scopes([(schedule.environment, schedule.account, schedule.credential)], now)


# --- requests -------------------------------------------------------------------------------------------------


def _try(claim: Claim, now: datetime) -> str | None:
    """Begin the rotation of a claimed credential; return its id, or None."""
    try:
        rotation = begin(claim.candidate, now)
    except Exception as error:  # noqa: BLE001  errors are isolated per credential and recorded
        _note_refusal(claim, error, now)
        return None
    # Without a rotation the credential or its schedule has changed meanwhile, so its date is computed again.
    _settle(claim.row, ask_at=None if rotation is not None else now, refusals=0, why="")
    return None if rotation is None else rotation.rotation_id


def _note_refusal(claim: Claim, error: Exception, now: datetime) -> None:
    """Record a refusal in the database, for every worker and across restarts.

    A new reason is logged; a refusal that lasts raises an alarm.
    """
    why = format_failure(error)[:300]
    if claim.before != why:
        _log.warning(
            "scheduled rotation cannot be begun",
            exc_info=not isinstance(error, KeyvaultError),
            extra={"credential_id": claim.row.pk, "schedule": str(claim.candidate.order.schedule), "why": why},
        )
    _settle(claim.row, why=why)
    if claim.row.refusals >= _ALARM_AFTER:
        try:
            _raise_alarm(claim, why, now)
        except Exception:  # noqa: BLE001  errors are isolated per credential; the next refusal raises the alarm
            _log.exception("a lasting refusal raised no alarm", extra={"credential_id": claim.row.pk})


def _raise_alarm(claim: Claim, why: str, now: datetime) -> None:
    """Raise an alarm, at most one a day for a schedule: its keys may expire before a person looks at the calendar."""
    credential, schedule = claim.candidate.credential, claim.candidate.order.schedule
    sent = Notice.objects.filter(kind=NoticeKind.SCHEDULE_STALLED, subject=str(schedule.pk))
    if sent.filter(created_at__gte=now - timedelta(days=1)).exists():
        return
    account = credential.account
    payload: dict[str, JsonValue] = {
        "schedule_id": schedule.pk,
        "credential_id": credential.credential_id,
        "scope": str(scope_of(schedule)),
        "why": why,
    }
    grant = authorize(WORKER, P.ROTATIONS_BEGIN, account, now=now)
    with recorded(grant, P.ROTATIONS_BEGIN, "schedule.stalled", account=account, **payload):
        announce(grant, NoticeKind.SCHEDULE_STALLED, account, str(schedule.pk), **payload)
    _log.error("schedule stalled", extra={"schedule": str(schedule), "why": why})


def begin(candidate: Candidate, now: datetime) -> Rotation | None:
    """Request the candidate's rotation. Raises what `begin_rotation` raises.

    None: it was begun concurrently, or the schedule or its standing approval has changed since it was read.
    """
    credential, order = candidate.credential, candidate.order
    usable = Key.objects.filter(credential=credential, state=KeyState.ACTIVE).values_list("key_id", flat=True)
    if list(usable) != [candidate.key_id] or _has_open(credential):
        return None
    grant = authorize(WORKER, P.ROTATIONS_BEGIN, credential.account, now=now)
    standing_approval = find_standing_approval(order.schedule, now)
    try:
        with transaction.atomic():
            # The locks serialize this with a change of the schedule and with the end of the approval. They come in
            # the order in which a change of the schedule locks both.
            if not all(_lock_unchanged(row) for row in (order.schedule, standing_approval) if row is not None):
                return None
            return begin_rotation(
                grant,
                credential,
                overrides_for(candidate, now),
                author=order.schedule.author,
                schedule=order.schedule,
                standing_approval=standing_approval,
            )
    except KeyvaultError:
        if _has_open(credential):
            return None
        raise


def _lock_unchanged(row: RotationSchedule | StandingApproval) -> bool:
    """Lock the row until the end of the transaction; return whether it is unchanged since it was read."""
    rows = type(row).objects.select_for_update(no_key=True).filter(pk=row.pk, version=row.version)
    return bool(rows.values_list("pk"))


def format_failure(error: Exception) -> str:
    """Format why a rotation could not be begun, in one line."""
    if isinstance(error, RequestInvalidError) and error.faults:
        return "; ".join(f"{fault.pointer.strip('/')}: {fault.detail}" for fault in error.faults)
    return error.detail if isinstance(error, KeyvaultError) else type(error).__name__


def _has_open(credential: Credential) -> bool:
    return Rotation.objects.filter(credential=credential).exclude(state__in=CLOSED).exists()
