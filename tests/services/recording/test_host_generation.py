"""The host generation file: no announcement is lost, and any doubt makes readers discard their whole cache."""

import fcntl
import multiprocessing
import os
import random
import signal
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyvault.domain.ids import Subject
from keyvault.services.recording import host_generation as subject_under_test
from keyvault.services.recording.host_generation import SLOTS, HostGeneration
from tests.services.racing import TIMEOUT_SECONDS

SPAWN = multiprocessing.get_context("spawn")

WRITERS, BATCHES, BATCH = 3, 100, 3
"""Numbers of writers, batches and subjects; their product fits the ring, so a reader may miss no announcement."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "generation"


def key(number: int | str) -> Subject:
    return "key", f"k{number}"


# ------------------------------------------------------------------------------------------------- one announcement


def test_generation_announcement_is_seen_by_every_reader(path: Path) -> None:
    """A second instance stands for another process: its counter differs immediately, and the subjects are in order."""
    writer, reader = HostGeneration(path), HostGeneration(path)
    seen = reader.memory[0]
    writer.announce([key(1), ("limit", "acme/sandbox/lagréé")])
    assert reader.memory[0] != seen
    assert reader.since(seen) == (writer.memory[0], [key(1), ("limit", "acme/sandbox/lagréé")])
    assert reader.since(writer.memory[0]) == (writer.memory[0], [])


def test_generation_announcing_nothing_keeps_the_counter(path: Path) -> None:
    shared = HostGeneration(path)
    before = shared.memory[0]
    shared.announce([])
    assert shared.memory[0] == before


@pytest.mark.parametrize(("behind", "is_known"), [(SLOTS, True), (SLOTS + 1, False)])
def test_generation_reader_too_far_behind_gets_no_subjects(path: Path, behind: int, is_known: bool) -> None:
    """The ring holds the last SLOTS subjects; a reader that needs an older one must discard its whole cache."""
    shared = HostGeneration(path)
    seen = shared.memory[0]
    for number in range(behind):
        shared.announce([key(number)])
    expected = [key(number) for number in range(behind)] if is_known else None
    assert shared.since(seen) == (shared.memory[0], expected)


def test_generation_announcement_larger_than_the_ring_gives_no_subjects(path: Path) -> None:
    shared = HostGeneration(path)
    seen = shared.memory[0]
    shared.announce([key(number) for number in range(SLOTS + 5)])
    assert shared.since(seen) == (shared.memory[0], None)


def test_generation_subject_too_long_for_a_slot_gives_no_subjects(path: Path) -> None:
    """A truncated name could match another subject."""
    shared = HostGeneration(path)
    seen = shared.memory[0]
    shared.announce([("limit", "é" * 160)])
    assert shared.since(seen) == (shared.memory[0], None)


@given(st.lists(st.lists(st.tuples(st.sampled_from(["key", "limit", "merchant"]), st.text("äx/-1", max_size=40)))))
def test_generation_reader_gets_exactly_what_was_announced_since(batches: list[list[Subject]]) -> None:
    with _temporary() as place:
        shared, announced = HostGeneration(place), []
        stops = [(shared.memory[0], 0)]
        for batch in batches:
            shared.announce(batch)
            announced += batch
            stops.append((shared.memory[0], len(announced)))
        for seen, position in stops:
            assert shared.since(seen) == (shared.memory[0], announced[position:])


@contextmanager
def _temporary() -> Iterator[Path]:
    place = Path(os.environ["KEYVAULT_DATA_DIR"], f"generation-{os.getpid()}-{threading.get_ident()}")
    try:
        yield place
    finally:
        place.unlink(missing_ok=True)


# ----------------------------------------------------------------------------------------------------------- the file


def test_generation_file_is_writable_only_by_its_owner(path: Path) -> None:
    """A user who could write it could hide a revocation for a moment."""
    before = os.umask(0)
    try:
        HostGeneration(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_generation_file_outlives_its_processes(path: Path) -> None:
    first = HostGeneration(path)
    first.announce([key(1)])
    assert HostGeneration(path).memory[0] == first.memory[0]


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 400_000], ids=["empty", "short", "foreign"])
def test_generation_file_with_invalid_content_is_created_again(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    shared = HostGeneration(path)
    seen = shared.memory[0]
    shared.announce([key(1)])
    assert HostGeneration(path).since(seen) == (shared.memory[0], [key(1)])


def test_generation_file_deleted_and_created_again_gives_readers_no_subjects(path: Path) -> None:
    """The first process to notice marks the deleted file, and readers use the new one from then on."""
    reader, second_reader, other = HostGeneration(path), HostGeneration(path), HostGeneration(path)
    seen, memory = reader.memory[0], reader.memory
    path.unlink()
    other.announce([key(1)])  # detects the deletion and creates a new file
    assert memory[0] != seen
    assert reader.since(seen)[1] is None
    assert second_reader.since(seen)[1] is None
    seen = reader.memory[0]
    other.announce([key(2)])
    assert reader.since(seen) == (other.memory[0], [key(2)])


def test_generation_file_deleted_is_noticed_by_remap(path: Path) -> None:
    reader, other = HostGeneration(path), HostGeneration(path)
    seen, memory = reader.memory[0], reader.memory
    path.unlink()
    other.remap()
    assert memory[0] != seen, "readers of the old file must notice"
    other.remap()
    assert reader.since(memory[0])[1] is None


def test_generation_file_overwritten_in_place_gives_readers_no_subjects(path: Path) -> None:
    """A restored older copy sets the counter back, so the ring is not trusted."""
    reader = HostGeneration(path)
    old = path.read_bytes()
    reader.announce([key(1)])
    seen = reader.memory[0]
    with path.open("r+b") as file:
        file.write(old)
    assert reader.memory[0] != seen
    assert reader.since(seen)[1] is None


@pytest.mark.parametrize("is_remapped_first", [False, True])
def test_generation_file_replaced_by_an_older_copy_gives_readers_no_subjects(
    path: Path, is_remapped_first: bool
) -> None:
    """The older counter grows beyond what a reader has seen; announcements in between are not skipped.

    This holds for a reader that maps the file itself and for one whose process has mapped it already.
    """
    reader, writer = HostGeneration(path), HostGeneration(path)
    writer.announce([key(1)])
    old = path.read_bytes()
    writer.announce([key(2), key(3)])
    seen = reader.memory[0]
    copy = path.with_name("copy")
    copy.write_bytes(old)
    copy.replace(path)
    if is_remapped_first:
        reader.remap()
    for number in range(4, 9):
        writer.announce([key(number)])
    assert reader.memory[0] != seen
    assert reader.since(seen)[1] is None


def test_generation_magic_overwritten_gives_readers_no_subjects(path: Path) -> None:
    reader, writer = HostGeneration(path), HostGeneration(path)
    seen = reader.memory[0]
    reader.memory[1] = 0
    writer.announce([key(1)])
    assert reader.memory[0] != seen
    assert reader.since(seen)[1] is None


def test_generation_file_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="generation"):
        HostGeneration(tmp_path / "absent" / "generation")


# --------------------------------------------------------------------------------------------------- stopped writers


@contextmanager
def _held(path: Path) -> Iterator[None]:
    """Hold the file's lock, as a writer does that was stopped."""
    descriptor = os.open(path, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)


