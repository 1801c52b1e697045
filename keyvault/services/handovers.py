"""An issued key that leaves inside a wrapping token: handed over, confirmed, or suspected and made anew.

issued → token out → confirmed: collected
                   → asked for again, unopened: taken back, the key burned quietly, and another issued
                   → gone, and nobody confirmed: an alarm, the key burned, approved again and issued anew
                   → gone, and the key is in use: collected, unless somebody says that it did not open for them
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER, Operator
from keyvault.backends.base import Wrapped
from keyvault.domain.environments import Environment
from keyvault.domain.errors import NotFoundError, StateConflictError
from keyvault.domain.issuance import Delivery, IssuanceState
from keyvault.models import IssuanceRequest, Key, WrappedHandover
from keyvault.services import wrapping
from keyvault.services.authorization import authorize
from keyvault.services.collection import is_asked_by, record_collection, require_collectable
from keyvault.services.issuance import get_request
from keyvault.services.leases import Lease, claim, hold, release
from keyvault.services.material import require_served
from keyvault.services.recording import recorded

_EITHER = frozenset({P.ISSUANCE_COLLECT, P.ISSUANCE_EXECUTE})

TAKEN_BACK = (
    "The wrapping token given before was not opened. It was taken back with its key, and another key is made under the "
    "same approval: collect that one in a moment."
)
SUSPECTED = (
    "The wrapping token was opened by somebody, or expired: that may be an interception. The key was ended, and "
    "another is made under the same approval."
)
SUSPECTED_AGAIN = (
    "The wrapping token was opened by somebody, or expired, once too often: the key was ended and none is made anew. "
    "Find out who opens them, then ask again."
)
SUSPECTED_IN_USE = (
    "The wrapping token was opened by somebody, and the key is in use: it goes on until a person decides. If it is "
    "nobody of yours, report the key as compromised."
)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A token that has no row yet; nobody else is at work on the request while the lease is held."""

    request: IssuanceRequest
    key: Key
    wrapped: Wrapped
    lease: Lease


def hand_over_wrapped(grant: Grant, request: IssuanceRequest) -> Wrapped:
    """A token that opens once to the issued key, for whoever asked for it.

    Raises what `prepare_handover` raises.
    """
    prepared = prepare_handover(grant, request)
    try:
        record_handover(grant, prepared)
    finally:
        release(prepared.lease)
    return prepared.wrapped


def prepare_handover(grant: Grant, request: IssuanceRequest) -> Prepared:
    """What `record_handover` then notes; outside any transaction. Its lease ends with it, or by itself.

    Raises NotFoundError to everybody but whoever asked for the key; StateConflictError when there is nothing to
    collect, when somebody else collects this moment, or when a token was given before: an unopened one is taken back
    with its key, and one that is gone is recorded as a possible interception, see `suspect_handover`;
    BackendUnavailableError.
    """
    _require_asker(grant, request)
    lease = _claimed(request, grant.at)
    try:
        fresh = _fresh(request)
        former = wrapping.find_open(fresh.request_id)
        if former is not None and former.used_at is not None and not wrapping.is_ended(former):
            raise StateConflictError(_suspect(grant, fresh, former, lease))
        key = require_collectable(fresh, grant.at)
        if fresh.plan_digest != fresh.plan().digest():
            raise StateConflictError("The request is not what was approved.", internal=f"{fresh.request_id} digest")
        if former is not None and not wrapping.is_ended(former):
            end = _take_back if wrapping.is_unopened(former) else _suspect
            raise StateConflictError(end(grant, fresh, former, lease))
        return Prepared(fresh, key, wrapping.wrap_key(key), lease)
    except BaseException:
        release(lease)
        raise


def record_handover(grant: Grant, prepared: Prepared) -> None:
    """Notes the token; the request stays issued until its receiver confirms."""
    request = prepared.request
    wrapping.note_wrapped(
        grant, request.request_id, request.requester_person, prepared.key, prepared.wrapped, prepared.lease
    )


def confirm_handover(grant: Grant, request: IssuanceRequest, key_id: str) -> IssuanceRequest:
    """The receiver has that key: the request is collected, and our copy is destroyed. Repeatable.

    Raises NotFoundError as `prepare_handover`; StateConflictError when no token of that key is out.
    """
    _require_asker(grant, request)
    with _held(request, grant.at):
        fresh = _fresh(request)
        is_collected = fresh.state == IssuanceState.COLLECTED and fresh.key_id == key_id
        if is_collected and wrapping.find_open(fresh.request_id) is None:
            return fresh
        handover = wrapping.require_open(fresh.request_id, key_id)
        if is_collected:
            wrapping.confirm(grant, handover)
        else:
            with record_collection(grant, fresh):
                wrapping.confirm(grant, handover)
    return fresh


