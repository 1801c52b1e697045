"""Run work that is due according to the database, row by row. Each step may be killed and run again."""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, TypeVar

from django.conf import settings
from django.db import connection

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.access.principals import WORKER
from keyvault.backends import meters
from keyvault.backends.base import BackendDeniedError
from keyvault.domain.environments import Environment
from keyvault.domain.errors import DependencyUnavailableError, KeyvaultError, StateConflictError
from keyvault.models import Account, Credential, IssuanceRequest, Key, ProviderConnection, WebhookEndpoint
from keyvault.services import idempotency, offboarding, retention
from keyvault.services.issuance import collection
from keyvault.services.issuance import requests as issuance
from keyvault.services.keys import lifecycle
from keyvault.services.pepper_rotation import propagation
from keyvault.services.peppers.ring import load_peppers
from keyvault.services.recording.authorization import authorize
from keyvault.services.recording.clock_alarm import report_clock
from keyvault.services.revocations import anchor, log_backfill
from keyvault.services.revocations.log_opening import late_comparison
from keyvault.services.secrets import provider_connections, stored_copies
from keyvault.services.secrets.backend import secret_backend
from keyvault.services.usage.retention import roll_up
from keyvault.services.webhooks import endpoints
from keyvault.services.work import leases
from keyvault.services.work.clock import ClockDiffersError, require_true_clock
from keyvault.services.work.leases import Lease
from keyvault.services.work.row_turns import RowTurns

_log = logging.getLogger(__name__)

_MAX_UNANSWERED = 3
"""Consecutive calls without a reply after which the backend counts as unavailable and the run ends."""

_MAINTENANCE_SECONDS = 20.0
"""Time in which one maintenance step starts backend calls or deletes rows, in seconds."""

_UNATTRIBUTED_RETRY = timedelta(hours=1)
"""Retry interval for a path that holds an unattributed copy. The reconciler reports it, and an operator resolves it."""

_USED_REPORT_INTERVAL = timedelta(days=1)
"""Interval between two warnings about one key. The sweep itself runs every few seconds."""

_Row = TypeVar("_Row", Key, Credential, ProviderConnection)


def issue_due() -> int:
    """Issue every approved request that no other worker holds. Return how many it issued."""
    batch = _turns.approved.visit(issuance.list_approved)
    requests = {f"issuance:{request.issuance_request_id}": request for request in batch}
    return sum(issue_one(requests[subject]) for subject in leases.list_due(requests, datetime.now(UTC)))


def issue_one(request: IssuanceRequest) -> bool:
    """Issue one request. Return whether this call issued it; a failure is recorded on the lease and retried later."""
    now = datetime.now(UTC)
    lease = leases.claim(f"issuance:{request.issuance_request_id}", now)
    if lease is None:
        return False
    try:
        fresh = issuance.get_request(request.issuance_request_id)
        if fresh is None:
            return False
        issuance.issue_approved(fresh, lease, now)
    except DependencyUnavailableError as error:
        leases.pause(lease, now, error.internal or error.detail)
        _log.warning(
            "issuance paused", extra={"issuance_request_id": request.issuance_request_id, "why": error.internal}
        )
        return False
    except KeyvaultError as error:
        if isinstance(error, BackendDeniedError):
            stored_copies.report_refusal(_grant(request.account, now), request.account, "issuing", error)
        leases.postpone(lease, now, error.internal or error.detail)
        _log.warning(
            "issuance will be retried",
            extra={"issuance_request_id": request.issuance_request_id, "why": error.internal},
        )
        return False
    except Exception as error:  # noqa: BLE001  isolated and logged, whatever it is
        _postpone_unexpected(lease, now, error)
        return False
    leases.release(lease)
    return True


def expire_due() -> None:
    """Record expiries that have passed: of unapproved requests and of keys."""
    now = datetime.now(UTC)
    if not _has_true_clock(now):
        return
    for request in _turns.overdue.visit(partial(issuance.list_overdue, now)):
        with _isolated():
            issuance.expire_issuance(_grant(request.account, now), request)
    for key in _turns.expired.visit(partial(lifecycle.list_expired, now)):
        with _isolated():
            lifecycle.expire_key(_grant(key.credential.account, now), key)


