"""Shared by all temporary servers: a directory, an unprivileged owner, a free port, a guard, a readiness check."""

import json
import os
import pwd
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

GUARD = Path(__file__).with_name("guard.py")
READY_WITHIN_SECONDS = 60
STOP_WITHIN_SECONDS = 20
ATTEMPTS = 3
"""Number of attempts to start: another process can take a free port before the server binds it."""


class MissingServerError(Exception):
    """This machine has no binary of that server. The text names the places searched."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class FailedServerError(Exception):
    """The server is installed but did not start. The text ends with the end of its log."""


@dataclass(frozen=True)
class Plan:
    """The commands of one server: preparation, server, readiness check, and the signal that stops it."""

    url: str
    serve: list[str]
    is_ready: Callable[[], bool]
    stop_signal: int
    prepare: tuple[list[str], ...] = ()


@dataclass(frozen=True)
class Place:
    """The directory and the port of one server, and the user that it runs as (None: the current user)."""

    directory: Path
    port: int
    owner: tuple[int, int] | None

    def write(self, name: str, text: str) -> Path:
        """Write a file that only the server's user can read."""
        path = self.directory / name
        path.touch(mode=0o600)
        path.write_text(text)
        if self.owner:
            os.chown(path, *self.owner)
        return path


def free_port() -> int:
    """Return a loopback port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def unprivileged_owner() -> tuple[int, int] | None:
    """Return the user for a server that root starts: PostgreSQL refuses root, and Redis does not need it."""
    if os.geteuid() != 0:
        return None
    account = pwd.getpwnam("nobody")
    return account.pw_uid, account.pw_gid


def is_open_to_all(path: Path) -> bool:
    """Return whether any user can reach this directory."""
    return all(step.stat().st_mode & stat.S_IXOTH for step in (path, *path.parents))


def new_directory(prefix: str, owner: tuple[int, int] | None) -> Path:
    """Create a directory that belongs to the server's user and that this user can reach."""
    choices = [Path(tempfile.gettempdir()), Path("/tmp"), Path("/var/tmp")]  # noqa: S108  mkdtemp follows
    base = next((path for path in choices if owner is None or is_open_to_all(path)), choices[0])
    directory = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
    if owner:
        os.chown(directory, *owner)
    return directory


def guard_order(plan: Plan, place: Place) -> str:
    """Return the specification for a guard: the commands, their directory and their user."""
    environment = {
        "HOME": str(place.directory),
        "PATH": os.environ.get("PATH", os.defpath),
        "LC_ALL": "C",
        "TZ": "UTC",
    }
    return json.dumps(
        {
            "directory": str(place.directory),
            "environment": environment,
            "owner": place.owner,
            "parent": os.getpid(),
            "prepare": plan.prepare,
            "serve": plan.serve,
            "stop_signal": plan.stop_signal,
        }
    )


class Guarded:
    """A server that runs under `guard.py`."""

    def __init__(self, plan: Plan, place: Place) -> None:
        self.plan = plan
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(GUARD), guard_order(plan, place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C belongs to the tests, which still need the server while they are torn down.
            start_new_session=True,
        )

    def wait_until_ready(self) -> None:
        """Wait until the server is ready. Raises FailedServerError when it ended or does not respond."""
        deadline = time.monotonic() + READY_WITHIN_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                assert self.process.stdout
                tail = self.process.stdout.read().decode(errors="replace")
                raise FailedServerError(f"{self.plan.serve[0]} exited during its start:\n{tail}")
            if self.plan.is_ready():
                return
            time.sleep(0.03)
        raise FailedServerError(f"{self.plan.serve[0]} did not answer within {READY_WITHIN_SECONDS} s")

    def stop(self) -> None:
        """Stop the server, and return when it has ended and its directory is deleted."""
        let_end(self.process)


def let_end(keeper: "subprocess.Popen[bytes]") -> None:
    """Close the pipe of a guard and wait for its end; kill it if that takes too long."""
    assert keeper.stdin
    assert keeper.stdout
    keeper.stdin.close()
    try:
        keeper.wait(STOP_WITHIN_SECONDS)
    except subprocess.TimeoutExpired:
        keeper.kill()
        keeper.wait()
    keeper.stdout.close()


@contextmanager
def running(prefix: str, plan_at: Callable[[Place], Plan]) -> Iterator[str]:
    """Run a server and yield its URL. The server is stopped and deleted at the end of the block, also on an error."""
    owner = unprivileged_owner()
    for attempt in range(1, ATTEMPTS + 1):
        place = Place(new_directory(prefix, owner), free_port(), owner)
        server = Guarded(plan_at(place), place)
        try:
            server.wait_until_ready()
        except FailedServerError:
            server.stop()
            if attempt == ATTEMPTS:
                raise
        except BaseException:
            server.stop()
            raise
        else:
            break
    try:
        yield server.plan.url
    finally:
        server.stop()
