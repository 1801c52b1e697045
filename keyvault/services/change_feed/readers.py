"""Readers: verifiers that follow the change feed over HTTP and have no log-in to the database.

A reader is a verifier like any other: receipts wait for it, and a rotation's silence waits for its reports. After a
response it may answer from memory for its token's staleness bound, counted from a time before the poll.

**Guarantee.** Once the receipt of a change is complete, no reader answers from the state before it.
`read_changes` records that the reader is alive, and then polls. A change that the poll does not show is therefore
committed later, and its receipt waits for the reader: until it confirms the change, or until it has been stale for half
its bound.

**Confirmation.** A reader owes the confirmation of one sequence at a time: the first offered one, and after it the
newest. It has its bound for each. Otherwise reads and registrations get 410, and `seen_at` is not renewed, so that
receipts stop waiting for it after at most five bounds, whatever it does (later while transactions stay open). Then it
may register again.

**Position.** `after` is a confirmed sequence that an earlier response offered: every change up to it was in that
response or an earlier one. Changes above it are in every response until a later sequence is confirmed, so a reader
applies some of them again. Changes that a live reader has not confirmed are not deleted (`forget_old_changes`). If this
database never offered a reader's position, the database was restored, and lacks changes that the reader has seen: the
reader starts again.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from django.db import transaction
from django.db.models import F, Model, Subquery
from django.db.models.functions import Now

from keyvault.access.permissions import Permission
from keyvault.access.principals import Service
from keyvault.domain.errors import (
    CursorExpiredError,
    DependencyUnavailableError,
    Fault,
    RequestInvalidError,
    StateConflictError,
)
from keyvault.domain.ids import Subject
from keyvault.domain.timestamps import format_timestamp
from keyvault.models import (
    Confirmation,
    Credential,
    CustomerToken,
    FeedReader,
    Key,
    ServiceToken,
    UsageReporter,
    Verifier,
)
from keyvault.models.usage import UseOutcome
from keyvault.services.change_feed.follower import find_confirmed_here
from keyvault.services.change_feed.receipts import MAX_SEQUENCE
from keyvault.services.recording.changes import Row, poll_feed
from keyvault.services.recording.signals import changes_confirmed
from keyvault.services.usage.recorder import LOST_AFTER, Uses, register_reporter, store_report
from keyvault.services.work.deletion import delete_batch

ENTRY_POINT: Final = "reader"
"""The entry point of readers, shown in receipts."""

MAX_NAME_LENGTH: Final = 40
MAX_CHANGES: Final = 2_000
"""Maximum changes in one response. A reader that is further behind starts again."""

MAX_USES: Final = 100
"""Maximum rows of one usage report. Long rows fill a body of 64 KiB sooner."""

OLDEST_USE: Final = timedelta(days=1)
"""Maximum age of a reported use."""

_WITHOUT_DIGESTS: Final = (UseOutcome.ALLOWED, UseOutcome.DENIED, UseOutcome.REFUSED)
"""Outcomes that every reader reports. Exposures take proof of possession, and probes an entry point for tokens."""

_FORGOTTEN_AFTER: Final = timedelta(hours=1)
"""Time after which a silent reader is deleted. It then starts again."""

_CONFIRM_SECONDS: Final = 1.0
_CONFIRM_PAUSE_SECONDS: Final = 0.02


@dataclass(frozen=True, slots=True)
class ReadChanges:
    """Result of one read.

    `sequence`: the confirmed sequence to read on from. `rows`: the visible changes above `after`, within the token's
    scope. `staleness_seconds`: how long the reader may answer from memory.
    """

    reader_id: str
    sequence: int
    rows: list[Row]
    staleness_seconds: int


def read_changes(service: Service, name: str, after: int | None, now: datetime) -> ReadChanges:
    """Read the changes after a sequence. `after` None: register a reader, whose memory is empty.

    Raises CursorExpiredError when the reader must start again or has not confirmed in time, StateConflictError when the
    token has too many readers, DependencyUnavailableError when open transactions delay the first position.
    """
    began_at = time.monotonic()
    token = ServiceToken.objects.get(pk=service.token_id)
    staleness = token.max_staleness_seconds
    reader_id = _id_of(service, name)
    if after is None:
        was_live = _register(service, reader_id, token, now)
        confirmed, rows = _first_position(), []
        if was_live:
            # Its memory may be in use: this may be a late copy of an earlier request.
            _await_confirmation(reader_id, confirmed)
        else:
            # Its memory is empty, so no receipt has to wait for its first confirmation.
            Verifier.objects.filter(pk=reader_id, confirmed_sequence__lt=confirmed).update(confirmed_sequence=confirmed)
    else:
        confirmed_before = _renew(service, reader_id, token, after)
        # Before the poll: each of these changes is visible to it.
        confirmed_here = find_confirmed_here()
        if time.monotonic() - began_at > staleness / 4:
            raise DependencyUnavailableError("The database did not answer in time. Read again.")
        batch = poll_feed(after)
        rows = batch.rows
        confirmed = max(after, min(confirmed_here, batch.drawn) if batch.holders else batch.drawn)
        if confirmed > confirmed_before:
            _await_confirmation(reader_id, confirmed)
        if len(rows) > MAX_CHANGES:
            raise CursorExpiredError(f"There are more than {MAX_CHANGES} changes. Start again with an empty memory.")
    FeedReader.objects.filter(pk=reader_id, offered_sequence__lt=confirmed).update(offered_sequence=confirmed)
    return ReadChanges(reader_id, confirmed, _in_scope(service, rows), staleness)


def confirm_changes(service: Service, name: str, sequence: int, now: datetime) -> str:
    """Record that a reader has applied every change up to a sequence that was offered to it. Return the reader's id.

    Repeatable. Raises CursorExpiredError for an unknown reader, StateConflictError for a sequence never offered.
    """
    reader = FeedReader.objects.filter(pk=_id_of(service, name)).first()
    row = None if reader is None else Verifier.objects.filter(pk=reader.pk, stopped_at__isnull=True).first()
    if reader is None or row is None:
        raise CursorExpiredError("The reader is unknown. Start again with an empty memory.")
    if sequence > reader.offered_sequence:
        raise StateConflictError(
            f"The sequence {sequence} was not offered to this reader. Confirm at most {reader.offered_sequence}."
        )
    above = row.confirmed_sequence
    if sequence > above:
        with transaction.atomic():
            Verifier.objects.filter(pk=reader.pk, confirmed_sequence__lt=sequence).update(confirmed_sequence=sequence)
            Confirmation.objects.bulk_create(
                [Confirmation(verifier_id=reader.pk, sequence=sequence, at=Now())], ignore_conflicts=True
            )
        changes_confirmed.send(None, above=above, through=sequence, now=now)
    return reader.pk


@dataclass(frozen=True, slots=True)
class UsageReport:
    """A reader's numbered report. All its uses up to `flushed_through` are in this report or in an earlier one.

    `peppers`: the newest version of each set that the reader has loaded; empty for a reader without peppers.
    `is_final`: the reader deregisters.
    """

    number: int
    flushed_through: datetime
    uses: Sequence["ReportedUse"]
    peppers: dict[str, int]
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class ReportedUse:
    key_id: str
    endpoint: str
    source: str
    user_agent: str
    origin: str
    outcome: UseOutcome
    count: int
    first_at: datetime
    last_at: datetime


def report_usage(service: Service, name: str, report: UsageReport, now: datetime) -> str:
    """Store a report; a repeated number adds nothing. Return the reader's id.

    Raises CursorExpiredError for an unknown reader, StateConflictError for new uses under an old number, and
    RequestInvalidError for a key outside the token's scope, an outcome that takes a proof of possession which the
    reader cannot check, or a time that the clocks of reader and server do not allow.
    """
    reader_id = _id_of(service, name)
    if not FeedReader.objects.filter(pk=reader_id).exists():
        raise CursorExpiredError("The reader is unknown. Start again with an empty memory.")
    later = UsageReporter.objects.filter(pk=reader_id, report__gt=report.number)
    if later.filter(flushed_through_at__lt=report.flushed_through).exists():
        # A new report under an old number. Ignoring it like a late copy of an earlier one would lose its uses.
        raise StateConflictError(
            f"An earlier report has the number {report.number}. Give each process a reader name of its own."
        )
    faults = [*_time_faults(report, now), *_key_faults(service, report.uses), *_outcome_faults(service, report.uses)]
    if faults:
        raise RequestInvalidError("The usage report is invalid.", faults)
    uses = [_row_of(service, use) for use in report.uses]
    through, is_final = report.flushed_through, report.is_final
    if not store_report(reader_id, report.number, through, uses, report.peppers, is_final=is_final):
        raise CursorExpiredError("The reader is unknown. Start again with an empty memory.")
    if is_final:
        with transaction.atomic():
            Verifier.objects.filter(pk=reader_id).update(stopped_at=Now())
            FeedReader.objects.filter(pk=reader_id).delete()
    return reader_id


def forget_old_readers(now: datetime) -> int:
    """Delete a batch of readers that were silent for an hour. Return how many.

    Their rows as verifiers stay for receipts, stopped.
    """
    running = Verifier.objects.filter(entry_point=ENTRY_POINT, stopped_at__isnull=True)
    # By the database's clock: receipts wait for no verifier that has stopped.
    running.filter(seen_at__lt=Now() - _FORGOTTEN_AFTER).update(stopped_at=F("seen_at"))
    old = FeedReader.objects.filter(created_at__lt=now - _FORGOTTEN_AFTER).order_by("created_at")
    return delete_batch(old.exclude(pk__in=running.values_list("pk")))


def _id_of(service: Service, name: str) -> str:
    return f"{service.lineage}.{name}"


def _register(service: Service, reader_id: str, token: ServiceToken, now: datetime) -> bool:
    """Register a reader. Return whether it was live already. Raises CursorExpiredError, StateConflictError."""
    with transaction.atomic():
        _require_room(service, reader_id, token)
        reader = FeedReader.objects.filter(pk=reader_id).first()
        row = Verifier.objects.filter(pk=reader_id, stopped_at__isnull=True).annotate(now=Now()).first()
        was_live = row is not None and _is_live(row)
        fields: dict[str, Any] = {"lineage": service.lineage, "offered_sequence": 0, "created_at": now}
        if was_live:
            _require_confirmed(reader, row, token)
        else:
            fields |= {"awaited_sequence": 0, "awaited_since": None}
        FeedReader.objects.update_or_create(pk=reader_id, defaults=fields)
        alive = {"seen_at": Now(), "staleness_ms": _staleness_ms(token), "stopped_at": None}
        Verifier.objects.update_or_create(
            pk=reader_id, defaults=alive, create_defaults={**alive, "entry_point": ENTRY_POINT, "started_at": Now()}
        )
        reporter = UsageReporter.objects.filter(pk=reader_id)
        if reporter.exists():
            # A reader that did not deregister may have uses to report. Silence waits for them.
            reporter.filter(stopped_at__isnull=False).update(flushed_through_at=now)
            reporter.update(stopped_at=None, lost_at=None)
        else:
            scope = service.scope
            register_reporter(reader_id, scope.environments, {}, now, merchants=scope.merchants)
    return was_live


def _require_room(service: Service, reader_id: str, token: ServiceToken) -> None:
    """Raise StateConflictError if the token has its maximum of other live readers. Call it in a transaction."""
    # The lock keeps two concurrent readers from both taking the last place.
    ServiceToken.objects.select_for_update(of=("self",)).get(pk=token.pk)
    others = FeedReader.objects.filter(lineage=service.lineage).exclude(pk=reader_id).values_list("pk")
    rows = Verifier.objects.filter(pk__in=others, stopped_at__isnull=True).annotate(now=Now())
    live = sum(_is_live(row) for row in rows)
    if live >= token.max_readers:
        raise StateConflictError(
            f"The token has {live} readers already, and may have {token.max_readers}. Stop one, or use another token."
        )


def _renew(service: Service, reader_id: str, token: ServiceToken, after: int) -> int:
    """Record that the reader is alive; return its confirmed sequence. Call it before the poll.

    Raises CursorExpiredError, StateConflictError.
    """
    reader = FeedReader.objects.filter(pk=reader_id).first()
    row = Verifier.objects.filter(pk=reader_id, stopped_at__isnull=True).annotate(now=Now()).first()
    if reader is None or row is None or not row.confirmed_sequence <= after <= reader.offered_sequence:
        raise CursorExpiredError("The reader is unknown, or fell behind. Start again with an empty memory.")
    _require_confirmed(reader, row, token)
    if row.now - row.seen_at >= timedelta(seconds=token.max_staleness_seconds / 4):
        with transaction.atomic():
            if not _is_live(row):
                # Others may have taken its place meanwhile.
                _require_room(service, reader_id, token)
            alive = {"seen_at": Now(), "staleness_ms": _staleness_ms(token)}
            if not Verifier.objects.filter(pk=reader_id, stopped_at__isnull=True).update(**alive):
                raise CursorExpiredError("The reader was forgotten meanwhile. Start again with an empty memory.")
    return int(row.confirmed_sequence)


def _await_confirmation(reader_id: str, sequence: int) -> None:
    """Note since when the reader owes the confirmation of a sequence, unless it owes that of an earlier one."""
    confirmed = Verifier.objects.filter(pk=reader_id).values("confirmed_sequence")
    # A later sequence that was offered meanwhile counts from the read that finds the earlier one confirmed.
    FeedReader.objects.filter(pk=reader_id, awaited_sequence__lte=Subquery(confirmed)).update(
        awaited_sequence=sequence, awaited_since=Now()
    )


def _require_confirmed(reader: FeedReader | None, row: Any, token: ServiceToken) -> None:
    """Raise CursorExpiredError if the reader owes a confirmation for longer than its bound.

    `row`: as for `_is_live`, read after the reader.
    """
    bound = timedelta(seconds=token.max_staleness_seconds)
    if reader is None or reader.awaited_since is None or reader.awaited_sequence <= row.confirmed_sequence:
        return
    if row.now - reader.awaited_since > bound:
        raise CursorExpiredError(
            f"The reader has not confirmed the sequence {reader.awaited_sequence} for {bound.seconds} seconds. Start "
            "again with an empty memory. Repeat the registration until receipts no longer wait for the reader."
        )


def _is_live(row: Any) -> bool:
    """Whether receipts wait for the verifier. `row` has the database's time as `now`."""
    return bool(row.seen_at + timedelta(milliseconds=row.staleness_ms) >= row.now)


