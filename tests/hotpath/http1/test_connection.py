"""A connection that awaits an answer while other events arrive; its transport records the calls."""

import asyncio
from collections.abc import Callable, Iterator
from unittest import mock

import pytest

from keyvault.hotpath.http1.framing import Header
from keyvault.hotpath.http1.protocol import Bounds, Connection, Shared
from keyvault.hotpath.messages.callback_future import CallbackFuture
from keyvault.hotpath.messages.responses import HttpResponse

GET = b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n"
BOUNDS = Bounds()


class RecordedConnection:
    """One connection with its requests and the bytes that were written to it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.laters: list[CallbackFuture] = []
        self.written: list[bytes] = []
        self.transport = mock.Mock()
        self.transport.write = self.written.append
        self.transport.get_write_buffer_size.return_value = 0
        self.loop = loop
        self.shared = Shared(self._handle, BOUNDS, loop)
        self.connection = Connection(self.shared)
        self.connection.connection_made(self.transport)

    def _handle(self, method: bytes, target: bytes, headers: list[Header], body: bytes | None) -> CallbackFuture:
        self.laters.append(CallbackFuture())
        return self.laters[-1]

    def settle(self, number: int) -> None:
        self.laters[number].set_result(HttpResponse(200, b"answer %d" % number, "req"))
        self.turn()

    def turn(self) -> None:
        """Run the callbacks of the loop's next iteration."""
        self.loop.run_until_complete(asyncio.sleep(0))

    @property
    def answers(self) -> list[bytes]:
        return [each.rpartition(b"\r\n\r\n")[2] for each in b"".join(self.written).split(b"HTTP/1.1 ")[1:]]


@pytest.fixture
def wire() -> Iterator[RecordedConnection]:
    loop = asyncio.new_event_loop()
    yield RecordedConnection(loop)
    loop.close()


def test_awaited_answer_is_sent_immediately_and_the_next_request_is_read(wire: RecordedConnection) -> None:
    for number in range(3):
        wire.connection.data_received(GET % number)
        wire.laters[number].set_result(HttpResponse(200, b"answer %d" % number, "req"))
        assert wire.answers == [b"answer %d" % each for each in range(number + 1)]
    assert b"connection:" not in b"".join(wire.written)


def test_request_that_arrives_meanwhile_is_answered_after_the_awaited_one(wire: RecordedConnection) -> None:
    wire.connection.data_received(GET % 0)
    wire.connection.data_received(GET % 1 + (GET % 2)[:7])
    assert len(wire.laters) == 1
    wire.settle(0)
    wire.settle(1)
    wire.connection.data_received((GET % 2)[7:])
    wire.settle(2)
    assert wire.answers == [b"answer 0", b"answer 1", b"answer 2"]


def test_client_that_sends_no_more_gets_the_awaited_answer_and_is_closed(wire: RecordedConnection) -> None:
    wire.connection.data_received(GET % 0)
    assert wire.connection.eof_received()
    wire.settle(0)
    assert wire.answers == [b"answer 0"]
    wire.transport.close.assert_called_once_with()


def test_answer_of_a_lost_connection_is_tracked_until_it_is_complete(wire: RecordedConnection) -> None:
    """`Server.stop` waits for such answers."""
    wire.connection.data_received(GET % 0)
    assert (wire.connection.awaited, wire.shared.orphans) == (wire.laters[0], set())
    wire.connection.connection_lost(None)
    assert wire.shared.orphans == {wire.laters[0]}
    wire.settle(0)
    assert (wire.connection.awaited, wire.shared.orphans, wire.answers) == (None, set(), [])


def test_awaited_answer_of_a_server_that_ends_is_the_last(wire: RecordedConnection) -> None:
    wire.connection.data_received(GET % 0)
    wire.connection.close_after_response()
    wire.settle(0)
    assert wire.answers == [b"answer 0"]
    assert b"connection: close\r\n" in wire.written[0]
    wire.transport.write_eof.assert_called_once_with()
    wire.connection.data_received(GET % 1)
    assert len(wire.laters) == 1


def test_client_that_does_not_read_gets_its_awaited_answer_and_nothing_more_until_it_does(
    wire: RecordedConnection,
) -> None:
    wire.connection.data_received(GET % 0)
    wire.connection.pause_writing()
    wire.settle(0)
    wire.connection.data_received(GET % 1)
    assert (wire.answers, len(wire.laters)) == ([b"answer 0"], 1)
    wire.connection.resume_writing()
    wire.settle(1)
    assert wire.answers == [b"answer 0", b"answer 1"]


def test_awaited_answer_to_head_has_no_body(wire: RecordedConnection) -> None:
    wire.connection.data_received(b"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n")
    wire.settle(0)
    assert wire.answers == [b""]
    assert b"content-length: 8\r\n" in wire.written[0]


