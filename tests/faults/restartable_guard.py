"""A guard of a server that can be stopped and restarted on purpose, in place of `tests.servers.guard`.

Run as `python -m tests.faults.restartable_guard SPEC`. It reads commands from its input, one per line, and writes
`done` after each: `stop N` sends signal N and waits for the end, `start` starts the server again on the same data. At
the end of the input it ends the server and deletes its directory.
"""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.servers.guard import LOOK_EVERY_SECONDS, child_options, stop

COMMAND_SECONDS = 60


def main() -> int:
    spec: dict[str, Any] = json.loads(sys.argv[1])
    directory = Path(spec["directory"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with (directory / "server.log").open("ab") as log:
            options = child_options(spec) | {"stdout": log}
            for step in spec["prepare"]:
                subprocess.run(step, check=True, **options)
            _execute_commands(spec, options)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return 0


def _execute_commands(spec: dict[str, Any], options: dict[str, Any]) -> None:
    server = subprocess.Popen(spec["serve"], **options)
    try:
        while os.getppid() == spec["parent"]:
            if not select.select([0], [], [], LOOK_EVERY_SECONDS)[0]:
                continue
            command = os.read(0, 100).decode().split()
            if not command:
                return
            if command[0] == "stop":
                server.send_signal(int(command[1]))
                server.wait(COMMAND_SECONDS)
            elif server.poll() is not None:
                server = subprocess.Popen(spec["serve"], **options)
            os.write(1, b"done\n")
    finally:
        stop(server, spec["stop_signal"])


if __name__ == "__main__":
    sys.exit(main())
