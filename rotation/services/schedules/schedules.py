"""Rotation schedules and their blackout calendars, written by operators; `starting` begins the due rotations."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from django.db import IntegrityError
from django.db.models import Q

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import OperatorPrincipal, is_claimed
from keyvault.access.scopes import AccessScope
from keyvault.domain.canonical import JsonValue, canonical_bytes
from keyvault.domain.environments import Environment
from keyvault.domain.errors import Fault, NotFoundError, RequestInvalidError, StateConflictError
from keyvault.domain.free_text import find_text_fault
from keyvault.domain.keys import KeyKind
from keyvault.models import Account, Credential
from keyvault.services.approvals.four_eyes import lock_row
from keyvault.services.merchants.merchants import find_account
from keyvault.services.operators.operators import operator_row
from keyvault.services.recording.transaction import Record, recorded
from rotation.domain.cryptoperiods import Terms, find_term_faults
from rotation.domain.plan_fields import FIELDS, PlanOverrides, Proof, default_of, with_defaults
from rotation.domain.policy import Plan, find_faults
from rotation.domain.windows import Window, coming_blackouts, read_blackouts
from rotation.models import (
    BlackoutCalendar,
    RotationSchedule,
    ScheduleCheck,
    StandingApproval,
    StandingApprovalState,
    explain_unreadable,
)
from rotation.models.standing_approvals import LIVE
from rotation.services.schedules.date_marks import mark_scopes

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?", re.ASCII)
_UNREADABLE = "The schedule cannot be read by this release"
_EXPIRY_POINTER = "/overrides/expires_in_days"
_SET_BY_SCHEDULE = ("not_before", "deadline", "window", "retire_at")
"""Plan overrides that a schedule sets itself for each rotation, so that a draft must leave them empty."""

MAX_OF_CALENDAR = 1_000
"""Maximum number of enabled schedules of one calendar: each change of the calendar validates and marks all of them."""

_MAX_NAMED = 10
"""Maximum number of schedules that an error names."""


@dataclass(frozen=True, slots=True)
class ScheduleScope:
    """The subject of a schedule: an environment, one account there, or one private credential."""

    environment: Environment
    account: Account | None = None
    credential: Credential | None = None

    @property
    def place(self) -> Account | None:
        """The account that a grant for the schedule names; None: the platform."""
        return self.account if self.credential is None else self.credential.account

    @property
    def within(self) -> AccessScope:
        """The accounts that a schedule of the platform applies to."""
        return AccessScope(environments=frozenset({self.environment}))

    def __str__(self) -> str:
        return str(self.credential or self.account or self.environment)


@dataclass(frozen=True, slots=True)
class ScheduleDraft:
    """The terms of a schedule: interval, window and plan overrides.

    `window` has no blackouts of its own: those of the `calendar` apply, as they are when a rotation is requested.
    """

    cryptoperiod_days: int
    jitter_days: int = 0
    lead_days: int = 0
    window: Window | None = None
    calendar: BlackoutCalendar | None = None
    overrides: PlanOverrides = field(default_factory=PlanOverrides)


def save_schedule(
    grant: Grant, scope: ScheduleScope, draft: ScheduleDraft, *, known: RotationSchedule | None = None
) -> RotationSchedule:
    """Create the scope's schedule, or change `known`, and enable it.

    The saving operator is the requester of each rotation that the schedule begins.

    Raises RequestInvalidError with every reason why it cannot be met. Raises StateConflictError when the scope has a
    schedule that the caller did not load, so that creating one never overwrites another.
    """
    faults = [*_scope_faults(scope), *_draft_faults(scope.environment, draft, grant.at)]
    if faults:
        raise RequestInvalidError("The schedule cannot be met.", faults)
    columns = _columns(grant, draft)
    row = find_schedule(scope)
    if row is not None and (known is None or known.pk != row.pk):
        raise StateConflictError(f"A schedule for {scope} exists already. Change that one.")
    try:
        with recorded(
            grant,
            P.SCHEDULES_WRITE,
            "schedule.saved",
            account=scope.place or scope.within,
            scope=str(scope),
            **_audit_details(draft),
        ) as record:
            _lock_calendar(draft.calendar, row)
            if row is not None:
                row.compare_and_swap(**columns)
            else:
                row = RotationSchedule(
                    environment=scope.environment,
                    account=scope.account,
                    credential=scope.credential,
                    created_at=grant.at,
                    **columns,
                )
                row.save()
            _note_change(grant, row, record)
    except IntegrityError as error:
        raise StateConflictError("The schedule was changed concurrently. Reload it.") from error
    return row


def disable_schedule(grant: Grant, schedule: RotationSchedule) -> None:
    """Disable the schedule: the next wider one applies, and open rotations continue."""
    if not schedule.is_enabled:
        raise StateConflictError("The schedule is disabled already.")
    scope = scope_of(schedule)
    with recorded(
        grant, P.SCHEDULES_WRITE, "schedule.disabled", account=scope.place or scope.within, **_about(schedule)
    ) as record:
        schedule.compare_and_swap(is_enabled=False)
        _note_change(grant, schedule, record)


def enable_schedule(grant: Grant, schedule: RotationSchedule) -> None:
    """Enable the schedule unchanged. Raises RequestInvalidError when it can no longer be met."""
    if schedule.is_enabled:
        raise StateConflictError("The schedule is enabled already.")
    faults = list(_draft_faults(Environment(schedule.environment), draft_of(schedule), grant.at))
    if faults:
        raise RequestInvalidError("The schedule can no longer be met. Change and save it.", faults)
    scope = scope_of(schedule)
    with recorded(
        grant, P.SCHEDULES_WRITE, "schedule.enabled", account=scope.place or scope.within, **_about(schedule)
    ) as record:
        _lock_calendar(schedule.calendar, schedule)
        schedule.compare_and_swap(is_enabled=True, **_author(grant))
        _note_change(grant, schedule, record)


def _note_change(grant: Grant, schedule: RotationSchedule, record: Record) -> None:
    """Have workers check the schedule and compute the dates of its credentials, in the transaction of its change."""
    _void_approvals(grant, [schedule], record, "the schedule was changed")
    ScheduleCheck.objects.update_or_create(schedule=schedule, defaults={"check_at": grant.at, "fault": ""})
    mark_scopes([(schedule.environment, schedule.account, schedule.credential)], grant.at)


def _void_approvals(grant: Grant, schedules: list[RotationSchedule], record: Record, why: str) -> None:
    """Void the standing approvals of these schedules, in the transaction of the change that they do not cover."""
    rows = StandingApproval.objects.filter(schedule__in=schedules, state__in=LIVE).order_by("pk")
    voided: list[JsonValue] = []
    for row in rows:
        row.compare_and_swap(state=StandingApprovalState.VOID, why=why, closed_at=grant.at)
        voided.append(row.pk)
    if voided:
        record.details["voided_standing_approvals"] = voided


def save_calendar(
    grant: Grant, name: str, periods: object, *, known: BlackoutCalendar | None = None
) -> BlackoutCalendar:
    """Create a calendar, or change `known`. `periods`: as `windows.read_blackouts` reads them.

    Raises RequestInvalidError, also for schedules that could no longer be met; StateConflictError when another
    calendar has that name.
    """
    faults = [] if _NAME.fullmatch(name) else [Fault("/name", "1 to 64 of a-z, 0-9 and inner hyphens")]
    try:
        blackouts = read_blackouts(periods, "/periods")
    except RequestInvalidError as error:
        blackouts, faults = (), [*faults, *error.faults]
    if faults:
        raise RequestInvalidError("The calendar is invalid.", faults)
    row = find_calendar(name)
    if row is not None and (known is None or known.pk != row.pk):
        raise StateConflictError(f"A calendar {name} exists already. Change that one.")
    stored: list[JsonValue] = [each.as_json() for each in blackouts]
    try:
        with recorded(grant, P.SCHEDULES_WRITE, "calendar.saved", name=name, periods=stored) as record:
            if row is None:
                row = BlackoutCalendar(name=name, periods=stored, created_at=grant.at)
                row.save()
            else:
                row.compare_and_swap(periods=stored)
            using = _using(row)
            _require_kept(using, grant.at)
            _void_approvals(grant, using, record, f"the calendar {name} was changed")
            mark_scopes(((each.environment, each.account, each.credential) for each in using), grant.at)
    except IntegrityError as error:
        raise StateConflictError("The calendar was changed concurrently. Reload it.") from error
    return row


def find_schedule(scope: ScheduleScope) -> RotationSchedule | None:
    """Find the schedule of exactly this scope."""
    rows = _rows().filter(environment=scope.environment, account=scope.account, credential=scope.credential)
    found: RotationSchedule | None = rows.first()
    return found


def find_scope(environment: Environment, merchant: str | None, credential_id: str | None) -> ScheduleScope:
    """Find the scope that these ids name.

    Raises NotFoundError for an unknown account, RequestInvalidError for an unknown credential.
    """
    if not credential_id:
        return ScheduleScope(environment, find_account(merchant, environment) if merchant else None)
    rows = Credential.objects.select_related("account__merchant").filter(pk=credential_id)
    if merchant:
        rows = rows.filter(account__merchant=merchant, account__environment=environment)
    credential = rows.first()
    if credential is None:
        # The same for an unknown merchant: the operator's scope may not have it.
        whose = f" of {merchant}/{environment}" if merchant else ""
        raise RequestInvalidError("Credential not found.", [Fault("/credential", f"not the id of a credential{whose}")])
    return ScheduleScope(environment, credential=credential)


def find_calendar(name: str) -> BlackoutCalendar | None:
    row: BlackoutCalendar | None = BlackoutCalendar.objects.filter(name=name).first()
    return row


def get_calendar(name: str) -> BlackoutCalendar:
    """Get the calendar. Raises NotFoundError."""
    row = find_calendar(name)
    if row is None:
        raise NotFoundError(f"There is no blackout calendar {name}.")
    return row


def list_all(environments: Iterable[str]) -> list[RotationSchedule]:
    """List the schedules of these environments, disabled ones included."""
    return list(_rows().filter(environment__in=list(environments)))


_OF_ENVIRONMENT = Q(account__isnull=True, credential__isnull=True)


def list_applicable(credentials: Iterable[Credential]) -> list[RotationSchedule]:
    """List the enabled schedules of these credentials, of their accounts and of their environments."""
    ids, accounts, environments = set(), set(), set()
    for credential in credentials:
        ids.add(credential.pk)
        accounts.add(credential.account_id)
        environments.add(credential.account.environment)
    scope = Q(credential__in=ids) | Q(account__in=accounts) | (_OF_ENVIRONMENT & Q(environment__in=environments))
    return list(_rows().filter(scope, is_enabled=True))


def place_of(schedule: RotationSchedule) -> Account | None:
    return schedule.account if schedule.credential is None else schedule.credential.account


def find_alarm_account(schedule: RotationSchedule) -> Account | None:
    """Find the account whose notices concern the schedule; for an environment's schedule, any account there."""
    accounts = Account.objects.select_related("merchant").filter(environment=schedule.environment)
    return place_of(schedule) or accounts.order_by("pk").first()


