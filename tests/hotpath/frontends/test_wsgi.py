"""The WSGI frontend alone: what it reads of a body, and what it calls."""

from collections.abc import Iterable
from typing import Any

import pytest

from keyvault.hotpath.frontends.wsgi import mounted
from keyvault.hotpath.messages.pending_requests import VERIFY, Headers
from keyvault.hotpath.messages.responses import HttpResponse

KNOWN = b'{"allowed":true}'


class Endless:
    """An endless body."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def read(self, size: int = -1) -> bytes:
        assert size >= 0, "it would be read without end"
        self.asked.append(size)
        return b"x" * size


class Whole:
    def __init__(self, body: bytes) -> None:
        self._body = body

    def read(self, size: int = -1) -> bytes:
        read, self._body = (self._body, b"") if size < 0 else (self._body[:size], self._body[size:])
        return read


class FakeFrontend:
    """A frontend with one fixed answer or error."""

    def __init__(self, known: object = None) -> None:
        self.asked: list[tuple[bytes, bytes]] = []
        self.bodies: list[bytes | None] = []
        self._known = known

    def verify_known(self, authorization: bytes, body: bytes) -> object:
        self.asked.append((authorization, body))
        if isinstance(self._known, Exception):
            raise self._known
        return self._known

    def answer(self, method: str, target: str, headers: Headers, body: bytes | None) -> HttpResponse:
        self.bodies.append(body)
        return HttpResponse(401, b"{}", "req_whole")


def ask(frontend: FakeFrontend, stream: object, **named: Any) -> tuple[str, dict[str, str], bytes]:
    environ = {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": VERIFY,
        "HTTP_HOST": "127.0.0.1",
        "HTTP_AUTHORIZATION": "Bearer x",
        "CONTENT_TYPE": "application/json",
        "wsgi.input": stream,
        **named,
    }
    starts: list[tuple[str, dict[str, str]]] = []

    def start_response(status: str, headers: list[tuple[str, str]], exc_info: object = None) -> Any:
        starts.append((status, dict(headers)))

    def behind(environ: object, start_response: object) -> Iterable[bytes]:
        raise AssertionError("it is asked for here")

    content = b"".join(mounted(behind, frontend, lambda host: True)(environ, start_response))
    ((status, headers),) = starts
    return status, headers, content


TERMINATED = {"wsgi.input_terminated": True}


@pytest.mark.parametrize("server", [{}, TERMINATED])
def test_wsgi_body_is_read_whole_and_once(server: dict[str, Any]) -> None:
    frontend = FakeFrontend(HttpResponse(200, KNOWN, "req_known"))
    status, headers, content = ask(frontend, Whole(b"{}"), CONTENT_LENGTH="2", **server)
    assert (status, content, frontend.asked) == ("200 OK", KNOWN, [(b"Bearer x", b"{}")])
    assert headers == {
        "Content-Type": "application/json",
        "Cache-Control": "no-store",
        "X-Request-Id": "req_known",
        "Content-Length": str(len(KNOWN)),
    }
    frontend = FakeFrontend()
    assert ask(frontend, Whole(b"{}"), CONTENT_LENGTH="2", **server)[0] == "401 Unauthorized"
    assert (frontend.asked, frontend.bodies) == ([(b"Bearer x", b"{}")], [b"{}"])


@pytest.mark.parametrize(
    ("sent", "read", "body"),
    [
        ({}, [], b""),
        ({"CONTENT_LENGTH": ""}, [], b""),
        ({"HTTP_TRANSFER_ENCODING": "chunked"}, [], b""),
        ({"HTTP_TRANSFER_ENCODING": "chunked", "CONTENT_LENGTH": "3"}, [3], b"xxx"),
        ({"CONTENT_LENGTH": "65536"}, [65536], b"x" * 65536),
        ({"CONTENT_LENGTH": "65537"}, [], None),
        ({"CONTENT_LENGTH": "9" * 5000}, [], None),
        ({"CONTENT_LENGTH": "+3"}, [], None),
    ],
)
@pytest.mark.parametrize("server", [{}, TERMINATED])
def test_wsgi_body_of_unknown_length_is_read_within_a_bound(
    sent: dict[str, str], read: list[int], body: bytes | None, server: dict[str, Any]
) -> None:
    """Guarantee: however a body is framed, no more than its bound is read."""
    frontend, stream = FakeFrontend(), Endless()
    assert ask(frontend, stream, **sent, **server)[0] == "401 Unauthorized"
    assert (stream.asked, frontend.bodies) == (read, [body])


def test_wsgi_answer_longer_than_most_has_its_length() -> None:
    text = b"x" * 5000
    assert (
        ask(FakeFrontend(HttpResponse(200, text, "req")), Whole(b"{}"), CONTENT_LENGTH="2")[1]["Content-Length"]
        == "5000"
    )


@pytest.mark.parametrize(
    "named",
    [
        {"REQUEST_METHOD": "PUT"},
        {"QUERY_STRING": "a=b"},
        {"CONTENT_TYPE": "application/json; charset=utf-8"},
        {"HTTP_AUTHORIZATION": "Bearer \xe9"},
    ],
)
def test_wsgi_unusual_request_takes_the_slow_path(named: dict[str, str]) -> None:
    frontend = FakeFrontend(HttpResponse(200, KNOWN, "req_known"))
    assert ask(frontend, Whole(b"{}"), **{"CONTENT_LENGTH": "2", **TERMINATED, **named})[0] == "401 Unauthorized"
    assert not frontend.asked


def test_wsgi_error_of_the_fast_path_is_logged_and_the_slow_path_answers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    frontend = FakeFrontend(ZeroDivisionError())
    assert ask(frontend, Whole(b"{}"), CONTENT_LENGTH="2")[0] == "401 Unauthorized"
    assert [record.message for record in caplog.records if record.exc_info] == ["the fast path failed"]
    assert frontend.bodies == [b"{}"]
