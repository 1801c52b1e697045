"""The spool's guarantees, with real processes, signals and files."""

import errno
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from kombu import Connection, Exchange, Producer, Queue

from keyvault.project import spool

TASKS: Any = Queue("tasks", Exchange("tasks", type="direct"), "tasks")

# Scripts and workers import the module through a link: it needs kombu and nothing of the project.
PRELUDE = """
import os, pathlib, signal, sys
import spool_alone as spool
from kombu import Connection, Exchange, Producer, Queue
assert "keyvault" not in sys.modules
spool.register()
home = pathlib.Path(os.environ["SPOOL_HOME"])
connection = Connection(spool.spool_url(home / "spool"))
channel = connection.channel()
tasks = Queue("tasks", Exchange("tasks", type="direct"), "tasks")(channel)
tasks.declare()
def report(line):
    with open(home / f"reported-{sys.argv[1]}", "a") as file:
        file.write(f"{line}\\n")
"""
PRODUCE = """
for number in range(int(sys.argv[2])):
    Producer(channel).publish(f"{sys.argv[1]}/{number}", exchange="tasks", routing_key="tasks")
"""
CONSUME = """
def take(body, message):
    report(body)
    message.ack()
with connection.Consumer(tasks, callbacks=[take], prefetch_count=4):
    while not (home / "stop").exists():
        try:
            connection.drain_events(timeout=0.2)
        except TimeoutError:
            pass
"""
HOLD = """
held = [tasks.get() for _ in range(int(sys.argv[2]))]
report("ready")
signal.pause()
"""
FORK = """
held = tasks.get()
if os.fork() == 0:
    channel.close()  # as forked pool processes do with the connections that they inherit
    report(os.getpid())
signal.pause()
"""
LISTEN = """
Queue("mailbox", Exchange("broadcast", type="fanout"), exclusive=True)(channel).declare()
report("ready")
signal.pause()
"""
DIE_AT_SYNC = """
remaining = int(sys.argv[2])
def fsync(descriptor, sync=os.fsync):
    global remaining
    remaining -= 1
    if not remaining:
        os.kill(os.getpid(), signal.SIGKILL)
    sync(descriptor)
os.fsync = fsync
Producer(channel).publish("last message", exchange="tasks", routing_key="tasks")
"""
APP = """
import os, pathlib, time
import spool_alone as spool
from celery import Celery
spool.register()
home = pathlib.Path(os.environ["SPOOL_HOME"])
app = Celery("app", broker=spool.spool_url(home / "spool"))
app.conf.update(task_acks_late=True, worker_prefetch_multiplier=1, broker_connection_retry_on_startup=True)
@app.task(name="mark")
def mark(number):
    (home / f"started-{number}").touch()
    while not (home / "go").exists():
        time.sleep(0.02)
    (home / f"done-{number}").write_text(os.environ["WORKER"])
"""


def eventually(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.02)


