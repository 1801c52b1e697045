"""A background thread starts once, survives its failures, writes what is left and is forgotten in a forked child."""

import logging
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
from django.db import InterfaceError, OperationalError, connection

from keyvault.backends.base import BackendUnavailableError
from keyvault.services.work import background_thread
from keyvault.services.work.background_thread import BackgroundThread, forget_at_fork, log_failure
from tests.services.racing import TIMEOUT_SECONDS

FORK = multiprocessing.get_context("fork")


@dataclass(slots=True, eq=False)
class Writer(BackgroundThread):
    """Writes what is pending, in rounds that follow each other without a pause."""

    thread_name: ClassVar[str] = "writer"

    pending: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    work: Callable[[], None] = lambda: None
    preparing: Callable[[], None] = lambda: None

    def forget(self) -> None:
        self.__init__()  # type: ignore[misc]  # a dataclass's own

    def _prepare(self) -> None:
        self.preparing()
        self.events.append("prepared")

    def _loop(self) -> None:
        self._repeat(self.work, 0.0)

    def _finish(self) -> None:
        self.events.append(f"finished without a thread: {self._thread is None}")
        self.events += self.pending


@pytest.fixture
def writer() -> Iterator[Writer]:
    made = Writer()
    yield made
    made.stop()


def running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "writer"]


def test_background_thread_started_twice_is_one_daemon_with_a_name(writer: Writer) -> None:
    writer.start()
    writer.start()
    (thread,) = running()
    assert thread.daemon
    assert writer.events == ["prepared"]


def test_background_thread_whose_preparation_fails_is_not_started_and_may_be_later(writer: Writer) -> None:
    def fail() -> None:
        raise OperationalError("away")

    writer.preparing = fail
    with pytest.raises(OperationalError):
        writer.start()
    assert (running(), writer.events) == ([], [])
    writer.preparing = lambda: None
    writer.start()
    assert len(running()) == 1


def test_background_thread_stopped_has_ended_before_the_rest_is_written(writer: Writer) -> None:
    """Two writers of the same pending data would write in any order."""
    begun, may_end = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert may_end.wait(TIMEOUT_SECONDS)
        writer.events.append("round")

    writer.work = work
    writer.start()
    assert begun.wait(TIMEOUT_SECONDS)
    stopping = threading.Thread(target=writer.stop)
    stopping.start()
    assert writer._stop.wait(TIMEOUT_SECONDS)
    writer.pending.append("the rest")
    may_end.set()
    stopping.join(TIMEOUT_SECONDS)
    assert writer.events == ["prepared", "round", "finished without a thread: True", "the rest"]
    assert running() == []


