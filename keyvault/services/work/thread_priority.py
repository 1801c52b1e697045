"""Lower the priority of background threads below that of threads that answer requests."""

import os
from contextlib import suppress


def lower_priority() -> None:
    """Schedule the calling thread as SCHED_BATCH, so that it does not preempt threads that answer requests.

    See sched(7). Does nothing outside Linux, or when the process already has another scheduling policy.
    """
    with suppress(AttributeError, OSError):  # not Linux, or the C library or a sandbox denies the call
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