class Home:
    """A folder with a spool in it, and the processes that this test started on it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.spool = path / "spool"
        self.url = spool.spool_url(self.spool)
        self.processes: list[subprocess.Popen[bytes]] = []
        (path / "spool_alone.py").symlink_to(spool.__file__)
        (path / "app.py").write_text(APP)

    def start(self, *arguments: str, worker: str = "") -> subprocess.Popen[bytes]:
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(self.path),
            "SPOOL_HOME": str(self.path),
            "WORKER": worker,
        }
        process = subprocess.Popen([sys.executable, *arguments], cwd=self.path, env=environment, start_new_session=True)
        self.processes.append(process)
        return process

    def script(self, body: str, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        return self.start("-W", "error", "-c", PRELUDE + body, name, *arguments)

    def worker(self, name: str, pool: str) -> subprocess.Popen[bytes]:
        options = ["-P", pool, "-c", "2", "-n", f"{name}@spool", "--without-gossip", "--without-mingle"]
        return self.start("-m", "celery", "-A", "app", "worker", *options, "-l", "WARNING", worker=name)

    def reported(self, name: str) -> list[str]:
        file = self.path / f"reported-{name}"
        return file.read_text().splitlines() if file.exists() else []

    def files(self, *parts: str) -> list[Path]:
        folder = self.spool.joinpath(*parts)
        return sorted(folder.iterdir()) if folder.exists() else []

    def connect(self) -> Any:  # the stubs know neither our channel nor that get() returns what was put
        return Connection(self.url)

    def client(self) -> Celery:
        return Celery("client", broker=self.url, set_as_current=False)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    spool.register()
    home = Home(tmp_path)
    yield home
    for process in home.processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also the children of a killed parent
        process.wait()


def publish(connection: Any, *bodies: object) -> None:
    producer = Producer(connection.default_channel)
    for body in bodies:
        producer.publish(body, exchange=TASKS.exchange, routing_key="tasks", declare=[TASKS])


def bodies_left(connection: Any) -> list[Any]:
    """Take and acknowledge the ready messages, after a sweep."""
    channel = connection.default_channel
    channel.claims.next_sweep = 0
    queue, bodies = TASKS(channel), []
    while (message := queue.get()) is not None:
        message.ack()
        bodies.append(message.payload)
    return bodies


def test_race_of_producers_and_consumers_delivers_each_message_once(home: Home) -> None:
    """Guarantee: processes that publish and consume concurrently neither lose nor duplicate a message."""
    for name in "abc":
        home.script(CONSUME, f"consumer-{name}")
    producers = [home.script(PRODUCE, name, "200") for name in "abc"]
    assert [process.wait(30) for process in producers] == [0, 0, 0]

    def received() -> list[str]:
        return [body for name in "abc" for body in home.reported(f"consumer-{name}")]

    eventually(lambda: len(received()) >= 600)
    (home.path / "stop").touch()
    assert [process.wait(30) for process in home.processes] == [0] * 6
    assert sorted(received()) == sorted(f"{name}/{number}" for name in "abc" for number in range(200))
    assert home.files("dead") == home.files("queues", "tasks") == []


def test_race_threads_of_one_process_deliver_each_message_once(home: Home) -> None:
    """Guarantee: threads share a process's claims folder without losing or duplicating a message."""
    received: list[str] = []

    def produce(name: str) -> None:
        with home.connect() as connection:
            publish(connection, *(f"{name}/{number}" for number in range(50)))

    def consume() -> None:
        with home.connect() as connection:
            while len(received) < 200:
                received.extend(bodies_left(connection))

    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(consume) for _ in range(4)] + [pool.submit(produce, name) for name in "abcd"]
        for future in futures:
            future.result(30)
    assert sorted(received) == sorted(f"{name}/{number}" for name in "abcd" for number in range(50))


def test_claims_of_a_killed_consumer_are_delivered_to_another_process(home: Home) -> None:
    """Guarantee: kill -9 of a consumer loses no unacknowledged message; a live consumer keeps its claims.

    The other process runs throughout: it checks for dead consumers periodically, not only at its start.
    """
    with home.connect() as connection:
        publish(connection, *range(5))
        holder = home.script(HOLD, "holder", "3")
        eventually(lambda: home.reported("holder") == ["ready"])
        assert bodies_left(connection) == [3, 4]
        holder.kill()
        holder.wait()
        messages: list[Any] = []
        with connection.Consumer(TASKS, on_message=messages.append):
            for _ in range(3):
                connection.drain_events(timeout=10)
        assert [message.payload for message in messages] == [0, 1, 2]
        assert all(message.delivery_info["redelivered"] for message in messages)
        assert home.files("claims") == [connection.default_channel.claims.path]


def test_claims_of_a_forked_consumer_stay_with_the_parent(home: Home) -> None:
    """Guarantee: a forked child neither releases its parent's claims nor keeps them locked after the parent ends."""
    with home.connect() as connection:
        publish(connection, "precious")
        parent = home.script(FORK, "fork")
        eventually(lambda: len(home.reported("fork")) == 1)
        child = int(home.reported("fork")[0])
        assert bodies_left(connection) == []
        parent.kill()
        parent.wait()
        assert bodies_left(connection) == ["precious"]
        os.kill(child, 0)  # still running, and held nothing


