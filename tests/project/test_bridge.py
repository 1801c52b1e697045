"""The bridge from ASGI to WSGI by itself: what it hands on, what it refuses, and in which threads."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import pytest
from django.core.exceptions import RequestDataTooBig
from django.core.handlers.wsgi import WSGIRequest

from keyvault.project.bridge import Bridge, VerifyKnown

Message = dict[str, Any]
LIMIT = 65_536
JSON = (b"content-type", b"application/json")


class Application:
    """A WSGI application that keeps what it was asked."""

    def __init__(self, answer: Callable[[dict[str, Any]], Iterable[bytes]] = lambda environ: [b"o", b"k"]) -> None:
        self.answer = answer
        self.environs: list[dict[str, Any]] = []
        self.threads: set[int] = set()
        self.closed = 0

    def __call__(self, environ: dict[str, Any], start_response: Any) -> "Application":
        self.environs.append(environ)
        self.threads.add(threading.get_ident())
        self.parts = list(self.answer(environ))
        start_response("201 Created", [("X-One", "1"), ("Set-Cookie", "a=\xe9"), ("Set-Cookie", "b=2")])
        return self

    def __iter__(self) -> Any:
        return iter(self.parts)

    def close(self) -> None:
        self.closed += 1


def ask(
    application: Any,
    *headers: tuple[bytes, bytes],
    raw_path: bytes = b"/a",
    query: bytes = b"a=%2f\xc3\xa9",
    body: Iterable[Message] = (),
    verify_known: VerifyKnown | None = None,
) -> tuple[int, list[tuple[bytes, bytes]], bytes, int]:
    """Status, headers and body of the answer, and how many messages were taken."""
    waiting, taken, sent = list(body), [], list[Message]()

    async def receive() -> Message:
        taken.append(waiting.pop(0))
        return taken[-1]

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "unused",
        "raw_path": raw_path,
        "query_string": query,
        "headers": headers,
        "server": ("127.0.0.1", "8000"),
        "client": ("192.0.2.1", "1234"),
    }
    asyncio.run(Bridge(application, verify_known)(scope, receive, send))
    start, end = sent
    return start["status"], start["headers"], end["body"], len(taken)


def chunk(body: bytes, *, more: bool = False) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


def refused(answer: tuple[int, list[tuple[bytes, bytes]], bytes, int]) -> tuple[int, str]:
    status, sent, body, _ = answer
    headers, problem = dict(sent), json.loads(body)
    assert headers[b"content-type"] == b"application/problem+json"
    assert headers[b"cache-control"] == b"no-store"
    assert headers[b"x-request-id"].decode() == problem["request_id"]
    return status, problem["code"]


def test_bridge_hands_on_the_request_as_it_was_sent() -> None:
    application = Application()
    headers = ((b"host", b"kv.example"), (b"x-a", b"1"), (b"x_a", b"2"), (b"X-A", b"\xe9"), (b"content-type", b"a/b"))
    assert ask(application, *headers, raw_path=b"/a%2Fb%ff;x/..")[0] == 201
    (environ,) = application.environs
    assert environ["keyvault.raw_path"] == "/a%2Fb%ff;x/.."
    assert environ["PATH_INFO"] == "/a/b\xff;x/.."
    assert environ["QUERY_STRING"] == "a=%2f\xc3\xa9"
    assert (environ["HTTP_X_A"], environ["CONTENT_TYPE"], environ["CONTENT_LENGTH"]) == ("1,\xe9", "a/b", "0")
    assert (environ["REMOTE_ADDR"], environ["HTTP_HOST"], environ["REQUEST_METHOD"]) == (
        "192.0.2.1",
        "kv.example",
        "POST",
    )


def test_bridge_gives_back_status_headers_and_the_whole_body_and_closes_the_response() -> None:
    application = Application()
    status, headers, body, _ = ask(application)
    assert (status, body, application.closed) == (201, b"ok", 1)
    assert headers == [(b"x-one", b"1"), (b"set-cookie", b"a=\xe9"), (b"set-cookie", b"b=2")]


@pytest.mark.parametrize("headers", [((b"content-length", b"4"),), ((b"transfer-encoding", b"Chunked"),)])
def test_bridge_body_comes_whole_however_its_length_was_told(headers: tuple[tuple[bytes, bytes], ...]) -> None:
    application = Application(lambda environ: [environ["wsgi.input"].read()])
    body = [chunk(b"ab", more=True), chunk(b"", more=True), chunk(b"cd")]
    assert ask(application, *headers, body=body)[2] == b"abcd"
    assert application.environs[0]["CONTENT_LENGTH"] == "4"
    assert "HTTP_TRANSFER_ENCODING" not in application.environs[0]


def test_bridge_body_of_the_limit_is_taken() -> None:
    application = Application(lambda environ: [environ["wsgi.input"].read()])
    body = [chunk(b"a" * LIMIT)]
    assert ask(application, (b"content-length", b"%d" % LIMIT), body=body)[2] == b"a" * LIMIT


@pytest.mark.parametrize(
    ("headers", "taken"),
    [(((b"content-length", b"65537"),), 0), (((b"transfer-encoding", b"chunked"),), 3)],
    ids=["announced", "chunked"],
)
def test_bridge_body_above_the_limit_is_left_unread_and_told_to_whoever_wants_it(
    headers: tuple[tuple[bytes, bytes], ...], taken: int
) -> None:
    """Guarantee: no more than the limit and one chunk is kept, and nobody takes the beginning for the whole."""

    def answer(environ: dict[str, Any]) -> Iterable[bytes]:
        assert int(environ["CONTENT_LENGTH"]) > LIMIT
        for read in (environ["wsgi.input"].read, environ["wsgi.input"].readline):
            with pytest.raises(RequestDataTooBig):
                read(10)
        return [b"seen"]

    body = [chunk(b"a" * 30_000, more=True) for _ in range(10)]
    assert ask(Application(answer), *headers, body=body)[2:] == (b"seen", taken)


@pytest.mark.parametrize(
    "headers",
    [
        ((b"transfer-encoding", b"gzip, chunked"),),
        ((b"transfer-encoding", b"chunked"), (b"transfer-encoding", b"chunked")),
        ((b"transfer-encoding", b"chunked"), (b"content-length", b"2")),
        ((b"content-length", b"2"), (b"content-length", b"2")),
        ((b"content-length", b"+2"),),
        ((b"content-length", b""),),
        ((b"content-length", b"\xb2"),),
        ((b"content-length", b"9" * 5000),),
    ],
)
def test_bridge_body_that_two_servers_could_frame_differently_is_refused(
    headers: tuple[tuple[bytes, bytes], ...],
) -> None:
    application = Application()
    answer = ask(application, *headers, body=[chunk(b"ab")])
    assert refused(answer) == (400, "request_invalid")
    assert (application.environs, answer[3]) == ([], 0)


def test_bridge_body_that_breaks_off_reaches_nobody() -> None:
    application = Application()
    body = [chunk(b"ab", more=True), {"type": "http.disconnect"}]
    assert refused(ask(application, (b"content-length", b"4"), body=body)) == (400, "request_invalid")
    assert application.environs == []


def test_bridge_fault_of_the_application_is_logged_and_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def fail(environ: dict[str, Any]) -> Iterable[bytes]:
        raise RuntimeError("the secret is hunter2")

    answer = ask(Application(fail))
    assert refused(answer) == (500, "internal_error")
    assert b"hunter2" not in answer[2]
    (record,) = (record for record in caplog.records if record.levelname == "ERROR")
    assert vars(record)["request_id"] == json.loads(answer[2])["request_id"]


def test_bridge_threads_are_few_and_stay_until_the_end() -> None:
    """Guarantee: a database connection, which belongs to a thread, is not made anew for each request."""
    application = Application()
    told: list[str] = []

    async def live() -> None:
        bridge = Bridge(application, threads=2)
        events: asyncio.Queue[Message] = asyncio.Queue()

        async def tell(message: Any) -> None:
            told.append(message["type"])

        lifespan = asyncio.create_task(bridge({"type": "lifespan"}, events.get, tell))
        await events.put({"type": "lifespan.startup"})
        scope = {"type": "http", "http_version": "1.1", "method": "GET", "scheme": "http", "raw_path": b"/"}
        scope |= {"query_string": b"", "headers": ()}
        await asyncio.gather(*(bridge(scope, events.get, tell) for _ in range(50)))
        assert all(thread.is_alive() for thread in threading.enumerate() if thread.ident in application.threads)
        await events.put({"type": "lifespan.shutdown"})
        await lifespan

    asyncio.run(live())
    assert len(application.environs) == 50
    assert len(application.threads) <= 2
    assert not application.threads & {thread.ident for thread in threading.enumerate()}
    assert [each for each in told if each.startswith("lifespan")] == [
        "lifespan.startup.complete",
        "lifespan.shutdown.complete",
    ]


def test_bridge_speaks_http_only() -> None:
    async def nothing(*_: Any) -> Any:
        raise AssertionError("nothing is received or sent")

    with pytest.raises(ValueError, match="websocket"):
        asyncio.run(Bridge(Application())({"type": "websocket"}, nothing, nothing))


CONTENT_TYPES = (
    *(b"", b";", b";;", b";=", b";charset", b"a;b*", b"a;b*=", b"a;b*=''", b"a;b*0*=''", b"\xff;\x00", b"a" * 9000),
    *(b"a;b*=" + name + b"''%ff" for name in (b"utf-9", b"idna", b"punycode", b"rot13", b"undefined", b"a\x00b")),
    *(b"a;charset=" + name for name in (b"nonexistent", b"rot13", b"hex", b"idna", b"undefined", b"utf-16", b"\xff")),
    *(b"a;charset*=" + name + b"''rot13" for name in (b"utf-8", b"utf-9", b"", b"us-ascii")),
    *(b"multipart/form-data;" + rest for rest in (b"", b"boundary=", b"boundary=\xff", b"boundary*=utf-9''x")),
    b"a;b*=idna''xn--a",
)


@pytest.mark.parametrize("sent", CONTENT_TYPES)
def test_bridge_content_type_of_any_kind_is_one_that_django_reads(sent: bytes) -> None:
    """Guarantee: no header makes Django fail before, or while, it looks at the query."""

    def answer(environ: dict[str, Any]) -> Iterable[bytes]:
        return [WSGIRequest(environ).GET["limit"].encode()]

    application = Application(lambda environ: answer({**environ, "QUERY_STRING": "limit=10"}))
    assert ask(application, (b"content-type", sent))[::2] == (201, b"10")


@pytest.mark.parametrize("sent", ["application/json; charset=UTF-8", "multipart/form-data; boundary=x", "a/b"])
def test_bridge_content_type_that_can_be_read_is_handed_on_as_it_is(sent: str) -> None:
    application = Application()
    ask(application, (b"content-type", sent.encode()))
    assert application.environs[0]["CONTENT_TYPE"] == sent


def test_bridge_whose_engine_meets_a_fault_in_the_loop_goes_the_whole_way(caplog: pytest.LogCaptureFixture) -> None:
    """Guarantee: a fault of ours is told to the log, and its client has an answer all the same."""

    def fail(*asked: object) -> NoReturn:
        raise ZeroDivisionError

    application = Application()
    headers = ((b"host", b"127.0.0.1:8000"), (b"authorization", b"x"), (b"content-length", b"2"), JSON)
    answer = ask(application, *headers, raw_path=b"/v1/keys/verify", query=b"", body=[chunk(b"{}")], verify_known=fail)
    assert answer[2] == b"ok"
    assert [record.message for record in caplog.records if record.exc_info] == ["unhandled"]


def test_bridge_path_and_query_above_the_limit_are_refused_before_anybody_is_asked() -> None:
    application = Application()
    query = len(b"a=%2f\xc3\xa9")
    assert ask(application, raw_path=b"/" * (8192 - query))[0] == 201
    answer = ask(application, (b"content-length", b"2"), raw_path=b"/" * (8193 - query), body=[chunk(b"ab")])
    assert refused(answer) == (414, "uri_too_long")
    assert (len(application.environs), answer[3]) == (1, 0)


def test_bridge_body_that_cannot_be_read_is_listed_as_a_fault() -> None:
    problem = json.loads(ask(Application(), (b"content-length", b"+2"))[2])
    assert problem["errors"] == [{"pointer": "", "detail": problem["detail"]}]