class UnreadableScheduleError(StateConflictError):
    """A stored schedule or its calendar has a field or value that this release does not know, or lacks one."""


def draft_of(schedule: RotationSchedule) -> ScheduleDraft:
    """Return what was saved. Raises UnreadableScheduleError."""
    try:
        window = None if schedule.window is None else Window.from_json(schedule.window)
        overrides = PlanOverrides.from_json(schedule.overrides)
    except Exception as error:
        # Content of a newer release or a damaged row can fail to parse in any way.
        raise UnreadableScheduleError(f"{_UNREADABLE}: {explain_unreadable(error)}.") from error
    return replace(partial_draft(schedule), window=window, overrides=overrides)


def partial_draft(schedule: RotationSchedule) -> ScheduleDraft:
    """Return the draft without window and plan overrides, the parts that this release may be unable to read."""
    days = schedule.cryptoperiod_days, schedule.jitter_days, schedule.lead_days
    return ScheduleDraft(*days, calendar=schedule.calendar)


def find_draft(schedule: RotationSchedule) -> ScheduleDraft | None:
    """Return what was saved, or None where this release cannot read it; for display."""
    try:
        return draft_of(schedule)
    except UnreadableScheduleError:
        return None


def read_schedule(schedule: RotationSchedule) -> tuple[Terms, PlanOverrides]:
    """Return the schedule's current terms and plan overrides. Raises UnreadableScheduleError."""
    draft = draft_of(schedule)
    try:
        return terms_of(draft), draft.overrides
    except RequestInvalidError as error:
        why = f"{_UNREADABLE}: calendar {schedule.calendar}, {explain_unreadable(error)}."
        raise UnreadableScheduleError(why) from error