def _staleness_ms(token: ServiceToken) -> int:
    """Return how long receipts wait for a silent reader after `seen_at`, in milliseconds: one and a half bounds.

    `seen_at` may be a quarter of the bound old when a read begins, and a read may take another quarter until its poll.
    """
    return 1500 * token.max_staleness_seconds


def _first_position() -> int:
    """Return a confirmed sequence for a reader with an empty memory. Raises DependencyUnavailableError."""
    confirmed_here = find_confirmed_here()
    batch = poll_feed(MAX_SEQUENCE)
    if not batch.holders:
        return batch.drawn
    if confirmed_here:
        return min(confirmed_here, batch.drawn)
    last_drawn, holders = batch.drawn, batch.holders
    until = time.monotonic() + _CONFIRM_SECONDS
    while time.monotonic() < until:
        time.sleep(_CONFIRM_PAUSE_SECONDS)
        holders &= poll_feed(MAX_SEQUENCE).holders
        if not holders:
            return last_drawn
    raise DependencyUnavailableError("Open transactions delay the first position. Try again.")


def _in_scope(service: Service, rows: Iterable[Row]) -> list[Row]:
    """Return the rows about accounts within the token's scope. Rows about endpoints concern every account."""
    rows = list(rows)
    keys = _accounts_of(rows, "key", Key, "key_id", "credential__account__")
    credentials = _accounts_of(rows, "credential", Credential, "credential_id", "account__")
    tokens = _accounts_of(rows, "customer_token", CustomerToken, "token_id", "account__")
    known = {**keys, **credentials, **tokens}
    return [row for row in rows if _is_in_scope(service, row.subject, known)]


