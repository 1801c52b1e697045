"""Uses that a killed process had not reported: another process of the host reports each of them."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from django.db import OperationalError
from hypothesis import given
from hypothesis import strategies as st

from keyvault.domain.environments import Environment
from keyvault.models import Key, UsageReporter, UseBucket
from keyvault.models.usage import UseOutcome
from keyvault.services.recording.signals import keys_refused
from keyvault.services.usage import recorder, unreported_uses
from keyvault.services.usage.recorder import LOST_AFTER, UsageLog, note_lost, observe, report_dead
from keyvault.services.usage.reports import find_sources
from keyvault.services.usage.unreported_uses import Entry, UnreportedUses, list_dead
from tests.clocks import Clock
from tests.factories import account, issue, make_merchant, now
from tests.services.usage.conftest import use

USED: Entry = ("key", "orders.create", "192.0.2.1", "curl", "", "allowed", 1_000_000.0)
MINUTE = 60


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(recorder, "_folder", lambda: tmp_path / "uses")
    return tmp_path / "uses"


@pytest.fixture
def clock() -> Clock:
    return Clock(now())


@pytest.fixture
def key(db: None) -> Key:
    make_merchant("acme")
    return issue(account(environment=Environment.PRODUCTION))[0]


@pytest.fixture
def log(clock: Clock, folder: Path, key: Key) -> UsageLog:
    """A reporter without its thread; the test flushes."""
    log = UsageLog(now=clock)
    log._prepare()
    return log


def kill(log: UsageLog) -> None:
    """Leave the file as a killed process does: the kernel closes the descriptors and nothing else happens."""
    assert log._file is not None
    log._file.forget()
    log._file = None


def counts() -> dict[str, int]:
    return dict(UseBucket.objects.values_list("context__source", "count"))


# --- a process --------------------------------------------------------------------------------------------


def in_killed_child(work: Callable[[], None]) -> None:
    """Run the work in a forked process, which SIGKILL ends."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.database
@pytest.mark.django_db
def test_uses_of_a_killed_process_are_reported_by_another(clock: Clock, folder: Path, key: Key) -> None:
    """Silence continues, and the uses restart that of their sources only."""
    UsageReporter.objects.create(reporter_id="dead", started_at=clock(), flushed_through_at=clock(), peppers={})

    def work() -> None:
        file = UnreportedUses(folder, "dead")
        for source in ("192.0.2.1", "198.51.100.1", "192.0.2.1"):
            file.note(key.key_id, "orders.create", source, "curl", "", "allowed", clock().timestamp())

    in_killed_child(work)
    clock.tick(LOST_AFTER.total_seconds() + 1)
    note_lost(clock())
    assert observe(clock(), "acme", Environment.PRODUCTION).lost_at is not None
    report_dead(clock())
    assert observe(clock(), "acme", Environment.PRODUCTION).lost_at is None
    assert counts() == {"192.0.2.1": 1, "198.51.100.1": 1}
    assert set(find_sources(key.key_id)) == {"192.0.2.0/24 curl", "198.51.100.0/24 curl"}
    assert not list(folder.iterdir())
    report_dead(clock())
    assert counts() == {"192.0.2.1": 1, "198.51.100.1": 1}


@pytest.mark.parametrize("outcome", [UseOutcome.ALLOWED, UseOutcome.REFUSED])
def test_refused_uses_of_a_killed_process_notify_the_receivers(
    log: UsageLog, key: Key, clock: Clock, outcome: UseOutcome
) -> None:
    """An attempt in quarantine reinstates the key as soon as it is reported."""
    notified: list[set[str]] = []

    def receive(key_ids: set[str], **_: object) -> None:
        notified.append(key_ids)

    use(log, key, outcome=outcome)
    kill(log)
    keys_refused.connect(receive)
    try:
        report_dead(clock())
    finally:
        keys_refused.disconnect(receive)
    assert notified == ([{key.key_id}] if outcome is UseOutcome.REFUSED else [])


@pytest.mark.database
def test_uses_that_were_reported_are_not_reported_again(log: UsageLog, key: Key, clock: Clock) -> None:
    use(log, key)
    log.flush()
    use(log, key, source="198.51.100.1")
    kill(log)
    report_dead(clock())
    assert counts() == {"192.0.2.1": 1, "198.51.100.1": 1}


