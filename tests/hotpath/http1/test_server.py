"""The HTTP server: bounds, slow and greedy clients, order of answers, and graceful shutdown."""

import json
import resource
import socket
import struct
from contextlib import suppress
from http import HTTPStatus
from typing import cast

import pytest

from keyvault.hotpath.http1.framing import BODY_BYTES, HEAD_BYTES, HEADERS, TARGET_BYTES
from keyvault.hotpath.http1.protocol import Bounds
from keyvault.hotpath.http1.server import MIN_TICK_SECONDS, _fit_connections
from keyvault.hotpath.messages.callback_future import CallbackFuture
from keyvault.hotpath.messages.responses import HttpResponse
from tests.hotpath.served import REQUEST_ID, SECONDS, Asked, Client, Served, plain, serving

HELLO = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
LAST = b"GET /last HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
MISS = b"GET /miss HTTP/1.1\r\nHost: a\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: a\r\n"
SHORT = 0.05
"""Value of a bound in tests that wait for its enforcement, in seconds."""


def answer(body: bytes) -> HttpResponse:
    return HttpResponse(200, body, REQUEST_ID)


def refusal(client: Client) -> tuple[int, str]:
    """Return the status and code of a problem that ends its connection."""
    status, headers, body = client.read_answer()
    problem = json.loads(body)
    assert headers["content-type"] == "application/problem+json"
    assert headers["connection"] == "close"
    assert (problem["status"], problem["request_id"]) == (status, headers["x-request-id"])
    assert client.read_all() == b""
    return status, problem["code"]


