"""The embedded default's broker: a kombu transport that keeps messages in a folder and needs no server.

This module holds that folder and the classes that present it to kombu. It imports neither Django nor anything of this
project, and does not interpret messages.

    queues/<queue>/<time>-<uuid>     a message that is ready; a final "r" marks a redelivery
    claims/<uuid>/                   the claims of one process: `.lock` is flock-held for the process's life
        .<uuid>                        a message being written; its rename into a queue publishes it
        <time>-<uuid>@<queue>          a message that this process took and has not acknowledged
        =<queue>                       "this process declared that exclusive or auto-delete queue"
    exchanges/<exchange>/<routing key>@<queue>   a binding, all in its name: an empty file cannot be half written
    dead/                            files that hold no message, and rejected messages

Each step is one rename or unlink, so kill -9 at any point leaves every message in exactly one place. If the lock of a
claims folder can be taken, its process is dead: consumers put its messages back and drop the queues that no other
process declared, or the mailboxes of dead workers would grow without limit. Delivery is at least once; tasks are
idempotent. Use local file systems only: network shares do not implement flock and rename reliably. One user owns the
folder.

The URL is `spool://` and the percent-encoded absolute path, which `spool_url` writes: `spool:///var/lib/kv/spool`. A
fourth slash, as in other kombu URLs, changes nothing. The one transport option is kombu's `polling_interval`, in
seconds; its default is 0.1.
"""

import fcntl
import heapq
import os
import re
import shutil
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty
from typing import Any
from urllib.parse import quote, unquote
from uuid import uuid4

from kombu.connection import Connection
from kombu.log import get_logger
from kombu.transport import TRANSPORT_ALIASES, virtual
from kombu.utils.json import dumps, loads

SWEEP_SECONDS = 2.0
STALE_SECONDS = 3600  # Maximum age, in seconds, of a message in an exclusive or auto-delete queue
DEAD_FILES = 1000  # Maximum number of files in dead/; the newest are kept
BATCH = 64  # Number of names read ahead, so that a long queue is not listed once per message

_STEM = re.compile(r"\d{20}-[0-9a-f]{32}r?")

logger = get_logger(__name__)


def register() -> None:
    """Register `spool://` URLs with kombu. Idempotent; call it before the first connection is made."""
    TRANSPORT_ALIASES["spool"] = f"{__name__}:Transport"


def spool_url(root: str | os.PathLike[str]) -> str:
    """Return the broker URL of the spool in `root`. Raises ValueError if the path is not absolute."""
    if not os.path.isabs(root):
        raise ValueError(f"the path of a spool must be absolute, not {os.fspath(root)!r}")
    return f"spool://{quote(os.fspath(root))}"


def _quoted(name: str) -> str:
    if not name:
        raise ValueError("a queue or an exchange needs a name")
    quoted = quote(name, safe="")
    return f"%2E{quoted[1:]}" if quoted.startswith(".") else quoted  # "." and ".." would leave the folder


def _new_stem() -> str:
    return f"{time.time_ns():020d}-{uuid4().hex}"


def _list_names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _open_private(path: Path, flags: int = os.O_RDWR) -> int:
    descriptor = os.open(path, flags | os.O_CREAT, 0o600)
    os.fchmod(descriptor, 0o600)  # regardless of the umask
    return descriptor


def _sync_folder(folder: Path) -> None:
    # Not `private_files.sync_folder`: this module imports nothing of the project.
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        _make_folder(folder.parent)
        with suppress(FileExistsError):  # another process was faster
            folder.mkdir(0o700)
            folder.chmod(0o700)
            _sync_folder(folder.parent)


_fork_lock = threading.RLock()  # held while a lock file is open, so that no fork copies the descriptor


@contextmanager
def _locked(path: Path, flags: int = 0) -> Iterator[None]:
    with _fork_lock:
        descriptor = _open_private(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | flags)
            yield
        finally:
            os.close(descriptor)


