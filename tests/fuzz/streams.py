"""Hostile bytes: `generate(seed)` makes the same stream for the same seed.

A stream is one request or a few, mutated in some places, and a plain request at the end. A parser that reads a mutated
request differently finds the plain one in another place, or not at all.
"""

import random
from collections.abc import Callable

LAST = b"GET /last HTTP/1.1\r\nHost: last\r\nConnection: close\r\n\r\n"

BASES = (
    b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /v1/keys/verify?a=b&c HTTP/1.1\r\nHost: a.example:8000\r\nAccept: */*\r\nUser-Agent: x/1\r\n\r\n",
    b"HEAD /x HTTP/1.1\r\nHost: a\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET http://b.example/x?y=z HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /old HTTP/1.0\r\nHost: a\r\nConnection: keep-alive\r\n\r\n",
    b'POST /p HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"a":"b"}',
    b"POST /p HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer abc\r\nContent-Length: 0\r\n\r\n",
    b"PUT /q HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\na\r\n\r\n",
    b"POST /c HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nA\r\n0123456789\r\n0\r\n\r\n",
    b"POST /c HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n4;a=b\r\nabcd\r\n0\r\nX-Trailer: 1\r\n\r\n",
    b"POST /e HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\nabc",
    b"POST /u HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, X\r\nUpgrade: h2c\r\nContent-Length: 3\r\n\r\nabc",
    b"GET /l HTTP/1.1\r\nHost: a\r\nX-Long: " + b"a" * 500 + b"\r\nX_Under: 1\r\nX-Under: 2\r\n\r\n",
)

LINES = (
    b"Content-Length: 3",
    b"Content-Length: 0",
    b"Content-Length: 60",
    b"Content-Length: +3",
    b"Content-Length: 3, 3",
    b"Content-Length: 18446744073709551617",
    b"Content-Length:",
    b"Content-Length : 3",
    b"content-length: 03",
    b"Content_Length: 3",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: CHUNKED",
    b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: chunked, gzip",
    b"Transfer-Encoding: identity",
    b"Transfer-Encoding: chunked ",
    b"Transfer-Encoding:\tchunked",
    b"Transfer-Encoding:\x0bchunked",
    b"Transfer-Encoding:",
    b"Transfer_Encoding: chunked",
    b"Transfer-Encoding: \r\n chunked",
    b"Host: b",
    b"Host:",
    b"Host: a b",
    b"Host: a/b@c",
    b"Host: [::1]:80",
    b"Connection: close",
    b"Connection: keep-alive",
    b"Connection: upgrade",
    b"Connection: Content-Length, close",
    b"Upgrade: websocket",
    b"Expect: 100-continue",
    b"Expect: 200-ok",
    b"Trailer: X-T",
    b"TE: trailers",
    b"Keep-Alive: timeout=5",
    b"Proxy-Connection: keep-alive",
    b"X: a\x00b",
    b"X: \x7f",
    b"X: \xff\xfe",
    b"X: a\tb \t",
    b": empty",
    b"no colon",
    b" X: folded",
    b"\tX: folded",
    b"X\x80: a",
    b'X"(): a',
    b"",
)

TOKENS = (
    *(b"\r\n", b"\n", b"\r", b"\r\n\r\n", b"\n\n", b"\r\r\n", b" ", b"\t", b"\x00", b"\x0b", b"\x0c", b"\x7f", b"\x80"),
    *(
        b"\xff",
        b":",
        b";",
        b",",
        b"#",
        b"?",
        b"/",
        b"//",
        b"\\",
        b"|",
        b"{}",
        b"<>",
        b"`",
        b"^",
        b'"',
        b"%",
        b"%00",
        b"*",
    ),
    *(b"\xc3\xa9", b"0", b"1", b"-1", b"+", b"0x", b"ffffffffffffffff", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/0.9"),
    *(
        b"HTTP/2.0",
        b"HTTP/1.2",
        b"HTTP/1.10",
        b"http/1.1",
        b"RTSP/1.0",
        b"ICE/1.0",
        b"GET",
        b"POST",
        b"get",
        b"CONNECT",
    ),
    *(b"PRI", b"BREW", b"M-SEARCH", b"GET / HTTP/1.1\r\nHost: s\r\n\r\n", b"0\r\n\r\n", b"http://", b"https://u@h/"),
    *(b"@", b"[", b"]", b"a" * 300, b"chunked", b"close", b"Content-Length", b"Transfer-Encoding", b"_", b"-", b"''"),
)

Mutation = Callable[[random.Random, bytes], bytes]


def generate(seed: int) -> bytes:
    draw = random.Random(seed)  # noqa: S311  repeatable on purpose
    parts = []
    for _ in range(draw.choices((1, 2, 3), (80, 15, 5))[0]):
        part = draw.choice(BASES)
        for _ in range(draw.choices((0, 1, 2, 3, 6), (10, 50, 25, 10, 5))[0]):
            part = draw.choice(MUTATIONS)(draw, part)
        parts.append(part)
    return b"".join(parts) + LAST


def _place(draw: random.Random, part: bytes) -> int:
    """Return a random place, more often one at which a line or a word begins or ends."""
    if draw.random() < 0.5:
        places = [at for at in range(len(part)) if part[at : at + 1] in b" :\r\n/;,"]
        if places:
            return draw.choice(places) + draw.randrange(2)
    return draw.randrange(len(part) + 1)


def _insert(draw: random.Random, part: bytes) -> bytes:
    at = _place(draw, part)
    return part[:at] + draw.choice(TOKENS) + part[at:]


def _insert_byte(draw: random.Random, part: bytes) -> bytes:
    at = _place(draw, part)
    return part[:at] + bytes([draw.randrange(256)]) + part[at:]


def _replace(draw: random.Random, part: bytes) -> bytes:
    at = _place(draw, part)
    return part[:at] + draw.choice((*TOKENS, bytes([draw.randrange(256)]))) + part[at + 1 :]


def _delete(draw: random.Random, part: bytes) -> bytes:
    at = _place(draw, part)
    return part[:at] + part[at + draw.choice((1, 1, 1, 2, 5, 20)) :]


def _add_line(draw: random.Random, part: bytes) -> bytes:
    line = draw.choice(LINES)
    if draw.random() < 0.2:
        line = line.swapcase()
    places = [at for at in range(len(part)) if part.startswith(b"\r\n", at)]
    at = draw.choice(places) if places else len(part)
    return part[:at] + b"\r\n" + line + part[at:]


def _repeat_line(draw: random.Random, part: bytes) -> bytes:
    lines = part.split(b"\r\n")
    lines.insert(draw.randrange(len(lines) + 1), draw.choice(lines))
    return b"\r\n".join(lines)


def _drop_line(draw: random.Random, part: bytes) -> bytes:
    lines = part.split(b"\r\n")
    del lines[draw.randrange(len(lines))]
    return b"\r\n".join(lines)


def _change_line_end(draw: random.Random, part: bytes) -> bytes:
    places = [at for at in range(len(part)) if part.startswith(b"\r\n", at)]
    if not places:
        return part
    at = draw.choice(places)
    return part[:at] + draw.choice((b"\n", b"\r", b"\r\r\n", b"\n\r\n", b" \r\n", b"\t\r\n", b"\r\n ")) + part[at + 2 :]


def _change_case(draw: random.Random, part: bytes) -> bytes:
    at = _place(draw, part)
    end = at + draw.choice((1, 4, 20))
    return part[:at] + part[at:end].swapcase() + part[end:]


def _cut(draw: random.Random, part: bytes) -> bytes:
    return part[: _place(draw, part)]


def _splice(draw: random.Random, part: bytes) -> bytes:
    other = draw.choice(BASES)
    return part[: _place(draw, part)] + other[_place(draw, other) :]


MUTATIONS: tuple[Mutation, ...] = (
    _insert,
    _insert,
    _insert_byte,
    _replace,
    _replace,
    _delete,
    _add_line,
    _add_line,
    _add_line,
    _repeat_line,
    _drop_line,
    _change_line_end,
    _change_case,
    _cut,
    _splice,
)
