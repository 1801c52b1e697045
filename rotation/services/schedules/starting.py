"""Find the credentials that schedules apply to, and begin their rotations when due."""

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import Count, Max, Q

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER
from keyvault.domain.canonical import JsonValue
from keyvault.domain.errors import KeyvaultError, RequestInvalidError
from keyvault.domain.keys import KeyKind, KeyState
from keyvault.domain.notifications import NoticeKind
from keyvault.models import Account, Credential, Key, MerchantStatus, WorkLease
from keyvault.services.recording.authorization import authorize
from keyvault.services.recording.notifications import announce
from keyvault.services.recording.transaction import recorded
from keyvault.services.work import leases
from rotation.domain.cryptoperiods import NextDate, Terms, next_date
from rotation.domain.events import RotationState
from rotation.domain.plan_fields import PlanOverrides
from rotation.domain.states import CLOSED
from rotation.models import Rotation, RotationSchedule
from rotation.services.rotations.requests import begin_rotation
from rotation.services.schedules.schedules import (
    UnreadableScheduleError,
    list_enabled,
    partial_draft,
    place_of,
    read_schedule,
    scope_of,
)

S = RotationState

_log = logging.getLogger(__name__)

RETRY_DELAY = timedelta(days=7)
"""Pause after a scheduled rotation that ended without replacing the key; none if its approval expired."""

MAX_BEGUN = 100
"""Maximum number of rotations begun per tick, so that a new schedule of a large environment starts gradually."""

MAX_TRIED = 300
"""Maximum number of credentials tried per tick."""

_PREFIX = "schedule:"
"""Prefix of the subjects under which failures are recorded."""

_ENDED = (S.REJECTED, S.CANCELLED, S.ROLLED_BACK)


@dataclass(frozen=True, slots=True)
class StartOrder:
    """A schedule with its current terms, read once for all its credentials.

    `fault`: why it cannot be read. It then still takes precedence for its credentials, but begins nothing.
    """

    schedule: RotationSchedule
    terms: Terms
    overrides: PlanOverrides
    fault: str = ""


@dataclass(frozen=True, slots=True)
class OpenRotation:
    """A credential's open rotation, from any requester. `not_before`: None where its plan cannot be read."""

    rotation_id: str
    state: RotationState
    not_before: datetime | None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A scheduled credential. `key_id`: its one usable key; `obstacle`: why no rotation can be begun."""

    credential: Credential
    order: StartOrder
    key_id: str | None = None
    date: NextDate | None = None
    open_rotation: OpenRotation | None = None
    obstacle: str = ""
    not_again_before: datetime | None = None

    @property
    def ask_at(self) -> datetime | None:
        """When its rotation is requested; None: a person must act, or the open rotation must end, first."""
        if self.date is None or self.obstacle or self.open_rotation is not None:
            return None
        return max(self.date.ask_at, self.not_again_before or self.date.ask_at)

    def begins_at(self, now: datetime) -> datetime | None:
        """Return when a rotation requested at `now` begins; a missed date moves to the next opening."""
        if self.date is None:
            return None
        begins_at = max(self.date.begins_at or self.date.due_at, now)
        window = self.order.terms.window
        return begins_at if window is None else window.next_opening(begins_at)


def list_candidates(now: datetime, environments: Iterable[str], merchant: str | None = None) -> Iterator[Candidate]:
    """Yield every scheduled private credential with its narrowest enabled schedule. Read-only, in a few queries."""
    yield from _list_ordered(_read_orders(now, environments), merchant)


def _read_orders(now: datetime, environments: Iterable[str]) -> list[StartOrder]:
    return [_order(schedule, now) for schedule in list_enabled(environments)]


def _list_ordered(
    orders: Sequence[StartOrder], merchant: str | None = None, requested_before: datetime | None = None
) -> Iterator[Candidate]:
    """Yield candidates. `requested_before`: leaves out those that are certainly requested later than that, or never."""
    readable = [order for order in orders if not order.fault]
    if not (orders if requested_before is None else readable):
        return
    by_credential = {o.schedule.credential_id: o for o in orders if o.schedule.credential_id is not None}
    by_account = {o.schedule.account_id: o for o in orders if o.schedule.account_id is not None}
    by_environment = {
        o.schedule.environment: o for o in orders if o.schedule.account_id is None and o.schedule.credential_id is None
    }
    rows = (
        Credential.objects.filter(kind=KeyKind.PRIVATE)
        .filter(
            Q(account__environment__in=list(by_environment))
            | Q(account__in=list(by_account))
            | Q(pk__in=list(by_credential))
        )
        .select_related("account__merchant")
        .annotate(
            active_keys=Count("keys", filter=Q(keys__state=KeyState.ACTIVE)),
            newest_at=Max("keys__activated_at", filter=Q(keys__state=KeyState.ACTIVE)),
        )
        .order_by("newest_at", "pk")
    )
    if merchant is not None:
        rows = rows.filter(account__merchant_id=merchant)
    if requested_before is not None:
        soonest = min(_min_age(order.terms) for order in readable)
        rows = rows.filter(newest_at__lte=requested_before - soonest)
    found = [
        (row, by_credential.get(row.pk) or by_account.get(row.account_id) or by_environment[row.account.environment])
        for row in rows
    ]
    yield from _with_rotations([(row, order) for row, order in found if requested_before is None or not order.fault])


def _min_age(terms: Terms) -> timedelta:
    """Return the minimum time from a key's activation to the request for its replacement."""
    days = terms.cryptoperiod_days - terms.jitter_days - terms.lead_days
    if terms.window is None:
        return timedelta(days=days)
    return timedelta(days=min(days, terms.cryptoperiod_days / 2 - terms.lead_days))


