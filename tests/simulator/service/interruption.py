"""Interruptions of a worker's turn: its process ends, or another actor acts between two of its transactions."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connection

from tests.killing import KilledError
from tests.rotation.machine.backend import MemoryBackend


class TurnInterruption:
    """Count the database statements and backend calls of a turn; at number `at` end the worker, or run `act`.

    `act` runs as soon as no transaction is open. A dead worker executes nothing more.
    """

    def __init__(self, at: int, act: Callable[[], None] | None = None) -> None:
        self._at, self._act, self._count = at, act, 0
        self.has_happened = self._is_acting = False
        self._outside = _find_depth()

    @contextmanager
    def under_way(self, backend: MemoryBackend) -> Iterator[None]:
        self._outside = _find_depth()
        before, backend.on_call = backend.on_call, self._event
        try:
            with connection.execute_wrapper(self):
                yield
        finally:
            backend.on_call = before

    def __call__(self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        # At a savepoint the services have started a transaction, but the database has not.
        if not sql.startswith(("SAVEPOINT", "RELEASE", "ROLLBACK")):
            self._event()
        return execute(sql, params, many, context)

    def _event(self, _name: str = "") -> None:
        if self._is_acting:
            return
        if self.has_happened and self._act is None:
            raise KilledError
        self._count += 1
        if self._count < self._at or self.has_happened:
            return
        if self._act is None:
            self.has_happened = True
            raise KilledError
        if _find_depth() == self._outside:
            self.has_happened = self._is_acting = True
            try:
                self._act()
            finally:
                self._is_acting = False


def _find_depth() -> tuple[bool, int]:
    """Return how deep the open transactions are nested."""
    return connection.in_atomic_block, len(connection.savepoint_ids)
