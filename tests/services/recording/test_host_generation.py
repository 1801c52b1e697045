"""The shared word of a host: no announcement is lost, and any doubt is told as "forget everything"."""

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

from keyvault.services.recording import host_generation as subject_under_test
from keyvault.services.recording.host_generation import SLOTS, HostGeneration, Subject
from tests.services.racing import TIMEOUT_SECONDS

SPAWN = multiprocessing.get_context("spawn")

WRITERS, BATCHES, BATCH = 3, 100, 3
"""Fewer announcements than there are slots: whenever the reader looks, none may be missing."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "generation"


def key(number: int | str) -> Subject:
    return "key", f"k{number}"


# ------------------------------------------------------------------------------------------------- one announcement


def test_generation_announcement_is_seen_by_every_reader(path: Path) -> None:
    """Another instance is what another process has: the word differs at once, and the subjects are there in order."""
    writer, reader = HostGeneration(path), HostGeneration(path)
    seen = reader.words[0]
    writer.announce([key(1), ("limit", "acme/sandbox/lagréé")])
    assert reader.words[0] != seen
    assert reader.since(seen) == (writer.words[0], [key(1), ("limit", "acme/sandbox/lagréé")])
    assert reader.since(writer.words[0]) == (writer.words[0], [])


def test_generation_announcing_nothing_leaves_the_word(path: Path) -> None:
    shared = HostGeneration(path)
    before = shared.words[0]
    shared.announce([])
    assert shared.words[0] == before


@pytest.mark.parametrize(("behind", "is_known"), [(SLOTS, True), (SLOTS + 1, False)])
def test_generation_reader_too_far_behind_forgets_everything(path: Path, behind: int, is_known: bool) -> None:
    """The ring holds the last SLOTS subjects; whoever needs one more is told to forget everything."""
    shared = HostGeneration(path)
    seen = shared.words[0]
    for number in range(behind):
        shared.announce([key(number)])
    expected = [key(number) for number in range(behind)] if is_known else None
    assert shared.since(seen) == (shared.words[0], expected)


def test_generation_announcement_of_more_than_the_ring_holds_is_forget_everything(path: Path) -> None:
    shared = HostGeneration(path)
    seen = shared.words[0]
    shared.announce([key(number) for number in range(SLOTS + 5)])
    assert shared.since(seen) == (shared.words[0], None)


def test_generation_subject_too_long_for_a_slot_is_forget_everything(path: Path) -> None:
    """Never a part of a name: another subject would be forgotten instead."""
    shared = HostGeneration(path)
    seen = shared.words[0]
    shared.announce([("limit", "é" * 160)])
    assert shared.since(seen) == (shared.words[0], None)


@given(st.lists(st.lists(st.tuples(st.sampled_from(["key", "limit", "merchant"]), st.text("äx/-1", max_size=40)))))
def test_generation_any_readers_find_exactly_what_was_announced_since(batches: list[list[Subject]]) -> None:
    """Wherever a reader stopped reading, it is told all that came after, in order."""
    with _temporary() as place:
        shared, announced = HostGeneration(place), []
        stops = [(shared.words[0], 0)]
        for batch in batches:
            shared.announce(batch)
            announced += batch
            stops.append((shared.words[0], len(announced)))
        for seen, position in stops:
            assert shared.since(seen) == (shared.words[0], announced[position:])


@contextmanager
def _temporary() -> Iterator[Path]:
    place = Path(os.environ["KEYVAULT_DATA_DIR"], f"generation-{os.getpid()}-{threading.get_ident()}")
    try:
        yield place
    finally:
        place.unlink(missing_ok=True)


# ----------------------------------------------------------------------------------------------------------- the file


def test_generation_file_is_its_owners_only(path: Path) -> None:
    """Whoever could write it could hide a revocation for a moment."""
    before = os.umask(0)
    try:
        HostGeneration(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_generation_outlives_the_processes(path: Path) -> None:
    first = HostGeneration(path)
    first.announce([key(1)])
    assert HostGeneration(path).words[0] == first.words[0]


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 400_000], ids=["empty", "short", "not ours"])
def test_generation_file_that_is_not_ours_is_made_anew(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    shared = HostGeneration(path)
    seen = shared.words[0]
    shared.announce([key(1)])
    assert HostGeneration(path).since(seen) == (shared.words[0], [key(1)])


def test_generation_file_deleted_and_made_anew_makes_readers_forget_everything(path: Path) -> None:
    """A reader of the deleted file is told by whoever notices first, and reads the new one from then on."""
    reader, neighbour, other = HostGeneration(path), HostGeneration(path), HostGeneration(path)
    seen, words = reader.words[0], reader.words
    path.unlink()
    other.announce([key(1)])  # notices, and makes a new one
    assert words[0] != seen
    assert reader.since(seen)[1] is None
    assert neighbour.since(seen)[1] is None
    seen = reader.words[0]
    other.announce([key(2)])
    assert reader.since(seen) == (other.words[0], [key(2)])


def test_generation_file_deleted_is_noticed_by_heal(path: Path) -> None:
    reader, other = HostGeneration(path), HostGeneration(path)
    seen, words = reader.words[0], reader.words
    path.unlink()
    other.remap()
    assert words[0] != seen, "who still reads the old file is told"
    other.remap()
    assert reader.since(words[0])[1] is None


def test_generation_file_overwritten_in_place_makes_readers_forget_everything(path: Path) -> None:
    """Somebody restored an older copy: the word went back, and nobody believes the ring."""
    reader = HostGeneration(path)
    old = path.read_bytes()
    reader.announce([key(1)])
    seen = reader.words[0]
    with path.open("r+b") as file:
        file.write(old)
    assert reader.words[0] != seen
    assert reader.since(seen)[1] is None


@pytest.mark.parametrize("is_healed_first", [False, True])
def test_generation_file_replaced_by_an_older_copy_makes_readers_forget_everything(
    path: Path, is_healed_first: bool
) -> None:
    """A copy of the day before whose word passes what a reader has seen: what was announced between the two is not
    skipped, by the reader that maps it itself nor by one whose process has mapped it meanwhile."""
    reader, writer = HostGeneration(path), HostGeneration(path)
    writer.announce([key(1)])
    old = path.read_bytes()
    writer.announce([key(2), key(3)])
    seen = reader.words[0]
    copy = path.with_name("copy")
    copy.write_bytes(old)
    copy.replace(path)
    if is_healed_first:
        reader.remap()
    for number in range(4, 9):
        writer.announce([key(number)])
    assert reader.words[0] != seen
    assert reader.since(seen)[1] is None


def test_generation_magic_overwritten_makes_readers_forget_everything(path: Path) -> None:
    reader, writer = HostGeneration(path), HostGeneration(path)
    seen = reader.words[0]
    reader.words[1] = 0
    writer.announce([key(1)])
    assert reader.words[0] != seen
    assert reader.since(seen)[1] is None


def test_generation_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="generation"):
        HostGeneration(tmp_path / "absent" / "generation")


# --------------------------------------------------------------------------------------------------- stopped in the act


@contextmanager
def _held(path: Path) -> Iterator[None]:
    """The lock is another's, who was stopped while holding it."""
    descriptor = os.open(path, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)