def discard_due() -> None:
    """Discard keys that were not collected in time. A key in use stays active and is reported for an operator."""
    now = datetime.now(UTC)
    if not _has_true_clock(now):
        return
    for request in _turns.uncollected.visit(partial(issuance.list_uncollected, now)):
        with _isolated():
            collection.discard_uncollected(_grant(request.account, now), request)
    _used_uncollected.report(now)


@dataclass(slots=True)
class UsedUncollected:
    """Report uncollected keys that are in use, each once a day per process, however many there are.

    `after`: the last one reported. `again_at`: when to start over; None: now.
    """

    after: tuple[datetime, str] | None = None
    again_at: datetime | None = None

    def report(self, now: datetime) -> None:
        """Log the next page of them."""
        if self.again_at is None or now >= self.again_at:
            self.after, self.again_at = None, now + _USED_REPORT_INTERVAL
        for request in issuance.list_used_uncollected(now, self.after):
            _log.warning(
                "an uncollected key was used",
                extra={"issuance_request_id": request.issuance_request_id, "key_id": request.key_id},
            )
            if request.issued_at is not None:
                self.after = request.issued_at, request.issuance_request_id


_used_uncollected = UsedUncollected()


def _by_environment() -> "defaultdict[Environment, RowTurns[Any]]":
    return defaultdict(RowTurns)


@dataclass(slots=True)
class MaintenanceTurns:
    """The position of each step in its due rows, in this process."""

    approved: RowTurns[IssuanceRequest] = field(default_factory=RowTurns)
    overdue: RowTurns[IssuanceRequest] = field(default_factory=RowTurns)
    withdrawn: RowTurns[IssuanceRequest] = field(default_factory=RowTurns)
    uncollected: RowTurns[IssuanceRequest] = field(default_factory=RowTurns)
    expired: RowTurns[Key] = field(default_factory=RowTurns)
    to_destroy: defaultdict[Environment, RowTurns[Key]] = field(default_factory=_by_environment)
    unsettled: defaultdict[Environment, RowTurns[Key]] = field(default_factory=_by_environment)
    paths: defaultdict[Environment, RowTurns[Credential]] = field(default_factory=_by_environment)
    connections: RowTurns[ProviderConnection] = field(default_factory=RowTurns)
    removed_connections: RowTurns[ProviderConnection] = field(default_factory=RowTurns)
    endpoints: RowTurns[WebhookEndpoint] = field(default_factory=RowTurns)


_turns = MaintenanceTurns()


def shred_due() -> None:
    """Shred sealed secrets whose retention is over."""
    now = datetime.now(UTC)
    if _has_true_clock(now):
        idempotency.shred_due(now)


def forget_due() -> None:
    """Roll usage up and delete expired rows, batch by batch, until none are left or the step's time is over.

    What fails is left to the next run and does not stop the others. Raises the first error at the end.
    """
    ends_at = time.monotonic() + _MAINTENANCE_SECONDS
    jobs = {"keyvault_usebucket (roll-up)": _roll_up_usage, **retention.list_deletions()}
    errors: list[Exception] = []
    while _has_true_clock(now := datetime.now(UTC)):
        done = 0
        for name, job in list(jobs.items()):
            try:
                done += job(now)
            except Exception as error:  # noqa: BLE001  logged here, raised below
                why = error.internal if isinstance(error, KeyvaultError) else ""
                _log.exception("rows were not rolled up or deleted", extra={"table": name, "why": why})
                errors.append(error)
                del jobs[name]
        if not done or time.monotonic() >= ends_at:
            break
    if errors:
        raise errors[0]


def _roll_up_usage(now: datetime) -> int:
    """Roll usage up, unless another worker does; return how many. One run takes a third of the lease's lifetime."""
    lease = leases.claim("usage:rollup", now)
    if lease is None:
        return 0
    try:
        return roll_up(now)
    finally:
        leases.release(lease)


def compare_revocation_log() -> None:
    """Compare the revocation log with the revocation anchor if the start could not, and revoke again what was lost."""
    late_comparison.run(datetime.now(UTC))


def backfill_revocation_log() -> None:
    """Append missing revocations to this host's revocation log, a bounded number at a time."""
    log_backfill.backfill_log(datetime.now(UTC))


def anchor_revocations() -> None:
    """Copy new revocations to the revocation anchor, a bounded number at a time."""
    anchor.anchor_revocations(datetime.now(UTC))


