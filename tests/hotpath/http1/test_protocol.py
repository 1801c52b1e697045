"""Parsing requests from a real socket: in one piece, byte by byte, and pipelined."""

import asyncio
import json
from collections.abc import Iterator
from unittest import mock

import pytest

from keyvault.hotpath.http1.framing import Header, RequestLine
from keyvault.hotpath.http1.protocol import Bounds, Connection, Shared
from keyvault.hotpath.messages.responses import HttpResponse
from tests.domain.minting import mint
from tests.hotpath.served import Asked, Served, serving

HELLO = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
LAST = b"GET /last HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving() as served:
        yield served


def request(line: bytes, *headers: bytes, body: bytes = b"") -> bytes:
    return b"\r\n".join([line, *headers, b"", body])


def understood(server: Served, *parts: bytes) -> list[Asked]:
    """Return the requests that reach the handler from a connection that sends these parts."""
    server.asked.clear()
    server.connect().ask(*parts)
    return list(server.asked)


POST = b"POST /p HTTP/1.1"
TAKEN = {
    "plain": (HELLO, b"GET", b"/", b""),
    "query": (request(b"GET /a?b=c&d HTTP/1.1", b"Host: a"), b"GET", b"/a?b=c&d", b""),
    "lower-case header names": (request(b"GET / HTTP/1.1", b"host: a"), b"GET", b"/", b""),
    "host with port": (request(b"GET / HTTP/1.1", b"Host: a.example:8000"), b"GET", b"/", b""),
    "IPv6 host": (request(b"GET / HTTP/1.1", b"Host: [::1]:8000"), b"GET", b"/", b""),
    "body": (request(POST, b"Host: a", b"Content-Length: 3", body=b"abc"), b"POST", b"/p", b"abc"),
    "GET with body": (request(b"GET / HTTP/1.1", b"Host: a", b"Content-Length: 3", body=b"abc"), b"GET", b"/", b"abc"),
    "empty body": (request(POST, b"Host: a", b"Content-Length: 0"), b"POST", b"/p", b""),
    "POST without length": (request(POST, b"Host: a"), b"POST", b"/p", b""),
    "chunks": (
        request(POST, b"Host: a", b"Transfer-Encoding: chunked", body=b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"),
        b"POST",
        b"/p",
        b"abcde",
    ),
    "chunk extension": (
        request(POST, b"Host: a", b"Transfer-Encoding: Chunked", body=b'3;a=b;c="d"\r\na\nb\r\n0\r\n\r\n'),
        b"POST",
        b"/p",
        b"a\nb",
    ),
    "absolute form": (request(b"GET http://b.example/x?y HTTP/1.1", b"Host: a"), b"GET", b"/x?y", b""),
    "absolute form without path": (request(b"GET https://b.example HTTP/1.1", b"Host: a"), b"GET", b"/", b""),
    "asterisk form": (request(b"OPTIONS * HTTP/1.1", b"Host: a"), b"OPTIONS", b"*", b""),
    "empty lines before": (b"\r\n\r\n" + HELLO, b"GET", b"/", b""),
    "HTTP/1.0": (request(b"GET / HTTP/1.0"), b"GET", b"/", b""),
    "upgrade with a body": (
        request(
            POST, b"Host: a", b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"Content-Length: 3", body=b"abc"
        ),
        b"POST",
        b"/p",
        b"abc",
    ),
    "upgrade": (request(b"GET / HTTP/1.1", b"Host: a", b"Connection: upgrade", b"Upgrade: x"), b"GET", b"/", b""),
}

CHUNKED = (b"Host: a", b"Transfer-Encoding: chunked")
REFUSED = {
    "bare LF": HELLO.replace(b"\r\n", b"\n"),
    "bare LF in the head": b"GET / HTTP/1.1\r\nHost: a\nX: b\r\n\r\n",
    "bare LF at its end": b"GET / HTTP/1.1\r\nHost: a\r\n\n",
    "bare CR": b"GET / HTTP/1.1\r\nHost: a\rX: b\r\n\r\n",
    "folded header": request(b"GET / HTTP/1.1", b"Host: a", b"X: a", b" b"),
    "blank before the first header": request(b"GET / HTTP/1.1", b" Host: a"),
    "blank before the colon": request(b"GET / HTTP/1.1", b"Host: a", b"X : a"),
    "header without a name": request(b"GET / HTTP/1.1", b"Host: a", b": a"),
    "header without a colon": request(b"GET / HTTP/1.1", b"Host: a", b"X"),
    "NUL in a value": request(b"GET / HTTP/1.1", b"Host: a", b"X: \0"),
    "blank before the method": b" " + HELLO,
    "two blanks before the target": request(b"GET  / HTTP/1.1", b"Host: a"),
    "two blanks before the version": request(b"GET /  HTTP/1.1", b"Host: a"),
    "blank after the version": request(b"GET / HTTP/1.1 ", b"Host: a"),
    "blank in the target": request(b"GET /a b HTTP/1.1", b"Host: a"),
    "HTTP/0.9": b"GET /\r\n\r\n",
    "HTTP/0.9 with headers": request(b"GET /", b"Host: a"),
    "HTTP/0.9 by name": request(b"GET / HTTP/0.9", b"Host: a"),
    "HTTP/1.2": request(b"GET / HTTP/1.2", b"Host: a"),
    "HTTP/2.0": request(b"GET / HTTP/2.0", b"Host: a"),
    "HTTP/2's preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "RTSP": request(b"GET / RTSP/1.1", b"Host: a"),
    "ICE": request(b"SOURCE / ICE/1.0", b"Host: a"),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n",
    "lower-case method": request(b"get / HTTP/1.1", b"Host: a"),
    "unknown method": request(b"BREW / HTTP/1.1", b"Host: a"),
    "CONNECT": request(b"CONNECT a:80 HTTP/1.1", b"Host: a"),
    "asterisk for GET": request(b"GET * HTTP/1.1", b"Host: a"),
    "target without a slash": request(b"GET x HTTP/1.1", b"Host: a"),
    "fragment": request(b"GET /a#b HTTP/1.1", b"Host: a"),
    "not ASCII": request(b"GET /\xc3\xa9 HTTP/1.1", b"Host: a"),
    "angle brackets": request(b"GET /<> HTTP/1.1", b"Host: a"),
    "other scheme": request(b"GET ftp://a/ HTTP/1.1", b"Host: a"),
    "user in the target": request(b"GET http://u@a/ HTTP/1.1", b"Host: a"),
    "no authority": request(b"GET http:///a HTTP/1.1", b"Host: a"),
    "no Host": request(b"GET / HTTP/1.1"),
    "two Hosts": request(b"GET / HTTP/1.1", b"Host: a", b"hoST: a"),
    "empty Host": request(b"GET / HTTP/1.1", b"Host: "),
    "Host that is none": request(b"GET / HTTP/1.1", b"Host: a/b"),
    "Host with a user": request(b"GET / HTTP/1.1", b"Host: u@a"),
    "two lengths": request(POST, b"Host: a", b"Content-Length: 1", b"Content-Length: 1", body=b"a"),
    "two lengths in one": request(POST, b"Host: a", b"Content-Length: 1, 1", body=b"a"),
    "signed length": request(POST, b"Host: a", b"Content-Length: +1", body=b"a"),
    "empty length": request(POST, b"Host: a", b"Content-Length: "),
    "immense length": request(POST, b"Host: a", b"Content-Length: " + b"9" * 30),
    "length and chunks": request(POST, *CHUNKED, b"Content-Length: 5", body=b"0\r\n\r\n"),
    "chunks and length": request(POST, b"Host: a", b"Content-Length: 5", *CHUNKED[1:], body=b"0\r\n\r\n"),
    "gzip": request(POST, b"Host: a", b"Transfer-Encoding: gzip", body=b"0\r\n\r\n"),
    "gzip in chunks": request(POST, b"Host: a", b"Transfer-Encoding: gzip, chunked", body=b"0\r\n\r\n"),
    "chunked twice": request(POST, *CHUNKED, CHUNKED[1], body=b"0\r\n\r\n"),
    "chunked by another name": request(POST, b"Host: a", b"Transfer-Encoding: xchunked", body=b"0\r\n\r\n"),
    "chunks in HTTP/1.0": request(b"POST / HTTP/1.0", *CHUNKED, body=b"0\r\n\r\n"),
    "immense chunk": request(POST, *CHUNKED, body=b"f" * 20 + b"\r\n"),
    "chunk size with a blank": request(POST, *CHUNKED, body=b"3 \r\nabc\r\n0\r\n\r\n"),
    "chunk size of C": request(POST, *CHUNKED, body=b"0x3\r\nabc\r\n0\r\n\r\n"),
    "chunk size and LF": request(POST, *CHUNKED, body=b"3\nabc\r\n0\r\n\r\n"),
    "chunk longer than it says": request(POST, *CHUNKED, body=b"3\r\nabcd\r\n0\r\n\r\n"),
    "length in a trailer": request(POST, *CHUNKED, body=b"0\r\nContent-Length: 5\r\n\r\n"),
}


@pytest.mark.parametrize("case", TAKEN)
def test_request_is_parsed_alike_however_it_arrives(server: Served, case: str) -> None:
    """Guarantee: a request is parsed alike however the network splits it and whatever precedes it."""
    sent, method, target, body = TAKEN[case]
    once = understood(server, sent, LAST)
    assert [(asked.method, asked.target, asked.body) for asked in once[:1]] == [(method, target, body)]
    ends_here = case == "HTTP/1.0"
    assert [asked.target for asked in once[1:]] == ([] if ends_here else [b"/last"])
    every_byte = [bytes([byte]) for byte in sent]
    assert understood(server, *every_byte, LAST) == once
    assert understood(server, HELLO + sent + LAST)[1:] == once
    assert understood(server, sent + LAST) == once


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_request_is_refused_and_ends_the_connection(server: Served, case: str) -> None:
    """Guarantee: no ambiguous request reaches the handler, nor any request after it."""
    for before, count in ((b"", 0), (HELLO, 1)):
        server.asked.clear()
        with server.connect() as client:
            client.send(before + REFUSED[case] + LAST)
            if before:
                assert client.read_answer()[0] == 200
            status, headers, body = client.read_answer()
            assert client.read_all() == b""
        assert (status, headers["content-type"], headers["connection"]) == (400, "application/problem+json", "close")
        problem = json.loads(body)
        assert (problem["code"], problem["status"]) == ("request_invalid", 400)
        assert problem["request_id"] == headers["x-request-id"]
        assert {"date", "cache-control", "content-length"} <= headers.keys()
        assert len(server.asked) == count


def test_headers_reach_the_handler_unchanged_but_stripped(server: Served) -> None:
    sent = request(
        b"GET / HTTP/1.1", b"Host: a", b"X_y: 1", b"X-y:\t2 \t", b"x-Y: 3", b"Z:", b"W: \xff a", b"Connection: close"
    )
    expected = [
        (b"Host", b"a"),
        (b"X_y", b"1"),
        (b"X-y", b"2"),
        (b"x-Y", b"3"),
        (b"Z", b""),
        (b"W", b"\xff a"),
        (b"Connection", b"close"),
    ]
    assert [asked.headers for asked in understood(server, sent)] == [expected]
    assert [asked.headers for asked in understood(server, *[bytes([byte]) for byte in sent])] == [expected]


def test_client_that_pipelines_thousands_takes_turns_with_others() -> None:
    """Guarantee: one client's flood does not block the event loop until all of it is answered."""
    loop = asyncio.new_event_loop()
    asked: list[bytes] = []

    def handle(method: bytes, target: bytes, headers: list[Header], body: bytes | None) -> HttpResponse:
        asked.append(target)
        return HttpResponse(200, b"", "0" * 22)

    wire = mock.Mock()
    connection = Connection(Shared(handle, Bounds(), loop))
    connection.connection_made(wire)
    connection.data_received(HELLO * 5000)
    assert 0 < len(asked) < 500
    before = len(asked)
    loop.run_until_complete(asyncio.sleep(0))
    assert before < len(asked) < 1000
    connection.data_received(HELLO * 10)
    wire.pause_reading.assert_called_once_with()
    while len(asked) < 5010:
        loop.run_until_complete(asyncio.sleep(0))
    wire.resume_reading.assert_called_once_with()
    assert b"".join(call.args[0] for call in wire.write.call_args_list).count(b"HTTP/1.1 200 OK") == 5010
    connection.connection_lost(None)
    loop.close()


def test_trailers_are_no_headers(server: Served) -> None:
    """Guarantee: a trailer after a body is no credential, neither for its request nor for the next one."""
    sent = request(POST, *CHUNKED, body=b"1\r\na\r\n0\r\nX-Api-Key: b\r\nY: c\r\n\r\n")
    first, last = understood(server, sent + LAST)
    assert first.headers == [(b"Host", b"a"), (b"Transfer-Encoding", b"chunked")]
    assert last.headers == [(b"Host", b"a"), (b"Connection", b"close")]


def test_upgrade_is_ignored_and_the_next_request_follows(server: Served) -> None:
    """Guarantee: a body is never parsed as a request, whatever protocol upgrade its request offers."""
    smuggled = request(b"GET /smuggled HTTP/1.1", b"Host: a")
    sent = request(
        POST,
        b"Host: a",
        b"Connection: Upgrade",
        b"Upgrade: h2c",
        b"Content-Length: %d" % len(smuggled),
        body=smuggled,
    )
    first, last = understood(server, sent + LAST)
    assert (first.body, last.target) == (smuggled, b"/last")


def test_known_keeps_no_key_of_a_host_or_request_line() -> None:
    """Not even the shortest key, which a client sent in the wrong place, stays in memory."""
    known, key = RequestLine(), mint(key_prefix="a").encode()
    assert known.is_host(key)
    assert known.read_line(b"GET /" + key + b" HTTP/1.1\r") is not None
    assert (known.hosts, known.lines) == (set(), {})


def test_known_keeps_no_header_name_that_may_be_a_secret() -> None:
    """Guarantee: a key that a client sends as a header name is not kept after its request."""
    known = RequestLine()
    assert known.read_shape((b"Host", b"kv_sk_" + b"a" * 60)) is not None
    assert not known.shapes
    assert known.read_shape((b"Host", b"Accept")) is known.shapes[b"Host", b"Accept"]