# --- how much -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 100, 1 << 20])
@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /%b HTTP/1.1\r\nHost: a\r\n" % (b"a" * (TARGET_BYTES - 1)), 200),
        (b"GET /%b HTTP/1.1\r\nHost: a\r\n" % (b"a" * TARGET_BYTES), 414),
        (b"GET /%b HTTP/1.1\r\nHost: a\r\n" % (b"a" * 2 * HEAD_BYTES), 414),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: %b\r\n" % (b"a" * (HEAD_BYTES - 32)), 200),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: %b\r\n" % (b"a" * (HEAD_BYTES - 31)), 431),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: %b" % (b"a" * HEAD_BYTES), 431),
        (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: a\r\n" * (HEADERS - 1), 200),
        (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: a\r\n" * HEADERS, 431),
        (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: a\r\n" * 100 * HEADERS, 431),
        (b"\r\n" * HEAD_BYTES, 414),
    ],
)
def test_head_is_accepted_up_to_its_bound_and_refused_beyond(head: bytes, status: int, cut: int) -> None:
    """Guarantee: the memory for one request is bounded, however it arrives."""
    with serving() as served, served.connect() as client:
        sent = head + b"\r\n"
        try:
            client.send(*[sent[at : at + cut] for at in range(0, len(sent), cut)])
        except (BrokenPipeError, ConnectionResetError):
            assert status != 200
        if status == HTTPStatus.OK:
            assert client.read_answer()[0] == 200
        else:
            assert refusal(client) == (status, {414: "uri_too_long", 431: "request_invalid"}[status])
        assert len(served.asked) == (status == 200)


def test_body_is_accepted_up_to_its_bound() -> None:
    with serving() as served, served.connect() as client:
        client.send(POST + b"Content-Length: %d\r\n\r\n" % BODY_BYTES, b"a" * BODY_BYTES)
        assert client.read_answer()[0] == 200
        client.send(
            POST + b"Transfer-Encoding: chunked\r\n\r\n", b"%x\r\n%b\r\n0\r\n\r\n" % (BODY_BYTES, b"b" * BODY_BYTES)
        )
        assert client.read_answer()[0] == 200
        assert [asked.body for asked in served.asked] == [b"a" * BODY_BYTES, b"b" * BODY_BYTES]


@pytest.mark.parametrize(
    "sent",
    [
        b"Content-Length: %d\r\n\r\n" % (BODY_BYTES + 1),
        b"Content-Length: 999999999999\r\nExpect: 100-continue\r\n\r\n",
        b"Content-Length: %d\r\n\r\n%b" % (BODY_BYTES + 1, b"a" * (BODY_BYTES + 1)),
        b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (BODY_BYTES + 1, b"a" * (BODY_BYTES + 1)),
        b"Transfer-Encoding: chunked\r\n\r\n" + b"1;%b\r\na\r\n" % (b"x" * 1000) * 1000,
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: a\r\n" * 1000,
        b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: %b" % (b"a" * 16 * BODY_BYTES),
    ],
)
def test_body_above_its_bound_is_not_read_and_the_request_is_answered(sent: bytes) -> None:
    """Guarantee: the server judges and answers the client without storing an oversized body."""
    with (
        serving(lambda asked: answer(b"none" if asked.body is None else b"some")) as served,
        served.connect() as client,
    ):
        client.send(POST + sent)
        status, headers, body = client.read_answer()
        assert (status, headers["connection"], body) == (200, "close", b"none")
        assert client.read_all() == b""
        assert len(served.asked) == 1


def test_client_that_sends_on_after_its_refusal_still_reads_the_answer() -> None:
    """Guarantee: unread data does not reset the connection before the answer is read (RFC 9112, 9.6)."""
    with serving() as served, served.connect() as client:
        client.send(POST + b"Content-Length: %d\r\n\r\n" % (1 << 30))
        client.send(*[b"a" * BODY_BYTES] * 20)
        assert client.read_answer()[0] == 200
        assert client.read_all() == b""


@pytest.mark.parametrize("last", [b"GET / HTTP/1.0\r\n\r\n", LAST])
def test_client_that_sends_on_after_its_last_answer_is_not_reset(last: bytes) -> None:
    """Guarantee: the same holds for the last answer of a client that asked to close the connection."""
    with serving() as served, served.connect() as client:
        client.send(last)
        assert client.read_answer()[0] == 200
        assert client.read_all() == b""
        for _ in range(3):
            client.send(HELLO)
            assert client.wire.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
        assert len(served.asked) == 1


# --- how slow -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bounds", "sent"),
    [
        (Bounds(head_seconds=SHORT), b"GET"),
        (Bounds(head_seconds=SHORT), b"\r\n"),
        (Bounds(head_seconds=SHORT), HELLO[:-2]),
        (Bounds(body_seconds=SHORT), POST + b"Content-Length: 5\r\n\r\nabc"),
        (Bounds(body_seconds=SHORT), POST + b"Transfer-Encoding: chunked\r\n\r\n3\r\n"),
        (Bounds(idle_seconds=SHORT), b""),
        (Bounds(idle_seconds=SHORT), HELLO),
    ],
)
def test_connection_that_waits_too_long_is_closed(bounds: Bounds, sent: bytes) -> None:
    """Guarantee: an idle or slow client cannot hold a connection indefinitely."""
    with serving(bounds=bounds) as served, served.connect() as client:
        client.send(sent)
        if sent == HELLO:
            assert client.read_answer()[0] == 200
        with suppress(ConnectionResetError):  # it was in the middle of something
            assert client.read_all() == b""


def test_slow_head_is_not_given_more_time_by_another_byte() -> None:
    with serving(bounds=Bounds(head_seconds=SHORT)) as served, served.connect() as client:
        client.send(b"GET / HTTP/1.1\r\n")
        client.wire.settimeout(SHORT / 5)
        is_open = True
        while is_open:
            try:
                client.send(b"X: a\r\n")
                is_open = client.wire.recv(1) != b""
            except TimeoutError:
                continue
            except (BrokenPipeError, ConnectionResetError):
                is_open = False
        assert served.asked == []


def test_client_that_reads_nothing_is_not_read_from_and_is_cut_off() -> None:
    """Guarantee: a client that does not read its responses takes neither unbounded memory nor unbounded time."""
    large = answer(b"x" * 60_000)
    with serving(lambda _: large, bounds=Bounds(write_seconds=0.2)) as served, served.connect() as client:
        client.wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            client.send(*[HELLO * 100] * 1_000_000)
        # The kernel's buffer and one of the server hold far fewer answers than were requested.
        assert len(served.asked) < 1000


def test_client_that_reads_late_gets_all_its_answers_in_order() -> None:
    count = 300
    with serving(lambda asked: answer(asked.target * 10_000)) as served, served.connect() as client:
        client.send(b"".join(b"GET /%04d HTTP/1.1\r\nHost: a\r\n\r\n" % number for number in range(count)))
        served.wait_until_asked()
        for number in range(count):
            assert client.read_answer()[2] == b"/%04d" % number * 10_000


