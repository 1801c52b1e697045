"""An answer that is still to come."""

import asyncio
import logging
from collections.abc import Callable, Generator

from keyvault.hotpath.answers import Answer

_log = logging.getLogger(__name__)


class Later:
    """As an `asyncio.Future` of an answer, but that whoever waits for it is called at once and not in the loop's next
    turn: that turn costs more than handing over the answer."""

    __slots__ = ("_answer", "_callbacks", "_is_cancelled")

    def __init__(self) -> None:
        self._answer: Answer | None = None
        self._callbacks: list[Callable[[Later], object]] = []
        self._is_cancelled = False

    def done(self) -> bool:
        return self._answer is not None or self._is_cancelled

    def cancelled(self) -> bool:
        return self._is_cancelled

    def result(self) -> Answer:
        """Raises asyncio.CancelledError, and InvalidStateError while there is none."""
        if self._answer is None:
            raise asyncio.CancelledError if self._is_cancelled else asyncio.InvalidStateError
        return self._answer

    def set_result(self, answer: Answer) -> None:
        """Nobody gets it where it was given up."""
        if not self.done():
            self._answer = answer
            self._tell()

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        if not self.done():
            self._is_cancelled = True
            self._tell()

    def add_done_callback(self, callback: "Callable[[Later], object]") -> None:
        self._callbacks.append(callback)
        if self.done():
            self._tell()

    def __await__(self) -> Generator[object, None, Answer]:
        if not self.done():
            told = asyncio.Event()
            self.add_done_callback(lambda _: told.set())
            try:
                yield from told.wait().__await__()
            except asyncio.CancelledError:
                self.cancel()
                raise
        return self.result()

    def _tell(self) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except Exception:  # noqa: BLE001  of one who waits: the others have their answers all the same
                _log.exception("an answer could not be handed over")
