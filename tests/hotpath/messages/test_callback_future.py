import asyncio
import contextlib

import pytest

from keyvault.hotpath.messages.callback_future import CallbackFuture
from keyvault.hotpath.messages.responses import HttpResponse

ANSWER = HttpResponse(200, b"{}", "req")


def test_future_notifies_each_waiter_immediately_and_once() -> None:
    later, results = CallbackFuture(), list[HttpResponse]()
    later.add_done_callback(lambda done: results.append(done.result()))
    later.set_result(ANSWER)
    assert results == [ANSWER]
    later.set_result(HttpResponse(200, b"another", "req"))
    later.cancel()
    assert (results, later.result(), later.cancelled()) == ([ANSWER], ANSWER, False)
    later.add_done_callback(lambda done: results.append(done.result()))
    assert results == [ANSWER, ANSWER], "a late callback runs immediately"


def test_abandoned_future_takes_no_answer() -> None:
    later, results = CallbackFuture(), list[bool]()
    later.add_done_callback(lambda done: results.append(done.cancelled()))
    assert not later.done()
    with pytest.raises(asyncio.InvalidStateError):
        later.result()
    later.cancel()
    later.set_result(ANSWER)
    assert (results, later.done()) == ([True], True)
    with pytest.raises(asyncio.CancelledError):
        later.result()


def test_future_can_be_awaited() -> None:
    async def run() -> None:
        later = CallbackFuture()
        waiting = [asyncio.ensure_future(later) for _ in range(2)]
        await asyncio.sleep(0)
        later.set_result(ANSWER)
        assert [await each for each in waiting] == [ANSWER] * 2
        assert await later is ANSWER

    asyncio.run(run())


def test_future_whose_only_waiter_was_cancelled_is_abandoned() -> None:
    """Guarantee: nothing is spent for an answer without a recipient."""

    async def run() -> None:
        later = CallbackFuture()
        waiting = asyncio.ensure_future(later)
        await asyncio.sleep(0)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        assert later.cancelled()

    asyncio.run(run())


def test_future_waiter_that_raises_delays_no_other(caplog: pytest.LogCaptureFixture) -> None:
    later, results = CallbackFuture(), list[HttpResponse]()

    def fail(done: CallbackFuture) -> None:
        raise ZeroDivisionError

    later.add_done_callback(fail)
    later.add_done_callback(lambda done: results.append(done.result()))
    later.set_result(ANSWER)
    assert results == [ANSWER]
    assert [record.message for record in caplog.records if record.exc_info] == ["a response callback failed"]