def _with_rotations(found: list[tuple[Any, StartOrder]]) -> Iterator[Candidate]:
    if not found:
        return
    open_now = {
        credential_id: OpenRotation(rotation_id, S(state), _read_time(not_before))
        for credential_id, rotation_id, state, not_before in Rotation.objects.exclude(state__in=CLOSED).values_list(
            "credential_id", "rotation_id", "state", "plan__not_before"
        )
    }
    ended = dict(
        Rotation.objects.filter(schedule__isnull=False, state__in=_ENDED, predecessor__state=KeyState.ACTIVE)
        .values_list("predecessor_id")
        .annotate(at=Max("closed_at"))
    )
    active = dict(
        Key.objects.filter(state=KeyState.ACTIVE, credential__kind=KeyKind.PRIVATE)
        .order_by("activated_at")
        .values_list("credential_id", "key_id")
    )
    for credential, order in found:
        obstacle = order.fault or _find_obstacle(credential.account, credential.active_keys)
        key_id = active.get(credential.pk)
        newest_at = credential.newest_at
        date = None if newest_at is None or order.fault else next_date(order.terms, credential.pk, newest_at)
        ended_at = ended.get(key_id)
        yield Candidate(
            credential,
            order,
            key_id,
            date,
            open_now.get(credential.pk),
            obstacle,
            None if ended_at is None else ended_at + RETRY_DELAY,
        )


def _read_time(text: object) -> datetime | None:
    try:
        return datetime.fromisoformat(str(text))
    except ValueError:
        return None


def _find_obstacle(account: Account, active_keys: int) -> str:
    if account.merchant.status != MerchantStatus.ACTIVE:
        return f"the merchant is {account.merchant.status}"
    if account.status != MerchantStatus.ACTIVE:
        return f"the account is {account.status}"
    if active_keys == 0:
        return "it has no usable key"
    return "" if active_keys == 1 else "two of its keys verify"


def begin_due(now: datetime) -> list[str]:
    """Begin the due rotations of the environments that this process serves; return their ids.

    Safe to run concurrently, since a credential has one open rotation. A credential that cannot be begun is logged
    once, shown in the calendar, and retried after those that never failed and those that wait longer. An unreadable
    schedule begins nothing and raises one alarm.
    """
    orders = _read_orders(now, settings.ENVIRONMENTS)
    candidates = [
        candidate
        for candidate in _list_ordered(orders, requested_before=now)
        if candidate.ask_at is not None and candidate.ask_at <= now
    ]
    unreadable = [order for order in orders if order.fault]
    failed = _read_failures(
        {_subject(candidate.credential.pk) for candidate in candidates}
        | {_subject(order.schedule.pk) for order in unreadable}
    )
    for order in unreadable:
        _note_unreadable(order, failed.get(_subject(order.schedule.pk)), now)
    due = [(failed.get(_subject(candidate.credential.pk)), candidate.ask_at, candidate) for candidate in candidates]
    due = [item for item in due if item[0] is None or _may_be_tried(item[0], now)]
    due.sort(key=lambda item: (item[0] is not None, (item[0] and item[0].due_at) or item[1]))
    begun: list[str] = []
    for before, _, candidate in due[:MAX_TRIED]:
        if len(begun) == MAX_BEGUN:
            break
        try:
            rotation = begin(candidate, now)
        except Exception as error:  # noqa: BLE001  errors are isolated per credential and recorded
            _postpone(candidate, error, before, now)
        else:
            begun += [rotation.rotation_id] if rotation is not None else []
            if before is not None:
                leases.forget(before.subject)
    return begun


def _subject(identity: object) -> str:
    """Return the key under which a failing schedule (by its number) or credential is recorded."""
    return f"{_PREFIX}{identity}"


def _read_failures(current: Collection[str]) -> dict[str, WorkLease]:
    """Return the recorded failures of these subjects, and delete those of all others.

    A subject outside `current` is a schedule that is readable, disabled or gone, or a credential that is not due.
    """
    failed: dict[str, WorkLease] = {}
    for rows in leases.list_failed(_PREFIX):
        failed |= {row.subject: row for row in rows if row.subject in current}
        past = [row.subject for row in rows if row.subject not in current]
        if past:
            # One by one: concurrent workers that delete the same rows must not deadlock.
            for subject in set(past) - _list_elsewhere(past):
                leases.forget(subject)
    return failed


