"""Child processes with one open database. Each command is a line of text; its reply is a line of JSON."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tests.environment import ROOT

CommandProcess = subprocess.Popen[str]


@contextmanager
def start_command_process(module: str, environ: Mapping[str, str]) -> Iterator[CommandProcess]:
    with subprocess.Popen(
        [sys.executable, "-m", module],
        cwd=ROOT,
        env=dict(environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            # It has no data to save.
            process.kill()


def run_command(process: CommandProcess, command: str) -> Any:
    """Send a command and return its reply. Raises RuntimeError if the process has ended."""
    send_command(process, command)
    return receive_reply(process, command)


def send_command(process: CommandProcess, command: str) -> None:
    assert process.stdin
    process.stdin.write(f"{command}\n")
    process.stdin.flush()


def receive_reply(process: CommandProcess, command: str) -> Any:
    assert process.stdout
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"the process of {command!r} has ended with {process.wait()}")
    return json.loads(line)