def test_background_thread_that_hangs_is_waited_for_with_a_bound(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process must end although its database never answers."""
    monkeypatch.setattr(background_thread, "JOIN_SECONDS", 0.01)
    begun, may_end = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert may_end.wait(TIMEOUT_SECONDS)

    writer.work = work
    writer.start()
    assert begun.wait(TIMEOUT_SECONDS)
    (thread,) = running()
    try:
        writer.stop()
        assert thread.is_alive()
        assert writer.events[-1].startswith("finished")
        writer.start()
    finally:
        may_end.set()
        thread.join(TIMEOUT_SECONDS)
    assert not thread.is_alive(), "a later start does not revive it"
    assert len(running()) == 1


def test_background_thread_that_was_never_started_has_nothing_to_finish(writer: Writer) -> None:
    writer.stop()
    assert writer.events == []


def test_background_thread_stopped_may_start_again(writer: Writer) -> None:
    writer.start()
    writer.stop()
    rounds = threading.Event()
    writer.work = rounds.set
    writer.start()
    assert rounds.wait(TIMEOUT_SECONDS)


def test_background_thread_goes_on_after_a_round_that_failed(writer: Writer, caplog: pytest.LogCaptureFixture) -> None:
    failures, recovered = [ValueError("confused"), OperationalError("away")], threading.Event()

    def work() -> None:
        if failures:
            raise failures.pop(0)
        recovered.set()

    writer.work = work
    writer.start()
    assert recovered.wait(TIMEOUT_SECONDS)
    own = [record for record in caplog.records if record.name == background_thread.__name__]
    assert [record.levelname for record in own] == ["ERROR", "WARNING"]
    assert {record.message for record in own} == {"a round of a background thread failed"}
    assert {vars(record)["thread_name"] for record in own} == {"writer"}


@pytest.mark.parametrize("lost", [OperationalError, InterfaceError])
def test_failure_of_the_database_is_a_line_and_any_other_has_its_traceback(
    lost: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    log = logging.getLogger("tests.background")
    with log_failure(log, "not written", outage="not written; it is kept"):
        raise lost("away")
    with log_failure(log, "not written"):
        raise lost("away")
    with log_failure(log, "not written", outage="not written; it is kept"):
        raise ValueError("confused")
    with log_failure(log, "not written"):
        pass
    found = [(record.levelname, record.message, bool(record.exc_info)) for record in caplog.records]
    assert found == [
        ("WARNING", "not written; it is kept", False),
        ("WARNING", "not written", False),
        ("ERROR", "not written", True),
    ]
    assert str(caplog.records[0].__dict__["why"]) == "away"


def test_failure_of_another_dependency_is_a_line_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    with log_failure(logging.getLogger("tests.background"), "not read"):
        raise BackendUnavailableError("Try again.", internal="the secrets manager is sealed")
    (record,) = caplog.records
    assert (record.levelname, record.message, record.exc_info) == ("WARNING", "not read", None)
    assert vars(record)["why"] == "the secrets manager is sealed"


def test_failure_that_ends_the_process_is_not_caught() -> None:
    with pytest.raises(SystemExit), log_failure(logging.getLogger("tests.background"), "not written"):
        raise SystemExit


def _report_from_child(writer: Writer, reports: "multiprocessing.queues.Queue[tuple[object, ...]]") -> None:
    inherited = (writer._thread, writer.pending, writer._stop.is_set(), writer._starting.locked())
    writer.start()
    reports.put((*inherited, len(running())))


def test_background_thread_in_a_forked_child_is_forgotten_and_started_anew(writer: Writer) -> None:
    """A lock that the parent's thread holds is never released there, and the parent writes its own pending data."""
    reports: multiprocessing.queues.Queue[tuple[object, ...]] = FORK.Queue()
    forget_at_fork(writer)
    writer.start()
    writer.pending.append("the parent's")
    thread = writer._thread
    child = FORK.Process(target=_report_from_child, args=(writer, reports))
    with writer._starting:
        child.start()
    assert reports.get(timeout=TIMEOUT_SECONDS) == (None, [], False, False, 1)
    child.join(TIMEOUT_SECONDS)
    assert (writer._thread, writer.pending) == (thread, ["the parent's"])


def _end_child(reports: "multiprocessing.queues.Queue[str]") -> None:
    class Teller(Writer):
        def _finish(self) -> None:
            reports.put("finished")
            reports.close()
            reports.join_thread()

    Teller().start()


def test_background_thread_of_a_forked_process_finishes_when_it_ends() -> None:
    """Granian's workers are such processes; atexit does not run there."""
    reports: multiprocessing.queues.Queue[str] = FORK.Queue()
    child = FORK.Process(target=_end_child, args=(reports,))
    child.start()
    assert reports.get(timeout=TIMEOUT_SECONDS) == "finished"
    child.join(TIMEOUT_SECONDS)
    assert child.exitcode == 0


def test_state_that_nobody_holds_is_not_kept_for_a_fork() -> None:
    made = Writer()
    forget_at_fork(made)
    assert made in background_thread._states
    before = len(background_thread._states)
    del made
    assert len(background_thread._states) < before


def _end_child_with_two(reports: "multiprocessing.queues.Queue[bool]") -> None:
    requests = (threading.Event(), threading.Event())

    class Teller(Writer):
        def request_stop(self) -> None:
            Writer.request_stop(self)
            requests[reporters.index(self)].set()

        def _finish(self) -> None:
            reports.put(threads[reporters.index(self)].is_alive())

    reporters = [Teller(), Teller()]
    threads: list[threading.Thread] = []
    for teller, request_of_other in zip(reporters, requests[::-1], strict=True):
        begun = threading.Event()

        def work(begun: threading.Event = begun, request: threading.Event = request_of_other) -> None:
            begun.set()
            request.wait(TIMEOUT_SECONDS)

        teller.work = work
        teller.start()
        assert teller._thread is not None
        threads.append(teller._thread)
        assert begun.wait(TIMEOUT_SECONDS)


def test_background_threads_are_all_told_to_stop_before_one_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: their last rounds run at the same time, so that a process ends within its supervisor's timeout."""
    monkeypatch.setattr(background_thread, "JOIN_SECONDS", TIMEOUT_SECONDS / 2)
    reports: multiprocessing.queues.Queue[bool] = FORK.Queue()
    child = FORK.Process(target=_end_child_with_two, args=(reports,))
    child.start()
    assert [reports.get(timeout=TIMEOUT_SECONDS) for _ in range(2)] == [False, False]
    child.join(TIMEOUT_SECONDS)
    assert child.exitcode == 0


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_background_thread_that_lost_its_connection_in_a_round_works_in_the_next(writer: Writer) -> None:
    """Guarantee: after an outage of the database a thread continues without a restart of its process."""
    done, rounds = threading.Event(), iter(range(1_000_000))

    def work() -> None:
        with connection.cursor() as cursor:
            if next(rounds) == 0:
                cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")
            cursor.execute("SELECT 1")
        done.set()

    writer.work = work
    writer.start()
    assert done.wait(TIMEOUT_SECONDS)
