"""Collect the use of roles in the console in memory, and write it once a minute.

A page must not cost a write. A process that is killed loses the uses of its last minute.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import ClassVar

from keyvault.access.permissions import Permission
from keyvault.access.principals import OperatorPrincipal
from keyvault.access.roles import Role
from keyvault.services.operators.role_use import find_used_roles, write_uses
from keyvault.services.usage.recorder import usage_log
from keyvault.services.work.background_thread import FlushThread, forget_at_fork


@dataclass(slots=True, eq=False)
class RoleUses(FlushThread):
    """Unwritten uses of this process: the last one of each operator's role. The first one starts the thread."""

    thread_name: ClassVar[str] = "role-uses"
    interval_seconds: ClassVar[float] = 60.0
    failure: ClassVar[str] = "uses of roles could not be written"
    outage: ClassVar[str] = "uses of roles could not be written; they are kept"

    _last: dict[tuple[str, Role], datetime] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, operator: OperatorPrincipal, permissions: Iterable[Permission], now: datetime) -> None:
        """Note that the operator uses those of the permissions that it has. Performs no I/O."""
        roles = find_used_roles(operator, permissions)
        if not roles:
            return
        with self._lock:
            self._last |= {(operator.username, role): now for role in roles}
            if self._thread is None and usage_log.is_reporting:
                self.start()

    def flush(self) -> None:
        """Write the uses. After a failure they are kept."""
        with self._lock:
            pending = dict(self._last)
        for (username, role), at in pending.items():
            write_uses(username, {role}, at)
        with self._lock:
            self._last = {use: at for use, at in self._last.items() if pending.get(use) != at}

    def forget(self) -> None:
        """Reset in a forked child. The parent writes its own uses and owns the thread."""
        self.__init__()  # type: ignore[misc]  # a dataclass's own


role_uses = RoleUses()
"""This process's uses of roles."""

forget_at_fork(role_uses)
