"""Compute in threads that have a lower CPU priority than the requests of merchants."""

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_NICENESS = 10
"""Niceness added to the process's own. On a busy core such a thread gets about a tenth of the time."""


def _lower() -> None:
    # Elsewhere a priority belongs to the process, not to the thread.
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS)


# Separate threads, because an unprivileged thread cannot raise its priority again. As many as the console has.
_threads = ThreadPoolExecutor(2, thread_name_prefix="low-priority", initializer=_lower)


def run_at_low_priority(compute: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return or raise what `compute` does, which must not use the database: its thread has its own connection."""
    return _threads.submit(compute, *args, **kwargs).result()