def destroy_due() -> None:
    """Destroy the backend's copies of keys that are dead, were handed over, or were never delivered."""
    _discard_withdrawn(datetime.now(UTC))
    for environment in map(Environment, settings.ENVIRONMENTS):
        if stored_copies.list_to_destroy(environment):
            due = _turns.to_destroy[environment].visit(partial(stored_copies.list_to_destroy, environment))
            with _exclusive(environment) as may_continue:
                _destroy(due, may_continue)


def _destroy(due: Iterator[Key], may_continue: Callable[[], bool]) -> None:
    """Destroy copies until the backend denies access or leaves several calls in a row unanswered."""
    unanswered = 0
    while unanswered < _MAX_UNANSWERED and may_continue() and (key := next(due, None)) is not None:
        now, account = datetime.now(UTC), key.credential.account
        with _isolated():
            try:
                stored_copies.destroy_string(_grant(account, now), key)
                unanswered = 0
            except DependencyUnavailableError:
                unanswered += 1
                raise
            except BackendDeniedError as error:
                unanswered = _MAX_UNANSWERED
                stored_copies.report_refusal(_grant(account, now), account, "destroying copies", error)
                raise


def renew_peppers() -> None:
    """Start using new pepper versions once every process has loaded them, and reseal secrets under the newest.

    Each run checks a batch of endpoints.
    """
    load_peppers.refresh_if_due()
    now = datetime.now(UTC)
    for version in propagation.list_staged():
        with _isolated():
            if propagation.is_loaded_everywhere(version, now):
                grant = authorize(WORKER, Permission.KEYS_REHASH, now=now)
                propagation.begin_hashing(grant, version)
    for endpoint in filter(endpoints.needs_resealing, _turns.endpoints.visit(endpoints.list_in_turn)):
        with _isolated():
            grant = authorize(WORKER, Permission.KEYS_REHASH, endpoint.account, now=now)
            endpoints.reseal_secrets(grant, endpoint)


def watch_backend() -> None:
    """Query the secret backend's health for /metrics and the log. Nothing depends on the result."""
    health = secret_backend().health()
    if settings.IS_VAULT:
        # Only in this periodic task: a console process would keep the state that it last saw.
        meters.note_ready(health.ready)
    if not health.ready:
        _log.warning("the secret backend is not ready", extra={"why": health.detail})


def settle_due() -> None:
    """Hide the backend's copies of keys in quarantine, and restore those of keys that left it.

    An unavailable backend delays only its own environment, and no rotation.
    """
    for environment in map(Environment, settings.ENVIRONMENTS):
        batch = _turns.unsettled[environment].visit(partial(stored_copies.list_unsettled, environment))
        _step_through(environment, {stored_copies.copy_subject(key): key for key in batch}, _settle)


def forget_paths_due() -> None:
    """Remove the backend paths of offboarded merchants' credentials once they are empty."""
    for environment in map(Environment, settings.ENVIRONMENTS):
        batch = _turns.paths[environment].visit(partial(offboarding.list_to_forget, environment))
        _step_through(environment, {offboarding.path_subject(row): row for row in batch}, _forget_path)


def settle_connections_due() -> None:
    """Bring providers' credentials in the backend in line with their rows, and erase those of removed connections."""
    now = datetime.now(UTC)
    rows = [
        *_turns.connections.visit(partial(provider_connections.list_unsettled, now)),
        *_turns.removed_connections.visit(partial(provider_connections.list_to_forget, now)),
    ]
    for environment in map(Environment, settings.ENVIRONMENTS):
        own = {f"connection:{row.pk}": row for row in rows if row.account.environment == environment}
        _step_through(environment, own, _settle_connection)


@contextmanager
def _exclusive(environment: Environment) -> Iterator[Callable[[], bool]]:
    """Let one worker at a time use an environment's backend for maintenance, for _MAINTENANCE_SECONDS.

    The limits keep a slow backend from occupying every thread that issues and rotates keys. Yields a callable that
    returns whether to continue; the next run processes the remaining rows.
    """
    lease = leases.claim(f"maintenance:{environment}", datetime.now(UTC), ignore_due_at=True)
    ends_at = time.monotonic() + _MAINTENANCE_SECONDS
    if lease is None:
        yield lambda: False
        return
    held = lease

    def may_continue() -> bool:
        if time.monotonic() >= ends_at:
            return False
        leases.renew(held, datetime.now(UTC))
        return True

    try:
        with _isolated():
            yield may_continue
    finally:
        leases.release(held)


