"""Threads beside those that answer stand back; nothing else does."""

import errno
import os
import threading
from collections.abc import Callable

import pytest

from keyvault.services.usage.recorder import UsageLog
from keyvault.services.verification.refusals import RefusalLog
from keyvault.services.work.thread_priority import lower_priority
from tests.services.racing import TIMEOUT_SECONDS

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux's")


def policy_after(act: Callable[[], None]) -> int:
    """Of a thread that has done this."""
    found: list[int] = []

    def run() -> None:
        act()
        found.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(TIMEOUT_SECONDS)
    return found[0]


def test_background_thread_stands_back_and_no_other_thread_of_its_process() -> None:
    before = os.sched_getscheduler(0)
    assert policy_after(lower_priority) == (os.SCHED_BATCH if before == os.SCHED_OTHER else before)
    assert os.sched_getscheduler(0) == before
    assert policy_after(lambda: None) == before


def test_background_thread_of_a_process_with_another_policy_keeps_it() -> None:
    """Whoever runs the service with the least priority has said so."""

    def rest() -> None:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        lower_priority()

    assert policy_after(rest) == os.SCHED_IDLE


@pytest.mark.parametrize("call", ["sched_getscheduler", "sched_setscheduler"])
@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EPERM])
def test_background_thread_of_a_host_that_lets_nobody_ask_goes_on(
    monkeypatch: pytest.MonkeyPatch, call: str, error: int
) -> None:
    """musl answers that there is no such call, and a sandbox may forbid it."""

    def refuse(*_: object) -> None:
        raise OSError(error, "no")

    monkeypatch.setattr(os, call, refuse)
    lower_priority()


@pytest.mark.parametrize("log", [UsageLog, RefusalLog])
def test_background_threads_are_those_that_write_what_was_noted(
    log: type[UsageLog | RefusalLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    noted = log()
    name, run = ("usage.recorder", "_report") if isinstance(noted, UsageLog) else ("verification.refusals", "_write")
    monkeypatch.setattr(
        f"keyvault.services.{name}.lower_priority", lambda: told.append(threading.current_thread().name)
    )
    noted._stop.set()
    thread = threading.Thread(target=getattr(noted, run), name="the log's")
    thread.start()
    thread.join(TIMEOUT_SECONDS)
    assert told == ["the log's"]
