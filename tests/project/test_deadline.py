"""One deadline for many tasks, on a clock that the test controls."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from keyvault.project.deadline import BodyDeadline


class DeadlineClock:
    def __init__(self) -> None:
        self.now = 0.0

    async def set(self, now: float) -> None:
        self.now = now
        await run_ready_tasks()


async def run_ready_tasks() -> None:
    """Run everything that is ready or due."""
    for _ in range(10):
        await asyncio.sleep(0)


def on_a_clock(scenario: Callable[[DeadlineClock], Coroutine[Any, Any, None]]) -> None:
    clock = DeadlineClock()

    async def live() -> None:
        asyncio.get_running_loop().time = lambda: clock.now  # type: ignore[method-assign]  # the test controls the clock
        await scenario(clock)

    asyncio.run(live())


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


def test_deadline_each_task_gets_the_full_time() -> None:
    async def scenario(clock: DeadlineClock) -> None:
        deadline = BodyDeadline(10)
        first = asyncio.ensure_future(deadline.bound(forever()))
        await clock.set(0)
        await clock.set(6)
        second = asyncio.ensure_future(deadline.bound(forever()))
        await clock.set(6)
        await clock.set(9.9)
        assert not first.done()
        await clock.set(10)
        assert (first.done(), second.done()) == (True, False)
        await clock.set(15.9)
        assert not second.done()
        await clock.set(16)
        for late in (first, second):
            with pytest.raises(TimeoutError):
                late.result()
        third = asyncio.ensure_future(deadline.bound(forever()))
        await clock.set(16)
        await clock.set(26)
        with pytest.raises(TimeoutError):
            third.result()

    on_a_clock(scenario)


def test_deadline_task_that_ends_in_time_is_not_canceled() -> None:
    async def scenario(clock: DeadlineClock) -> None:
        deadline = BodyDeadline(10)
        assert await deadline.bound(asyncio.sleep(0, "done")) == "done"
        await clock.set(100)

        async def fail() -> None:
            raise KeyError("its own")

        with pytest.raises(KeyError):
            await deadline.bound(fail())
        await clock.set(200)

    on_a_clock(scenario)


def test_deadline_foreign_cancellation_is_propagated() -> None:
    async def scenario(clock: DeadlineClock) -> None:
        deadline = BodyDeadline(10)
        canceled, both = (asyncio.ensure_future(deadline.bound(forever())) for _ in range(2))
        await run_ready_tasks()
        canceled.cancel()
        await run_ready_tasks()
        assert canceled.cancelled()
        both.cancel()
        clock.now = 10
        await run_ready_tasks()
        assert both.cancelled()

    on_a_clock(scenario)