def _step_through(
    environment: Environment, rows: Mapping[str, _Row], step: Callable[[_Row, Lease, datetime], datetime | None]
) -> None:
    """Step through the due rows, each under its lease, until the backend does not answer or denies access."""
    if not rows:
        return
    with _exclusive(environment) as may_continue:
        for subject in leases.list_due(rows, datetime.now(UTC)):
            if not may_continue() or not _run_step(subject, rows[subject], step):
                return


def _run_step(subject: str, row: _Row, step: Callable[[_Row, Lease, datetime], datetime | None]) -> bool:
    """Run one step under its lease. False: the next row would fail in the same way."""
    now = datetime.now(UTC)
    lease = leases.claim(subject, now)
    if lease is None:
        return True
    try:
        due_at = step(row, lease, now)
    except DependencyUnavailableError as error:
        leases.pause(lease, now, error.internal or error.detail, seconds=error.retry_after_seconds)
        _log.warning("postponed: the secret backend is unavailable", extra={"subject": subject, "why": error.internal})
        return False
    except KeyvaultError as error:
        leases.postpone(lease, now, error.internal or error.detail)
        _log.warning("postponed", extra={"subject": subject, "why": error.internal or error.detail})
        if isinstance(error, BackendDeniedError):
            account = row.credential.account if isinstance(row, Key) else row.account
            stored_copies.report_refusal(_grant(account, now), account, "the maintenance of stored copies", error)
            return False
    except Exception as error:  # noqa: BLE001  isolated and logged, whatever it is
        _postpone_unexpected(lease, now, error)
    else:
        leases.release(lease, due_at=due_at)
    return True


def _settle_connection(row: ProviderConnection, lease: Lease, now: datetime) -> None:
    grant = authorize(WORKER, Permission.BACKEND_RECONCILE, row.account, now=now)
    if row.removed_at is None:
        provider_connections.settle_connection(grant, row)
    else:
        provider_connections.forget_connection(grant, row)


def _settle(row: Key, lease: Lease, now: datetime) -> None:
    # Read again under the lease: the key may have been settled or changed since it was listed.
    key = lifecycle.get_key(row.key_id)
    if key is not None:
        stored_copies.settle_string(_grant(key.credential.account, now), key, lease)


def _forget_path(row: Credential, lease: Lease, now: datetime) -> datetime | None:
    """Forget a path. Return when to retry if something is stored there that must not be erased."""
    is_forgotten = offboarding.forget_path(_grant(row.account, now), row)
    return None if is_forgotten else now + _UNATTRIBUTED_RETRY


def _discard_withdrawn(now: datetime) -> None:
    """Discard keys of withdrawn requests, under the issuance lease so that no worker is issuing them."""
    for request in _turns.withdrawn.visit(issuance.list_withdrawn):
        lease = leases.claim(f"issuance:{request.issuance_request_id}", now, ignore_due_at=True)
        if lease is not None:
            with _isolated():
                issuance.discard_withdrawn(request, lease, now)
            leases.release(lease)


def _has_true_clock(now: datetime) -> bool:
    """Whether this host's clock is accurate enough for irreversible actions. If not, raise one alarm for the host."""
    try:
        require_true_clock()
    except ClockDiffersError as error:
        _log.error("irreversible actions are refused: the clock is wrong", extra={"why": error.internal})
        report_clock(error, now)
        return False
    return True


def _grant(account: Account, now: datetime) -> Grant:
    return authorize(WORKER, Permission.ISSUANCE_EXECUTE, account, now=now)


@contextmanager
def _isolated() -> Iterator[None]:
    """Isolate errors per row; a failed row is retried on the next run."""
    try:
        yield
    except StateConflictError as error:
        _log.info("skipped: another worker changed the row", extra={"why": error.internal})
    except KeyvaultError as error:
        _log.warning("postponed", extra={"why": error.internal or error.detail})
    except Exception as error:  # noqa: BLE001  isolated and logged, whatever it is
        _require_database(error)
        _log.exception("postponed: a row cannot be processed")


def _postpone_unexpected(lease: Lease, now: datetime, error: Exception) -> None:
    """Postpone a row that cannot be processed, for example because the database refuses it."""
    _require_database(error)
    leases.postpone(lease, now, type(error).__name__)
    _log.exception("postponed: a row cannot be processed", extra={"subject": lease.subject})


def _require_database(error: Exception) -> None:
    """Raise the error if the connection is lost: every other row would fail in the same way."""
    if not connection.is_usable():
        raise error
