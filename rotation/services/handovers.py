"""A replacement that leaves inside a wrapping token: handed over, confirmed, or suspected and made anew.

A replacement that somebody else may have, and that nobody uses, is burned, and the rotation goes back to where it makes
one. One in use stays, and is for a person to decide about. So is one without which the merchant has no key: a word that
merely fails to come ends nobody's last key.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER, Operator, System
from keyvault.backends.base import Wrapped
from keyvault.domain.errors import KeyvaultError, StateConflictError
from keyvault.domain.issuance import Delivery
from keyvault.domain.keys import DEAD_STATES
from keyvault.domain.notifications import NoticeKind
from keyvault.models import Key, Material, WrappedHandover
from keyvault.services import wrapping
from keyvault.services.authorization import authorize
from keyvault.services.keys import usable_keys
from keyvault.services.leases import Lease, hold, release
from keyvault.services.notifications import announce
from keyvault.services.recording import recorded
from rotation.events import RotationState
from rotation.models import Rotation
from rotation.services.interventions import claim_rotation, may_collect
from rotation.services.reports import about, get_rotation

S = RotationState

_EITHER = frozenset({P.ISSUANCE_COLLECT, P.ROTATIONS_ADVANCE})

_MAKES_ANOTHER = frozenset({S.PUBLISHING, S.AWAITING_PROOF})
"""Where a burned replacement is made anew. Anywhere else its end is judged by the table of `rotation.events`."""

TAKEN_BACK = (
    "The wrapping token given before was not opened. It was taken back with its key, and another replacement is made: "
    "collect that one in a moment."
)
SUSPECTED = (
    "The wrapping token was opened by somebody, or expired: that may be an interception. The replacement was ended, "
    "and another is made."
)
SUSPECTED_AGAIN = (
    "The wrapping token was opened by somebody, or expired: that may be an interception. The replacement was ended, "
    "and the rotation ends with it."
)
SUSPECTED_IN_USE = (
    "The wrapping token was opened by somebody, and the replacement is in use: it goes on until a person decides. If "
    "it is nobody of yours, report the key as compromised."
)
SUSPECTED_LAST = (
    "The wrapping token was opened by somebody, or expired: that may be an interception. The credential has no other "
    "key that is good, so the replacement goes on until a person decides. If nobody of yours has it, report it as "
    "compromised and reissue the credential."
)

_log = logging.getLogger(__name__)


def hand_over_replacement(grant: Grant, rotation: Rotation) -> Wrapped:
    """A token that opens once to the replacement, for whom `may_collect` names.

    Raises StateConflictError when there is nothing to collect, when a worker or somebody else is at it, or when a token
    was given before: an unopened one is taken back with its key, and one that is gone is recorded as a possible
    interception; BackendUnavailableError.
    """
    _require_collector(grant, rotation)
    with _held(rotation, grant.at) as lease:
        fresh = get_rotation(rotation.rotation_id)
        former = wrapping.find_open(fresh.rotation_id)
        if former is not None and former.used_at is not None and not wrapping.is_ended(former):
            raise StateConflictError(_suspect(grant, fresh, former, lease))
        key = _collectable(fresh)
        if former is not None and not wrapping.is_ended(former):
            end = _take_back if wrapping.is_unopened(former) else _suspect
            raise StateConflictError(end(grant, fresh, former, lease))
        if former is not None and wrapping.is_ended(former):
            wrapping.close_dead(grant, former, lease)
        wrapped = wrapping.wrap_key(key)
        wrapping.note_wrapped(grant, fresh.rotation_id, fresh.requester_person, key, wrapped, lease)
    return wrapped


def confirm_replacement(grant: Grant, rotation: Rotation, key_id: str) -> Rotation:
    """The receiver has that replacement, so that our copy is destroyed; it says nothing of its use. Repeatable."""
    _require_collector(grant, rotation)
    with _held(rotation, grant.at) as lease:
        fresh = get_rotation(rotation.rotation_id)
        is_collected = fresh.collected_at is not None and fresh.replacement_id == key_id
        if is_collected and wrapping.find_open(fresh.rotation_id) is None:
            return fresh
        handover = wrapping.require_open(fresh.rotation_id, key_id)
        if is_collected:
            wrapping.confirm(grant, handover)
        else:
            with _collected(grant, fresh, handover, lease):
                wrapping.confirm(grant, handover)
    return fresh


def suspect_replacement(grant: Grant, rotation: Rotation, key_id: str) -> str:
    """The token did not open for its receiver. Where it is gone indeed, that may be an interception: an alarm, and the
    replacement is burned and made anew; one in use goes on until a person decides. What was done, in words.

    Raises StateConflictError when no token of that key is out, or it is unopened still: nobody has the key then.
    """
    _require_collector(grant, rotation)
    with _held(rotation, grant.at) as lease:
        fresh = get_rotation(rotation.rotation_id)
        handover = wrapping.require_open(fresh.rotation_id, key_id)
        if handover.used_at is None and wrapping.is_unopened(handover):
            raise StateConflictError("Nobody has opened the token. Try again, or collect again for another key.")
        return _suspect(grant, fresh, handover, lease)


def suspect_due(now: datetime) -> None:
    """The sweep: the replacement of a token that has ended was used, or nobody who should has it."""
    for handover in wrapping.list_to_settle("rot_", now):
        try:
            _settle(handover, now)
        except KeyvaultError as error:
            _log.info("put off", extra={"rotation_id": handover.subject, "why": error.internal or error.detail})


def _settle(handover: WrappedHandover, now: datetime) -> None:
    rotation = get_rotation(handover.subject)
    grant = authorize(WORKER, P.ROTATIONS_ADVANCE, rotation.credential.account, now=now)
    with _held(rotation, now) as lease:
        fresh, current = get_rotation(handover.subject), wrapping.find_open(handover.subject)
        if current is None or current.pk != handover.pk:
            return
        if wrapping.is_ended(current):
            wrapping.close_dead(grant, current, lease)
        elif wrapping.is_used(current.key):
            with _collected(grant, fresh, current, lease):
                wrapping.note_used(grant, current)
        else:
            _suspect(grant, fresh, current, lease)


@contextmanager
def _collected(grant: Grant, rotation: Rotation, handover: WrappedHandover, lease: Lease) -> Iterator[None]:
    """The one collection of a replacement, with what becomes of its token."""
    key = handover.key
    account = rotation.credential.account
    with recorded(grant, _EITHER, "rotation.collected", account=account, **about(rotation), key_id=key.key_id):
        hold(lease)
        if key.material == Material.HELD:
            key.compare_and_swap(material=Material.DESTROY_DUE)
        rotation.compare_and_swap(collected_at=grant.at)
        yield


def _take_back(grant: Grant, rotation: Rotation, handover: WrappedHandover, lease: Lease) -> str:
    """The replacement first, in one transaction: whoever opens the token after that has a dead one. What was done, in
    words. Raises StateConflictError where no other is made: the token is left to its receiver then."""
    if rotation.state not in _MAKES_ANOTHER:
        raise StateConflictError("A wrapping token is out and unopened; no other key is made at this stage.")
    account = rotation.credential.account
    worker = authorize(WORKER, P.ROTATIONS_ADVANCE, account, now=grant.at)
    with recorded(
        grant,
        P.ISSUANCE_COLLECT,
        "rotation.handover_taken_back",
        account=account,
        **about(rotation),
        key_id=handover.key_id,
        accessor=handover.accessor,
    ):
        hold(lease)
        wrapping.take_back(grant, worker, handover)
        _make_another(rotation, grant.at, "its wrapping token was taken back; another is made")
    wrapping.revoke_token(handover)
    return TAKEN_BACK


def _suspect(grant: Grant, rotation: Rotation, handover: WrappedHandover, lease: Lease) -> str:
    """One transaction; what was done, in words."""
    account = rotation.credential.account
    worker = authorize(WORKER, P.ROTATIONS_ADVANCE, account, now=grant.at)
    mints_again = rotation.state in _MAKES_ANOTHER and wrapping.may_mint_again(rotation.rotation_id)
    with recorded(
        grant,
        _EITHER,
        "rotation.handover_suspected",
        account=account,
        **about(rotation),
        key_id=handover.key_id,
        accessor=handover.accessor,
    ):
        hold(lease)
        is_alone = not _has_another_key(handover.key, grant.at)
        # Whoever says that it did not open does without it anyway, until there is another one.
        may_burn = not is_alone or (mints_again and not isinstance(grant.principal, System))
        if not wrapping.suspect(grant, worker, handover, may_burn=may_burn, mints_again=mints_again):
            return SUSPECTED_IN_USE if wrapping.is_used(handover.key) else SUSPECTED_LAST
        if is_alone:
            _tell_of_last(grant, handover.key)
        if not mints_again:
            return SUSPECTED_AGAIN  # The engine finds its replacement gone.
        _make_another(rotation, grant.at, "its replacement may have been intercepted; another is made")
    return SUSPECTED


def _make_another(rotation: Rotation, now: datetime, why: str) -> None:
    """Back to where the replacement is made, under the same approval."""
    rotation.compare_and_swap(
        state=S.EMERGENCY if rotation.predecessor.state in DEAD_STATES else S.SCHEDULED,
        replacement=None,
        entered_at=now,
        accepted_at=None,
        delivered_at=None,
        told_at=None,
        reminded_percent=0,
        why=why,
    )


def _has_another_key(key: Key, now: datetime) -> bool:
    """Inside the transaction that takes this one away: the other is locked. One that another transaction holds may be
    going too, and is not counted on."""
    others = usable_keys(key.credential_id, now).exclude(pk=key.pk)
    return bool(list(others.select_for_update(skip_locked=True, no_key=True)))


def _tell_of_last(grant: Grant, key: Key) -> None:
    announce(
        grant,
        NoticeKind.CREDENTIAL_WITHOUT_KEY,
        key.credential.account,
        key.credential_id,
        reason=str(key.reason),
        key_id=key.key_id,
        credential_id=key.credential_id,
    )


def _collectable(rotation: Rotation) -> Key:
    if rotation.collected_at is not None:
        raise StateConflictError("The key was collected already.")
    if rotation.replacement is None or rotation.delivered_at is None:
        raise StateConflictError("The replacement is not there yet.")
    return rotation.replacement


def _require_collector(grant: Grant, rotation: Rotation) -> None:
    operator = grant.principal
    if not isinstance(operator, Operator) or not may_collect(rotation, operator.person):
        raise StateConflictError("Only whoever asked for the rotation collects its key.")
    if rotation.credential.delivery != Delivery.WRAPPED:
        raise StateConflictError("This credential's keys are not handed over inside a wrapping token.")


@contextmanager
def _held(rotation: Rotation, now: datetime) -> Iterator[Lease]:
    """No worker takes a step meanwhile, and of two that collect at once one is told to come again."""
    lease = claim_rotation(rotation, now)
    if lease is None:
        raise StateConflictError("Somebody is at work on it this moment. Try again.")
    try:
        yield lease
    finally:
        release(lease)
