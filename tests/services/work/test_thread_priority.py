"""Background threads lower their scheduling priority; other threads keep theirs."""

import errno
import os
import threading
from collections.abc import Callable

import pytest

from keyvault.services.sessions.refusals import SignInRefusals
from keyvault.services.usage.recorder import UsageLog
from keyvault.services.verification.refusals import RefusalLog
from keyvault.services.work import background_thread
from keyvault.services.work.thread_priority import lower_priority
from tests.services.racing import TIMEOUT_SECONDS

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="requires Linux")


def policy_after(call: Callable[[], None]) -> int:
    """Return the scheduling policy of a thread after this call."""
    found: list[int] = []

    def run() -> None:
        call()
        found.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(TIMEOUT_SECONDS)
    return found[0]


def test_background_thread_lowers_only_its_own_priority() -> None:
    before = os.sched_getscheduler(0)
    assert policy_after(lower_priority) == (os.SCHED_BATCH if before == os.SCHED_OTHER else before)
    assert os.sched_getscheduler(0) == before
    assert policy_after(lambda: None) == before


def test_background_thread_of_a_process_with_another_policy_keeps_it() -> None:
    """An administrator has chosen that policy."""

    def choose_idle() -> None:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        lower_priority()

    assert policy_after(choose_idle) == os.SCHED_IDLE


@pytest.mark.parametrize("call", ["sched_getscheduler", "sched_setscheduler"])
@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EPERM])
def test_background_thread_on_a_host_without_scheduling_calls_continues(
    monkeypatch: pytest.MonkeyPatch, call: str, error: int
) -> None:
    """musl lacks the calls, and a sandbox may forbid them."""

    def refuse(*_: object) -> None:
        raise OSError(error, "no")

    monkeypatch.setattr(os, call, refuse)
    lower_priority()


@pytest.mark.parametrize("log", [UsageLog, RefusalLog, SignInRefusals])
def test_background_thread_of_each_log_lowers_its_priority(
    log: type[UsageLog | RefusalLog | SignInRefusals], monkeypatch: pytest.MonkeyPatch
) -> None:
    thread_names: list[str] = []
    log_instance = log()
    monkeypatch.setattr(
        background_thread, "lower_priority", lambda: thread_names.append(threading.current_thread().name)
    )
    log_instance._stop.set()
    thread = threading.Thread(target=log_instance._run, name="the log's")
    thread.start()
    thread.join(TIMEOUT_SECONDS)
    assert thread_names == ["the log's"]
