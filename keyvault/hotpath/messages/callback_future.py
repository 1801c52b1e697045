"""An answer that is still to come."""

import asyncio
import logging
from collections.abc import Callable, Generator

from msgspec import Struct

from keyvault.hotpath.messages.responses import HttpResponse

_log = logging.getLogger(__name__)


class CallbackFuture(Struct, eq=False):
    """As an `asyncio.Future` of an answer, but that whoever waits for it is called at once and not in the loop's next
    turn: that turn costs more than handing over the answer.

    `is_open` while there is no `answer` and it was not given up.
    """

    is_open: bool = True
    answer: HttpResponse | None = None
    callbacks: tuple[Callable[["CallbackFuture"], object], ...] = ()

    def done(self) -> bool:
        return not self.is_open

    def cancelled(self) -> bool:
        return not self.is_open and self.answer is None

    def result(self) -> HttpResponse:
        """Raises asyncio.CancelledError, and InvalidStateError while there is none."""
        if self.answer is None:
            raise asyncio.InvalidStateError if self.is_open else asyncio.CancelledError
        return self.answer

    def set_result(self, answer: HttpResponse) -> None:
        """Nobody gets it where it was given up."""
        if self.is_open:
            self.is_open, self.answer = False, answer
            self._tell()

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        if self.is_open:
            self.is_open = False
            self._tell()

    def add_done_callback(self, callback: "Callable[[CallbackFuture], object]") -> None:
        self.callbacks = (*self.callbacks, callback) if self.callbacks else (callback,)
        if not self.is_open:
            self._tell()

    def __await__(self) -> Generator[object, None, HttpResponse]:
        if self.is_open:
            told = asyncio.Event()
            self.add_done_callback(lambda _: told.set())
            try:
                yield from told.wait().__await__()
            except asyncio.CancelledError:
                self.cancel()
                raise
        return self.result()

    def _tell(self) -> None:
        callbacks, self.callbacks = self.callbacks, ()
        for callback in callbacks:
            try:
                callback(self)
            except Exception:  # noqa: BLE001  of one who waits: the others have their answers all the same
                _log.exception("an answer could not be handed over")