@pytest.mark.parametrize(("sync", "survives"), [(1, False), (2, True)], ids=["before rename", "after rename"])
def test_publish_by_a_killed_producer_leaves_the_whole_message_or_none(home: Home, sync: int, survives: bool) -> None:
    """Guarantee: kill -9 of a producer never publishes half a message and never leaves its draft behind."""
    home.script("", "declare").wait(30)
    producer = home.script(DIE_AT_SYNC, "producer", str(sync))
    assert producer.wait(30) == -signal.SIGKILL
    with home.connect() as connection:
        assert bodies_left(connection) == (["last message"] if survives else [])
        assert home.files("claims") == [connection.default_channel.claims.path]
        assert home.files("dead") == []


def test_publish_disk_full_raises_and_publishes_nothing(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: a publisher gets the failure as a kombu connection error, and may retry."""

    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with home.connect() as connection:
        publish(connection, "before")
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", refuse)
            with pytest.raises(connection.connection_errors) as caught:
                publish(connection, "lost")
        assert caught.value.errno == errno.ENOSPC
        assert bodies_left(connection) == ["before"]
        assert [path.name for path in connection.default_channel.claims.path.iterdir()] == [".lock"]


STEM = f"{1:020d}-{'a' * 32}"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (STEM, b""),
        (STEM, b'{"body": "W1tdLCB7fSwg'),
        (STEM, b"\x00\xff\xfe garbage"),
        (STEM, b"[" * 100_000),
        (STEM, b"[]"),
        (STEM, b'{"properties": {"delivery_info": {}}, "headers": [1]}'),
        (STEM, b'{"body": "@@@", "properties": {"delivery_info": {}, "body_encoding": "rot13"}}'),
        ("x" * 255, b"left by an editor"),
        (STEM, None),
    ],
    ids=["empty", "torn", "binary", "deep", "list", "headers", "encoding", "long name", "folder"],
)
def test_garbage_file_in_a_queue_goes_to_dead_and_consumption_continues(
    home: Home, name: str, content: bytes | None
) -> None:
    """Guarantee: no file, whatever its content, stops a consumer, and none is deleted."""
    with home.connect() as connection:
        publish(connection, "good")
        path = home.spool / "queues" / "tasks" / name
        if content is None:
            path.mkdir()
        else:
            path.write_bytes(content)
        assert bodies_left(connection) == ["good"]
        (dead,) = home.files("dead")
        assert dead.name.endswith("@tasks")
        assert content is None or dead.read_bytes() == content
        assert home.files("queues", "tasks") == []


def test_garbage_file_beside_the_queues_is_ignored(home: Home) -> None:
    """Guarantee: a stray file anywhere in the spool stops neither publishers nor consumers."""
    with home.connect() as connection:
        fanout = Exchange("fanout", type="fanout")
        Queue("tasks", fanout)(connection.default_channel).declare()
        publish(connection, "before")
        for folder in (".", "queues", "claims", "exchanges", "exchanges/tasks", "exchanges/fanout", "dead"):
            (home.spool / folder / "stray").write_bytes(b"\x00")
        (home.spool / "claims" / "left-unfinished").mkdir()
        publish(connection, "after")
        Producer(connection.default_channel).publish("to all", exchange=fanout)
        assert bodies_left(connection) == ["before", "after", "to all"]
        assert not (home.spool / "claims" / "left-unfinished").exists()


def test_dead_files_above_the_bound_are_dropped_oldest_first(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: dead/ does not grow without bound."""
    monkeypatch.setattr(spool, "DEAD_FILES", 2)
    with home.connect() as connection:
        publish(connection, *range(4))
        queue = TASKS(connection.default_channel)
        for _ in range(4):
            queue.get().reject()
        before = home.files("dead")
        assert bodies_left(connection) == []
        assert home.files("dead") == before[-2:]


@pytest.mark.parametrize("umask", [0, 0o277])
def test_modes_with_any_umask_are_owner_only(home: Home, umask: int) -> None:
    """Guarantee: only the owner can read or write anything in the spool."""
    before = os.umask(umask)
    try:
        with home.connect() as connection:
            publish(connection, "ready", "claimed", "rejected")
            queue = TASKS(connection.default_channel)
            queue.get()
            queue.get().reject()
            paths = [home.spool, *home.spool.rglob("*")]
            modes = {path: stat.S_IMODE(path.stat().st_mode) for path in paths}
            assert len([path for path in paths if path.is_file()]) == 6
            assert modes == {path: 0o700 if path.is_dir() else 0o600 for path in paths}
    finally:
        os.umask(before)


def test_root_writable_by_others_is_refused(home: Home) -> None:
    """Guarantee: a folder where another user could plant messages is not used as a spool."""
    home.spool.mkdir()
    home.spool.chmod(0o770)
    with home.connect() as connection, pytest.raises(PermissionError, match="writable by no other user"):
        publish(connection, "x")


def test_reject_with_requeue_delivers_again_and_without_goes_to_dead(home: Home) -> None:
    with home.connect() as connection:
        queue = TASKS(connection.default_channel)
        publish(connection, "again")
        first = queue.get()
        assert not first.delivery_info["redelivered"]
        first.requeue()
        publish(connection, "later")
        second = queue.get()
        assert (second.payload, second.delivery_info["redelivered"]) == ("again", True)
        second.reject()
        assert len(home.files("dead")) == 1
        assert bodies_left(connection) == ["later"]


def test_close_with_unacknowledged_messages_requeues_them_in_order(home: Home) -> None:
    """Guarantee: a consumer that closes normally returns its messages immediately, without waiting for a sweep."""
    with home.connect() as connection:
        publish(connection, *range(3))
        queue = TASKS(connection.channel())
        late = [queue.get() for _ in range(2)][1]
        queue.channel.close()
        assert bodies_left(connection) == [0, 1, 2]
        late.ack()  # too late, no effect


def test_queue_long_backlog_is_delivered_in_order(home: Home) -> None:
    with home.connect() as connection:
        publish(connection, *range(spool.BATCH * 2 + 1))
        assert bodies_left(connection) == list(range(spool.BATCH * 2 + 1))


def test_queue_purge_and_delete_count_and_remove(home: Home) -> None:
    with home.connect() as connection:
        channel = connection.default_channel
        publish(connection, "a", "b", "c")
        held = TASKS(channel).get()
        assert channel.queue_declare("tasks", passive=True).message_count == 2
        assert channel.queue_purge("tasks") == 2
        held.requeue()
        channel.queue_delete("tasks", if_empty=True)
        assert channel.queue_declare("tasks", passive=True).message_count == 1
        channel.queue_delete("tasks")
        assert home.files("queues") == home.files("exchanges", "tasks") == []
        with pytest.raises(connection.channel_errors, match="NOT_FOUND"):
            channel.queue_declare("tasks", passive=True)


def test_spool_folder_emptied_at_runtime_is_recreated(home: Home) -> None:
    with home.connect() as connection:
        publish(connection, "old")
        shutil.rmtree(home.spool)
        Producer(connection.default_channel).publish("new", routing_key="tasks")
        assert bodies_left(connection) == ["new"]


def test_exchange_direct_and_topic_reach_queues_bound_by_another_connection(home: Home) -> None:
    direct, topic = Exchange("orders", type="direct"), Exchange("events", type="topic")
    with home.connect() as consumer, home.connect() as publisher:
        queues = [
            queue(consumer.default_channel)
            for queue in (
                Queue("paid", direct, "paid"),
                Queue("all", topic, "#"),
                Queue("tasks", topic, "task.*"),
                Queue(".", topic, "worker.on/off"),
            )
        ]
        for queue in queues:
            queue.declare()
        producer = Producer(publisher.default_channel)
        producer.publish("d", exchange=direct, routing_key="paid", declare=[direct])
        producer.publish("t", exchange=topic, routing_key="task.sent", declare=[topic])
        producer.publish("w", exchange=topic, routing_key="worker.on/off")
        producer.publish("?", exchange=direct, routing_key="unbound")

        def drained(queue: Queue) -> list[object]:
            return [message.payload for message in iter(lambda: queue.get(no_ack=True), None)]

        assert [drained(queue) for queue in queues] == [["d"], ["t", "w"], ["t"], ["w"]]
        queues[1].unbind_from(topic, "#")
        producer.publish("t", exchange=topic, routing_key="task.sent")
        assert [drained(queue) for queue in queues[1:3]] == [[], ["t"]]
        assert home.files("claims") == [consumer.default_channel.claims.path]
        assert len(list(consumer.default_channel.claims.path.iterdir())) == 1  # the lock


def test_fanout_two_consumers_receive_a_copy_each(home: Home) -> None:
    broadcast = Exchange("broadcast", type="fanout")
    with home.connect() as connection, home.connect() as publisher:
        heard: list[tuple[str, object]] = []
        consumers = [
            connection.Consumer(
                Queue(name, broadcast, auto_delete=True),
                callbacks=[lambda body, message, name=name: heard.append((name, body))],
                no_ack=True,
            )
            for name in ("one", "two")
        ]
        for consumer in consumers:
            consumer.consume()
        Producer(publisher.default_channel).publish("extra", exchange=broadcast, declare=[broadcast])
        for _ in range(2):
            connection.drain_events(timeout=5)
        assert sorted(heard) == [("one", "extra"), ("two", "extra")]
        with pytest.raises(socket.timeout):
            connection.drain_events(timeout=0.05)


def test_fanout_shutdown_order_is_delivered_once(home: Home) -> None:
    """Guarantee: a shutdown order for a worker is not delivered again to the next worker of that name."""

    def shut_down(message: object) -> None:
        raise SystemExit

    with home.connect() as connection:
        publish(connection, "shut down")
        with connection.Consumer(TASKS, on_message=shut_down, no_ack=True), pytest.raises(SystemExit):
            connection.drain_events(timeout=5)
        assert list(home.spool.glob("*/*/*@tasks")) == home.files("exchanges", "tasks")


def test_mailbox_of_a_killed_owner_is_dropped_and_a_new_owner_starts_empty(home: Home) -> None:
    """Guarantee: mailboxes of dead workers do not grow, and old orders do not reach a new worker of the same name."""
    broadcast = Exchange("broadcast", type="fanout")
    owner = home.script(LISTEN, "owner")
    eventually(lambda: home.reported("owner") == ["ready"])
    with home.connect() as connection:
        channel = connection.default_channel
        channel.claims.next_sweep = 0
        assert bodies_left(connection) == []
        Producer(channel).publish("shut down", exchange=broadcast, declare=[broadcast])
        assert len(home.files("queues", "mailbox")) == 1
        owner.kill()
        owner.wait()
        mailbox: Any = Queue("mailbox", broadcast, exclusive=True)(channel)
        mailbox.declare()
        assert mailbox.get() is None
        Producer(channel).publish("welcome", exchange=broadcast)
        assert mailbox.get(no_ack=True).payload == "welcome"


def test_mailbox_without_live_owner_is_removed_with_its_binding(home: Home) -> None:
    """Guarantee: broadcasts leave no file behind once no worker listens."""
    owner = home.script(LISTEN, "owner")
    eventually(lambda: home.reported("owner") == ["ready"])
    owner.kill()
    owner.wait()
    with home.connect() as connection:
        assert bodies_left(connection) == []
        broadcast = Exchange("broadcast", type="fanout")
        Producer(connection.default_channel).publish("anyone?", exchange=broadcast, declare=[broadcast])
        assert [path.name for path in home.files("queues")] == ["tasks"]
        assert home.files("exchanges", "broadcast") == []


def test_mailbox_never_read_by_its_owner_drops_stale_messages(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: a mailbox that its live owner never reads does not grow without bound; durable queues keep
    everything.
    """
    monkeypatch.setattr(spool, "STALE_SECONDS", -1)
    broadcast = Exchange("broadcast", type="fanout")
    with home.connect() as connection:
        Queue("mailbox", broadcast, auto_delete=True)(connection.default_channel).declare()
        Producer(connection.default_channel).publish("stale", exchange=broadcast)
        publish(connection, "task")
        assert bodies_left(connection) == ["task"]
        assert home.files("queues", "mailbox") == []


def test_url_path_with_reserved_characters_survives_the_round_trip(tmp_path: Path) -> None:
    spool.register()
    root = tmp_path / "a b;c%2F?#é"
    with Connection(spool.spool_url(root)) as connection:
        publish(connection, "x")
        four_slashes = spool.spool_url(root).replace("spool://", "spool:///")
        for url in (connection.as_uri(include_password=True), four_slashes):
            with Connection(url) as again:
                assert vars(again.transport)["root"] == root
        with connection.clone() as clone:
            assert vars(clone.transport)["root"] == root
    assert root.is_dir()


def test_url_without_absolute_path_raises_value_error() -> None:
    spool.register()
    for url in ("spool://", "spool:///", "spool:////", "spool://var/lib/kv"):
        with pytest.raises(ValueError, match="absolute path and no host"):
            Connection(url).connect()
    with pytest.raises(ValueError, match="absolute"):
        spool.spool_url("var/lib/kv")


def test_worker_with_a_torn_file_answers_ping_and_obeys_shutdown(home: Home) -> None:
    """Guarantee: a file that ends a worker on kombu's filesystem transport does not end this one."""
    folder = home.spool / "queues" / "celery"
    with home.client() as client:
        (home.path / "go").touch()
        client.send_task("mark", [0])
        (folder / STEM).write_bytes(b'{"body": "W1tdLCB7fSwg')
        worker = home.worker("one", "threads")
        eventually(lambda: (home.path / "done-0").exists())
        assert len(home.files("dead")) == 1
        (folder / STEM.replace("a", "b")).write_bytes(b"")
        client.send_task("mark", [1])
        eventually(lambda: (home.path / "done-1").exists())
        assert len(home.files("dead")) == 2
        for _ in range(2):
            inspect = client.control.inspect(["one@spool"], timeout=20)
            assert inspect.ping() == {"one@spool": {"ok": "pong"}}
        client.control.shutdown(["one@spool"])
        assert worker.wait(30) == 0
        assert [path.name for path in home.files("queues", "celery")] == []
        with home.connect() as connection:
            assert bodies_left(connection) == []  # this call sweeps
        assert [path.name for path in home.files("queues")] == ["celery"]


@pytest.mark.parametrize(("first", "second"), [("prefork", "threads"), ("threads", "prefork"), ("solo", "solo")])
def test_worker_killed_with_late_acks_second_worker_completes_every_task(home: Home, first: str, second: str) -> None:
    """Guarantee: kill -9 of a worker's main process loses no unfinished task, in any pool."""
    with home.client() as client:
        worker = home.worker("one", first)
        for number in range(6):
            client.send_task("mark", [number])
        busy = 1 if first == "solo" else 2
        eventually(lambda: len(list(home.path.glob("started-*"))) == busy)
        worker.kill()
        worker.wait()
        (home.path / "go").touch()
        home.worker("two", second)
        # Each file exists before it names its producer.
        eventually(lambda: sum(bool(path.read_text()) for path in home.path.glob("done-*")) == 6)
        assert {path.read_text() for path in home.path.glob("done-*")} == {"two"}
        eventually(lambda: not list(home.spool.glob("claims/*/*@*")))
        assert home.files("queues", "celery") == home.files("dead") == []
