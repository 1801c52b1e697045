"""One deadline for many tasks, on a clock that the test sets."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from keyvault.project.deadline import BodyDeadline


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    async def set(self, now: float) -> None:
        self.now = now
        await turn_the_loop()


async def turn_the_loop() -> None:
    """Let everything that is ready or due run."""
    for _ in range(10):
        await asyncio.sleep(0)


def on_a_clock(scenario: Callable[[Clock], Coroutine[Any, Any, None]]) -> None:
    clock = Clock()

    async def live() -> None:
        asyncio.get_running_loop().time = lambda: clock.now  # type: ignore[method-assign]  # a clock set by hand
        await scenario(clock)

    asyncio.run(live())


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


def test_deadline_each_task_has_the_whole_time() -> None:
    async def scenario(clock: Clock) -> None:
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


def test_deadline_leaves_what_ends_in_time_alone() -> None:
    async def scenario(clock: Clock) -> None:
        deadline = BodyDeadline(10)
        assert await deadline.bound(asyncio.sleep(0, "done")) == "done"
        await clock.set(100)

        async def fail() -> None:
            raise KeyError("its own")

        with pytest.raises(KeyError):
            await deadline.bound(fail())
        await clock.set(200)

    on_a_clock(scenario)


def test_deadline_passes_on_a_cancellation_that_is_not_its_own() -> None:
    async def scenario(clock: Clock) -> None:
        deadline = BodyDeadline(10)
        canceled, both = (asyncio.ensure_future(deadline.bound(forever())) for _ in range(2))
        await turn_the_loop()
        canceled.cancel()
        await turn_the_loop()
        assert canceled.cancelled()
        both.cancel()
        clock.now = 10
        await turn_the_loop()
        assert both.cancelled()

    on_a_clock(scenario)
