"""The embedded default's broker: complete messages, private files, and no file that stays behind."""

import multiprocessing
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery.beat import Scheduler
from kombu import Connection, Exchange, Producer, Queue

from keyvault.project.celery import app
from keyvault.project.file_broker import EXCHANGE, FileTransport, prepare_folder, remove_parts

TASKS: Any = Queue("tasks", Exchange(EXCHANGE), "tasks")
SECONDS = 60


def connect(folder: Path) -> Connection:
    return Connection(
        "filesystem://localhost",
        transport="keyvault.project.file_broker:FileTransport",
        transport_options=prepare_folder(folder),
    )


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Connection]:
    FileTransport.global_state.clear()  # the state of the previous test's folder
    with connect(tmp_path) as connection:
        TASKS(connection.default_channel).declare()
        yield connection


def publish(folder: Path, count: int) -> None:
    with connect(folder) as connection:
        TASKS(connection.default_channel).declare()
        for number in range(count):
            Producer(connection.default_channel).publish({"number": number}, exchange=EXCHANGE, routing_key="tasks")


def test_consumer_that_polls_meanwhile_sees_only_complete_messages(broker: Connection, tmp_path: Path) -> None:
    """The stock transport fails here: a message's file exists before its content, and the worker ends."""
    context = multiprocessing.get_context("spawn")
    producers = [context.Process(target=publish, args=(tmp_path, 300)) for _ in range(2)]
    for producer in producers:
        producer.start()
    queue, received, until = TASKS(broker.default_channel), 0, time.monotonic() + SECONDS
    while received < 600 and time.monotonic() < until:
        message = queue.get(no_ack=True)
        received += message is not None
    for producer in producers:
        producer.join()
        assert producer.exitcode == 0, "two processes bound the queue at the same time"
    assert received == 600
    assert queue.get() is None


def test_files_are_private_and_none_stays_behind(broker: Connection, tmp_path: Path) -> None:
    publish(tmp_path, 1)
    (message,) = (tmp_path / "messages").iterdir()
    assert stat.S_IMODE(message.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "messages").stat().st_mode) == 0o700
    assert TASKS(broker.default_channel).get(no_ack=True).payload == {"number": 0}
    assert list((tmp_path / "messages").iterdir()) == []
    assert [path.name for path in (tmp_path / "control").iterdir()] == [f"{EXCHANGE}.exchange"]


def test_unreadable_message_is_removed_when_it_is_read(broker: Connection, tmp_path: Path) -> None:
    """Guarantee: a damaged message fails its reader once, not again and again."""
    (tmp_path / "messages" / "00_a.tasks.msg").write_bytes(b"\x00 no message")
    publish(tmp_path, 1)
    queue = TASKS(broker.default_channel)
    with pytest.raises(ValueError, match="Expecting value"):
        queue.get()
    assert queue.get(no_ack=True).payload == {"number": 0}


def test_search_for_due_rotations_does_not_wait_for_a_backlog_of_rotations(broker: Connection) -> None:
    """Guarantee: however many turns wait in a queue, a worker soon reads the tick that finds an emergency."""
    app.loader.import_default_modules()
    find_due, turn = app.tasks["rotation.tasks.dispatch_due"], app.tasks["rotation.tasks.advance_rotation"]
    beat, received = Scheduler(app=app), []
    with broker.Producer() as producer:
        for number in range(50):
            turn.apply_async((f"rot_{number}",), queue="rotations.sandbox", producer=producer)
        for entry in beat.schedule.values():
            if entry.task == find_due.name:
                beat.apply_async(entry, producer=producer, advance=False)

    def note(_: Any, message: Any) -> None:
        received.append(message.headers["task"])
        message.ack()

    with broker.Consumer(list(app.amqp.queues.values()), callbacks=[note], accept=["json"]):
        for _ in range(10):
            broker.drain_events(timeout=SECONDS)
    assert received.count(find_due.name) == 1
    assert turn.name in received


def test_consumer_does_not_list_the_folder_for_each_queue(broker: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle worker polls ten times a second."""
    listed: list[str] = []
    list_folder = os.listdir

    def note(path: str) -> list[str]:
        listed.append(path)
        return list_folder(path)

    monkeypatch.setattr(os, "listdir", note)
    queues = [Queue(name, Exchange(EXCHANGE), name) for name in ("first", "second", "third")]
    with broker.Consumer(queues, callbacks=[lambda body, message: message.ack()]):
        listed.clear()  # declaring a queue counts its messages
        with pytest.raises(TimeoutError):
            broker.drain_events(timeout=0)
        assert len(listed) == 1
        Producer(broker.default_channel).publish({}, exchange=EXCHANGE, routing_key="third")
        broker.drain_events(timeout=SECONDS)
        assert len(listed) == 3, "one more to poll, and one to take the message"


def test_incomplete_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    prepare_folder(tmp_path)
    old, new = (tmp_path / "messages" / name for name in ("old.part", "new.part"))
    for part in (old, new):
        part.touch()
    os.utime(old, (0, 0))
    remove_parts(tmp_path)
    assert [path.name for path in (tmp_path / "messages").iterdir()] == ["new.part"]
