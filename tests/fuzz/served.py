"""The server of `make run` on the database that the environment names, and raw connections to it."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPResponse
from pathlib import Path

from keyvault.management import service
from keyvault.management.service import find_free_port

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 60
STOP_SECONDS = 20


@dataclass(frozen=True)
class Answer:
    """`headers` by lower-case name."""

    status: int
    headers: dict[str, str]
    body: bytes


@contextmanager
def serving(folder: Path, **settings: str) -> Iterator[int]:
    """Start the server and yield its port. Its log is `server.log` in the folder. SIGTERM ends it on exit."""
    port = find_free_port()
    # The same command line as `make run`, and therefore the same server.
    command = service.server_program(port).command
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "KEYVAULT_ORIGIN": f"http://127.0.0.1:{port}", **settings},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while (answered := service._get_readyz(port)) is None or answered[0] != 200:
            assert process.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < deadline, f"{answered} {log.read_text()[-2000:]}"
            time.sleep(0.05)
        yield port
    finally:
        process.terminate()  # it ends its own worker process
        try:
            assert process.wait(STOP_SECONDS) == 0
        finally:
            process.kill()
            process.wait()


class Wire:
    """Connections to a server, one after the other, for requests as raw bytes."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connection: socket.socket | None = None

    def send(self, method: bytes, *parts: bytes) -> Answer:
        """Send a request in the given pieces. A connection is used again as long as the server keeps it open."""
        if self._connection is None:
            self._connection = socket.create_connection(("127.0.0.1", self._port), timeout=20)
        for part in parts:
            self._connection.sendall(part)
        with HTTPResponse(self._connection, method=method.decode()) as response:
            response.begin()
            headers = {name.lower(): value for name, value in response.getheaders()}
            answer = Answer(response.status, headers, response.read())
            closes = response.will_close
        if closes:
            self.close()
        return answer

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