def _accounts_of(
    rows: Iterable[Row], kind: str, model: type[Model], column: str, account: str
) -> dict[Subject, tuple[str, str]]:
    """Return merchant id and environment of each subject of the kind, in one query."""
    ids = {identity for row in rows for found, identity in (row.subject,) if found == kind}
    if not ids:
        return {}
    columns = (column, f"{account}merchant_id", f"{account}environment")
    found = model._default_manager.filter(**{f"{column}__in": ids}).values_list(*columns)
    return {(kind, identity): (merchant_id, environment) for identity, merchant_id, environment in found}


def _is_in_scope(service: Service, subject: Subject, known: dict[Subject, tuple[str, str]]) -> bool:
    kind, identity = subject
    scope = service.scope
    if subject in known:
        return scope.has(*known[subject])
    if kind == "endpoint":
        return True
    if kind == "service_token":
        return Permission.KEYS_REPLICATE_DIGESTS in service.permissions
    if kind == "merchant":
        return scope.merchants is None or identity in scope.merchants
    # An account's id is "acme/sandbox". A limit's is "acme/sandbox orders.create", or for all "sandbox orders.create".
    merchant_id, _, environment = identity.partition(" ")[0].rpartition("/")
    if kind in {"account", "limit"}:
        return scope.has(merchant_id, environment) if merchant_id else environment in scope.environments
    return False