def find_unreadable(schedule: RotationSchedule) -> str:
    """Return why this release cannot read the schedule; empty where it can."""
    try:
        read_schedule(schedule)
    except UnreadableScheduleError as error:
        return error.detail
    return ""


def terms_of(draft: ScheduleDraft) -> Terms:
    """Return the terms, whose window has the calendar's current blackouts."""
    window = draft.window
    if draft.calendar is not None and (blackouts := read_blackouts(draft.calendar.periods)):
        window = replace(window or Window(), blackouts=blackouts)
    return Terms(draft.cryptoperiod_days, draft.jitter_days, draft.lead_days, window)


def _rows() -> Any:
    return RotationSchedule.objects.select_related(
        "account__merchant", "credential__account__merchant", "calendar", "author"
    ).order_by("pk")


def _using(calendar: BlackoutCalendar) -> list[RotationSchedule]:
    return list(_rows().filter(calendar=calendar, is_enabled=True))


def _lock_calendar(calendar: BlackoutCalendar | None, schedule: RotationSchedule | None) -> None:
    """Lock the calendar, so that it stays as validated; a later save of it validates this schedule, too.

    Raises RequestInvalidError if it has MAX_OF_CALENDAR other schedules.
    """
    if calendar is None:
        return
    lock_row(calendar)
    others = RotationSchedule.objects.filter(calendar=calendar, is_enabled=True)
    if schedule is not None:
        others = others.exclude(pk=schedule.pk)
    if others[:MAX_OF_CALENDAR].count() == MAX_OF_CALENDAR:
        detail = f"a calendar of fewer than {MAX_OF_CALENDAR} enabled schedules; use another one, or one wider schedule"
        raise RequestInvalidError("The calendar has too many schedules.", [Fault("/calendar", detail)])