def _list_elsewhere(subjects: Collection[str]) -> set[str]:
    """Return the subjects in environments that this process does not serve. Their own workers delete them."""
    names = [subject.removeprefix(_PREFIX) for subject in subjects]
    numbers = [int(name) for name in names if name.isdecimal()]
    credentials = Credential.objects.filter(pk__in=names).exclude(account__environment__in=settings.ENVIRONMENTS)
    schedules = RotationSchedule.objects.filter(pk__in=numbers).exclude(environment__in=settings.ENVIRONMENTS)
    return {_subject(identity) for rows in (credentials, schedules) for identity in rows.values_list("pk", flat=True)}


def _may_be_tried(failure: WorkLease, now: datetime) -> bool:
    return failure.due_at is None or failure.due_at <= now


def _postpone(candidate: Candidate, error: Exception, before: WorkLease | None, now: datetime) -> None:
    """Record a failure in the database, for every worker and across restarts; log it if the reason is new."""
    credential_id, why = candidate.credential.pk, format_failure(error)[:300]
    if before is None or before.last_error != why:
        _log.warning(
            "scheduled rotation cannot be begun",
            exc_info=not isinstance(error, KeyvaultError),
            extra={"credential_id": credential_id, "schedule": str(candidate.order.schedule), "why": why},
        )
    leases.record_failure(_subject(credential_id), now, why)


def _note_unreadable(order: StartOrder, before: WorkLease | None, now: datetime) -> None:
    """Raise an alarm when a schedule becomes unreadable or the reason changes."""
    try:
        if before is None or before.last_error != order.fault[:300]:
            _raise_alarm(order, now)
    except Exception:  # noqa: BLE001  errors are isolated per schedule
        _log.exception("an unreadable schedule raised no alarm", extra={"schedule": str(order.schedule)})


def _raise_alarm(order: StartOrder, now: datetime) -> None:
    """Raise the alarm for the schedule's account; for an environment's schedule, for any account there."""
    schedule, why = order.schedule, order.fault[:300]
    accounts = Account.objects.select_related("merchant").filter(environment=schedule.environment)
    account = place_of(schedule) or accounts.order_by("pk").first()
    if account is None:
        return
    grant = authorize(WORKER, P.ROTATIONS_BEGIN, account, now=now)
    payload: dict[str, JsonValue] = {"schedule_id": schedule.pk, "scope": str(scope_of(schedule)), "why": why}
    with transaction.atomic():
        # One worker gets the lease; any other finds it not due after this commit.
        lease = leases.claim(_subject(schedule.pk), now)
        if lease is None:
            return
        with recorded(grant, P.ROTATIONS_BEGIN, "schedule.stalled", account=account, **payload):
            announce(grant, NoticeKind.SCHEDULE_STALLED, account, str(schedule.pk), **payload)
        leases.postpone(lease, now, why)
    _log.error("schedule stalled", extra={"schedule": str(schedule), "why": why})


def begin(candidate: Candidate, now: datetime) -> Rotation | None:
    """Request the candidate's rotation. None: it was begun concurrently. Raises what `begin_rotation` raises."""
    credential, order = candidate.credential, candidate.order
    usable = Key.objects.filter(credential=credential, state=KeyState.ACTIVE).values_list("key_id", flat=True)
    if list(usable) != [candidate.key_id] or _has_open(credential):
        return None
    grant = authorize(WORKER, P.ROTATIONS_BEGIN, credential.account, now=now)
    try:
        return begin_rotation(
            grant, credential, overrides_for(candidate, now), author=order.schedule.author, schedule=order.schedule
        )
    except KeyvaultError:
        if _has_open(credential):
            return None
        raise


def overrides_for(candidate: Candidate, now: datetime) -> PlanOverrides:
    """Return the overrides for a rotation now. Raises RequestInvalidError when the window no longer opens."""
    begins_at = candidate.begins_at(now)
    if begins_at is None:
        raise RequestInvalidError("The schedule's window has no further opening.")
    terms = candidate.order.terms
    overrides = replace(candidate.order.overrides, not_before=begins_at, window=terms.window)
    return (
        overrides if overrides.reason else replace(overrides, reason=f"cryptoperiod of {terms.cryptoperiod_days} days")
    )


def format_failure(error: Exception) -> str:
    """Format why a rotation could not be begun, in one line."""
    if isinstance(error, RequestInvalidError) and error.faults:
        return "; ".join(f"{fault.pointer.strip('/')}: {fault.detail}" for fault in error.faults)
    return error.detail if isinstance(error, KeyvaultError) else type(error).__name__


def _has_open(credential: Credential) -> bool:
    return Rotation.objects.filter(credential=credential).exclude(state__in=CLOSED).exists()


def _order(schedule: RotationSchedule, now: datetime) -> StartOrder:
    try:
        return StartOrder(schedule, *read_schedule(schedule, now))
    except UnreadableScheduleError as error:
        draft = partial_draft(schedule)
        terms = Terms(draft.cryptoperiod_days, draft.jitter_days, draft.lead_days)
        return StartOrder(schedule, terms, draft.overrides, error.detail)
