"""The process between a test run and a server that it started: the server ends with the run, however that ends.

It is a separate script that uses only the standard library: `python -I -S guard.py SPEC`. SPEC is the JSON object that
`throwaway.py` writes. Its standard input is a pipe that the test run holds open. The end of that pipe, or another
parent process, means that the run has ended, even by kill -9. The guard then stops the server and removes its
directory.
"""

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

LOOK_EVERY_SECONDS = 0.2
STOP_WITHIN_SECONDS = 10
LOG_TAIL_BYTES = 4000
PR_SET_PDEATHSIG = 1


class StoppedError(BaseException):
    """A signal asked this process to end (SIGTERM or SIGHUP)."""


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent dies, where the kernel can (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def child_options(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the options that the server and its preparation share: user, directory, environment, log."""
    options: dict[str, Any] = {
        "cwd": spec["directory"],
        "env": spec["environment"],
        "stdin": subprocess.DEVNULL,
        "stderr": subprocess.STDOUT,
        # This process has one thread, so that code between fork and exec is safe here.
        "preexec_fn": die_with_parent,
    }
    if spec["owner"]:
        uid, gid = spec["owner"]
        options |= {"user": uid, "group": gid, "extra_groups": []}
    return options


def is_abandoned(parent: int) -> bool:
    """Wait a moment. Return whether the test run closed the pipe or is no longer the parent."""
    readable, _, _ = select.select([sys.stdin], [], [], LOOK_EVERY_SECONDS)
    return bool(readable) or os.getppid() != parent


def stop(server: "subprocess.Popen[bytes]", how: int) -> None:
    """End the server as its documentation advises, and kill it when that takes too long."""
    if server.poll() is not None:
        return
    server.send_signal(how)
    try:
        server.wait(STOP_WITHIN_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def serve(spec: dict[str, Any], log: Path) -> int:
    """Prepare and run the server until the test run or the server ends. Return 0 if this process stopped the server."""
    with log.open("ab") as output:
        options = child_options(spec) | {"stdout": output}
        for command in spec["prepare"]:
            done = subprocess.run(command, check=False, **options)
            if done.returncode:
                return done.returncode
        server = subprocess.Popen(spec["serve"], **options)
    try:
        while server.poll() is None:
            if is_abandoned(spec["parent"]):
                return 0
        return server.returncode or 1
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        stop(server, spec["stop_signal"])


def ask_to_stop(number: int, frame: FrameType | None) -> None:
    """Raise the error whose handler stops the server."""
    raise StoppedError


def main() -> int:
    """Guard one server. If it ends early, print the end of its log to standard output."""
    spec = json.loads(sys.argv[1])
    directory = Path(spec["directory"])
    log = directory / "server.log"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, ask_to_stop)
    signal.signal(signal.SIGHUP, ask_to_stop)
    outcome = 0
    try:
        outcome = serve(spec, log)
        if outcome:
            sys.stdout.buffer.write(log.read_bytes()[-LOG_TAIL_BYTES:])
    except StoppedError:
        pass
    except OSError as refused:
        outcome = 1
        sys.stdout.write(f"{refused}\n")
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return outcome


if __name__ == "__main__":
    sys.exit(main())