def _require_kept(schedules: Iterable[RotationSchedule], now: datetime) -> None:
    broken = []
    # Many schedules have the same terms, and validating them takes some milliseconds.
    known: dict[bytes, list[Fault]] = {}
    for schedule in schedules:
        draft = find_draft(schedule)
        if draft is None:
            continue  # It already begins nothing, and an alarm was raised.
        terms = canonical_bytes([schedule.environment, {**_audit_details(draft), "calendar": None}])
        if terms not in known:
            faults = _draft_faults(Environment(schedule.environment), draft, now)
            # No calendar causes this fault, and an earlier release may have accepted it.
            known[terms] = [fault for fault in faults if fault.pointer != _EXPIRY_POINTER]
        if known[terms]:
            broken.append(f"{scope_of(schedule)} ({known[terms][0].detail})")
    if broken:
        more = [f"and {len(broken) - _MAX_NAMED} more"] if len(broken) > _MAX_NAMED else []
        detail = f"these schedules could no longer be met: {'; '.join([*broken[:_MAX_NAMED], *more])}"
        raise RequestInvalidError("The calendar prevents scheduled rotations.", [Fault("/periods", detail)])


def scope_of(schedule: RotationSchedule) -> ScheduleScope:
    return ScheduleScope(Environment(schedule.environment), schedule.account, schedule.credential)


def _scope_faults(scope: ScheduleScope) -> Iterable[Fault]:
    if scope.account is not None and scope.credential is not None:
        yield Fault("/credential", "an account or a credential, not both")
    if scope.account is not None and scope.account.environment != scope.environment:
        yield Fault("/account", f"an account in {scope.environment}")
    if scope.credential is not None:
        if scope.credential.account.environment != scope.environment:
            yield Fault("/credential", f"a credential in {scope.environment}")
        if scope.credential.kind != KeyKind.PRIVATE:
            yield Fault("/credential", "a private key's credential; public keys are replaced with their apps")