# --- order ----------------------------------------------------------------------------------------------------


def test_requests_behind_a_miss_wait_for_it_and_are_answered_in_order() -> None:
    """Guarantee: answers keep the order of their requests, however long one of them takes."""
    with serving(misses=(b"/miss",)) as served, served.connect() as client, served.connect() as other:
        client.send(HELLO + MISS + HELLO + MISS + LAST)
        assert client.read_answer()[2] == b"GET / "
        other.send(HELLO)
        assert other.read_answer()[2] == b"GET / "  # other clients do not wait
        assert [asked.target for asked in served.asked] == [b"/", b"/miss", b"/"]
        served.settle(0, answer(b"first"))
        assert client.read_answer()[2] == b"first"
        assert client.read_answer()[2] == b"GET / "
        for _ in range(5):
            served.wait_until_asked()
        served.settle(1, answer(b"second"))
        assert client.read_answer()[2] == b"second"
        assert client.read_answer()[2] == b"GET /last "
        assert client.read_all() == b""


def test_client_that_pipelines_behind_a_miss_is_not_read_from() -> None:
    """Guarantee: the buffer of requests behind a miss is bounded."""
    with serving(misses=(b"/miss",)) as served, served.connect() as client:
        client.send(MISS)
        served.wait_until_asked()
        sent = 0
        client.wire.settimeout(0.5)
        with suppress(TimeoutError):
            for _ in range(1_000_000):
                sent += client.wire.send(HELLO * 1000)
        assert sent < 1_000_000 * len(HELLO)
        assert len(served.asked) == 1
        client.wire.settimeout(SECONDS)
        served.settle(0, answer(b"miss"))
        assert client.read_answer()[2] == b"miss"
        for _ in range(sent // len(HELLO)):
            assert client.read_answer()[2] == b"GET / "


def test_client_that_disconnects_before_its_miss_is_settled_affects_no_other() -> None:
    with serving(misses=(b"/miss",)) as served:
        with served.connect() as client:
            client.send(MISS)
            served.wait_until_asked()
            client.wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        served.settle(0, answer(b"late"))
        assert served.connect().ask(LAST).endswith(b"GET /last ")


def test_client_that_half_closes_gets_all_its_answers() -> None:
    """Guarantee: a client that half-closes, as shell tools do, still gets every answer."""
    with serving(misses=(b"/miss",)) as served, served.connect() as client:
        client.send(HELLO + MISS + HELLO)
        client.wire.shutdown(socket.SHUT_WR)
        assert client.read_answer()[2] == b"GET / "
        served.wait_until_asked()
        served.wait_until_asked()
        served.settle(0, answer(b"miss"))
        assert client.read_answer()[2] == b"miss"
        assert client.read_answer()[2] == b"GET / "
        assert client.read_all() == b""


# --- what HTTP asks of an answer --------------------------------------------------------------------------------


def test_continue_is_sent_when_the_server_waits_for_the_body() -> None:
    with serving() as served, served.connect() as client:
        client.send(POST + b"Content-Length: 3\r\nExpect: 100-Continue\r\n\r\n")
        assert client.read_answer()[0] == 100
        client.send(b"abc")
        assert client.read_answer()[2] == b"POST / abc"
        client.send(POST + b"Content-Length: 3\r\nExpect: 100-continue\r\n\r\nabc")
        assert client.read_answer()[2] == b"POST / abc"  # it was there already
        client.send(b"POST / HTTP/1.0\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n")
        client.send(b"abc")
        assert client.read_answer()[2] == b"POST / abc"  # RFC 9110, 10.1.1: not to an older client
        assert len(served.asked) == 3


def test_continue_follows_the_answers_that_are_due_before() -> None:
    with serving(misses=(b"/miss",)) as served, served.connect() as client:
        client.send(MISS + POST + b"Content-Length: 3\r\nExpect: 100-continue\r\n\r\n")
        served.wait_until_asked()
        served.settle(0, answer(b"miss"))
        assert client.read_answer()[2] == b"miss"
        assert client.read_answer()[0] == 100
        client.send(b"abc")
        assert client.read_answer()[2] == b"POST / abc"


def test_head_is_answered_without_a_body() -> None:
    with serving() as served, served.connect() as client:
        client.send(b"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n" * 2)
        for _ in range(2):
            status, headers, _ = client.read_answer(has_body=False)
            assert (status, headers["content-length"]) == (200, "7")
        client.send(b"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert client.read_answer(has_body=False)[0] == 200
        assert client.wire.getpeername()
        assert len(served.asked) == 3


@pytest.mark.parametrize(
    ("line", "connection", "stays"),
    [
        (b"GET / HTTP/1.1", b"", True),
        (b"GET / HTTP/1.1", b"keep-alive", True),
        (b"GET / HTTP/1.1", b"close", False),
        (b"GET / HTTP/1.1", b"x, Close", False),
        (b"GET / HTTP/1.0", b"", False),
        (b"GET / HTTP/1.0", b"close", False),
        (b"GET / HTTP/1.0", b"Keep-Alive", True),
    ],
)
def test_connection_stays_when_both_sides_want_it(line: bytes, connection: bytes, stays: bool) -> None:
    with serving() as served, served.connect() as client:
        asked = line + b"\r\nHost: a\r\n" + (b"Connection: %b\r\n" % connection if connection else b"") + b"\r\n"
        client.send(asked)
        status, headers, _ = client.read_answer()
        assert status == 200
        assert headers.get("connection") == ("close" if not stays else "keep-alive" if line.endswith(b"1.0") else None)
        if stays:
            client.send(asked)
            assert client.read_answer()[0] == 200
        else:
            assert client.read_all() == b""


def test_every_answer_is_dated_and_has_its_length() -> None:
    headers = (("Content-Type", "text/plain"), ("Retry-After", "5"))
    with serving(lambda _: HttpResponse(503, b"x" * 5000, REQUEST_ID, headers)) as served, served.connect() as client:
        client.send(HELLO)
        status, got, body = client.read_answer()
        assert (status, len(body)) == (503, 5000)
        assert got.pop("date").endswith(" GMT")
        assert got == {
            "content-type": "text/plain",
            "retry-after": "5",
            "x-request-id": REQUEST_ID,
            "content-length": "5000",
        }


# --- faults -----------------------------------------------------------------------------------------------------


def test_handler_that_raises_is_a_500_and_the_connection_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """Guarantee: an exception reaches only the log, with the request id, and does not end the process."""

    def respond(asked: Asked) -> HttpResponse:
        if asked.target == b"/":
            raise RuntimeError("out of order")
        return plain(asked)

    with serving(respond, misses=(b"/miss",)) as served, served.connect() as client:
        client.send(HELLO, MISS)
        served.wait_until_asked()
        served.wait_until_asked()
        served.settle(0, RuntimeError("later"))
        for said in ("out of order", "later"):
            status, headers, body = client.read_answer()
            problem = json.loads(body)
            assert (status, problem["code"], said in body.decode()) == (500, "internal_error", False)
            logged = next(record for record in caplog.records if record.exc_info and said in str(record.exc_info[1]))
            assert vars(logged)["request_id"] == problem["request_id"] == headers["x-request-id"]
        client.send(LAST)
        assert client.read_answer()[0] == 200


@pytest.mark.parametrize("value", ["\u20ac", "a\r\nB: c", "a\nB: c", "a\r"])
def test_answer_that_cannot_be_sent_is_a_500(value: str) -> None:
    """Guarantee: after an invalid return value of a handler, the client gets one answer, and the next request works."""
    unsendable = HttpResponse(200, b"", REQUEST_ID, (("X", value),))
    with serving(lambda asked: unsendable if asked.target == b"/" else cast(HttpResponse, None)) as served:
        for sent in (HELLO, LAST.replace(b"Connection", b"X"), LAST, HELLO[:-2] + b"Connection: close\r\n\r\n"):
            with served.connect() as client:
                client.send(sent)
                assert client.read_answer()[0] == 500


def test_late_answer_becomes_a_503_and_is_abandoned(caplog: pytest.LogCaptureFixture) -> None:
    """Guarantee: after a 503 nothing is spent or counted as a use for that client."""
    with serving(misses=(b"/miss",), bounds=Bounds(answer_seconds=SHORT)) as served, served.connect() as client:
        client.send(MISS + HELLO)
        assert refusal(client) == (503, "dependency_unavailable")
        assert served.connect().ask(LAST).endswith(b"GET /last ")
        assert served.misses[0].cancelled()
    assert [record for record in caplog.records if record.exc_info] == []


# --- how many, and the end ---------------------------------------------------------------------------------------


def test_connection_beyond_the_cap_gets_a_503_and_others_are_served() -> None:
    """Guarantee: the process stays within its descriptors; a refused client gets Retry-After."""
    with serving(bounds=Bounds(connections=2)) as served:
        first, second, third = served.connect(), served.connect(), served.connect()
        with first, second, third:
            for client in (first, second):
                client.send(HELLO)
                assert client.read_answer()[0] == 200
            status, headers, body = third.read_answer()
            assert (status, json.loads(body)["code"]) == (503, "dependency_unavailable")
            assert (headers["retry-after"], headers["connection"]) == ("1", "close")
            assert third.read_all() == b""
            first.send(HELLO)
            assert first.read_answer()[0] == 200


def test_stop_waits_for_the_answers_of_disconnected_clients() -> None:
    """Guarantee: every request is spent and noted before the process deregisters, even after its client left."""
    later, order = CallbackFuture(), list[str]()
    later.add_done_callback(lambda _: order.append("answered"))
    with serving(lambda _: later) as served:  # type: ignore[arg-type, return-value]  # what an asyncio frontend returns
        with served.connect() as client:
            client.send(HELLO)
            served.wait_until_asked()
            client.wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # to be reset
        stopped = served.stop(SECONDS, 0)
        stopped.add_done_callback(lambda _: order.append("stopped"))
        served.loop.call_soon_threadsafe(served.loop.call_later, 10 * MIN_TICK_SECONDS, later.set_result, answer(b""))
        stopped.result(SECONDS)
    assert order == ["answered", "stopped"]


def test_stop_answers_pending_requests_and_accepts_no_connection() -> None:
    """Guarantee: a restart for a deployment loses no answer."""
    with serving(misses=(b"/miss",)) as served, served.connect() as client, served.connect() as idle:
        client.send(MISS)
        idle.send(HELLO)
        assert idle.read_answer()[0] == 200
        served.wait_until_asked()
        served.wait_until_asked()
        stopped = served.stop(SECONDS, SECONDS)
        wait_until_refused(served)
        idle.send(HELLO)
        assert idle.read_answer()[1]["connection"] == "close"
        assert idle.read_all() == b""
        served.settle(0, answer(b"miss"))
        status, headers, body = client.read_answer()
        assert (status, headers["connection"], body) == (200, "close", b"miss")
        assert client.read_all() == b""
        for each in (client, idle):
            each.wire.shutdown(socket.SHUT_WR)
        stopped.result(SECONDS)


def test_stop_ends_in_time_whatever_clients_and_misses_do() -> None:
    with serving(misses=(b"/miss",)) as served, served.connect() as client, served.connect() as idle:
        client.send(MISS)
        idle.send(HELLO)
        assert idle.read_answer()[0] == 200
        served.wait_until_asked()
        served.wait_until_asked()
        served.stop(SHORT, 0).result(SECONDS)
        assert idle.read_all() == b""
        assert served.server.connections == 0


def wait_until_refused(served: Served) -> None:
    """Wait until the port refuses connections."""
    while True:
        try:
            socket.create_connection(("127.0.0.1", served.port), timeout=SECONDS).close()
        except ConnectionRefusedError:
            return
        except ConnectionResetError:
            continue


@pytest.mark.parametrize(
    ("limits", "connections", "descriptors"),
    [
        ((1024, 1 << 20), 1000, 2256),  # raised as far as is needed
        ((1024, 2000), 872, 2000),  # raised as far as may be
        ((1 << 20, 1 << 20), 1000, 1 << 20),
        ((1024, resource.RLIM_INFINITY), 1000, 2256),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 1000, resource.RLIM_INFINITY),
        ((100, 100), 1, 100),
    ],
)
def test_connections_fit_the_descriptors_of_the_host(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], connections: int, descriptors: int
) -> None:
    """Guarantee: a flood of connections leaves descriptors for the database and the log."""
    kept = [limits]
    monkeypatch.setattr(resource, "getrlimit", lambda _: kept[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: kept.append(both))
    assert _fit_connections(1000) == connections
    assert kept[-1] == (descriptors, limits[1])