def test_awaited_answer_that_cannot_be_sent_is_a_500(
    wire: RecordedConnection, caplog: pytest.LogCaptureFixture
) -> None:
    wire.connection.data_received(GET % 0)
    wire.laters[0].set_result(HttpResponse(200, b"", "req", (("X", "a\r\nb"),)))
    assert wire.written[0].startswith(b"HTTP/1.1 500 ")
    wire.connection.data_received(GET % 1)
    wire.settle(1)
    assert wire.answers[1:] == [b"answer 1"]


@pytest.mark.parametrize("meanwhile", ["lost", "too long"])
def test_nothing_is_written_for_an_abandoned_request(wire: RecordedConnection, meanwhile: str) -> None:
    wire.connection.data_received(GET % 0)
    if meanwhile == "lost":
        wire.connection.connection_lost(None)
    else:
        wire.connection.check(wire.connection._since + BOUNDS.answer_seconds + 1)
        assert wire.laters[0].cancelled()
    before = len(wire.written)
    wire.settle(0)
    assert len(wire.written) == before == (meanwhile == "too long")


@pytest.mark.parametrize("delivery", ["whole", "line by line"])
def test_late_answer_to_nginx_is_a_403_with_the_actual_status(wire: RecordedConnection, delivery: str) -> None:
    """Guarantee: nginx auth_request, which fails on a 503, learns the status and when to try again."""
    sent = GET.replace(b"/%d", b"/v1/authorize/nginx")
    for part in [sent] if delivery == "whole" else [sent[:9], sent[9:]]:
        wire.connection.data_received(part)
    wire.connection.check(wire.connection._since + BOUNDS.answer_seconds + 1)
    assert nginx_refusal(wire) == (b"403", b"503", b"dependency_unavailable", b"1")


def test_invalid_headers_to_nginx_are_a_403_and_an_invalid_request_line_after_them_a_400(
    wire: RecordedConnection,
) -> None:
    """A request line that was not read is of no known path, whatever the request before it."""
    wire.connection.data_received(b"GET /v1/authorize/nginx?a HTTP/1.1\r\n\r\n")
    assert nginx_refusal(wire) == (b"403", b"400", b"request_invalid", None)
    other = RecordedConnection(wire.loop)
    other.connection.data_received(GET.replace(b"/%d", b"/v1/authorize/nginx"))
    other.settle(0)
    other.written.clear()
    other.connection.data_received(b"invalid\r\n\r\n")
    assert nginx_refusal(other) == (b"400", None, None, None)


def nginx_refusal(wire: RecordedConnection) -> tuple[bytes | None, ...]:
    """Return the status and the headers X-Auth-Status, X-Auth-Code and Retry-After."""
    status, *lines = b"".join(wire.written).partition(b"\r\n\r\n")[0].split(b"\r\n")
    headers = dict(line.split(b": ", 1) for line in lines)
    return (status.split()[1], *map(headers.get, (b"x-auth-status", b"x-auth-code", b"retry-after")))


# --- the end ------------------------------------------------------------------------------------------------


def _last(wire: RecordedConnection) -> float:
    """Give the last answer of the connection and return its time."""
    wire.connection.data_received(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    wire.settle(0)
    wire.transport.write_eof.assert_called_once_with()
    return wire.connection._since


def test_last_answer_that_is_partly_sent_has_the_usual_timeout(wire: RecordedConnection) -> None:
    wire.transport.get_write_buffer_size.return_value = 1
    began = _last(wire)
    wire.connection.check(began + BOUNDS.write_seconds - 0.1)
    wire.transport.abort.assert_not_called()
    wire.connection.check(began + BOUNDS.write_seconds + 0.1)
    wire.transport.abort.assert_called_once_with()


def test_last_answer_that_is_sent_late_still_lingers(wire: RecordedConnection) -> None:
    wire.transport.get_write_buffer_size.return_value = 1
    sent = _last(wire) + BOUNDS.write_seconds - 0.1
    wire.transport.get_write_buffer_size.return_value = 0
    wire.connection.check(sent)
    wire.connection.check(sent + BOUNDS.linger_seconds - 0.1)
    wire.transport.abort.assert_not_called()
    wire.connection.check(sent + BOUNDS.linger_seconds + 0.1)
    wire.transport.abort.assert_called_once_with()


@pytest.mark.parametrize("is_over", [lambda wire: None, lambda wire: wire.connection.pause_writing()])
def test_client_that_ends_its_side_after_its_last_answer_is_closed(
    wire: RecordedConnection, is_over: Callable[[RecordedConnection], None]
) -> None:
    _last(wire)
    is_over(wire)
    assert not wire.connection.eof_received(), "the transport closes by itself, once everything is written"