class _ClaimsFolder:
    """The claims folder of one process. Its threads share it; a forked child gets its own."""

    _of_this_process: "dict[Path, _ClaimsFolder]" = {}

    def __init__(self, root: Path) -> None:
        _make_folder(root)
        status = root.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise PermissionError(f"{root}: the spool folder must belong to this user and be writable by no other user")
        self.queues, self.all_claims, self.exchanges, self.dead = (
            root / name for name in ("queues", "claims", "exchanges", "dead")
        )
        self.root, self.path, self.next_sweep = root, self.all_claims / uuid4().hex, 0.0
        with self.registry():
            for folder in (self.queues, self.exchanges, self.dead, self.path):
                _make_folder(folder)
            self.lock = _open_private(self.path / ".lock")
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @classmethod
    def at(cls, root: Path) -> "_ClaimsFolder":
        claims = cls._of_this_process.get(root)
        if claims is not None and claims.path.is_dir():
            return claims
        with _fork_lock:
            if cls._of_this_process.get(root) is claims:  # no other thread was faster
                if claims is not None:  # the folder was emptied: create it again
                    os.close(cls._of_this_process.pop(root).lock)
                cls._of_this_process[root] = cls(root)
            return cls._of_this_process[root]

    @classmethod
    def forget_all(cls) -> None:
        """In a forked child: the parent's locks must end with the parent, and its claims are not the child's."""
        for claims in cls._of_this_process.values():
            with suppress(OSError):
                os.close(claims.lock)  # unlike LOCK_UN this leaves the parent's lock alone
        cls._of_this_process.clear()
        _fork_lock.release()

    def registry(self) -> Any:
        """Lock the registry while a claims folder or a queue is created or removed, so that none is seen half done."""
        return _locked(self.root / ".lock")

    def put_back(self, claim: Path) -> None:
        stem, _, queue = claim.name.partition("@")
        ready = self.queues / queue / f"{stem.removesuffix('r')}r"
        try:
            claim.rename(ready)
        except FileNotFoundError:
            if claim.exists():  # the queue is gone, and the message must not be lost with it
                _make_folder(ready.parent)
                claim.rename(ready)

    def move_to_dead(self, claim: Path) -> None:
        with suppress(FileNotFoundError):
            claim.rename(self.dead / claim.name)

    def drop(self, queue: str) -> None:
        for binding in self.exchanges.glob(f"*/*@{queue}"):
            binding.unlink(missing_ok=True)
        trash = self.path / f".{uuid4().hex}"
        with suppress(FileNotFoundError):
            os.rename(self.queues / queue, trash)  # atomically, so that no publisher sees half a queue
            shutil.rmtree(trash)

    def sweep(self) -> None:
        """Put back the messages of dead processes, and drop queues without a process. The caller holds the registry
        lock."""
        self.next_sweep = time.monotonic() + SWEEP_SECONDS
        for other in self.all_claims.iterdir():
            try:
                if other != self.path and other.is_dir():
                    with _locked(other / ".lock", fcntl.LOCK_NB):
                        self._clear(other)
            except BlockingIOError:
                continue  # its process is alive
            except OSError:
                logger.exception("cannot clear %s, the claims folder of a dead process", other)
        stale = f"{time.time_ns() - STALE_SECONDS * 10**9:020d}"
        for transient in self.all_claims.glob("*/=*"):
            folder = self.queues / transient.name[1:]
            for name in _list_names(folder):
                if name < stale:
                    (folder / name).unlink(missing_ok=True)
        for name in sorted(_list_names(self.dead))[:-DEAD_FILES]:
            with suppress(OSError):
                os.unlink(self.dead / name)

    def _clear(self, other: Path) -> None:
        names = _list_names(other)
        for name in names:
            if "@" in name:
                self.put_back(other / name)
        for name in names:
            if name.startswith("=") and len(list(self.all_claims.glob(f"*/{name}"))) == 1:
                self.drop(name[1:])
        shutil.rmtree(other)


