"""A TCP proxy between a verifier and its database, as a separate program: `python -m tests.faults.proxy FROM TO`.

It forwards from the loopback port FROM to the port TO. It reads commands from its input, one per line, and writes
`done` after each: `hold` stops forwarding without closing a connection; `go` forwards what was held and continues;
`cut` resets every connection; `delay SECONDS` delays what is sent from then on, in each direction. It ends with its
input.
"""

import asyncio
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from urllib.parse import urlsplit, urlunsplit

from tests.environment import ROOT
from tests.servers.throwaway import free_port

_RESET = struct.pack("ii", 1, 0)
_CHUNK_BYTES = 65536


class Proxy:
    """The handle of the started program."""

    def __init__(self, to: int) -> None:
        self.port = free_port()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.proxy", str(self.port), str(to)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._wait_until_done()

    @classmethod
    def before(cls, url: str) -> "tuple[Proxy, str]":
        """Start one to the server of a URL. Return it, and the URL through it."""
        server = urlsplit(url)
        proxy = cls(server.port or 5432)
        place = f"{server.username}:{server.password or ''}@127.0.0.1:{proxy.port}"
        return proxy, urlunsplit(server._replace(netloc=place))

    def send_command(self, command: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(f"{command}\n".encode())
        self._process.stdin.flush()
        self._wait_until_done()

    def _wait_until_done(self) -> None:
        assert self._process.stdout
        if self._process.stdout.readline() != b"done\n":
            raise RuntimeError("the proxy has ended")

    def close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class _Forwarder:
    """All connections of the program, and whether it forwards."""

    def __init__(self, to: int) -> None:
        self._to = to
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._delay_seconds = 0.0
        self._writers: set[asyncio.StreamWriter] = set()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        other: asyncio.StreamWriter | None = None
        try:
            await self._is_open.wait()
            back, other = await asyncio.open_connection("127.0.0.1", self._to)
            self._writers.add(other)
            directions = {
                asyncio.ensure_future(self._forward(reader, other)),
                asyncio.ensure_future(self._forward(back, writer)),
            }
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
            for direction in directions:
                direction.cancel()
            await asyncio.gather(*directions, return_exceptions=True)
        except OSError:
            pass
        finally:
            for each in (writer, other):
                if each is not None:
                    self._writers.discard(each)
                    each.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                await self._is_open.wait()
                if self._delay_seconds:
                    await asyncio.sleep(self._delay_seconds)
                writer.write(data)
                await writer.drain()
            # The end of a connection is not forwarded on hold either.
            await self._is_open.wait()

    def execute(self, command: str) -> None:
        if command == "hold":
            self._is_open.clear()
        elif command == "go":
            self._is_open.set()
        elif command.startswith("delay "):
            self._delay_seconds = float(command.removeprefix("delay "))
        else:
            for writer in list(self._writers):
                connection: socket.socket = writer.get_extra_info("socket")
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                writer.transport.abort()


async def _serve(port: int, to: int) -> None:
    forwarder, loop = _Forwarder(to), asyncio.get_running_loop()
    await asyncio.start_server(forwarder.handle, "127.0.0.1", port)
    _say_done()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        forwarder.execute(line.strip())
        await asyncio.sleep(0)
        _say_done()


def _say_done() -> None:
    sys.stdout.write("done\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), int(sys.argv[2])))
