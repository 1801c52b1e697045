"""The next dates of scheduled rotations, computed as a dry run that writes nothing."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from enum import StrEnum

from keyvault.access.scopes import EVERYWHERE, AccessScope
from keyvault.domain.canonical import JsonValue
from keyvault.domain.errors import KeyvaultError
from keyvault.domain.keys import KeyKind
from keyvault.domain.timestamps import format_timestamp
from keyvault.models import Account, Credential
from keyvault.models.row_count import RowCount
from rotation.domain.events import RotationState
from rotation.models import BlackoutCalendar, ScheduledCredential
from rotation.services.rotations.planning import plan_rotation
from rotation.services.schedules.candidates import (
    Candidate,
    DatePosition,
    OpenRotation,
    find_rotations,
    list_candidates,
    make_candidates,
    overrides_for,
)
from rotation.services.schedules.starting import format_failure

MAX_DRY_RUNS = 50
"""Maximum number of overdue credentials of a page whose plan is validated to find the obstacle."""

MAX_COUNTED = 5_000
"""Maximum number of rotations that are counted for one day."""

MAX_CALENDARS = 50
"""Maximum number of blackout calendars that are read."""

_GRACE = timedelta(minutes=5)
"""Time after which an unrequested date is overdue; the worker checks every half minute and may be busy."""


class DateState(StrEnum):
    PLANNED = "planned"
    AWAITING_APPROVAL = "awaiting_approval"
    OPEN = "open"
    OVERDUE = "overdue"
    NOT_SCHEDULABLE = "not_schedulable"


@dataclass(frozen=True, slots=True)
class ScheduledDate:
    """One credential's next date. `begins_at`: the window's opening; `ask_at`: when it is requested."""

    credential_id: str
    label: str
    merchant_id: str
    environment: str
    schedule: str
    state: DateState
    due_at: datetime | None = None
    begins_at: datetime | None = None
    ask_at: datetime | None = None
    rotation_id: str | None = None
    why: str = ""

    def as_json(self) -> dict[str, JsonValue]:
        return {
            "credential_id": self.credential_id,
            "label": self.label,
            "merchant_id": self.merchant_id,
            "environment": self.environment,
            "schedule": self.schedule,
            "state": self.state.value,
            "due_at": format_timestamp(self.due_at),
            "begins_at": format_timestamp(self.begins_at),
            "ask_at": format_timestamp(self.ask_at),
            "rotation_id": self.rotation_id,
            "why": self.why,
        }


@dataclass(frozen=True, slots=True)
class CalendarPage:
    """Some of the next dates. `after` and `has_more_undated`: see `CandidatePage`."""

    dates: list[ScheduledDate]
    after: DatePosition | None
    has_more_undated: bool


def list_next(
    now: datetime,
    until: datetime,
    scope: AccessScope = EVERYWHERE,
    after: DatePosition | None = None,
    *,
    is_by_request: bool = False,
    most: int | None = None,
) -> CalendarPage:
    """List the next date of each scheduled credential of the scope, those without a date first, then the earliest.

    `until`: later dates are omitted. `after`: the position after which the page begins; None: the first page.
    `is_by_request`: `until` limits when the rotations are requested, and not when they begin. `most`: see
    `list_candidates`.
    There is one date per credential, since the following one depends on when that rotation is completed.
    """
    dry_runs = MAX_DRY_RUNS
    found = []
    listed = list_candidates(scope, until, after, most)
    for candidate in listed.candidates:
        date = _next_date(candidate, now)
        if date.state is DateState.OVERDUE and dry_runs:
            dry_runs -= 1
            date = _try_out(candidate, date, now)
        if is_by_request or date.begins_at is None or date.begins_at <= until:
            found.append(date)
    first = datetime.min.replace(tzinfo=now.tzinfo)
    found.sort(key=lambda date: (date.begins_at or first, date.credential_id))
    return CalendarPage(found, listed.after, listed.has_more_undated)


def count_days(first: date, days: int, scope: AccessScope = EVERYWHERE) -> list[int]:
    """Count the rotations that schedules request on each day (UTC), at most MAX_COUNTED + 1 of each, by one query.

    A credential that was changed counts today, until a worker has computed its date within half a minute.
    """
    if scope.merchants is None:
        rows = ScheduledCredential.objects.filter(environment__in=sorted(scope.environments))
    else:
        accounts = Account.objects.filter(merchant__in=scope.merchants, environment__in=scope.environments)
        rows = ScheduledCredential.objects.filter(account__in=accounts.values("pk"))
    starts = [start_of_day(first + timedelta(days=number)) for number in range(days + 1)]
    counts = {
        f"day_{number}": RowCount(
            rows.filter(ask_at__gte=starts[number], ask_at__lt=starts[number + 1]).values("pk")[: MAX_COUNTED + 1]
        )
        for number in range(days)
    }
    # Counted beside any row: without one there is nothing to count.
    found = ScheduledCredential.objects.annotate(**counts).values_list(*counts)[:1]
    return list(found[0]) if found else [0] * days


def start_of_day(day: date) -> datetime:
    return datetime.combine(day, time(), UTC)


@dataclass(frozen=True, slots=True)
class CalendarBlackout:
    """A period of a calendar in which no scheduled rotation begins."""

    calendar: str
    begins_at: datetime
    ends_at: datetime
    why: str


def list_blackouts(since: datetime, until: datetime) -> list[CalendarBlackout]:
    """List the blackouts between these times, of the first MAX_CALENDARS calendars."""
    periods = [
        CalendarBlackout(
            row.name, datetime.fromisoformat(each["begins_at"]), datetime.fromisoformat(each["ends_at"]), each["why"]
        )
        for row in BlackoutCalendar.objects.order_by("name")[:MAX_CALENDARS]
        for each in row.periods
    ]
    return [period for period in periods if period.begins_at < until and period.ends_at > since]


def find_next(credential: Credential, now: datetime) -> ScheduledDate | None:
    """Find the next date of one private credential; None: no schedule applies."""
    candidate = make_candidates([credential]).get(credential.pk)
    if candidate is None:
        return None
    date = _next_date(candidate, now)
    return _try_out(candidate, date, now) if date.state is DateState.OVERDUE else date


@dataclass(frozen=True, slots=True)
class NextRotation:
    """The next rotation of a credential. `date`: None: no schedule applies. `open_rotation`: of any requester."""

    cryptoperiod: timedelta | None
    date: ScheduledDate | None
    open_rotation: OpenRotation | None


def list_next_of(credentials: Collection[Credential], now: datetime) -> dict[str, NextRotation]:
    """Return the next rotation of each credential by its id, by two queries and without a dry run.

    `credentials`: with their accounts and merchants, and `keys` prefetched with all active ones.
    """
    if not credentials:
        return {}
    rotations = find_rotations([each.pk for each in credentials])
    candidates = make_candidates((each for each in credentials if each.kind == KeyKind.PRIVATE), rotations)
    found = {each.pk: NextRotation(None, None, rotations[0].get(each.pk)) for each in credentials}
    for pk, candidate in candidates.items():
        period = timedelta(days=candidate.order.terms.cryptoperiod_days)
        found[pk] = NextRotation(period, _next_date(candidate, now), candidate.open_rotation)
    return found


def _next_date(candidate: Candidate, now: datetime) -> ScheduledDate:
    open_rotation, date = candidate.open_rotation, candidate.date
    if open_rotation is not None:
        is_undecided = open_rotation.state in {RotationState.AWAITING_APPROVAL, RotationState.REQUESTED}
        return _date(
            candidate,
            DateState.AWAITING_APPROVAL if is_undecided else DateState.OPEN,
            open_rotation.not_before,
            rotation_id=open_rotation.rotation_id,
            why="" if is_undecided else f"its rotation is open: {open_rotation.state.value.replace('_', ' ')}",
        )
    if candidate.obstacle or date is None:
        return _date(candidate, DateState.NOT_SCHEDULABLE, None, why=candidate.obstacle)
    begins_at = candidate.begins_at(now)
    if begins_at is None:
        return _date(candidate, DateState.NOT_SCHEDULABLE, None, why="the window has no further opening")
    if candidate.ask_at is not None and candidate.ask_at > now - _GRACE:
        return _date(candidate, DateState.PLANNED, begins_at, why=_why_then(candidate))
    return _date(candidate, DateState.OVERDUE, begins_at, why="the request is overdue; check that the worker runs")


def _why_then(candidate: Candidate) -> str:
    if candidate.not_again_before is not None and candidate.ask_at == candidate.not_again_before:
        return "requested again after it was rejected"
    is_late = candidate.date is not None and candidate.date.is_late
    return "later than its cryptoperiod: the window has no earlier opening" if is_late else ""


def _try_out(candidate: Candidate, date: ScheduledDate, now: datetime) -> ScheduledDate:
    """Validate the plan of an overdue date to find the obstacle, if any."""
    try:
        plan_rotation(candidate.credential, overrides_for(candidate, now), now)
    except KeyvaultError as error:
        return _date(candidate, DateState.NOT_SCHEDULABLE, None, why=format_failure(error))
    return date


def _date(
    candidate: Candidate, state: DateState, begins_at: datetime | None, *, why: str, rotation_id: str | None = None
) -> ScheduledDate:
    credential, date = candidate.credential, candidate.date
    return ScheduledDate(
        credential.credential_id,
        credential.label,
        credential.account.merchant_id,
        credential.account.environment,
        str(candidate.order.schedule),
        state,
        None if date is None else date.due_at,
        begins_at,
        candidate.ask_at,
        rotation_id,
        why,
    )
