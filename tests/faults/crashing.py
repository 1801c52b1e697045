"""The crash points of a process: before and after each of its side effects, by name.

A name is `STEP:before-EFFECT` or `STEP:after-EFFECT`. The step is the event that a transaction records
(`rotation.staged:before-commit`), the state of the rotation whose ledger row was written last (`publishing:after-put`),
or another operation (`claim:after-update`). The product's code has no crash points: this module wraps what it calls.
"""

import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from django.db import connections, transaction
from django.db.backends.signals import connection_created
from django.db.models.signals import post_save, pre_save

from keyvault.backends.local import LocalKeystore
from keyvault.services.recording import transaction as recording
from keyvault.services.work import leases
from rotation.models import LedgerEntry

NOWHERE = "nowhere"

_WRITE = re.compile(r"(INSERT|UPDATE|DELETE)\b(?: OR \w+)?(?: INTO| FROM)? \"?(?:keyvault_|rotation_)?(\w+)")
_LEASE_CHANGES = {
    "claim": "claim",
    "claim_early": "claim",
    "claim_dispatched": "claim",
    "renew": "renew",
    "release": "release",
    "release_queued": "release",
    "postpone": "postpone",
    "pause": "pause",
    "wake": "wake",
}
"""The functions that change a lease, and the names of their crash points."""


class _Thread(threading.local):
    """The position of a thread. `event`: that its open transaction records. `inner`: depth in a named effect."""

    step = "turn"
    event = ""
    change = ""
    inner = 0


class CrashInjector:
    """Kills this process at its n-th crash point, counting from 1, or at the first one of that name.

    0 and `nowhere`: never. `names`: the crash points passed, in order; each new one is added to `notes` as a line.
    """

    def __init__(self, at: int | str = NOWHERE, notes: Path | None = None) -> None:
        self.at = at
        self.names: list[str] = []
        self.count = 0
        self._notes = notes
        self._thread = _Thread()

    def tick(self, name: str) -> None:
        self.count += 1
        if name not in self.names:
            self.names.append(name)
            self._note(name)
        if self.at in (self.count, name):
            os.kill(os.getpid(), signal.SIGKILL)
            threading.Event().wait()  # the signal has yet to arrive

    def _note(self, name: str) -> None:
        if self._notes is not None:
            # One short write to a file opened for appending is atomic beside other writers.
            with self._notes.open("ab", buffering=0) as file:
                file.write(f"{name}\n".encode())

    def install(self) -> None:
        """Wrap the outermost commits, the writes that commit by themselves, the backend's writes, and messages."""
        self._wrap_commits()
        self._wrap_statements()
        self._wrap_ledger()
        for effect in ("put", "soft_delete", "undelete", "destroy", "forget"):
            self._wrap_call(LocalKeystore, effect, effect)

    def _wrap_call(self, owner: Any, attribute: str, effect: str, step: str = "") -> None:
        call = getattr(owner, attribute)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            at = step or self._thread.step
            self.tick(f"{at}:before-{effect}")
            result = call(*args, **kwargs)
            self.tick(f"{at}:after-{effect}")
            return result

        setattr(owner, attribute, wrapped)

    def _wrap_commits(self) -> None:
        thread = self._thread
        patched: Any = recording
        commit = patched._commit

        def noted(unit: Any, *rest: Any) -> Any:
            thread.event = unit.records[0].event
            return commit(unit, *rest)

        patched._commit = noted
        atomic: Any = transaction.Atomic
        leave = atomic.__exit__

        def left(block: Any, kind: Any, *rest: Any) -> Any:
            if len(connections["default"].atomic_blocks) != 1:
                return leave(block, kind, *rest)
            step, thread.event = thread.event or thread.change or "transaction", ""
            end = "commit" if kind is None else "rollback"
            self.tick(f"{step}:before-{end}")
            result = leave(block, kind, *rest)
            self.tick(f"{step}:after-{end}")
            return result

        atomic.__exit__ = left

    def _wrap_statements(self) -> None:
        for function, change in _LEASE_CHANGES.items():
            self._wrap_lease_change(function, change)

        def watch(connection: Any, **_: Any) -> None:
            if self._around_statement not in connection.execute_wrappers:
                connection.execute_wrappers.append(self._around_statement)

        # Each thread has a connection of its own. Kept alive by the injector, since signals hold no handler.
        self._watch = watch
        connection_created.connect(watch)
        watch(connections["default"])

    def _wrap_lease_change(self, function: str, change: str) -> None:
        thread, call = self._thread, getattr(leases, function)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            thread.change = change
            if change in {"claim", "release"}:
                thread.step, thread.inner = "turn", 0
            try:
                return call(*args, **kwargs)
            finally:
                thread.change = ""

        setattr(leases, function, wrapped)

    def _around_statement(self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        written = _WRITE.match(sql)
        if written is None or context["connection"].in_atomic_block or self._thread.inner:
            return execute(sql, params, many, context)
        table = written[2]
        if table == "ledgerentry":
            name = (self._thread.step, "ledger-outcome")
        else:
            name = (self._thread.change or table, written[1].lower())
        self.tick(f"{name[0]}:before-{name[1]}")
        result = execute(sql, params, many, context)
        self.tick(f"{name[0]}:after-{name[1]}")
        return result

    def _wrap_ledger(self) -> None:
        """Wrap ledger writes: the row names the thread's step from then on."""
        thread = self._thread

        def before(instance: LedgerEntry, **_: Any) -> None:
            thread.step = str(instance.step)
            self.tick(f"{thread.step}:before-ledger")
            thread.inner += 1

        def after(**_: Any) -> None:
            thread.inner -= 1
            self.tick(f"{thread.step}:after-ledger")

        self._ledger = (before, after)
        pre_save.connect(before, sender=LedgerEntry)
        post_save.connect(after, sender=LedgerEntry)
