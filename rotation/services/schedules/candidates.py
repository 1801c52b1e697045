"""Scheduled credentials, with what decides when their rotations are requested. Read-only."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from django.db.models import F, Prefetch, QuerySet
from django.db.models.fields.tuple_lookups import Tuple, TupleGreaterThan

from keyvault.access.scopes import AccessScope
from keyvault.domain.errors import RequestInvalidError
from keyvault.domain.keys import KeyKind, KeyState
from keyvault.models import Account, Credential, Key, MerchantStatus
from keyvault.models.union_parts import limit_part
from rotation.domain.cryptoperiods import NextDate, Terms, next_date
from rotation.domain.events import RotationState
from rotation.domain.plan_fields import PlanOverrides
from rotation.domain.states import ABANDONED, CLOSED
from rotation.domain.windows import coming_blackouts
from rotation.models import Rotation, RotationSchedule, ScheduledCredential
from rotation.services.schedules.schedules import (
    UnreadableScheduleError,
    list_applicable,
    partial_draft,
    read_schedule,
)

S = RotationState

RETRY_DELAY = timedelta(days=7)
"""Pause after a scheduled rotation that ended without replacing the key; none if its approval expired."""

BATCH = 500
"""Maximum number of credentials whose facts are read in one batch."""

MAX_LISTED = 250
"""Maximum number of credentials that a page lists with a date, and of those that it lists without one."""

DatePosition = tuple[datetime, str]
"""When the rotation of a listed credential is requested, and the credential's id."""

_DELAYING = sorted(ABANDONED - {S.EXPIRED})
"""States of an ended rotation that delay the next scheduled one by `RETRY_DELAY`."""


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


KnownRotations = tuple[dict[str, OpenRotation], dict[str | None, datetime]]
"""The open rotation of each credential, and when the last scheduled one of each active predecessor ended."""


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


@dataclass(frozen=True, slots=True)
class CandidatePage:
    """Some scheduled credentials. `after`: where the next page begins; None: no other one has a date.

    `has_more_undated`: credentials without a date are missing.
    """

    candidates: list[Candidate]
    after: DatePosition | None
    has_more_undated: bool


def list_candidates(
    scope: AccessScope,
    until: datetime | None = None,
    after: DatePosition | None = None,
    most: int | None = None,
) -> CandidatePage:
    """List the scheduled credentials that are due first and others without a date, up to `most` or MAX_LISTED of each.

    `until`: rotations that are requested later are omitted. `after`: a page without those that have no date.
    """
    places, most = _list_places(scope), MAX_LISTED if most is None else most
    due, waiting = [], []
    for place in places:
        rows = ScheduledCredential.objects.filter(**place)
        dates = rows.filter(ask_at__isnull=False) if until is None else rows.filter(ask_at__lte=until)
        due.append(dates if after is None else dates.filter(TupleGreaterThan(Tuple(F("ask_at"), F("pk")), after)))
        if after is None:
            waiting.append(rows.filter(ask_at__isnull=True))
    positions = (
        _read_first([*due, *waiting], most)
        if len(places) > 1
        else [*_read_first(due, most), *_read_first(waiting, most)]
    )
    undated = [pk for ask_at, pk in positions if ask_at is None]
    dated = [(ask_at, pk) for ask_at, pk in positions if ask_at is not None]
    if len(places) > 1:
        # The database orders those of one time: it may compare ids in another way than Python does.
        dated.sort(key=lambda position: position[0])
        last_at = dated[most][0] if len(dated) > most else None
        first = [pk for ask_at, pk in dated if last_at is None or ask_at <= last_at]
        earliest = ScheduledCredential.objects.filter(pk__in=first, ask_at__isnull=False)
        dated = list(earliest.order_by("ask_at", "pk").values_list("ask_at", "pk")[: most + 1])
    ids = [pk for _, pk in dated[:most]] + sorted(undated)[:most]
    found = [
        candidate
        for start in range(0, len(ids), BATCH)
        for candidate in find_candidates(ids[start : start + BATCH]).values()
    ]
    next_after = dated[most - 1] if len(dated) > most else None
    return CandidatePage(found, next_after, has_more_undated=len(undated) > most)


def _read_first(selections: list[QuerySet[ScheduledCredential]], most: int) -> list[tuple[datetime | None, str]]:
    """Return the first positions of each selection, by one walk through an index for each of them.

    One condition over all of them would sort all rows. Several selections are returned in no particular order.
    """
    first = [rows.order_by("ask_at", "pk") for rows in selections]
    if len(first) == 1:
        return list(first[0].values_list("ask_at", "pk")[: most + 1])
    parts = [limit_part(rows, most + 1).values_list("ask_at", "pk") for rows in first]
    return list(parts[0].union(*parts[1:], all=True)) if parts else []