def test_generation_reader_does_not_wait_for_a_stopped_writer(path: Path) -> None:
    """A request is not delayed by a stopped process: the reader discards its cache and continues."""
    reader = HostGeneration(path)
    reader.announce([key(1)])
    with _held(path):
        assert reader.since(reader.memory[0] - 1) == (reader.memory[0], None)


def test_generation_writer_does_not_wait_for_a_stopped_writer(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The revocation is announced; when the stopped writer continues, its numbers are not trusted."""
    monkeypatch.setattr(subject_under_test, "_WRITER_SECONDS", 0.01)
    shared = HostGeneration(path)
    before = shared.memory[0]
    with _held(path):
        shared.announce([key(1)])
        jumped = shared.memory[0]
        shared.announce([key(2)])
    assert shared.since(before)[1] is None
    assert jumped not in (before, shared.memory[0]), "each such announcement must have a separate number"
    last = shared.memory[0]
    shared.memory[0] = before + 1  # the stopped writer continues
    assert shared.since(last)[1] is None
    assert shared.since(jumped)[1] is None


def test_generation_writer_that_continues_after_a_stop_hides_no_announcement(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that has not polled in between discards its whole cache, not only the stopped writer's subjects."""
    monkeypatch.setattr(subject_under_test, "_WRITER_SECONDS", 0.01)
    stopped, other, reader = HostGeneration(path), HostGeneration(path), HostGeneration(path)
    seen = reader.memory[0]
    write = subject_under_test._write_slot

    def stop(memory: memoryview, number: int, subject: Subject) -> None:
        write(memory, number, subject)
        if subject == key("stopped"):
            other.announce([key("concurrent")])

    monkeypatch.setattr(subject_under_test, "_write_slot", stop)
    stopped.announce([key("stopped")])
    assert reader.since(seen)[1] is None


def _announce_forever(path: Path, writer: int, ready: "multiprocessing.queues.Queue[int]") -> None:
    shared = HostGeneration(path)
    ready.put(writer)
    number = 0
    while True:
        shared.announce([key(f"{writer}-{number + step}") for step in range(5)])
        number += 5


@pytest.mark.long
def test_generation_writer_killed_at_any_moment_blocks_and_corrupts_nothing(path: Path) -> None:
    """The next writer can announce in the file, and readers understand it."""
    reader, rng = HostGeneration(path), random.Random(6)  # noqa: S311  picks a moment, not a secret
    for killing in range(8):
        ready: multiprocessing.queues.Queue[int] = SPAWN.Queue()
        writer = SPAWN.Process(target=_announce_forever, args=(path, killing, ready), daemon=True)
        writer.start()
        assert ready.get(timeout=TIMEOUT_SECONDS) == killing
        _follow_for(reader, rng.uniform(0, 0.02))
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join(TIMEOUT_SECONDS)
        seen = reader.memory[0]
        HostGeneration(path).announce([key("after")])
        assert reader.since(seen) == (seen + 1, [key("after")])


def _follow_for(reader: HostGeneration, seconds: float) -> None:
    """Read for a while, and check that the subjects are complete and in order."""
    ends_at, seen = time.monotonic() + seconds, reader.memory[0]
    while time.monotonic() < ends_at:
        seen, subjects = reader.since(seen)
        numbers = [int(identity.split("-")[1]) for _, identity in subjects or ()]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True


@pytest.mark.parametrize("point", ["before the number", "before the word"])
def test_generation_writer_killed_within_a_slot_is_not_trusted(
    path: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The half-written slot held an older subject; a reader that still needs it discards its whole cache."""
    shared = HostGeneration(path)
    for number in range(SLOTS):
        shared.announce([key(number)])
    counter = shared.memory[0]
    with monkeypatch.context() as killed:

        def die(memory: memoryview, number: int, subject: Subject) -> None:
            if point == "before the word":
                write(memory, number, subject)
            else:
                memory[subject_under_test._start_of(number)] = 0
            raise KeyboardInterrupt

        write = subject_under_test._write_slot
        killed.setattr(subject_under_test, "_write_slot", die)
        with pytest.raises(KeyboardInterrupt):
            shared.announce([key("lost")])
    assert shared.memory[0] == counter
    assert shared.since(counter - SLOTS)[1] is None, "the oldest slot must count as lost"
    assert shared.since(counter - SLOTS + 1)[1] == [key(number) for number in range(1, SLOTS)]
    shared.announce([key("next")])
    assert shared.since(counter) == (counter + 1, [key("next")])


# ------------------------------------------------------------------------------------------------------ many writers


def _announce_batches(path: Path, writer: int, gate: "multiprocessing.synchronize.Barrier") -> None:
    shared = HostGeneration(path)
    gate.wait(TIMEOUT_SECONDS)
    for batch in range(BATCHES):
        shared.announce([key(f"{writer}-{batch * BATCH + step}") for step in range(BATCH)])


def test_generation_with_several_writers_loses_no_announcement(path: Path) -> None:
    """Processes announce concurrently while another reads each announcement once, in its writer's order."""
    reader = HostGeneration(path)
    seen, received = reader.memory[0], []
    gate = SPAWN.Barrier(WRITERS + 1)
    writers = [SPAWN.Process(target=_announce_batches, args=(path, writer, gate)) for writer in range(WRITERS)]
    for writer in writers:
        writer.start()
    gate.wait(TIMEOUT_SECONDS)
    is_over = False
    while not is_over:
        is_over = not any(writer.is_alive() for writer in writers)  # must be read before the last poll
        if reader.memory[0] != seen:
            seen, subjects = reader.since(seen)
            assert subjects is not None, "the announcements fit the ring, so none may be lost"
            received += subjects
    assert [writer.exitcode for writer in writers] == [0] * WRITERS
    assert len(received) == WRITERS * BATCHES * BATCH
    for number in range(WRITERS):
        own = [subject for subject in received if subject[1].startswith(f"k{number}-")]
        assert own == [key(f"{number}-{step}") for step in range(BATCHES * BATCH)]


def test_generation_with_several_threads_loses_no_announcement(path: Path) -> None:
    """A file lock alone would not exclude threads that share the descriptor."""
    shared = HostGeneration(path)
    seen = shared.memory[0]

    def announce(writer: int) -> None:
        for number in range(100):
            shared.announce([key(f"{writer}-{number}")])

    threads = [threading.Thread(target=announce, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_SECONDS)
    counter, subjects = shared.since(seen)
    assert counter == seen + 400
    assert subjects is not None
    assert sorted(subjects) == sorted(key(f"{writer}-{number}") for writer in range(4) for number in range(100))


def test_generation_of_a_forked_child_is_the_parent_s(path: Path) -> None:
    shared = HostGeneration(path)
    seen = shared.memory[0]
    child = multiprocessing.get_context("fork").Process(target=shared.announce, args=([key("child")],))
    child.start()
    child.join(TIMEOUT_SECONDS)
    assert shared.since(seen) == (shared.memory[0], [key("child")])