os.register_at_fork(
    before=_fork_lock.acquire, after_in_parent=_fork_lock.release, after_in_child=_ClaimsFolder.forget_all
)


class _Claims(virtual.QoS):
    """Unacknowledged messages. kombu counts them, and this class moves the files. A tag is the name of a claim.

    A claim that this process does not hold (a forked child's, or from an emptied folder) is ignored.
    """

    channel: "SpoolChannel"

    def ack(self, delivery_tag: str) -> None:
        self.channel.claim(delivery_tag).unlink(missing_ok=True)
        super().ack(delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        claims = self.channel.claims
        (claims.put_back if requeue else claims.move_to_dead)(self.channel.claim(delivery_tag))
        super().ack(delivery_tag)


class SpoolChannel(virtual.Channel):
    """kombu's virtual channel with queues, claims and bindings in the folder.

    Publishing returns once the message survives kill -9 and, unless its delivery_mode is transient, a power cut. Any
    error of the file system is raised as OSError, which kombu counts as a connection error.
    """

    QoS = _Claims
    supports_fanout = True
    connection: "Transport"

    def __init__(self, connection: "Transport", **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        self.root = connection.root  # acknowledgements may follow the closing of the connection
        self._ready: defaultdict[str, deque[str]] = defaultdict(deque)

    @property
    def claims(self) -> _ClaimsFolder:
        return _ClaimsFolder.at(self.root)

    def claim(self, delivery_tag: str) -> Path:
        return self.claims.path / delivery_tag

    def _folder(self, queue: str) -> Path:
        return self.claims.queues / _quoted(queue)

    def _put(self, queue: str, message: Any, **kwargs: Any) -> None:
        transient = message["properties"].get("delivery_mode") == 1
        draft, folder = self.claim(f".{uuid4().hex}"), self._folder(queue)
        try:
            with open(_open_private(draft, os.O_WRONLY | os.O_EXCL), "wb") as file:
                file.write(dumps(message).encode())
                file.flush()
                if not transient:
                    os.fsync(file.fileno())
                    _make_folder(folder)
            draft.rename(folder / _new_stem())
            if not transient:
                _sync_folder(folder)
        except FileNotFoundError:
            if not transient:  # a transient message to a queue that does not exist is dropped, as AMQP does
                raise
        finally:
            draft.unlink(missing_ok=True)

    def _put_fanout(self, exchange: str, message: Any, routing_key: str, **kwargs: Any) -> None:
        for queue in {queue for _, _, queue in self.get_table(exchange)}:
            self._put(queue, message)

    def _get(self, queue: str, timeout: float | None = None) -> Any:
        if time.monotonic() >= self.claims.next_sweep:
            with self.claims.registry():
                self.claims.sweep()
        while claim := self._take(queue):
            try:
                return self._read(claim)
            except Exception as error:
                if isinstance(error, OSError) and not isinstance(error, IsADirectoryError | PermissionError):
                    self.claims.put_back(claim)  # an error of the machine, not of the file
                    raise
                logger.error("%s holds no valid message and is moved to dead/: %r", claim.name, error)
                self.claims.move_to_dead(claim)
        raise Empty

    def _take(self, queue: str) -> Path | None:
        folder, ready = self._folder(queue), self._ready[queue]
        while True:
            if not ready:
                ready.extend(heapq.nsmallest(BATCH, _list_names(folder)))
            if not ready:
                return None
            name = ready.popleft()
            claim = self.claim(f"{name if _STEM.fullmatch(name) else _new_stem()}@{folder.name}")
            with suppress(FileNotFoundError):  # another consumer was faster
                os.rename(folder / name, claim)
                return claim

    def _read(self, claim: Path) -> Any:
        message = loads(claim.read_bytes())
        properties = message["properties"]
        properties["delivery_tag"] = claim.name
        properties["delivery_info"]["redelivered"] = "r@" in claim.name
        self.Message(message, channel=self)  # raise here what the consumer would raise
        return message

    def basic_consume(self, queue: str, no_ack: bool, callback: Any, *args: Any, **kwargs: Any) -> Any:
        def forget_first(message: Any) -> Any:  # a shutdown request raises in the callback: delete first
            self.claim(message.delivery_tag).unlink(missing_ok=True)
            return callback(message)

        return super().basic_consume(queue, no_ack, forget_first if no_ack else callback, *args, **kwargs)

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any:
        message: Any = super().basic_get(queue, no_ack=no_ack, **kwargs)
        if message is not None and no_ack:
            self.claim(message.delivery_tag).unlink(missing_ok=True)
        return message

    def _restore(self, message: Any) -> None:
        self.claims.put_back(self.claim(message.delivery_tag))

    def _new_queue(self, queue: str, auto_delete: bool = False, exclusive: bool = False, **kwargs: Any) -> None:
        claims, folder = self.claims, self._folder(queue)
        with claims.registry():
            if auto_delete or exclusive:
                claims.sweep()
                if not any(claims.all_claims.glob(f"*/={folder.name}")):
                    claims.drop(folder.name)  # messages for a dead queue of the same name must not be delivered
                os.close(_open_private(self.claim(f"={folder.name}")))
            _make_folder(folder)

    def _has_queue(self, queue: str, **kwargs: Any) -> bool:
        return self._folder(queue).is_dir()

    def _size(self, queue: str) -> int:
        return len(_list_names(self._folder(queue)))

    def _purge(self, queue: str) -> int:
        folder, purged = self._folder(queue), 0
        for name in _list_names(folder):
            with suppress(FileNotFoundError, IsADirectoryError):
                os.unlink(folder / name)
                purged += 1
        return purged

    def queue_delete(self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any) -> None:
        """Delete the queue with its messages and bindings; with `if_empty`, only if it has no message."""
        claims, folder = self.claims, self._folder(queue)
        with claims.registry():
            if if_empty and folder.is_dir():
                try:
                    folder.rmdir()  # fails if a message has just arrived
                except OSError:
                    return
            claims.drop(folder.name)
            self.claim(f"={folder.name}").unlink(missing_ok=True)

    def _binding(self, exchange: str | None, routing_key: str, queue: str) -> Path:
        name = f"{quote(routing_key, safe='')}@{_quoted(queue)}"
        return self.claims.exchanges / _quoted(exchange or "amq.direct") / name

    def queue_bind(self, queue: str, exchange: Any = None, routing_key: str = "", *_: Any, **__: Any) -> None:
        binding = self._binding(exchange, routing_key, queue)
        with self.claims.registry():
            _make_folder(binding.parent)
            os.close(_open_private(binding))

    def queue_unbind(self, queue: str, exchange: Any = None, routing_key: str = "", *_: Any, **__: Any) -> None:
        self._binding(exchange, routing_key, queue).unlink(missing_ok=True)

    def get_table(self, exchange: str) -> list[Any]:
        prepare = self.typeof(exchange).prepare_bind
        names = (name.partition("@") for name in _list_names(self.claims.exchanges / _quoted(exchange)))
        return [prepare(unquote(queue), exchange, unquote(key), None) for key, _, queue in names if queue]


class Transport(virtual.Transport):
    """The transport that kombu loads. Raises ValueError when the URL names a host or no path."""

    Channel = SpoolChannel
    polling_interval = 0.1
    driver_type = driver_name = "spool"
    connection_errors = (*virtual.Transport.connection_errors, OSError)  # a full disk: workers wait and try again
    implements = virtual.Transport.implements.extend(exchange_type=frozenset({"direct", "topic", "fanout"}))
    default_connection_params: dict[str, Any] = {}  # a spool has no host

    def __init__(self, client: Connection, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        self.root = Path("/", client.virtual_host)
        if client.hostname not in (None, "localhost") or self.root == Path("/"):  # as_uri() yields localhost
            raise ValueError("a spool URL holds an absolute path and no host: spool:///var/lib/kv/spool")

    def driver_version(self) -> str:
        return "1"