@pytest.mark.database
def test_uses_of_a_report_that_was_stored_but_not_confirmed_are_not_reported_again(
    log: UsageLog, key: Key, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process was killed between the commit and the note of it."""
    use(log, key)
    monkeypatch.setattr(UnreportedUses, "confirm", lambda _: None)
    log.flush()
    kill(log)
    report_dead(clock())
    assert counts() == {"192.0.2.1": 1}


@pytest.mark.database
def test_uses_of_a_failed_report_are_reported(
    log: UsageLog, key: Key, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(log, key)
    with monkeypatch.context() as patch:
        patch.setattr(recorder, "_write", lambda *_: (_ for _ in ()).throw(OperationalError("gone")))
        for source in ("198.51.100.1", "203.0.113.1"):
            with pytest.raises(OperationalError):
                log.flush()
            use(log, key, source=source)
    kill(log)
    report_dead(clock())
    assert counts() == {"192.0.2.1": 1, "198.51.100.1": 1, "203.0.113.1": 1}


@pytest.mark.database
def test_file_of_a_process_that_ends_normally_is_deleted(log: UsageLog, key: Key, folder: Path) -> None:
    use(log, key)
    log._finish()
    assert not list(folder.iterdir())
    use(log, key)  # a late request of another thread


@pytest.mark.database
def test_file_of_a_process_whose_last_report_fails_is_reported(
    log: UsageLog, key: Key, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(log, key)
    with monkeypatch.context() as patch:
        patch.setattr(recorder, "_write", lambda *_: (_ for _ in ()).throw(OperationalError("gone")))
        log._finish()
    assert counts() == {}
    report_dead(clock())
    assert counts() == {"192.0.2.1": 1}


@pytest.mark.database
def test_file_of_a_living_process_is_left_alone(log: UsageLog, key: Key, clock: Clock, folder: Path) -> None:
    use(log, key)
    report_dead(clock())
    assert counts() == {}
    assert len(list(folder.iterdir())) == 1


@pytest.mark.database
def test_file_that_may_lack_uses_is_deleted_and_its_reporter_lost(
    log: UsageLog, key: Key, clock: Clock, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host may have lost what was not yet on its disk, so silence restarts."""
    use(log, key)
    kill(log)
    monkeypatch.setattr(unreported_uses, "_boot_id", lambda: b"another".ljust(64, b"\0"))
    report_dead(clock())
    assert (counts(), list(folder.iterdir())) == ({}, [])
    clock.tick(LOST_AFTER.total_seconds() + 1)
    note_lost(clock())
    assert observe(clock(), "acme", Environment.PRODUCTION).lost_at == clock()


@pytest.mark.database
def test_file_that_cannot_be_created_does_not_stop_the_process(
    clock: Clock, key: Key, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("not a folder")
    log = UsageLog(now=clock)
    log._prepare()
    use(log, key)
    log.flush()
    assert counts() == {"192.0.2.1": 1}
    assert "silence restarts" in caplog.text


# --- the file ---------------------------------------------------------------------------------------------


@pytest.fixture
def file(folder: Path) -> Iterator[UnreportedUses]:
    made = UnreportedUses(folder, "reporter")
    yield made
    if made._is_open:
        made.close(is_reported=True)


def left(folder: Path, stored: int = 0) -> list[Entry] | None:
    """What a successor reads once the process is dead."""
    [dead] = list_dead(folder)
    with open(dead.path, "rb"):
        return dead.read(stored)


def test_file_keeps_one_entry_of_a_bucket_and_minute(file: UnreportedUses, folder: Path) -> None:
    for seconds in (0, 1, MINUTE):
        file.note(*USED[:6], USED[6] + seconds)
    file.forget()
    assert [entry[6] - USED[6] for entry in left(folder) or []] == [0, MINUTE]


def test_file_that_is_full_is_not_read_until_its_uses_are_reported(
    file: UnreportedUses, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unreported_uses, "_SIZE", 400)
    for number in range(10):
        file.note(*USED[:6], USED[6] + number * MINUTE)
    monkeypatch.undo()
    mark = file.mark()
    file.send(1, mark)
    assert _unlocked(file) == [None]
    file.confirm()
    file.note(*USED)
    assert _unlocked(file) == [[USED]]


def _unlocked(file: UnreportedUses) -> list[list[Entry] | None]:
    with open(file.path, "rb") as opened:
        return [unreported_uses.DeadFile(file.path, os.dup(opened.fileno())).read(0)]


def test_file_that_was_emptied_after_a_mark_keeps_the_later_uses(file: UnreportedUses, folder: Path) -> None:
    """A failed report is sent again after the next one has begun; confirming it moves the entries to the front."""
    file.note(*USED)
    file.send(1, file.mark())
    second = file.mark()
    file.confirm()
    file.send(2, second)
    file.confirm()
    file.note("later", *USED[1:])
    file.forget()
    assert left(folder, 2) == [("later", *USED[1:])]


def test_file_without_room_between_mark_and_confirmation_is_not_read(
    file: UnreportedUses, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The use that had no room is neither in the file nor in the report that is confirmed."""
    file.note(*USED)
    mark = file.mark()
    monkeypatch.setattr(unreported_uses, "_SIZE", 200)
    file.note("no room", *USED[1:])
    monkeypatch.undo()
    file.send(1, mark)
    file.confirm()
    assert _unlocked(file) == [None]
    file.send(2, file.mark())
    file.confirm()
    assert _unlocked(file) == [[]]


def test_file_of_a_busy_process_is_reused_before_it_is_full(
    file: UnreportedUses, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that always has a later use than its report covers."""
    monkeypatch.setattr(unreported_uses, "_SIZE", 2_000)
    for number in range(1, 100):
        file.note(f"before {number}", *USED[1:])
        mark = file.mark()
        file.note(f"after {number}", *USED[1:])
        file.send(number, mark)
        file.confirm()
    monkeypatch.undo()
    file.forget()
    assert [entry[0] for entry in left(folder, 99) or []] == ["after 99"]


def test_file_that_never_got_its_name_is_deleted(folder: Path) -> None:
    folder.mkdir()
    for age_seconds in (0, 61):
        path = folder / f"{age_seconds}.new"
        path.touch()
        os.utime(path, (time.time() - age_seconds,) * 2)
    assert list(list_dead(folder)) == []
    assert [path.name for path in folder.iterdir()] == ["0.new"]


def test_file_tells_a_limited_number_of_sources_apart(
    file: UnreportedUses, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unreported_uses, "_MAX_ENTRIES", 2)
    for number in range(5):
        file.note("key", "orders.create", f"192.0.2.{number}", "curl", "", "allowed", USED[6])
    file.forget()
    assert [entry[2] for entry in left(folder) or []] == ["192.0.2.0", "192.0.2.1", ""]


def test_file_with_damaged_content_is_not_read(file: UnreportedUses, folder: Path) -> None:
    file.note(*USED)
    file.forget()
    with open(file.path, "r+b") as opened:
        opened.seek(128)
        opened.write(b"\xff\xff")
    assert left(folder) is None
    file.path.write_bytes(b"short")
    assert left(folder) is None


def test_file_is_for_its_owner_only(file: UnreportedUses) -> None:
    assert (file.path.stat().st_mode & 0o777, file.path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


class Model:
    """The buckets that a file must have, while a report goes from `mark` to `confirm`."""

    def __init__(self, file: UnreportedUses) -> None:
        self.file, self.minute, self.number, self.stored = file, 0, 0, 0
        self.fresh: set[tuple[str, int]] = set()
        self.taken: set[tuple[str, int]] = set()
        self.mark: unreported_uses.Mark | None = None
        self.advance: Iterator[None] = iter(())

    def use(self, which: int) -> None:
        self.file.note(f"key{which}", *USED[1:6], float(self.minute * MINUTE))
        self.fresh.add((f"key{which}", self.minute))

    def tick(self, _: int) -> None:
        self.minute += 1

    def report(self, _: int) -> None:
        """Take one step of a report."""
        if next(self.advance, self) is self:
            self.advance = self._steps()
            next(self.advance)

    def _steps(self) -> Iterator[None]:
        self.mark = self.file.mark()
        self.taken, self.fresh = self.fresh, set()
        yield
        self.number += 1
        self.file.send(self.number, self.mark)
        self.mark = None
        yield
        self.stored, self.taken = self.number, set()
        yield
        self.file.confirm()
        yield

    def fail(self, _: int) -> None:
        """An earlier report fails again, so the one that was just taken is put back."""
        if self.mark is not None:
            self.file.keep(self.mark)
            self.fresh, self.taken, self.mark = self.fresh | self.taken, set(), None
            self.advance = iter(())


STEPS = st.tuples(
    st.sampled_from([Model.use, Model.use, Model.tick, Model.report, Model.report, Model.fail]), st.integers(0, 2)
)


@given(steps=st.lists(STEPS, max_size=30))
def test_file_after_a_kill_has_each_unreported_use_and_no_stored_one(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[Callable[[Model, int], None], int]]
) -> None:
    folder = tmp_path_factory.mktemp("uses")
    model = Model(UnreportedUses(folder, "reporter"))
    for step, which in steps:
        step(model, which)
    model.file.forget()
    found = {(entry[0], int(entry[6] // MINUTE)) for entry in left(folder, model.stored) or []}
    assert found == model.fresh | model.taken
