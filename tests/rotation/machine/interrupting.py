"""Interruptions within a step: the worker is killed, or another actor runs between its transactions.

Events are counted: each database statement, and each call to the secret backend before and after it. The whole sequence
runs in one transaction that is rolled back; a transaction of the services is a savepoint in it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connection, transaction

from tests.killing import KilledError
from tests.rotation.machine.backend import MemoryBackend


class DisruptedError(Exception):
    """The database refused a statement."""


class Interruption:
    """At event number `at` (from 1): kill, run `act` as soon as no transaction is open, or refuse a statement."""

    def __init__(self, at: int, act: Callable[[], None] | None = None, *, refuses: str = "") -> None:
        self.at, self.act, self.refuses = at, act, refuses
        self.count = 0
        self.has_happened = self.is_dead = self._is_acting = False
        self._depth = 0

    def __call__(self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        # At a savepoint the services have started a transaction, but the database has not: nothing can run in between.
        if sql.startswith(("SAVEPOINT", "RELEASE", "ROLLBACK")) or self._is_acting:
            return execute(sql, params, many, context)
        if self.refuses and self.refuses in sql and not self.has_happened:
            self.has_happened = True
            raise DisruptedError(sql[:40])
        self.event()
        return execute(sql, params, many, context)

    def event(self, _name: str = "") -> None:
        if self._is_acting or self.refuses:
            return
        if self.is_dead:
            raise KilledError
        self.count += 1
        if self.count < self.at or self.has_happened:
            return
        if self.act is None:
            self.has_happened = self.is_dead = True
            raise KilledError
        if len(connection.savepoint_ids) == self._depth:
            self.has_happened = self._is_acting = True
            try:
                self.act()
            finally:
                self._is_acting = False

    @contextmanager
    def under_way(self, backend: MemoryBackend) -> Iterator[None]:
        """End a killed step here, with what it had committed."""
        self._depth = len(connection.savepoint_ids)
        before, backend.on_call = backend.on_call, self._called(backend.on_call)
        try:
            with connection.execute_wrapper(self):
                yield
        except (KilledError, DisruptedError):
            # A killed transaction of one statement is undone by the database; the test's own transaction continues.
            transaction.set_rollback(False)
        finally:
            backend.on_call = before

    def _called(self, also: Callable[[str], None] | None) -> Callable[[str], None]:
        def called(name: str) -> None:
            if also is not None and not self.is_dead:
                # The watcher's statements are not the worker's: nothing happens between its check and the call.
                was_acting, self._is_acting = self._is_acting, True
                try:
                    also(name)
                finally:
                    self._is_acting = was_acting
            self.event(name)

        return called
