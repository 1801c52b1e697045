"""One deadline for many tasks."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class BodyDeadline:
    """The same timeout for many awaitables, with one timer for all of them.

    `asyncio.timeout` sets a timer for each, which would slow the fast path of verify.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._ends: dict[asyncio.Task[object], float] = {}
        """When each task's time ends, in the loop's seconds, earliest first: all have the same timeout."""
        self._is_timed = False

    async def bound(self, work: Awaitable[T]) -> T:
        """Return the result of `work`. Raises TimeoutError when its time is over."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        if task is None:
            raise RuntimeError("a deadline must run in a task")
        self._ends[task] = loop.time() + self.seconds
        if not self._is_timed:
            self._is_timed = True
            loop.call_later(self.seconds, self._end_overdue, loop)
        try:
            return await work
        except asyncio.CancelledError:
            if task in self._ends or task.uncancel() > 0:
                raise  # canceled by other code
            raise TimeoutError from None
        finally:
            self._ends.pop(task, None)

    def _end_overdue(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._ends:
            task, end = next(iter(self._ends.items()))
            if end > loop.time():
                loop.call_at(end, self._end_overdue, loop)
                return
            del self._ends[task]
            task.cancel()
        self._is_timed = False
