"""Send the same streams to our server and to the oracle, and find what only ours accepts.

Ours may be stricter: a stream on which it stops earlier is no finding. It must not read further or read anything
differently, except for the differences in ALLOWED.
"""

import select
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from .echo import UNREAD
from .streams import generate

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 60
PATIENCE_SECONDS = 0.03
"""Time without data from either server after which the client ends its stream, in seconds. The oracle then drops the
requests that it has not answered, so a finding is checked again with a longer time."""
LONG_PATIENCE_SECONDS = 1.0
HANG_SECONDS = 20
BATCH = 200

ALLOWED = {
    UNREAD: "a body of more than 64 KiB is announced: ours answers without reading it, the oracle waits for it",
    "/": "HTTP/1.0 without Host: Granian adds one, so it has another digest",
}
"""Requests that our server may accept although the oracle refuses them, by their mark in a response, with the reason.
"""


@dataclass(frozen=True)
class Find:
    seed: int
    what: str
    sent: bytes
    ours: list[str]
    theirs: list[str]

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.what}\n  sent   {self.sent!r}\n  ours   {self.ours}\n  theirs {self.theirs}"


@dataclass
class Duel:
    """The sockets of both servers, and the counts so far: accepted requests, and reasons of refusals of ours."""

    ours: Path
    theirs: Path
    process: "subprocess.Popen[bytes]"
    log: Path
    counted: Counter[str] = field(default_factory=Counter)

    def run(self, seeds: Sequence[int]) -> Iterator[Find]:
        for first in range(0, len(seeds), BATCH):
            batch = seeds[first : first + BATCH]
            for seed, found in zip(batch, self._compare(batch, PATIENCE_SECONDS), strict=True):
                if not found:
                    continue
                find = self.look_again(seed)
                if find is not None:
                    yield find
            assert self.process.poll() is None, self.log.read_text()[-3000:]

    def look_again(self, seed: int) -> Find | None:
        sent = generate(seed)
        (answers,) = _exchange([(self.ours, sent), (self.theirs, sent)], LONG_PATIENCE_SECONDS)
        ours, theirs = read_answers(answers[0]), read_answers(answers[1])
        what = find_fault(ours, theirs)
        return Find(seed, what, sent, ours, theirs) if what else None

    def _compare(self, seeds: Sequence[int], timeout: float) -> list[str]:
        sent = [generate(seed) for seed in seeds]
        pairs = _exchange([place for part in sent for place in ((self.ours, part), (self.theirs, part))], timeout)
        found = []
        for ours, theirs in pairs:
            mine = read_answers(ours)
            self.counted["streams"] += 1
            self.counted["requests taken"] += sum(not answer.startswith("refused") for answer in mine)
            self.counted["requests refused"] += sum(answer.startswith("refused") for answer in mine)
            self.counted[ALLOWED[UNREAD]] += UNREAD in mine
            found.append(find_fault(mine, read_answers(theirs)))
        return found

    def memory_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:")) * 1024

    def complaints(self) -> str:
        """The output of our server, which has no log: empty unless an error occurred in it."""
        return self.log.read_text()


def find_fault(ours: Sequence[str], theirs: Sequence[str]) -> str:
    """Return where our server reads further than the oracle, or differently; "" if it does not."""
    for number, mine in enumerate(ours):
        if mine in ("refused 400", "refused 414", "refused 431", UNREAD):
            return ""
        if mine.startswith(("refused", "broken")):
            return f"answer {number} is {mine}"
        if number >= len(theirs) or theirs[number].startswith("refused"):
            return f"request {number} is accepted, and the oracle refuses it"
        if mine not in theirs[number].split("/"):
            return f"request {number} is read differently"
    return ""


def read_answers(received: bytes) -> list[str]:
    """Return for each response the digest of the request as read, `refused` with the status, or `broken`."""
    found = []
    while received:
        head, end, received = received.partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        words = lines[0].split(b" ")
        if not end or len(words) < 2 or not words[1].isdigit():
            found.append(f"broken {head[:80]!r}")
            break
        if words[1] == b"100":
            continue
        headers = {name.lower(): value for name, _, value in (line.partition(b": ") for line in lines[1:])}
        length, digest = int(headers.get(b"content-length", b"0")), headers.get(b"x-echo")
        if digest is None:
            found.append(f"refused {words[1].decode()}")
        else:
            found.append(digest.decode())
        # A response to HEAD has only a head: the next response follows, or nothing.
        if received[:5] != b"HTTP/" or length == 0:
            received = received[length:]
    return found


def _exchange(sent: Sequence[tuple[Path, bytes]], timeout: float) -> list[tuple[bytes, bytes]]:
    """Return the responses of both servers, in pairs, in the order of the streams."""
    poll = select.epoll()
    wires: dict[int, tuple[int, socket.socket]] = {}
    received = [b""] * len(sent)
    for number, (path, data) in enumerate(sent):
        wire = socket.socket(socket.AF_UNIX)
        wire.settimeout(HANG_SECONDS)
        wire.connect(str(path))
        with suppress(BrokenPipeError, ConnectionResetError):
            wire.sendall(data)
        wires[wire.fileno()] = (number, wire)
        poll.register(wire, select.EPOLLIN)
    is_first_wait, deadline = True, time.monotonic() + HANG_SECONDS
    while wires:
        events = poll.poll(timeout if is_first_wait else HANG_SECONDS)
        if not events:
            hanging = [sent[number] for number, _ in wires.values()]
            assert is_first_wait, f"hangs: {hanging}"
            assert time.monotonic() < deadline, f"drips: {hanging}"
            is_first_wait = False
            for _, wire in wires.values():
                with suppress(OSError):
                    wire.shutdown(socket.SHUT_WR)
        for descriptor, _ in events:
            number, wire = wires[descriptor]
            try:
                part = wire.recv(65536)
            except ConnectionResetError:
                part = b""
            received[number] += part
            if not part:
                poll.unregister(wire)
                wire.close()
                del wires[descriptor]
    poll.close()
    return list(zip(received[::2], received[1::2], strict=True))


@contextmanager
def duel(folder: Path) -> Iterator[Duel]:
    """Start both servers, each in its own process, on Unix sockets in the folder."""
    ours, theirs, log = folder / "ours", folder / "theirs", folder / "ours.log"
    oracle = [
        *(sys.executable, "-m", "granian", "--interface", "asgi", "--http", "1", "--no-ws", "--uds", str(theirs)),
        *("--no-access-log", "--log-level", "critical", "tests.fuzz.echo:application"),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-m", "tests.fuzz.echo", str(ours)], cwd=ROOT, stderr=output)
        other = subprocess.Popen(oracle, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for path, server in ((ours, process), (theirs, other)):
            _wait_for(path, server)
        yield Duel(ours, theirs, process, log)
    finally:
        for server in (process, other):
            server.terminate()
            server.wait(START_SECONDS)


def _wait_for(path: Path, server: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_SECONDS
    with socket.socket(socket.AF_UNIX) as wire:
        while wire.connect_ex(str(path)) != 0:
            assert server.poll() is None, f"{path.name} has ended"
            assert time.monotonic() < deadline, f"{path.name} does not start"
            time.sleep(0.05)