def _list_places(scope: AccessScope) -> list[dict[str, Any]]:
    """Return the conditions of the scope's environments, or those of its accounts if it names merchants."""
    if scope.merchants is None:
        return [{"environment": environment} for environment in sorted(scope.environments)]
    accounts = Account.objects.filter(merchant__in=scope.merchants, environment__in=scope.environments)
    return [{"account": pk} for pk in accounts.values_list("pk", flat=True)]


def find_candidates(credential_ids: Collection[str]) -> dict[str, Candidate]:
    """Return the private and scheduled credentials among these, by id, in a few queries for up to BATCH."""
    active = Key.objects.filter(state=KeyState.ACTIVE).only("credential_id", "state", "activated_at")
    rows = Credential.objects.filter(pk__in=credential_ids, kind=KeyKind.PRIVATE).select_related("account__merchant")
    return make_candidates(rows.prefetch_related(Prefetch("keys", active)))


def make_candidates(credentials: Iterable[Credential], rotations: KnownRotations | None = None) -> dict[str, Candidate]:
    """Return the scheduled ones of these private credentials. `keys`: prefetched, with all active ones.

    `rotations`: those of the credentials, if they were read before.
    """
    ordered = _with_orders(list(credentials))
    if not ordered:
        return {}
    open_now, ended_at = rotations or find_rotations([credential.pk for credential, _ in ordered])
    found = {}
    for credential, order in ordered:
        active = [key for key in credential.keys.all() if key.state == KeyState.ACTIVE]
        newest = max(active, key=_activated_at, default=None)
        key_id, newest_at = (None, None) if newest is None else (newest.key_id, newest.activated_at)
        ended = ended_at.get(key_id)
        found[credential.pk] = Candidate(
            credential,
            order,
            key_id,
            next_date(order.terms, credential.pk, newest_at) if newest_at is not None and not order.fault else None,
            open_now.get(credential.pk),
            order.fault or _find_obstacle(credential.account, len(active)),
            None if ended is None else ended + RETRY_DELAY,
        )
    return found


def _activated_at(key: Key) -> datetime:
    at: datetime = key.activated_at or key.created_at
    return at


def _with_orders(credentials: list[Any]) -> list[tuple[Any, StartOrder]]:
    """Pair each credential with its narrowest enabled schedule, and leave out those without one."""
    orders = [_order(schedule) for schedule in list_applicable(credentials)]
    by_scope = {
        (order.schedule.environment, order.schedule.account_id, order.schedule.credential_id): order for order in orders
    }
    found = []
    for credential in credentials:
        environment = credential.account.environment
        scopes = [
            (environment, None, credential.pk),
            (environment, credential.account_id, None),
            (environment, None, None),
        ]
        order = next((by_scope[scope] for scope in scopes if scope in by_scope), None)
        if order is not None:
            found.append((credential, order))
    return found


def _order(schedule: RotationSchedule) -> StartOrder:
    try:
        return StartOrder(schedule, *read_schedule(schedule))
    except UnreadableScheduleError as error:
        draft = partial_draft(schedule)
        terms = Terms(draft.cryptoperiod_days, draft.jitter_days, draft.lead_days)
        return StartOrder(schedule, terms, draft.overrides, error.detail)


def find_rotations(credential_ids: Collection[str]) -> KnownRotations:
    """Return the open rotation of each credential, and when the last scheduled one of each predecessor ended.

    Only predecessors that are still active have an end.
    """
    rows = Rotation.objects.filter(credential__in=credential_ids)
    ended = rows.filter(schedule__isnull=False, state__in=_DELAYING, predecessor__state=KeyState.ACTIVE)
    columns = ("credential_id", "rotation_id", "state", "plan__not_before", "predecessor_id", "closed_at")
    open_now, ended_at = dict[str, OpenRotation](), dict[str | None, datetime]()
    found = rows.exclude(state__in=CLOSED).values_list(*columns).union(ended.values_list(*columns), all=True)
    for credential_id, rotation_id, state, not_before, predecessor_id, closed_at in found:
        if S(state) not in CLOSED:
            open_now[credential_id] = OpenRotation(rotation_id, S(state), _read_time(not_before))
        elif closed_at is not None:
            ended_at[predecessor_id] = max(closed_at, ended_at.get(predecessor_id, closed_at))
    return open_now, ended_at


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


def overrides_for(candidate: Candidate, now: datetime) -> PlanOverrides:
    """Return the overrides for a rotation now. Raises RequestInvalidError when the window no longer opens."""
    begins_at = candidate.begins_at(now)
    if begins_at is None:
        raise RequestInvalidError("The schedule's window has no further opening.")
    terms = candidate.order.terms
    window = coming_blackouts(terms.window, now)
    overrides = replace(candidate.order.overrides, not_before=begins_at, window=window)
    return (
        overrides if overrides.reason else replace(overrides, reason=f"cryptoperiod of {terms.cryptoperiod_days} days")
    )
