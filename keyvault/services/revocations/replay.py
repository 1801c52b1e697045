"""Compare the database with the revocation log, and revoke again what a restored backup brought back."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain

from django.db import connection, transaction
from django.db.models import Q

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.domain.canonical import JsonValue
from keyvault.domain.errors import StateConflictError
from keyvault.domain.ids import Subject
from keyvault.domain.keys import DEAD_STATES, KeyState
from keyvault.domain.revocation import RevocationReason
from keyvault.domain.revocation_log import CaughtUp, ConfirmedLines, Ended, Opened
from keyvault.domain.timestamps import format_timestamp
from keyvault.models import Account, CustomerToken, Merchant, MerchantStatus, ServiceToken
from keyvault.services.keys.lifecycle import get_key, reapply_revocation
from keyvault.services.recording.authorization import authorize
from keyvault.services.recording.revocation_log import ENDING, boot_id, read_lines
from keyvault.services.recording.transaction import recorded

_BATCH = 900
"""Ids in one query. SQLite accepts 999 parameters everywhere."""

_MAX_ATTEMPTS = 5
"""Maximum attempts on a row that another writer changes concurrently."""

_LIVING: Mapping[str, Q] = {
    "key": ~Q(state__in=DEAD_STATES),
    "service_token": Q(revoked_at__isnull=True),
    "customer_token": Q(revoked_at__isnull=True),
    "merchant": ~Q(status=MerchantStatus.OFFBOARDED),
}


@dataclass(slots=True)
class Comparison:
    """The difference between the revocation log and the database.

    `lost`: revoked in the log, but not in the database; or compromised in the log, but only deactivated in the
    database. `unknown`: revoked and without a row, so it authenticates nothing. `damaged`: line numbers. `highest`:
    newest change in the log. `newest_at`: time of its newest revocation; None: it has none. `counter`: newest change
    sequence drawn by the database. `installations`: ids that the log belongs to.
    """

    highest: int = 0
    newest_at: datetime | None = None
    counter: int = 0
    lines: int = 0
    lost: dict[Subject, Ended] = field(default_factory=dict)
    unknown: set[Subject] = field(default_factory=set)
    damaged: list[int] = field(default_factory=list)
    installations: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of a replay. `left`: not revoked, because concurrent writers kept changing the rows."""

    found: Comparison
    replayed: Sequence[Subject]
    left: Sequence[Subject]
    counter: int


def compare_revocation_log(more: Iterable[Ended] = ()) -> Comparison:
    """Read the whole revocation log and compare it with the database. A million lines take seconds.

    `more`: revocations that the log lacks. Expired customer tokens are skipped. Raises OSError if the log cannot be
    read.
    """
    found = Comparison()
    for batch in _batches(found, more, datetime.now(UTC)):
        _compare_batch(batch, found)
    # After the log: other processes may be writing, and a sequence is drawn before its line is written.
    found.counter = read_counter()
    return found


def have_ended(ends: Sequence[Ended]) -> bool:
    """Whether the database records the end of all of them, each in its final state."""
    found = Comparison()
    for begin in range(0, len(ends), _BATCH):
        _compare_batch(ends[begin : begin + _BATCH], found)
    return not (found.lost or found.unknown)


def replay_revocations(grant: Grant) -> Replay:
    """Revoke again what the revocation log records as revoked, each in its own transaction. Safe to kill and run again.

    The change sequence first moves past the newest change in the log, so that no receipt goes back. The grant is
    for the platform. Raises OSError if the log cannot be read.
    """
    found = compare_revocation_log()
    if found.counter < found.highest:
        with recorded(grant, P.REVOCATIONS_REPLAY, "changes.sequence_moved", was=found.counter, to=found.highest):
            _move_counter(found.highest)
    replayed: list[Subject] = []
    left: list[Subject] = []
    for subject, line in found.lost.items():
        (replayed if _end(grant, line) else left).append(subject)
    return Replay(found, replayed, left, read_counter())


def read_counter() -> int:
    """Return the newest change sequence that this database has drawn; 0 if none."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM keyvault_change_sequence_seq")
        else:
            cursor.execute("SELECT seq FROM sqlite_sequence WHERE name = 'keyvault_change'")
        row = cursor.fetchone()
    return 0 if row is None else int(row[0])


def _move_counter(sequence: int) -> None:
    """Move the sequence forward. A concurrent writer waits for this transaction or is already ahead."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("LOCK TABLE keyvault_change IN SHARE ROW EXCLUSIVE MODE")
            if read_counter() < sequence:
                cursor.execute("SELECT setval('keyvault_change_sequence_seq', %s)", [sequence])
            return
        cursor.execute(
            "UPDATE sqlite_sequence SET seq = max(seq, %s) WHERE name = 'keyvault_change'",
            [sequence],
        )
        if cursor.rowcount == 0:
            cursor.execute("INSERT INTO sqlite_sequence (name, seq) VALUES ('keyvault_change', %s)", [sequence])


# --- comparison -------------------------------------------------------------------------------------------


