"""The event loop's frontend: requests wait for data together, and one read serves all that are waiting.

A request joins the next read, never one in progress: that one may have begun before a change which this request
must see.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Final, Protocol, cast

from keyvault.access.limits import Bucket, Spend
from keyvault.access.policy_snapshot import PolicySnapshot
from keyvault.domain.errors import DependencyUnavailableError
from keyvault.domain.keys import KeyRecord
from keyvault.hotpath.engine.cached_verdicts import CacheMiss
from keyvault.hotpath.engine.engine import Engine
from keyvault.hotpath.frontends.threaded_frontend import StoreAwayError, lack, whole
from keyvault.hotpath.messages.callback_future import CallbackFuture
from keyvault.hotpath.messages.questions import KEY, RULES, VERIFY, DataRequirements, Found, Headers, PendingRequest
from keyvault.hotpath.messages.responses import HttpResponse
from keyvault.hotpath.slow_path.slow_path import SlowPath
from keyvault.wire.headers import join_headers

LANES: Final = 2
"""Maximum number of reads in progress: one is sent while the other is awaited. One more occurs when reads of keys and
of other data begin together."""

AT_ONCE: Final = 16
"""Maximum number of responses in one turn of the loop. Their clients send the next requests, which are read while the
others are answered. Otherwise all requests synchronize, and loop and database wait for each other by turns."""

PATIENCE_SECONDS: Final = 0.002
"""Maximum delay of the second read, in seconds, while fewer than MAX_ANSWERS_PER_TURN requests wait: the first read may
never end."""

SLOW_LANE: Final = 2
"""Maximum number of throttled requests in one read, from client addresses with too many failures."""


TellKeys = Callable[[Mapping[str, KeyRecord] | Exception], None]


class AsyncStore(Protocol):
    """The primary database. Methods raise StoreUnavailableError."""

    async def find(self, kind: str, ids: frozenset[str]) -> Mapping[str, Found]: ...

    def find_keys(self, ids: frozenset[str], tell: TellKeys) -> None:
        """Find keys as `find` does, without a coroutine per read.

        Calls `on_keys` once, after this method has returned, with the existing keys or the exception of `find`.
        """
        finding = asyncio.get_running_loop().create_task(_tell_keys(self, ids, tell))
        _finding.add(finding)
        finding.add_done_callback(_finding.discard)

    async def read_rules(self, known: PolicySnapshot | None) -> PolicySnapshot: ...


_finding: Final[set[asyncio.Task[None]]] = set()
"""Strong references: a loop does not hold its tasks."""


async def _tell_keys(store: AsyncStore, ids: frozenset[str], tell: TellKeys) -> None:
    try:
        found = cast("Mapping[str, KeyRecord]", await store.find(KEY, ids))
    except Exception as error:  # noqa: BLE001  passed on unchanged; not stored, since it references this frame
        tell(error)
    else:
        tell(found)


class AsyncBudgets(Protocol):
    async def spend_async(self, buckets: tuple[Bucket, ...], cost: int, *, refuse_on_loss: bool) -> Spend: ...


class IsOver(Protocol):
    def __call__(self, address: str | None, /) -> bool:
        """Return whether this address has failed too often recently."""


Waiting = tuple[PendingRequest, DataRequirements, CallbackFuture]
MissedKey = tuple[CacheMiss, bytes, bytes, CallbackFuture]


class AsyncioFrontend:
    """The frontend of one process, in the loop that `answer` is called in."""

    def __init__(self, engine: Engine, store: AsyncStore, budgets: AsyncBudgets, is_over: IsOver) -> None:
        self._engine = engine
        self._verify_known = engine.verify_known
        self._answering = SlowPath(engine)
        self._store = store
        self._budgets = budgets
        self._is_over = is_over
        self._waiting: list[Waiting] = []
        self._slow: list[Waiting] = []
        self._missed: list[MissedKey] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._reading = 0
        self._is_opening = self._has_patience = False

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def answer(
        self, method: bytes, target: bytes, headers: list[tuple[bytes, bytes]], body: bytes | None
    ) -> HttpResponse | Awaitable[HttpResponse]:
        """Answer a request for one of the engine's paths.

        Args:
            headers: As sent.
            body: None when it was too large and not read.
        """
        if target == _VERIFY and method == b"POST" and body is not None:
            authorization = _only_plain(headers)
            if authorization is not None:
                return self.verify(authorization, body)
        return self._begin(self._ask(method, target, headers, body))

    def verify(self, authorization: bytes, body: bytes) -> HttpResponse | Awaitable[HttpResponse]:
        """Answer a JSON body posted to verify. No header but Authorization may make a difference."""
        known = self._verify_known(authorization, body)
        if type(known) is HttpResponse:
            return known
        if type(known) is CacheMiss and not self._is_over(known.asked.client_ip or None):
            later, waiting = CallbackFuture(), self._missed
            waiting.append((known, authorization, body, later))
            if not self._is_opening and (len(waiting) == 1 or len(waiting) + len(self._waiting) >= AT_ONCE):
                self._open_lane()  # in between it would start none
            return later
        return self._begin(self._ask_plain(authorization, body))

    def _begin(self, question: PendingRequest) -> HttpResponse | Awaitable[HttpResponse]:
        found = self._step(question)
        if isinstance(found, HttpResponse):
            return found
        later = CallbackFuture()
        self._wait(question, found, later)
        return later

    def _ask_plain(self, authorization: bytes, body: bytes) -> PendingRequest:
        headers = [(b"authorization", authorization), (b"content-type", b"application/json")]
        return self._ask(b"POST", _VERIFY, headers, body)

    def _ask(
        self, method: bytes, target: bytes, headers: list[tuple[bytes, bytes]], body: bytes | None
    ) -> PendingRequest:
        return self._answering.ask(
            method.decode("latin-1"), target.decode("latin-1"), Headers(join_headers(headers)), body
        )

    def _step(self, question: PendingRequest) -> HttpResponse | DataRequirements:
        try:
            return self._answering.step(question)
        except Exception:  # noqa: BLE001  any error is logged and never shown to the client
            return self._answering.break_off(question)

    def _wait(self, question: PendingRequest, needs: DataRequirements, later: CallbackFuture) -> None:
        waiting = self._slow if self._is_over(needs.address) else self._waiting
        waiting.append((question, needs, later))
        self._open_lane()

    def _open_lane(self, *, is_patient: bool = True) -> None:
        if not self._is_opening and self._may_open(is_patient=is_patient):
            self._is_opening = True
            self._loop.call_soon(self._read_what_waits)  # together with all requests of this turn of the loop

    def _may_open(self, *, is_patient: bool = True) -> bool:
        """Return whether a read may begin. Otherwise the check is repeated, at the latest when a read ends."""
        if self._reading >= LANES or not (self._waiting or self._slow or self._missed):
            return False
        if is_patient and self._reading and len(self._missed) + len(self._waiting) < AT_ONCE:
            # A read costs as much as ten keys: requests that arrive during one wait for more requests, or for its end.
            if not self._has_patience:
                self._has_patience = True
                self._loop.call_later(PATIENCE_SECONDS, self._lose_patience)
            return False
        return True

    def _lose_patience(self) -> None:
        self._has_patience = False
        self._open_lane(is_patient=False)

    def _end_reading(self) -> None:
        """Start the next read before the answers of this one are sent."""
        self._reading -= 1
        if not self._is_opening and self._may_open():
            self._read_what_waits()

    def _read_what_waits(self) -> None:
        """Read all requests that miss only a key in one read, and the others in a second one beside it."""
        self._is_opening = False
        batch = [each for each in (*self._waiting, *self._slow[:SLOW_LANE]) if each[2].is_open]
        missed = [each for each in self._missed if each[3].is_open]
        self._waiting, self._missed = [], []
        del self._slow[:SLOW_LANE]
        if missed:
            self._reading += 1
            ids, settle = frozenset([each[0].keystring.key_id for each in missed]), partial(self._settle, missed)
            try:
                self._store.find_keys(ids, settle)
            except Exception as error:  # noqa: BLE001  a bug: the waiting requests get an error
                self._loop.call_soon(settle, error)
        if batch:
            self._reading += 1
            reading = self._loop.create_task(self._work(batch))
            self._tasks.add(reading)
            reading.add_done_callback(self._tasks.discard)
        if not (missed or batch):  # all these requests were canceled
            self._open_lane()

    async def _work(self, batch: list[Waiting]) -> None:
        """Read once for all requests of a turn, or for those queued meanwhile, then answer them."""
        try:
            try:
                await self._read(batch)
            finally:
                self._end_reading()
            for question, _, later in batch:
                self._go_on(question, later)
        except Exception:  # noqa: BLE001  a bug: the waiting requests get an error; later reads continue
            for question, _, later in batch:
                self._break_off(question, later)

    def _break_off(self, question: PendingRequest, later: CallbackFuture) -> None:
        if later.is_open:
            later.set_result(self._answering.break_off(question))

    def _go_on(self, question: PendingRequest, later: CallbackFuture) -> None:
        if not later.is_open:
            return  # canceled
        found = self._step(question)
        if isinstance(found, DataRequirements):
            self._wait(question, found, later)
        else:
            later.set_result(found)

    def _settle(self, missed: list[MissedKey], found: Mapping[str, KeyRecord] | Exception) -> None:
        self._end_reading()
        self._answer_missed(missed, found)

    def _answer_missed(self, missed: list[MissedKey], found: Mapping[str, KeyRecord] | Exception) -> None:
        """Answer requests that miss only a key. The slow path takes over the others, and reports a lost database."""
        if len(missed) > AT_ONCE:
            self._loop.call_soon(self._answer_missed, missed[AT_ONCE:], found)
            missed = missed[:AT_ONCE]
        missed = [each for each in missed if each[3].is_open]  # without canceled requests
        try:
            if isinstance(found, Exception) and not isinstance(found, StoreAwayError):
                raise found
            answers: Sequence[HttpResponse | None] = [None] * len(missed)
            if not isinstance(found, Exception):
                answers = self._engine.verify_missed([each[0] for each in missed], found)
            for (asked, authorization, body, later), answer in zip(missed, answers, strict=True):
                if answer is not None:
                    later.set_result(answer)
                    continue
                question = self._ask_plain(authorization, body)
                if not isinstance(found, Exception):
                    # Read after the request arrived: valid for its response, even if it may not be cached.
                    key_id = asked.keystring.key_id
                    question.found[KEY, key_id] = found.get(key_id)
                self._go_on(question, later)
        except Exception:  # noqa: BLE001  a bug: the waiting requests get an error
            for _, authorization, body, later in missed:
                if later.is_open:
                    self._break_off(self._ask_plain(authorization, body), later)

    async def _read(self, batch: list[Waiting]) -> None:
        wanted: defaultdict[str, set[str]] = defaultdict(set)
        for _, needs, _ in batch:
            for kind, ids in needs.ids.items():
                wanted[kind] |= ids
        away: StoreAwayError | None = None
        for kind, every in wanted.items():
            ids = frozenset(every)
            stamp = self._answering.stamp()
            try:
                if away is not None:
                    raise away
                if kind == RULES:
                    rules = await self._store.read_rules(self._engine.rules)
                    self._answering.admit_rules(rules, stamp)
                    for question, needs, _ in batch:
                        if kind in needs.ids:
                            question.rules = rules
                else:
                    found = whole(ids, await self._store.find(kind, ids))
                    self._answering.admit(kind, found, stamp)
                    for question, needs, _ in batch:
                        for identity in needs.ids.get(kind, ()):
                            question.found[kind, identity] = found[identity]
            except StoreAwayError as error:
                away = error
                for question, needs, _ in batch:
                    lack(question, kind, needs.ids.get(kind, frozenset()), error)
        await self._pay(batch)

    async def _pay(self, batch: list[Waiting]) -> None:
        owed = [
            (question, payment)
            for question, needs, later in batch
            if later.is_open  # not canceled
            for payment in needs.payments
        ]
        if not owed:
            return
        spends = (
            self._budgets.spend_async(payment.buckets, payment.cost, refuse_on_loss=payment.refuse_on_loss)
            for _, payment in owed
        )
        for (question, payment), spend in zip(owed, await asyncio.gather(*spends, return_exceptions=True), strict=True):
            if isinstance(spend, Spend | DependencyUnavailableError):
                question.paid[payment.number] = spend
            elif isinstance(spend, BaseException):
                raise spend


_VERIFY: Final = VERIFY.encode()


def _only_plain(headers: list[tuple[bytes, bytes]]) -> bytes | None:
    """Return the Authorization header if no other header makes a difference; None when all headers must be examined."""
    authorization: bytes | None = None
    is_json = False
    for name, value in headers:
        size = len(name)
        if size == _AUTHORIZATION_LENGTH and name.lower() == b"authorization":
            if authorization is not None:
                return None
            authorization = value
        elif size == _CONTENT_TYPE_LENGTH and name.lower() == b"content-type":
            if is_json or value != b"application/json":
                return None
            is_json = True
    return authorization if is_json else None


_AUTHORIZATION_LENGTH: Final = len(b"authorization")
_CONTENT_TYPE_LENGTH: Final = len(b"content-type")
