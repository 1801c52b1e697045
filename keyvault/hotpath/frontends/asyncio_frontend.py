"""The event loop's frontend: requests wait for data together, and one read serves all that are waiting.

A request joins the next read, never one in progress: that one may have begun before a change which this request must
see.
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
from keyvault.hotpath.frontends.threaded_frontend import StoreUnavailableError, record_failure, with_absent
from keyvault.hotpath.messages.callback_future import CallbackFuture
from keyvault.hotpath.messages.pending_requests import (
    KEY,
    RULES,
    VERIFY,
    DataRequirements,
    Found,
    Headers,
    PendingRequest,
)
from keyvault.hotpath.messages.responses import HttpResponse
from keyvault.hotpath.slow_path.slow_path import SlowPath
from keyvault.wire.headers import join_headers

MAX_CONCURRENT_READS: Final = 2
"""Maximum number of reads in progress: one is sent while the other is awaited. There is one more when a read of keys
and a read of other data begin together."""

MAX_ANSWERS_PER_TURN: Final = 16
"""Maximum number of responses in one turn of the loop. Their clients send the next requests while the remaining ones
are answered. Without this bound all requests arrive together, and the loop and the database wait for each other."""

MAX_BATCH_DELAY_SECONDS: Final = 0.002
"""Maximum delay of the second read, in seconds, while fewer than MAX_ANSWERS_PER_TURN requests wait. It must not wait
for the first read, which may never end."""

MAX_THROTTLED_PER_READ: Final = 2
"""Maximum number of throttled requests in one read. Their client addresses have failed too often."""


KeysCallback = Callable[[Mapping[str, KeyRecord] | Exception], None]


class AsyncStore(Protocol):
    """The primary database. Methods raise StoreUnavailableError."""

    async def find(self, kind: str, ids: frozenset[str]) -> Mapping[str, Found]: ...

    def find_keys(self, ids: frozenset[str], callback: KeysCallback) -> None:
        """Find keys as `find` does, without a coroutine per read.

        Calls `callback` once, after this method has returned, with the existing keys or the exception of `find`.
        """
        task = asyncio.get_running_loop().create_task(_find_keys(self, ids, callback))
        _find_tasks.add(task)
        task.add_done_callback(_find_tasks.discard)

    async def read_rules(self, known: PolicySnapshot | None) -> PolicySnapshot: ...


_find_tasks: Final[set[asyncio.Task[None]]] = set()
"""Strong references: a loop does not hold its tasks."""


async def _find_keys(store: AsyncStore, ids: frozenset[str], callback: KeysCallback) -> None:
    try:
        found = cast("Mapping[str, KeyRecord]", await store.find(KEY, ids))
    except Exception as error:  # noqa: BLE001  passed on unchanged; not stored, since it references this frame
        callback(error)
    else:
        callback(found)


class AsyncBudgets(Protocol):
    async def spend_async(self, buckets: tuple[Bucket, ...], cost: int, *, refuse_on_loss: bool) -> Spend: ...


class IsThrottled(Protocol):
    def __call__(self, address: str | None, /) -> bool:
        """Return whether this address has failed too often recently."""


QueuedRequest = tuple[PendingRequest, DataRequirements, CallbackFuture]
QueuedMiss = tuple[CacheMiss, bytes, bytes, CallbackFuture]


class AsyncioFrontend:
    """The frontend of one process, in the loop that `answer` is called in."""

    def __init__(self, engine: Engine, store: AsyncStore, budgets: AsyncBudgets, is_throttled: IsThrottled) -> None:
        self._engine = engine
        self._verify_known = engine.verify_known
        self._slow_path = SlowPath(engine)
        self._store = store
        self._budgets = budgets
        self._is_throttled = is_throttled
        self._queued: list[QueuedRequest] = []
        self._throttled: list[QueuedRequest] = []
        self._misses: list[QueuedMiss] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._reads = 0
        self._is_scheduled = self._is_delayed = False

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
        return self._begin(self._open(method, target, headers, body))

    def verify(self, authorization: bytes, body: bytes) -> HttpResponse | Awaitable[HttpResponse]:
        """Answer a JSON body posted to verify. No header but Authorization may make a difference."""
        known = self._verify_known(authorization, body)
        if type(known) is HttpResponse:
            return known
        if type(known) is CacheMiss and not self._is_throttled(known.request.client_ip or None):
            future, queue = CallbackFuture(), self._misses
            queue.append((known, authorization, body, future))
            if not self._is_scheduled and (len(queue) == 1 or len(queue) + len(self._queued) >= MAX_ANSWERS_PER_TURN):
                self._schedule_read()  # at other lengths of the queue no read can begin
            return future
        return self._begin(self._open_plain(authorization, body))

    def _begin(self, pending: PendingRequest) -> HttpResponse | Awaitable[HttpResponse]:
        found = self._step(pending)
        if isinstance(found, HttpResponse):
            return found
        future = CallbackFuture()
        self._wait(pending, found, future)
        return future

    def _open_plain(self, authorization: bytes, body: bytes) -> PendingRequest:
        headers = [(b"authorization", authorization), (b"content-type", b"application/json")]
        return self._open(b"POST", _VERIFY, headers, body)

    def _open(
        self, method: bytes, target: bytes, headers: list[tuple[bytes, bytes]], body: bytes | None
    ) -> PendingRequest:
        return self._slow_path.open_request(
            method.decode("latin-1"), target.decode("latin-1"), Headers(join_headers(headers)), body
        )

    def _step(self, pending: PendingRequest) -> HttpResponse | DataRequirements:
        try:
            return self._slow_path.step(pending)
        except Exception:  # noqa: BLE001  any error is logged and never shown to the client
            return self._slow_path.answer_failure(pending)

    def _wait(self, pending: PendingRequest, needs: DataRequirements, future: CallbackFuture) -> None:
        queue = self._throttled if self._is_throttled(needs.address) else self._queued
        queue.append((pending, needs, future))
        self._schedule_read()

    def _schedule_read(self, *, may_delay: bool = True) -> None:
        if not self._is_scheduled and self._may_read(may_delay=may_delay):
            self._is_scheduled = True
            self._loop.call_soon(self._read_queued)  # together with all requests of this turn of the loop

    def _may_read(self, *, may_delay: bool = True) -> bool:
        """Return whether a read may begin. Otherwise the check is repeated, at the latest when a read ends."""
        if self._reads >= MAX_CONCURRENT_READS or not (self._queued or self._throttled or self._misses):
            return False
        if may_delay and self._reads and len(self._misses) + len(self._queued) < MAX_ANSWERS_PER_TURN:
            # Beginning a read costs as much as reading ten keys: wait for more requests, or for the end of a read.
            if not self._is_delayed:
                self._is_delayed = True
                self._loop.call_later(MAX_BATCH_DELAY_SECONDS, self._end_delay)
            return False
        return True

    def _end_delay(self) -> None:
        self._is_delayed = False
        self._schedule_read(may_delay=False)

    def _end_read(self) -> None:
        """Note the end of a read. The next one begins before the responses of this one are sent."""
        self._reads -= 1
        if not self._is_scheduled and self._may_read():
            self._read_queued()

    def _read_queued(self) -> None:
        """Begin one read for all requests that miss only a key, and a parallel one for the others."""
        self._is_scheduled = False
        batch = [each for each in (*self._queued, *self._throttled[:MAX_THROTTLED_PER_READ]) if each[2].is_open]
        misses = [each for each in self._misses if each[3].is_open]
        self._queued, self._misses = [], []
        del self._throttled[:MAX_THROTTLED_PER_READ]
        if misses:
            self._reads += 1
            ids, finish = frozenset([each[0].keystring.key_id for each in misses]), partial(self._finish_keys, misses)
            try:
                self._store.find_keys(ids, finish)
            except Exception as error:  # noqa: BLE001  a bug: the waiting requests get an error
                self._loop.call_soon(finish, error)
        if batch:
            self._reads += 1
            task = self._loop.create_task(self._read_and_answer(batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if not (misses or batch):  # all these requests were canceled
            self._schedule_read()

    async def _read_and_answer(self, batch: list[QueuedRequest]) -> None:
        """Read the data that the batch requires, then answer its requests."""
        try:
            try:
                await self._read(batch)
            finally:
                self._end_read()
            for pending, _, future in batch:
                self._resume(pending, future)
        except Exception:  # noqa: BLE001  a bug: the waiting requests get an error; later reads continue
            for pending, _, future in batch:
                self._answer_failure(pending, future)

    def _answer_failure(self, pending: PendingRequest, future: CallbackFuture) -> None:
        if future.is_open:
            future.set_result(self._slow_path.answer_failure(pending))

    def _resume(self, pending: PendingRequest, future: CallbackFuture) -> None:
        if not future.is_open:
            return  # canceled
        found = self._step(pending)
        if isinstance(found, DataRequirements):
            self._wait(pending, found, future)
        else:
            future.set_result(found)

    def _finish_keys(self, misses: list[QueuedMiss], found: Mapping[str, KeyRecord] | Exception) -> None:
        self._end_read()
        self._answer_misses(misses, found)

    def _answer_misses(self, misses: list[QueuedMiss], found: Mapping[str, KeyRecord] | Exception) -> None:
        """Answer requests that miss only a key. The slow path takes over the others, and reports a lost database."""
        if len(misses) > MAX_ANSWERS_PER_TURN:
            self._loop.call_soon(self._answer_misses, misses[MAX_ANSWERS_PER_TURN:], found)
            misses = misses[:MAX_ANSWERS_PER_TURN]
        misses = [each for each in misses if each[3].is_open]  # without canceled requests
        try:
            if isinstance(found, Exception) and not isinstance(found, StoreUnavailableError):
                raise found
            answers: Sequence[HttpResponse | None] = [None] * len(misses)
            if not isinstance(found, Exception):
                answers = self._engine.verify_missed([each[0] for each in misses], found)
            for (miss, authorization, body, future), answer in zip(misses, answers, strict=True):
                if answer is not None:
                    future.set_result(answer)
                    continue
                pending = self._open_plain(authorization, body)
                if not isinstance(found, Exception):
                    # Read after the request arrived: valid for its response, even if it may not be cached.
                    key_id = miss.keystring.key_id
                    pending.found[KEY, key_id] = found.get(key_id)
                self._resume(pending, future)
        except Exception:  # noqa: BLE001  a bug: the waiting requests get an error
            for _, authorization, body, future in misses:
                if future.is_open:
                    self._answer_failure(self._open_plain(authorization, body), future)

    async def _read(self, batch: list[QueuedRequest]) -> None:
        wanted: defaultdict[str, set[str]] = defaultdict(set)
        for _, needs, _ in batch:
            for kind, ids in needs.ids.items():
                wanted[kind] |= ids
        unavailable: StoreUnavailableError | None = None
        for kind, required in wanted.items():
            ids = frozenset(required)
            stamp = self._slow_path.stamp()
            try:
                if unavailable is not None:
                    raise unavailable
                if kind == RULES:
                    rules = await self._store.read_rules(self._engine.rules)
                    self._slow_path.admit_rules(rules, stamp)
                    for pending, needs, _ in batch:
                        if kind in needs.ids:
                            pending.rules = rules
                else:
                    found = with_absent(ids, await self._store.find(kind, ids))
                    self._slow_path.admit(kind, found, stamp)
                    for pending, needs, _ in batch:
                        for identity in needs.ids.get(kind, ()):
                            pending.found[kind, identity] = found[identity]
            except StoreUnavailableError as error:
                unavailable = error
                for pending, needs, _ in batch:
                    record_failure(pending, kind, needs.ids.get(kind, frozenset()), error)
        await self._spend_all(batch)

    async def _spend_all(self, batch: list[QueuedRequest]) -> None:
        due = [
            (pending, spend)
            for pending, needs, future in batch
            if future.is_open  # not canceled
            for spend in needs.spends
        ]
        if not due:
            return
        calls = (
            self._budgets.spend_async(spend.buckets, spend.cost, refuse_on_loss=spend.refuse_on_loss)
            for _, spend in due
        )
        for (pending, spend), result in zip(due, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(result, Spend | DependencyUnavailableError):
                pending.spent[spend.number] = result
            elif isinstance(result, BaseException):
                raise result


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