def suspect_handover(grant: Grant, request: IssuanceRequest, key_id: str) -> str:
    """The token did not open for its receiver. Where it is gone indeed, that may be an interception: an alarm, the key
    is burned, and another is made under the same approval, a few times; a key in use goes on until a person decides.
    What was done, in words.

    Raises StateConflictError when no token of that key is out, or it is unopened still: nobody has the key then.
    """
    _require_asker(grant, request)
    with _held(request, grant.at) as lease:
        fresh = _fresh(request)
        handover = wrapping.require_open(fresh.request_id, key_id)
        if handover.used_at is None and wrapping.is_unopened(handover):
            raise StateConflictError("Nobody has opened the token. Try again, or collect again for another key.")
        return _suspect(grant, fresh, handover, lease)


def settle_handover(handover: WrappedHandover, now: datetime) -> None:
    """The sweep's part, see `wrapping.list_to_settle`. Raises StateConflictError when somebody else is at it."""
    request = get_request(handover.subject)
    if request is None:
        raise StateConflictError("There is no such request.", internal=handover.subject)
    grant = authorize(WORKER, P.ISSUANCE_EXECUTE, request.account, now=now)
    with _held(request, now) as lease:
        fresh, current = _fresh(request), wrapping.find_open(handover.subject)
        if current is None or current.pk != handover.pk:
            return
        if wrapping.is_ended(current) or fresh.state != IssuanceState.ISSUED:
            wrapping.close_dead(grant, current, lease)
        elif wrapping.is_used(current.key):
            with record_collection(grant, fresh):
                wrapping.note_used(grant, current)
        else:
            _suspect(grant, fresh, current, lease)


def _take_back(grant: Grant, request: IssuanceRequest, handover: WrappedHandover, lease: Lease) -> str:
    """The key first, in one transaction: whoever opens the token after that has a dead one. What was done, in words."""
    worker = authorize(WORKER, P.ISSUANCE_EXECUTE, request.account, now=grant.at)
    with recorded(
        grant,
        P.ISSUANCE_COLLECT,
        "issuance.handover_taken_back",
        account=request.account,
        request_id=request.request_id,
        key_id=handover.key_id,
        accessor=handover.accessor,
    ):
        hold(lease)
        wrapping.take_back(grant, worker, handover)
        request.compare_and_swap(state=IssuanceState.APPROVED, key=None, issued_at=None)
    wrapping.revoke_token(handover)
    return TAKEN_BACK


def _suspect(grant: Grant, request: IssuanceRequest, handover: WrappedHandover, lease: Lease) -> str:
    """One transaction; what was done, in words."""
    worker = authorize(WORKER, P.ISSUANCE_EXECUTE, request.account, now=grant.at)
    mints_again = wrapping.may_mint_again(request.request_id)
    with recorded(
        grant,
        _EITHER,
        "issuance.handover_suspected",
        account=request.account,
        request_id=request.request_id,
        key_id=handover.key_id,
        accessor=handover.accessor,
    ):
        hold(lease)
        if not wrapping.suspect(grant, worker, handover, mints_again=mints_again):
            return SUSPECTED_IN_USE
        if not mints_again:
            request.compare_and_swap(state=IssuanceState.BURNED)
            return SUSPECTED_AGAIN
        request.compare_and_swap(state=IssuanceState.APPROVED, key=None, issued_at=None)
    return SUSPECTED


def _require_asker(grant: Grant, request: IssuanceRequest) -> None:
    """The service that asked, or else the person; nobody for the other."""
    principal = grant.principal
    is_service = request.requested_via is not None
    by_person = isinstance(principal, Operator) and principal.person == request.requester_person
    if isinstance(principal, Operator) and (is_service or not by_person):
        raise StateConflictError("Only whoever asked for the key collects it.")
    if not isinstance(principal, Operator) and not is_asked_by(request, principal):
        raise NotFoundError(internal=f"{principal.actor} did not ask for {request.request_id}")
    require_served(Environment(request.account.environment))
    if request.delivery != Delivery.WRAPPED:
        raise StateConflictError("This request's key is not handed over inside a wrapping token.")


def _fresh(request: IssuanceRequest) -> IssuanceRequest:
    """As it is now that nobody else is at work on it."""
    found = get_request(request.request_id)
    if found is None:
        raise NotFoundError("There is no such request.")
    return found


def _claimed(request: IssuanceRequest, now: datetime) -> Lease:
    """The lease of its issuance: of two that collect at once one is told to come again."""
    lease = claim(f"issuance:{request.request_id}", now, now_or_never=True)
    if lease is None:
        raise StateConflictError("Somebody is at work on it this moment. Try again.")
    return lease


@contextmanager
def _held(request: IssuanceRequest, now: datetime) -> Iterator[Lease]:
    lease = _claimed(request, now)
    try:
        yield lease
    finally:
        release(lease)
