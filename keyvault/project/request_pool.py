"""A fixed number of threads behind a bounded queue."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class QueueFullError(Exception):
    """The queue is full."""


class ClientGoneError(Exception):
    """The client disconnected before a thread was free; nothing ran."""


class RequestPool:
    """Threads that run one event loop's requests in the order of their arrival.

    The executor's own queue is unbounded and keeps canceled work. Requests therefore wait here: the executor gets one
    only when a thread is free.
    """

    def __init__(self, name: str, threads: int, queue: int) -> None:
        self._executor = ThreadPoolExecutor(threads, name)
        self._threads = threads
        self._free = asyncio.Semaphore(threads)
        self._queue = queue
        self._waiting = 0

    async def run(self, call: Callable[[], T], wait_for_disconnect: Callable[[], Awaitable[None]] | None) -> T:
        """Run `call` in a thread and return its result.

        Args:
            call: The function to run.
            wait_for_disconnect: Returns when the client is gone; None where a disconnect cannot be detected.

        Raises:
            QueueFullError: No thread is free, and the queue is full.
            ClientGoneError: The client disconnected while `call` waited.
        """
        if self._free.locked():
            await self._wait(wait_for_disconnect)
        else:
            await self._free.acquire()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, call)
        finally:
            self._free.release()

    async def close(self) -> None:
        """Refuse new requests, finish queued and running ones, and stop the threads."""
        self._queue = 0
        for _ in range(self._threads):
            await self._free.acquire()
        self._executor.shutdown()

    async def _wait(self, wait_for_disconnect: Callable[[], Awaitable[None]] | None) -> None:
        """Wait for a free thread. Raises QueueFullError, ClientGoneError."""
        if self._waiting >= self._queue:
            raise QueueFullError
        self._waiting += 1
        turn = asyncio.ensure_future(self._free.acquire())
        gone = asyncio.ensure_future(_never() if wait_for_disconnect is None else wait_for_disconnect())
        is_served = False
        try:
            await asyncio.wait({turn, gone}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise ClientGoneError
            is_served = True
        finally:
            self._waiting -= 1
            gone.cancel()
            if not is_served and not turn.cancel():
                self._free.release()


async def _never() -> None:
    await asyncio.get_running_loop().create_future()
