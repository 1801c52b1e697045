"""Requests that wait for the next change of the feed, in the event loop, without a thread."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

MAX_WAITING = 256
"""Maximum number of requests of one process that wait. Others are answered immediately."""

_MERGE_SECONDS = 0.02
"""Time between a change and the answers to those that wait for it, in seconds: further changes share the answer."""


@dataclass(slots=True)
class FeedWait:
    """What a request and the view agree on, in the environ as `api.middleware.FEED_WAIT`.

    `wanted_seconds`: set by a view that has nothing to report yet. `waited_seconds`: how long the request has waited.
    """

    wanted_seconds: float = 0.0
    waited_seconds: float = 0.0


class FeedWaiters:
    """Wakes waiting requests when this process has read new changes.

    Args:
        subscribe: takes a function that is called, in another thread, after each poll with something new.
    """

    def __init__(self, subscribe: Callable[[Callable[[], None]], None]) -> None:
        self._subscribe = subscribe
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._waiting = 0
        self.version = 0
        """Grows with each poll that had something new."""

    def start(self) -> None:
        """Subscribe, in the event loop that waits."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._subscribe(self._notify)

    def close(self) -> None:
        """Let all requests that wait go on, and later ones not wait."""
        self._waiting = MAX_WAITING
        self._changed.set()

    async def wait(self, version: int, seconds: float, wait_for_disconnect: Callable[[], Awaitable[None]]) -> bool:
        """Wait until there is something newer than the version, the time is over, or the client is gone.

        Return False when nothing was waited for: too many requests wait already.
        """
        if self._waiting >= MAX_WAITING:
            return False
        self._waiting += 1
        gone = asyncio.ensure_future(wait_for_disconnect())
        changed = asyncio.ensure_future(self._wait_for_change(version))
        try:
            await asyncio.wait({gone, changed}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._waiting -= 1
            for task in (gone, changed):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        return True

    async def _wait_for_change(self, version: int) -> None:
        if self.version == version:
            await self._changed.wait()
        await asyncio.sleep(_MERGE_SECONDS)

    def _notify(self) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: the process ends
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self.version += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
