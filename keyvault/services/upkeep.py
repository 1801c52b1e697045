"""What falls due by itself, found in the database and done one by one; each may be killed and run again."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import lru_cache

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.access.principals import WORKER
from keyvault.domain.errors import DependencyUnavailableError, KeyvaultError, StateConflictError
from keyvault.models import Account, IssuanceRequest
from keyvault.services import (
    collection,
    idempotency,
    issuance,
    keys,
    leases,
    material,
    refusals,
    usage,
    webhook_deliveries,
)
from keyvault.services.authorization import authorize

_log = logging.getLogger(__name__)


def issue_due() -> int:
    """Issues every approved request that nobody is at work on; how many it issued."""
    now = datetime.now(UTC)
    requests = {f"issuance:{request.request_id}": request for request in issuance.list_approved()}
    return sum(issue_one(requests[subject]) for subject in leases.list_due(requests, now))


def issue_one(request: IssuanceRequest) -> bool:
    """Whether this call issued it. A failure is noted on the lease and tried again later."""
    now = datetime.now(UTC)
    lease = leases.claim(f"issuance:{request.request_id}", now)
    if lease is None:
        return False
    try:
        fresh = issuance.get_request(request.request_id)
        if fresh is None:
            return False
        issuance.issue_approved(fresh, lease, now)
    except DependencyUnavailableError as error:
        leases.pause(lease, now, error.internal or error.detail)
        _log.warning("issuance paused", extra={"request_id": request.request_id, "why": error.internal})
        return False
    except KeyvaultError as error:
        leases.postpone(lease, now, error.internal or error.detail)
        _log.warning("issuance will be tried again", extra={"request_id": request.request_id, "why": error.internal})
        return False
    leases.release(lease)
    return True


def expire_due() -> None:
    """Records expiries that the clock has decided: of requests nobody approved, and of keys."""
    now = datetime.now(UTC)
    for request in issuance.list_overdue(now):
        with _one_by_one():
            issuance.expire_issuance(_grant(request.account, now), request)
    for key in keys.list_expired(now):
        with _one_by_one():
            keys.expire_key(_grant(key.credential.account, now), key)


def burn_due() -> None:
    """Ends the keys that nobody collected in time. One in use goes on, and is told of for a person to see to."""
    now = datetime.now(UTC)
    for request in issuance.list_uncollected(now):
        with _one_by_one():
            collection.burn_uncollected(_grant(request.account, now), request)
    for request in issuance.list_used_uncollected(now):
        _warn_of_used(request.request_id, request.key_id or "")


def forget_due() -> None:
    """What is kept for a while only: sealed secrets, answers to retries, refusals that can be explained, old use."""
    now = datetime.now(UTC)
    idempotency.shred_due(now)
    idempotency.forget_expired(now)
    refusals.forget_old(now)
    webhook_deliveries.forget_old_deliveries(now)
    usage.forget_old(now)


def destroy_due() -> None:
    """Destroys the secret backend's copies of keys that are dead, were to be shown only once, or given to nobody."""
    now = datetime.now(UTC)
    _burn_withdrawn(now)
    for key in material.list_to_destroy():
        with _one_by_one():
            material.destroy_string(_grant(key.credential.account, now), key)


@lru_cache(maxsize=1000)
def _warn_of_used(request_id: str, key_id: str) -> None:
    """Once in the life of a process: the sweep comes by every few seconds, a person does not."""
    _log.warning("an uncollected key was used", extra={"request_id": request_id, "key_id": key_id})


def _burn_withdrawn(now: datetime) -> None:
    """Under the lease of its issuance, so that no worker is in the middle of it."""
    for request in issuance.list_withdrawn():
        lease = leases.claim(f"issuance:{request.request_id}", now, now_or_never=True)
        if lease is not None:
            with _one_by_one():
                issuance.burn_withdrawn(request, lease, now)
            leases.release(lease)


def _grant(account: Account, now: datetime) -> Grant:
    return authorize(WORKER, Permission.ISSUANCE_EXECUTE, account, now=now)


@contextmanager
def _one_by_one() -> Iterator[None]:
    """One row's trouble is not the next one's; each is looked at again next time."""
    try:
        yield
    except StateConflictError as error:
        _log.info("somebody was faster", extra={"why": error.internal})
    except KeyvaultError as error:
        _log.warning("put off", extra={"why": error.internal or error.detail})