def test_generation_reader_does_not_wait_for_a_stopped_writer(path: Path) -> None:
    """A request is not held up by a process that somebody froze: it forgets everything and goes on."""
    reader = HostGeneration(path)
    reader.announce([key(1)])
    with _held(path):
        assert reader.since(reader.words[0] - 1) == (reader.words[0], None)


def test_generation_writer_does_not_wait_for_a_stopped_writer(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A revocation is announced all the same; and when the stopped one goes on, nobody believes its numbers."""
    monkeypatch.setattr(subject_under_test, "_WRITER_SECONDS", 0.01)
    shared = HostGeneration(path)
    before = shared.words[0]
    with _held(path):
        shared.announce([key(1)])
        jumped = shared.words[0]
        shared.announce([key(2)])
    assert shared.since(before)[1] is None
    assert jumped not in (before, shared.words[0]), "each such announcement has a number of its own"
    last = shared.words[0]
    shared.words[0] = before + 1  # the stopped one goes on
    assert shared.since(last)[1] is None
    assert shared.since(jumped)[1] is None


def test_generation_writer_that_goes_on_after_others_gave_up_waiting_hides_nothing_of_theirs(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has not looked in between forgets everything, and not just what the stopped one tells of."""
    monkeypatch.setattr(subject_under_test, "_WRITER_SECONDS", 0.01)
    stopped, other, reader = HostGeneration(path), HostGeneration(path), HostGeneration(path)
    seen = reader.words[0]
    write = subject_under_test._write_slot

    def stop(words: memoryview, number: int, subject: Subject) -> None:
        write(words, number, subject)
        if subject == key("stopped"):
            other.announce([key("meanwhile")])

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


def test_generation_writer_killed_at_any_moment_blocks_and_corrupts_nothing(path: Path) -> None:
    """Whoever is killed while announcing leaves a file that the next one announces in, and that readers understand."""
    reader, chance = HostGeneration(path), random.Random(6)  # noqa: S311  a moment, not a secret
    for killing in range(8):
        ready: multiprocessing.queues.Queue[int] = SPAWN.Queue()
        writer = SPAWN.Process(target=_announce_forever, args=(path, killing, ready), daemon=True)
        writer.start()
        assert ready.get(timeout=TIMEOUT_SECONDS) == killing
        _follow_for(reader, chance.uniform(0, 0.02))
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join(TIMEOUT_SECONDS)
        seen = reader.words[0]
        HostGeneration(path).announce([key("after")])
        assert reader.since(seen) == (seen + 1, [key("after")])


def _follow_for(reader: HostGeneration, seconds: float) -> None:
    """What it is told while others write are whole names, in order, as far as it is told any."""
    ends_at, seen = time.monotonic() + seconds, reader.words[0]
    while time.monotonic() < ends_at:
        seen, subjects = reader.since(seen)
        numbers = [int(identity.split("-")[1]) for _, identity in subjects or ()]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True


@pytest.mark.parametrize("point", ["before the number", "before the word"])
def test_generation_writer_killed_in_the_middle_of_a_slot_is_not_believed(
    path: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot that it was overwriting belonged to an older subject: who still needs that forgets everything."""
    shared = HostGeneration(path)
    for number in range(SLOTS):
        shared.announce([key(number)])
    word = shared.words[0]
    with monkeypatch.context() as killed:

        def die(words: memoryview, number: int, subject: Subject) -> None:
            if point == "before the word":
                write(words, number, subject)
            else:
                words[subject_under_test._start_of(number)] = 0
            raise KeyboardInterrupt

        write = subject_under_test._write_slot
        killed.setattr(subject_under_test, "_write_slot", die)
        with pytest.raises(KeyboardInterrupt):
            shared.announce([key("lost")])
    assert shared.words[0] == word
    assert shared.since(word - SLOTS)[1] is None, "the oldest slot is gone"
    assert shared.since(word - SLOTS + 1)[1] == [key(number) for number in range(1, SLOTS)]
    shared.announce([key("next")])
    assert shared.since(word) == (word + 1, [key("next")])


# ------------------------------------------------------------------------------------------------------ many processes


def _announce_batches(path: Path, writer: int, gate: "multiprocessing.synchronize.Barrier") -> None:
    shared = HostGeneration(path)
    gate.wait(TIMEOUT_SECONDS)
    for batch in range(BATCHES):
        shared.announce([key(f"{writer}-{batch * BATCH + step}") for step in range(BATCH)])


def test_generation_several_writers_lose_no_announcement(path: Path) -> None:
    """Real processes announce at once while another reads: it is told each of them, once, in its writer's order."""
    reader = HostGeneration(path)
    seen, told = reader.words[0], []
    gate = SPAWN.Barrier(WRITERS + 1)
    writers = [SPAWN.Process(target=_announce_batches, args=(path, writer, gate)) for writer in range(WRITERS)]
    for writer in writers:
        writer.start()
    gate.wait(TIMEOUT_SECONDS)
    is_over = False
    while not is_over:
        is_over = not any(writer.is_alive() for writer in writers)  # before the last look, not after
        if reader.words[0] != seen:
            seen, subjects = reader.since(seen)
            assert subjects is not None, "they fit into the ring, and nobody holds the lock for long"
            told += subjects
    assert [writer.exitcode for writer in writers] == [0] * WRITERS
    assert len(told) == WRITERS * BATCHES * BATCH
    for number in range(WRITERS):
        own = [subject for subject in told if subject[1].startswith(f"k{number}-")]
        assert own == [key(f"{number}-{step}") for step in range(BATCHES * BATCH)]


def test_generation_threads_of_one_process_lose_no_announcement(path: Path) -> None:
    """A lock on a descriptor that threads share would keep none of them out."""
    shared = HostGeneration(path)
    seen = shared.words[0]

    def announce(writer: int) -> None:
        for number in range(100):
            shared.announce([key(f"{writer}-{number}")])

    threads = [threading.Thread(target=announce, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_SECONDS)
    word, subjects = shared.since(seen)
    assert word == seen + 400
    assert subjects is not None
    assert sorted(subjects) == sorted(key(f"{writer}-{number}") for writer in range(4) for number in range(100))


def test_generation_of_a_forked_child_is_the_parents(path: Path) -> None:
    shared = HostGeneration(path)
    seen = shared.words[0]
    child = multiprocessing.get_context("fork").Process(target=shared.announce, args=([key("child")],))
    child.start()
    child.join(TIMEOUT_SECONDS)
    assert shared.since(seen) == (shared.words[0], [key("child")])
