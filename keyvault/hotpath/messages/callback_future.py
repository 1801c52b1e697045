"""A future whose callbacks run immediately."""

import asyncio
import logging
from collections.abc import Callable, Generator

from msgspec import Struct

from keyvault.hotpath.messages.responses import HttpResponse

_log = logging.getLogger(__name__)


class CallbackFuture(Struct, eq=False):
    """An `asyncio.Future` for a response that calls its callbacks immediately, not in the next turn of the loop.

    A turn of the loop costs more than passing on the response. `is_open` is true until a result is set or the future is
    canceled.
    """

    is_open: bool = True
    answer: HttpResponse | None = None
    callbacks: tuple[Callable[["CallbackFuture"], object], ...] = ()

    def done(self) -> bool:
        return not self.is_open

    def cancelled(self) -> bool:
        return not self.is_open and self.answer is None

    def result(self) -> HttpResponse:
        """Return the response. Raises asyncio.CancelledError if canceled, and InvalidStateError if not done."""
        if self.answer is None:
            raise asyncio.InvalidStateError if self.is_open else asyncio.CancelledError
        return self.answer

    def set_result(self, answer: HttpResponse) -> None:
        """Set the response; ignored after cancellation."""
        if self.is_open:
            self.is_open, self.answer = False, answer
            self._run_callbacks()

    def cancel(self) -> None:
        if self.is_open:
            self.is_open = False
            self._run_callbacks()

    def add_done_callback(self, callback: "Callable[[CallbackFuture], object]") -> None:
        self.callbacks = (*self.callbacks, callback) if self.callbacks else (callback,)
        if not self.is_open:
            self._run_callbacks()

    def __await__(self) -> Generator[object, None, HttpResponse]:
        if self.is_open:
            finished = asyncio.Event()
            self.add_done_callback(lambda _: finished.set())
            try:
                yield from finished.wait().__await__()
            except asyncio.CancelledError:
                self.cancel()
                raise
        return self.result()

    def _run_callbacks(self) -> None:
        callbacks, self.callbacks = self.callbacks, ()
        for callback in callbacks:
            try:
                callback(self)
            except Exception:  # noqa: BLE001  isolate errors of one callback from the others
                _log.exception("a response callback failed")
