"""A network between a verifier and its database, as a separate program: `python -m tests.faults.wire FROM TO`.

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


class Wire:
    """The handle of the started program."""

    def __init__(self, to: int) -> None:
        self.port = free_port()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.wire", str(self.port), str(to)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._wait_until_done()

    @classmethod
    def before(cls, url: str) -> "tuple[Wire, str]":
        """Start one to the server of a URL. Return it, and the URL through it."""
        server = urlsplit(url)
        wire = cls(server.port or 5432)
        place = f"{server.username}:{server.password or ''}@127.0.0.1:{wire.port}"
        return wire, urlunsplit(server._replace(netloc=place))

    def order(self, word: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(f"{word}\n".encode())
        self._process.stdin.flush()
        self._wait_until_done()

    def _wait_until_done(self) -> None:
        assert self._process.stdout
        if self._process.stdout.readline() != b"done\n":
            raise RuntimeError("the wire has ended")

    def close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class _Ends:
    """All connections of the program, and whether it forwards."""

    def __init__(self, to: int) -> None:
        self._to = to
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._delay_seconds = 0.0
        self._writers: set[asyncio.StreamWriter] = set()

    async def join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        other: asyncio.StreamWriter | None = None
        try:
            await self._is_open.wait()
            back, other = await asyncio.open_connection("127.0.0.1", self._to)
            self._writers.add(other)
            ways = {
                asyncio.ensure_future(self._pass_on(reader, other)),
                asyncio.ensure_future(self._pass_on(back, writer)),
            }
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
        except OSError:
            pass
        finally:
            for each in (writer, other):
                if each is not None:
                    self._writers.discard(each)
                    each.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                await self._is_open.wait()
                if self._delay_seconds:
                    await asyncio.sleep(self._delay_seconds)
                writer.write(data)
                await writer.drain()
            # The end of a connection is not forwarded on hold either.
            await self._is_open.wait()

    def obey(self, word: str) -> None:
        if word == "hold":
            self._is_open.clear()
        elif word == "go":
            self._is_open.set()
        elif word.startswith("delay "):
            self._delay_seconds = float(word.removeprefix("delay "))
        else:
            for writer in list(self._writers):
                wire: socket.socket = writer.get_extra_info("socket")
                wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                writer.transport.abort()


async def _serve(port: int, to: int) -> None:
    ends, loop = _Ends(to), asyncio.get_running_loop()
    await asyncio.start_server(ends.join, "127.0.0.1", port)
    _say_done()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        ends.obey(line.strip())
        await asyncio.sleep(0)
        _say_done()


def _say_done() -> None:
    sys.stdout.write("done\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), int(sys.argv[2])))
