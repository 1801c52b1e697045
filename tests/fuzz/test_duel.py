"""A small share of `make fuzz`: 3,000 streams that resemble HTTP, sent to the verifier's server and to a stock one."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from keyvault.hotpath.http1.protocol import Bounds, Connection, Shared

from .duel import duel, find_fault, read_answers
from .echo import handle
from .streams import LAST, generate

SEED, COUNT = 30_000_000, 3_000


class RecordingTransport:
    """A transport that records the written bytes."""

    def __init__(self) -> None:
        self.written = b""
        self.is_open = True

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.is_open = False

    def write_eof(self) -> None:
        self.is_open = False


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    loop = asyncio.new_event_loop()
    yield Shared(handle, Bounds(), loop)
    loop.close()


def exchange(shared: Shared, parts: list[bytes]) -> tuple[bytes, bool]:
    wire = RecordingTransport()
    connection = Connection(shared)
    connection.connection_made(cast(asyncio.Transport, wire))
    for part in parts:
        connection.data_received(part)
    connection.connection_lost(None)
    return wire.written, wire.is_open


def test_server_accepts_nothing_that_a_stock_server_refuses_or_reads_differently(tmp_path: Path) -> None:
    """Guarantee: no bytes mean one request to us and another to a server in front of us (RFC 9112, 11.2)."""
    with duel(tmp_path) as servers:
        found = next(servers.run(range(SEED, SEED + COUNT)), None)
        assert found is None, str(found)
        assert servers.complaints() == ""
        assert servers.counted["requests taken"] > COUNT / 3
        assert servers.counted["requests refused"] > COUNT / 3


def test_streams_are_understood_the_same_however_they_are_cut(shared: Shared) -> None:
    """Guarantee: a request is read alike in whatever pieces the network delivers it."""
    for seed in range(SEED, SEED + COUNT):
        sent = generate(seed)
        draw = random.Random(seed)  # noqa: S311  repeatable on purpose
        cuts = sorted(draw.sample(range(1, len(sent)), min(len(sent) - 1, draw.choice((1, 3, 20)))))
        parts = [sent[start:end] for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
        whole, is_open = exchange(shared, [sent])
        in_parts, stays_open = exchange(shared, parts)
        assert (read_answers(whole), is_open) == (read_answers(in_parts), stays_open), f"seed {seed}: {sent!r} {cuts}"


def test_find_fault_reports_what_our_server_accepts_and_the_oracle_refuses() -> None:
    """The comparison itself finds a difference."""
    assert find_fault(["a", "b"], ["a", "b"]) == ""
    assert find_fault(["a", "refused 400"], ["a", "b"]) == ""
    assert find_fault(["a"], ["a", "b"]) == ""
    assert find_fault(["unread"], []) == ""
    assert find_fault(["a"], ["b/a"]) == ""
    assert find_fault(["a", "b"], ["a", "refused 400"]) == "request 1 is accepted, and the oracle refuses it"
    assert find_fault(["a"], []) == "request 0 is accepted, and the oracle refuses it"
    assert find_fault(["a"], ["b"]) == "request 0 is read differently"
    assert find_fault(["refused 500"], []) == "answer 0 is refused 500"
    assert generate(SEED).endswith(LAST)
