"""A bad line as a TCP proxy, in a program of its own: `python -m tests.faults.bad_line FROM TO DELAY LOSS SEED`.

It forwards from the loopback port FROM to the port TO. Each piece of data arrives DELAY seconds later. With the
probability LOSS it is lost, and is sent again as TCP does: after a round trip and 0.2 s, and after twice that time when
it is lost again. What follows on its connection waits for it. Commands on its input, one per line, each answered
`done`: `partition` holds all data, also of new connections, and `heal` lets it arrive, late, as retransmission would.
"""

import asyncio
import random
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field

from tests.environment import ROOT
from tests.servers.throwaway import free_port

_RESET = struct.pack("ii", 1, 0)
_PIECE_BYTES = 65_536
_LEAST_TIMEOUT_SECONDS = 0.2
"""The least retransmission timeout of Linux less the round trip, in seconds."""


class BadLine:
    """The handle of the started program."""

    def __init__(self, to: int, *, delay_seconds: float, loss: float, seed: int) -> None:
        self.port = free_port()
        options = [str(self.port), str(to), str(delay_seconds), str(loss), str(seed)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.bad_line", *options],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._wait_until_done()

    def partition(self) -> None:
        self._send_command("partition")

    def heal(self) -> None:
        self._send_command("heal")

    def close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _send_command(self, command: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(f"{command}\n".encode())
        self._process.stdin.flush()
        self._wait_until_done()

    def _wait_until_done(self) -> None:
        assert self._process.stdout
        if self._process.stdout.readline() != b"done\n":
            raise RuntimeError("the bad line has ended")


@dataclass(slots=True)
class _Line:
    to: int
    delay_seconds: float
    loss: float
    rng: random.Random
    is_whole: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far: asyncio.StreamWriter | None = None
        try:
            await self.is_whole.wait()
            back, far = await asyncio.open_connection("127.0.0.1", self.to)
            directions = [
                asyncio.ensure_future(self._forward(reader, far)),
                asyncio.ensure_future(self._forward(back, writer)),
            ]
            _, pending = await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
            for each in pending:
                each.cancel()
            await asyncio.gather(*directions, return_exceptions=True)
        except OSError:
            pass
        finally:
            for end in (writer, far):
                if end is not None:
                    _reset(end)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                due, data = await pieces.get()
                await asyncio.sleep(due - loop.time())
                await self.is_whole.wait()
                if not data:
                    return
                timeout = 2 * self.delay_seconds + _LEAST_TIMEOUT_SECONDS
                while self.rng.random() < self.loss:
                    await asyncio.sleep(timeout)
                    timeout *= 2
                    await self.is_whole.wait()
                writer.write(data)
                await writer.drain()

        delivery = asyncio.ensure_future(deliver())
        try:
            with suppress(OSError):
                while data := await reader.read(_PIECE_BYTES):
                    pieces.put_nowait((loop.time() + self.delay_seconds, data))
                    if delivery.done():
                        return
            pieces.put_nowait((loop.time() + self.delay_seconds, b""))
            await asyncio.wait({delivery})
        finally:
            delivery.cancel()


def _reset(writer: asyncio.StreamWriter) -> None:
    connection: socket.socket | None = writer.get_extra_info("socket")
    with suppress(OSError):
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()


async def _serve(port: int, to: int, delay_seconds: float, loss: float, seed: int) -> None:
    line = _Line(to, delay_seconds, loss, random.Random(seed))  # noqa: S311  not for secrets
    line.is_whole.set()
    await asyncio.start_server(line.handle, "127.0.0.1", port)
    loop = asyncio.get_running_loop()
    _say_done()
    while command := await loop.run_in_executor(None, sys.stdin.readline):
        if command.strip() == "partition":
            line.is_whole.clear()
        else:
            line.is_whole.set()
        _say_done()


def _say_done() -> None:
    sys.stdout.write("done\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _port, _to, _delay, _loss, _seed = sys.argv[1:]
    asyncio.run(_serve(int(_port), int(_to), float(_delay), float(_loss), int(_seed)))