def _time_faults(report: UsageReport, now: datetime) -> Iterable[Fault]:
    latest = now + LOST_AFTER
    if report.flushed_through > latest:
        yield Fault("/flushed_through", f"is later than the server's time, {format_timestamp(now)}; correct the clock")
    for number, use in enumerate(report.uses):
        if not now - OLDEST_USE <= use.first_at <= use.last_at <= latest:
            yield Fault(
                f"/uses/{number}",
                f"first_at and last_at must be in this order, within {OLDEST_USE.days} day before now",
            )


def _key_faults(service: Service, uses: Sequence[ReportedUse]) -> Iterable[Fault]:
    columns = ("key_id", "credential__account__merchant_id", "account_environment")
    found = Key.objects.filter(key_id__in={use.key_id for use in uses}).values_list(*columns)
    known = {key_id for key_id, *account in found if service.scope.has(*account)}
    for number, use in enumerate(uses):
        if use.key_id not in known:
            yield Fault(f"/uses/{number}/key_id", "there is no such key within the token's scope")


def _outcome_faults(service: Service, uses: Sequence[ReportedUse]) -> Iterable[Fault]:
    if Permission.KEYS_REPLICATE_DIGESTS in service.permissions:
        return
    for number, use in enumerate(uses):
        if use.outcome not in _WITHOUT_DIGESTS:
            yield Fault(f"/uses/{number}/outcome", f"only a token with keys:replicate_digests reports {use.outcome}")


def _row_of(service: Service, use: ReportedUse) -> Uses:
    outcome = UseOutcome.PROBED if service.is_probe else use.outcome
    first, last = use.first_at.timestamp(), use.last_at.timestamp()
    source = use.source or service.token_id
    return (use.key_id, use.endpoint, source, use.user_agent, use.origin, outcome.value, use.count, first, last)