def _batches(found: Comparison, more: Iterable[Ended], now: datetime) -> Iterator[list[Ended]]:
    """Yield the logged revocations in file order, and then `more`.

    Record line counts, damage and installations in `found`.
    """
    confirmed = ConfirmedLines()
    batch: list[Ended] = []
    for line in chain(_confirmed_lines(confirmed, found), more):
        found.highest = max(found.highest, line.sequence)
        if not isinstance(line, Ended):
            continue
        found.newest_at = line.at if found.newest_at is None else max(found.newest_at, line.at)
        if not line.has_expired(now):
            batch.append(line)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    yield batch


def _confirmed_lines(confirmed: ConfirmedLines, found: Comparison) -> Iterator[Ended | CaughtUp]:
    for number, (_, line) in enumerate(read_lines(), 1):
        found.lines = number
        if line is None:
            found.damaged.append(number)
        else:
            if isinstance(line, Opened):
                found.installations.add(line.installation)
            yield from confirmed.add(line)
    yield from confirmed.list_unfinished(boot_id())


def _compare_batch(batch: Sequence[Ended], found: Comparison) -> None:
    for kind in ENDING:
        _compare(kind, {line.id: line for line in batch if line.kind == kind}, found)


def _compare(kind: str, ends: Mapping[str, Ended], found: Comparison) -> None:
    if not ends:
        return
    rows = ENDING[kind]._default_manager.filter(pk__in=list(ends))
    known = set(rows.values_list("pk", flat=True))
    lost = set(rows.filter(_LIVING[kind]).values_list("pk", flat=True))
    compromised = [key_id for key_id, line in ends.items() if line.reason == RevocationReason.KEY_COMPROMISE]
    if compromised:
        weaker = rows.filter(pk__in=compromised, state=KeyState.DEACTIVATED)
        lost.update(weaker.values_list("pk", flat=True))
    # The latest line about a subject is the one that counts.
    found.lost.update({(kind, name): line for name, line in ends.items() if name in lost})
    found.unknown.update((kind, name) for name in ends if name not in known)


# --- replay -----------------------------------------------------------------------------------------------


def _end(grant: Grant, line: Ended) -> bool:
    """Revoke again. Return False if another writer changed the row during each of _MAX_ATTEMPTS attempts."""
    for _ in range(_MAX_ATTEMPTS):
        try:
            _END[line.kind](grant, line)
        except StateConflictError:
            continue
        return True
    return False


def _end_key(grant: Grant, line: Ended) -> None:
    key = get_key(line.id)
    is_compromise = line.reason == RevocationReason.KEY_COMPROMISE
    if key is None or (key.state in DEAD_STATES and not (is_compromise and key.state == KeyState.DEACTIVATED)):
        return
    reason = RevocationReason(line.reason or RevocationReason.UNSPECIFIED)
    reapply_revocation(_account_grant(grant, key.credential.account), key, reason, journal=_line_details(line))


def _end_service_token(grant: Grant, line: Ended) -> None:
    token: ServiceToken | None = ServiceToken.objects.filter(pk=line.id, revoked_at__isnull=True).first()
    if token is not None:
        event = "service_token.revocation_replayed"
        with recorded(grant, P.REVOCATIONS_REPLAY, event, token_id=token.token_id, journal=_line_details(line)):
            token.compare_and_swap(revoked_at=grant.at)


def _end_customer_token(grant: Grant, line: Ended) -> None:
    rows = CustomerToken.objects.select_related("account__merchant")
    token: CustomerToken | None = rows.filter(pk=line.id, revoked_at__isnull=True).first()
    if token is not None:
        account_grant, event = _account_grant(grant, token.account), "customer_token.revocation_replayed"
        with recorded(
            account_grant,
            P.REVOCATIONS_REPLAY,
            event,
            account=token.account,
            token_id=token.token_id,
            journal=_line_details(line),
        ):
            token.compare_and_swap(revoked_at=grant.at)


def _end_merchant(grant: Grant, line: Ended) -> None:
    """Mark the merchant as offboarded. Its assets have lines of their own, or `offboard_merchant` is run again."""
    with transaction.atomic():
        list(Account.objects.select_for_update(no_key=True).filter(merchant_id=line.id).order_by("pk"))
        merchant: Merchant = Merchant.objects.select_for_update(no_key=True).get(pk=line.id)
        if merchant.status != MerchantStatus.OFFBOARDED:
            event = "merchant.offboarding_replayed"
            with recorded(
                grant, P.REVOCATIONS_REPLAY, event, merchant_id=merchant.merchant_id, journal=_line_details(line)
            ):
                merchant.compare_and_swap(status=MerchantStatus.OFFBOARDED)


_END: Mapping[str, Callable[[Grant, Ended], None]] = {
    "key": _end_key,
    "service_token": _end_service_token,
    "customer_token": _end_customer_token,
    "merchant": _end_merchant,
}


def _account_grant(grant: Grant, account: Account) -> Grant:
    return authorize(grant.principal, P.REVOCATIONS_REPLAY, account, now=grant.at)


def _line_details(line: Ended) -> dict[str, JsonValue]:
    """Describe the line of the revocation log for the audit entry."""
    return {"at": format_timestamp(line.at), "sequence": line.sequence}