def _draft_faults(environment: Environment, draft: ScheduleDraft, now: datetime) -> Iterable[Fault]:
    if draft.window is not None and draft.window.blackouts:
        yield Fault("/window/blackouts", "no blackouts here; use a calendar")
    terms = terms_of(draft)
    faults = list(find_term_faults(terms, now))
    yield from faults
    overrides = draft.overrides
    for name in _SET_BY_SCHEDULE:
        if getattr(overrides, name) is not None:
            yield Fault(f"/overrides/{name}", "the schedule sets it")
    if overrides.reason:
        reason = FIELDS["reason"]
        text_fault = reason.find_fault(overrides.reason, environment, now)
        text_fault = text_fault or find_text_fault(overrides.reason, reason.most)
        if text_fault is not None:
            yield Fault("/overrides/reason", text_fault)
    least = _least_expiry_days(environment, draft)
    if overrides.expires_in_days is not None and overrides.expires_in_days < least:
        yield Fault(
            _EXPIRY_POINTER,
            f"{least} or more: the key would expire before its rotation, which begins after the cryptoperiod and needs "
            "the soak and quiet period",
        )
    if not faults:
        plan = _sample_plan(environment, overrides, coming_blackouts(terms.window, now), now)
        for fault in find_faults(plan, environment, KeyKind.PRIVATE, None, now):
            yield Fault(f"/overrides{fault.pointer}", fault.detail)


def _least_expiry_days(environment: Environment, draft: ScheduleDraft) -> int:
    """Return the shortest lifetime of a key that the schedule can replace, in days.

    The day beyond full days of soak and quiet period is for the time until a worker begins the rotation.
    """
    values = with_defaults(draft.overrides, environment)
    needed = 0 if draft.overrides.predecessor_may_expire else values["soak_seconds"] + values["quiet_seconds"]
    return int(draft.cryptoperiod_days + needed // 86_400 + 1)


def _sample_plan(environment: Environment, overrides: PlanOverrides, window: Window | None, now: datetime) -> Plan:
    """Return the plan that the schedule would request today for a typical key."""
    not_before = (window.next_opening(now) if window is not None else None) or now
    values = with_defaults(overrides, environment)
    values |= {"not_before": not_before, "window": window, "retire_at": None, "reason": ""}
    values["deadline"] = not_before + timedelta(seconds=default_of("deadline", environment))
    values["proof"] = overrides.proof or Proof.TRAFFIC
    return Plan(credential_id="any", predecessor_key_id="any", **values)


def _columns(grant: Grant, draft: ScheduleDraft) -> dict[str, Any]:
    return {
        "cryptoperiod_days": draft.cryptoperiod_days,
        "jitter_days": draft.jitter_days,
        "lead_days": draft.lead_days,
        "window": None if draft.window is None else draft.window.as_json(),
        "calendar": draft.calendar,
        "overrides": draft.overrides.as_json(),
        "is_enabled": True,
        **_author(grant),
    }


def _author(grant: Grant) -> dict[str, Any]:
    """Return the author's columns. The author is the requester of the rotations, and cannot approve them."""
    operator = grant.principal
    if not isinstance(operator, OperatorPrincipal):
        raise TypeError("only operators save schedules")
    return {
        "author": operator_row(operator),
        "author_person": operator.person,
        "is_author_claimed": is_claimed(operator),
    }


def _audit_details(draft: ScheduleDraft) -> Mapping[str, JsonValue]:
    return {
        "cryptoperiod_days": draft.cryptoperiod_days,
        "jitter_days": draft.jitter_days,
        "lead_days": draft.lead_days,
        "window": None if draft.window is None else draft.window.as_json(),
        "calendar": None if draft.calendar is None else draft.calendar.name,
        "overrides": draft.overrides.as_json(),
    }


def _about(schedule: RotationSchedule) -> Mapping[str, JsonValue]:
    return {"scope": str(scope_of(schedule)), "schedule_id": schedule.pk}
