"""The queue of turns: when each open rotation is due, and the dispatch of one message per due rotation.

A rotation's row in the queue says when its next turn is due. Events make it due now in their own transaction. If
the process sends messages (`dispatcher`), it dispatches the turn on commit; otherwise the next tick finds it. Messages
carry the rotation's id only.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from threading import Event
from typing import Any, ClassVar, NamedTuple

from django.conf import settings
from django.db import transaction
from django.db.models import Q

from keyvault.access.permissions import Permission
from keyvault.domain.keys import KeyKind
from keyvault.domain.notifications import NoticeKind
from keyvault.models import Change, Notice
from keyvault.services.merchants.merchants import select_accounts
from keyvault.services.recording.signals import (
    accounts_changed,
    changes_confirmed,
    keys_changed,
    keys_refused,
    notice_settled,
)
from keyvault.services.startup.processes import process_watch
from keyvault.services.usage.recorder import utc_now
from keyvault.services.work import leases
from keyvault.services.work.background_thread import BackgroundThread, forget_at_fork
from keyvault.wire.trace_context import current_traceparent
from rotation.domain.events import RotationState
from rotation.domain.states import CLOSED
from rotation.models import Rotation
from rotation.services.rotations.metrics import measure_rotations
from rotation.services.rotations.reports import subject_of

S = RotationState

_log = logging.getLogger(__name__)

MAX_QUEUED = 200
"""Maximum number of messages in a queue of the broker up to which a tick fills it.

A rotation that waits for a worker is dispatched again and again, since its message may be lost. Without this maximum,
slow workers would let the queue grow without end. Rotations beyond it stay due in the database, the longest due first.
"""


class Turn(NamedTuple):
    """A turn to dispatch. `is_urgent`: the merchant may have no usable key. `traceparent`: of the request behind it."""

    rotation_id: str
    environment: str
    is_urgent: bool
    traceparent: str = ""


Dispatch = Callable[[Turn], object]
"""Send the message of one turn."""

CountMessages = Callable[[str, bool], int]
"""Return how many messages wait in the broker's queue of an environment; True: its queue of urgent turns."""


# --- the queue ----------------------------------------------------------------------------------------------


def enqueue_turn(rotation: Rotation, now: datetime) -> None:
    """Put a new rotation into the queue, inside the transaction that requests it."""
    turn = _turn_of(rotation)
    leases.enqueue(subject_of(turn.rotation_id), _queue_of(turn.environment), now, is_urgent=turn.is_urgent)
    _dispatch_on_commit([turn])


def wake_rotation(rotation: Rotation, now: datetime) -> None:
    """Make the rotation due now, as the last write of the event's transaction."""
    _wake([_turn_of(rotation)], now)


def _turn_of(rotation: Rotation) -> Turn:
    return Turn(rotation.rotation_id, rotation.credential.environment.value, rotation.state == S.EMERGENCY)


def _wake(turns: Sequence[Turn], now: datetime) -> None:
    if turns:
        is_urgent = any(turn.is_urgent for turn in turns)
        woken = leases.wake([subject_of(turn.rotation_id) for turn in turns], now, is_urgent=is_urgent)
        _dispatch_on_commit([turn for turn in turns if subject_of(turn.rotation_id) in woken])


def dispatch_due(
    clock: Callable[[], datetime] = utc_now,
    dispatch: Dispatch | None = None,
    environments: Sequence[str] | None = None,
    count_messages: CountMessages = lambda environment, is_urgent: 0,
) -> int:
    """Dispatch due rotations, urgent ones first; return how many.

    The cost depends on the number of due rotations, not on that of open ones. No queue gets more than MAX_QUEUED
    messages. `environments`: those to dispatch among the ones that this process serves; None: all of these.
    """
    served = [each for each in settings.ENVIRONMENTS if environments is None or each in environments]
    send, dispatched = dispatch or dispatcher.require_sender(), 0
    for is_urgent in (True, False):
        for environment in served:
            queue = _queue_of(environment)
            if not leases.has_due(queue, clock(), is_urgent=is_urgent):
                continue  # Counting the messages costs a request to the broker.
            room = MAX_QUEUED - count_messages(environment, is_urgent)
            for subject in leases.take_due(queue, clock(), room, is_urgent=is_urgent):
                send(Turn(subject.removeprefix(subject_of("")), environment, is_urgent))
                dispatched += 1
    return dispatched


def list_queues() -> list[str]:
    """List the queues of the environments that this process serves (KEYVAULT_ENVIRONMENTS)."""
    return [_queue_of(environment) for environment in settings.ENVIRONMENTS]


def _queue_of(environment: str) -> str:
    return f"rotation:{environment}"


