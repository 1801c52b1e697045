"""Threads beside those that answer."""

import os
from contextlib import suppress


def lower_priority() -> None:
    """The calling thread, when it wakes up, lets the one that answers go on, and has its turn once that one waits:
    Linux's SCHED_BATCH, see sched(7). For what is not urgent. Elsewhere, and where the process was given another
    policy, nothing changes."""
    with suppress(AttributeError, OSError):  # not Linux; or a C library, or a sandbox, that lets nobody ask
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