# --- messages on commit -------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class TurnDispatcher(BackgroundThread):
    """Send messages from a thread of their own, so that a slow or unavailable broker delays no request.

    Does nothing until `send` is set. A message that cannot be sent is dropped: the next tick sends another.
    """

    thread_name: ClassVar[str] = "dispatch"

    send: Dispatch | None = None
    _pending: deque[Turn] = field(default_factory=partial(deque, maxlen=1_000))
    _has_pending: Event = field(default_factory=Event)

    def require_sender(self) -> Dispatch:
        if self.send is None:
            raise RuntimeError("this process sends no messages")
        return self.send

    def put(self, turns: Iterable[Turn]) -> None:
        if self.send is None:
            return
        self._pending.extend(turn._replace(traceparent=current_traceparent()) for turn in turns)
        self._has_pending.set()
        self.start()

    def forget(self) -> None:
        self.__init__(self.send)  # type: ignore[misc]  # a dataclass's own

    def request_stop(self) -> None:
        BackgroundThread.request_stop(self)
        self._has_pending.set()

    def _loop(self) -> None:
        send = self.require_sender()
        while self._has_pending.wait() and not self._stop.is_set():
            self._has_pending.clear()
            try:
                while self._pending:
                    send(self._pending.popleft())
            except Exception as error:  # noqa: BLE001  no broker: the next tick finds the rows
                self._pending.clear()
                _log.warning("turns were not dispatched; the next tick dispatches them", extra={"why": repr(error)})


dispatcher = TurnDispatcher()
forget_at_fork(dispatcher)


def _dispatch_on_commit(turns: Sequence[Turn]) -> None:
    """Dispatch turns in the environments of this process; the tick of another one finds the others."""
    turns = [turn for turn in turns if turn.environment in settings.ENVIRONMENTS]
    transaction.on_commit(partial(dispatcher.put, tuple(turns)), robust=True)


# --- events in keyvault -------------------------------------------------------------------------------------


def connect_signals() -> None:
    """Subscribe to the events in keyvault that may change what a rotation does next, and have the queue measured."""
    keys_changed.connect(_wake_for_changed, dispatch_uid="rotation.keys_changed")
    keys_refused.connect(_wake_for_refused, dispatch_uid="rotation.keys_refused")
    notice_settled.connect(_wake_for_notice, dispatch_uid="rotation.notice_settled")
    changes_confirmed.connect(_wake_for_confirmed, dispatch_uid="rotation.changes_confirmed")
    accounts_changed.connect(_wake_for_accounts, dispatch_uid="rotation.accounts_changed")
    process_watch.queues = tuple(list_queues())
    process_watch.measures = (measure_rotations,)


def _wake_for_changed(key_ids: Collection[str], permission: Permission | None, now: datetime, **_: Any) -> None:
    if permission is Permission.ROTATIONS_ADVANCE:
        return  # The rotation's own turn made the change, and it continues.
    _wake(_list_open(key_ids), now)


def _wake_for_refused(key_ids: Collection[str], now: datetime, **_: Any) -> None:
    """Wake rotations whose key in quarantine was tried. Attempts with an old public key have no effect.

    Where no attempt can reinstate the key, only those up to the alarm do. They are not urgent: a client that does not
    stop would delay the merchants without a usable key.
    """
    has_effect = Q(reinstated_at=None, waived_at=None) | Q(alarmed_at=None)
    tried = Q(has_effect, state=S.QUARANTINE) & ~Q(credential__kind=KeyKind.PUBLIC)
    tried |= Q(state=S.ROLLING_BACK, quarantined_at__isnull=False)
    _wake(_list_open(key_ids, tried, is_urgent=False), now)


def _wake_for_notice(notice: Notice, now: datetime, **_: Any) -> None:
    if notice.kind == NoticeKind.REPLACEMENT_AVAILABLE and notice.account is not None:
        _wake([Turn(notice.subject, notice.account.environment, is_urgent=False)], now)


def _wake_for_confirmed(above: int, through: int, now: datetime, **_: Any) -> None:
    """Wake rotations whose staged replacement a verifier has accepted."""
    accepted = Change.objects.filter(subject_kind="key", sequence__gt=above, sequence__lte=through)
    staged = Rotation.objects.filter(state=S.STAGED, replacement__in=accepted.values("subject_id"))
    rows = staged.values_list("pk", "credential__account__environment")
    _wake([Turn(rotation_id, environment, is_urgent=False) for rotation_id, environment in rows], now)


def _wake_for_accounts(merchants: Collection[str], accounts: Collection[str], now: datetime, **_: Any) -> None:
    """Wake the rotations that depend on a merchant's status: no change of a key wakes them.

    Those without a usable key end when the merchant is offboarded. Those that observe a key await its resumption.
    """
    account_ids = list(select_accounts(merchants, accounts).values_list("pk", flat=True))
    states = [S.EMERGENCY, S.STALLED, S.OVERLAP, S.QUARANTINE, S.ROLLING_BACK]
    rows = Rotation.objects.filter(account__in=account_ids, state__in=states)
    found = rows.values_list("pk", "account_environment")
    _wake([Turn(rotation_id, environment, is_urgent=False) for rotation_id, environment in found], now)


def _list_open(key_ids: Collection[str], condition: Q | None = None, *, is_urgent: bool = True) -> list[Turn]:
    rows = Rotation.objects.filter(Q(predecessor__in=key_ids) | Q(replacement__in=key_ids)).exclude(state__in=CLOSED)
    found = rows.filter(condition or Q()).values_list("pk", "credential__account__environment")
    return [Turn(rotation_id, environment, is_urgent) for rotation_id, environment in found]
