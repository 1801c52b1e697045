"""The ASGI-to-WSGI bridge on its own: what it forwards, what it refuses, and in which threads."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import pytest
from django.core.exceptions import RequestDataTooBig
from django.core.handlers.wsgi import WSGIRequest

from keyvault.hotpath.http1.framing import HEAD_BYTES, HEADERS
from keyvault.hotpath.messages.responses import HttpResponse
from keyvault.project.asgi_wsgi_bridge import Bridge, Capacity, VerifyKnown

Message = dict[str, Any]
LIMIT = 65_536
JSON = (b"content-type", b"application/json")


class Application:
    """A WSGI application that records its requests."""

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
    """Return status, headers and body of the response, and the number of messages taken."""
    unread, taken, sent = list(body), [], list[Message]()

    async def receive() -> Message:
        taken.append(unread.pop(0))
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


def test_bridge_forwards_the_request_as_it_was_sent() -> None:
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


def test_bridge_returns_status_headers_and_whole_body_and_closes_the_response() -> None:
    application = Application()
    status, headers, body, _ = ask(application)
    assert (status, body, application.closed) == (201, b"ok", 1)
    assert headers == [(b"x-one", b"1"), (b"set-cookie", b"a=\xe9"), (b"set-cookie", b"b=2")]


@pytest.mark.parametrize("headers", [((b"content-length", b"4"),), ((b"transfer-encoding", b"Chunked"),)])
def test_bridge_body_with_any_framing_arrives_whole(headers: tuple[tuple[bytes, bytes], ...]) -> None:
    application = Application(lambda environ: [environ["wsgi.input"].read()])
    body = [chunk(b"ab", more=True), chunk(b"", more=True), chunk(b"cd")]
    assert ask(application, *headers, body=body)[2] == b"abcd"
    assert application.environs[0]["CONTENT_LENGTH"] == "4"
    assert "HTTP_TRANSFER_ENCODING" not in application.environs[0]


def test_bridge_body_at_the_limit_is_accepted() -> None:
    application = Application(lambda environ: [environ["wsgi.input"].read()])
    body = [chunk(b"a" * LIMIT)]
    assert ask(application, (b"content-length", b"%d" % LIMIT), body=body)[2] == b"a" * LIMIT


@pytest.mark.parametrize(
    ("headers", "taken"),
    [(((b"content-length", b"65537"),), 0), (((b"transfer-encoding", b"chunked"),), 3)],
    ids=["announced", "chunked"],
)
def test_bridge_body_above_the_limit_is_left_unread_and_reported_on_read(
    headers: tuple[tuple[bytes, bytes], ...], taken: int
) -> None:
    """Guarantee: at most the limit and one chunk is kept, and a partial body is never taken for the whole."""

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
def test_bridge_body_with_ambiguous_framing_is_refused(
    headers: tuple[tuple[bytes, bytes], ...],
) -> None:
    application = Application()
    answer = ask(application, *headers, body=[chunk(b"ab")])
    assert refused(answer) == (400, "request_invalid")
    assert (application.environs, answer[3]) == ([], 0)


def test_bridge_truncated_body_is_not_forwarded() -> None:
    application = Application()
    body = [chunk(b"ab", more=True), {"type": "http.disconnect"}]
    assert refused(ask(application, (b"content-length", b"4"), body=body)) == (400, "request_invalid")
    assert application.environs == []


def test_bridge_application_fault_is_logged_and_not_disclosed(caplog: pytest.LogCaptureFixture) -> None:
    def fail(environ: dict[str, Any]) -> Iterable[bytes]:
        raise RuntimeError("the secret is hunter2")

    answer = ask(Application(fail))
    assert refused(answer) == (500, "internal_error")
    assert b"hunter2" not in answer[2]
    (record,) = (record for record in caplog.records if record.levelname == "ERROR")
    assert vars(record)["request_id"] == json.loads(answer[2])["request_id"]


def test_bridge_threads_are_few_and_reused_until_shutdown() -> None:
    """Guarantee: a database connection belongs to a thread and is not opened anew for each request."""
    application = Application()
    sent_types: list[str] = []

    async def live() -> None:
        bridge = Bridge(application, capacity=Capacity(threads=2))
        events: asyncio.Queue[Message] = asyncio.Queue()

        async def record(message: Any) -> None:
            sent_types.append(message["type"])

        lifespan = asyncio.create_task(bridge({"type": "lifespan"}, events.get, record))
        await events.put({"type": "lifespan.startup"})
        scope = {"type": "http", "http_version": "1.1", "method": "GET", "scheme": "http", "raw_path": b"/"}
        scope |= {"query_string": b"", "headers": ()}
        await asyncio.gather(*(bridge(scope, events.get, record) for _ in range(50)))
        assert all(thread.is_alive() for thread in threading.enumerate() if thread.ident in application.threads)
        await events.put({"type": "lifespan.shutdown"})
        await lifespan

    asyncio.run(live())
    assert len(application.environs) == 50
    assert len(application.threads) <= 2
    assert not application.threads & {thread.ident for thread in threading.enumerate()}
    assert [each for each in sent_types if each.startswith("lifespan")] == [
        "lifespan.startup.complete",
        "lifespan.shutdown.complete",
    ]


def test_bridge_refuses_other_protocols_than_http() -> None:
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
def test_bridge_any_content_type_is_readable_by_django(sent: bytes) -> None:
    """Guarantee: no header makes Django fail before or while it reads the query."""

    def answer(environ: dict[str, Any]) -> Iterable[bytes]:
        return [WSGIRequest(environ).GET["limit"].encode()]

    application = Application(lambda environ: answer({**environ, "QUERY_STRING": "limit=10"}))
    assert ask(application, (b"content-type", sent))[::2] == (201, b"10")


@pytest.mark.parametrize("sent", ["application/json; charset=UTF-8", "multipart/form-data; boundary=x", "a/b"])
def test_bridge_readable_content_type_is_forwarded_unchanged(sent: str) -> None:
    application = Application()
    ask(application, (b"content-type", sent.encode()))
    assert application.environs[0]["CONTENT_TYPE"] == sent


def test_bridge_engine_fault_in_the_loop_falls_back_to_the_slow_path(caplog: pytest.LogCaptureFixture) -> None:
    """Guarantee: an internal error is logged, and its client still gets an answer from the slow path."""

    def fail(*_: object) -> NoReturn:
        raise ZeroDivisionError

    application = Application()
    headers = ((b"host", b"127.0.0.1:8000"), (b"authorization", b"x"), (b"content-length", b"2"), JSON)
    answer = ask(application, *headers, raw_path=b"/v1/keys/verify", query=b"", body=[chunk(b"{}")], verify_known=fail)
    assert answer[2] == b"ok"
    assert [record.message for record in caplog.records if record.exc_info] == ["unhandled"]


def test_bridge_path_and_query_above_the_limit_are_refused_before_the_application_runs() -> None:
    application = Application()
    query = len(b"?a=%2f\xc3\xa9")
    assert ask(application, raw_path=b"/" * (8192 - query))[0] == 201
    answer = ask(application, (b"content-length", b"2"), raw_path=b"/" * (8193 - query), body=[chunk(b"ab")])
    assert refused(answer) == (414, "uri_too_long")
    assert (len(application.environs), answer[3]) == (1, 0)


@pytest.mark.parametrize(
    ("headers", "is_accepted"),
    [
        # The request line has 18 bytes, the end of the head 2, each header 4 besides its name and value.
        (((b"x", b"a" * (HEAD_BYTES - 25)),), True),
        (((b"x", b"a" * (HEAD_BYTES - 24)),), False),
        (((b"x", b""),) * HEADERS, True),
        (((b"x", b""),) * (HEADERS + 1), False),
    ],
    ids=["16 KiB", "one byte more", "100 headers", "one header more"],
)
def test_bridge_head_above_the_limit_is_refused_before_the_application_runs(
    headers: tuple[tuple[bytes, bytes], ...], is_accepted: bool
) -> None:
    """Guarantee: the ordinary server takes no head that the dedicated verifier refuses."""
    application = Application()
    answer = ask(application, *headers, query=b"")
    if is_accepted:
        assert answer[0] == 201
    else:
        assert refused(answer) == (431, "request_invalid")
        assert json.loads(answer[2])["errors"] == [{"pointer": "", "detail": json.loads(answer[2])["detail"]}]
    assert len(application.environs) == is_accepted


def test_bridge_unreadable_body_is_listed_as_a_fault() -> None:
    problem = json.loads(ask(Application(), (b"content-length", b"+2"))[2])
    assert problem["errors"] == [{"pointer": "", "detail": problem["detail"]}]


# ------------------------------------------------------------------------------------------------------ overload

GONE = {"type": "http.disconnect"}
EMPTY = chunk(b"")


class Held:
    """A WSGI application whose requests wait in their threads until the test lets them go, but for `…/echo`."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self._arrived = threading.Semaphore(0)
        self._let_go = threading.Event()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        self.ran.append(environ["PATH_INFO"])
        if not environ["PATH_INFO"].endswith(("/echo", "/healthz")):
            self._arrived.release()
            assert self._let_go.wait(60)
        start_response("200 OK", [])
        return [environ["PATH_INFO"].encode()]

    async def arrive(self, count: int) -> None:
        """Return when `count` requests hold their threads."""
        for _ in range(count):
            assert await asyncio.to_thread(self._arrived.acquire, timeout=60)

    def release(self) -> None:
        self._let_go.set()


class AsgiRequest:
    """One request whose ASGI events the test delivers by hand."""

    def __init__(self, bridge: Bridge, path: bytes, *headers: tuple[bytes, bytes]) -> None:
        self.sent: list[Any] = []
        self.events: asyncio.Queue[Message] = asyncio.Queue()
        self.received = 0
        scope = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "raw_path": path}
        scope |= {"query_string": b"", "headers": headers}
        self.task = asyncio.ensure_future(bridge(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        self.received += 1
        return await self.events.get()

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    async def answer(self) -> tuple[int, dict[bytes, bytes], bytes]:
        await asyncio.wait_for(self.task, 60)
        start, end = self.sent
        return start["status"], dict(start["headers"]), end["body"]


@asynccontextmanager
async def living(bridge: Bridge, held: Held) -> AsyncIterator[asyncio.Queue[Message]]:
    """Yield the events of the bridge's lifespan; its threads end whatever the outcome of the test."""
    events: asyncio.Queue[Message] = asyncio.Queue()

    async def record(message: Any) -> None:
        pass

    lifespan = asyncio.create_task(bridge({"type": "lifespan"}, events.get, record))
    await events.put({"type": "lifespan.startup"})
    try:
        yield events
    finally:
        held.release()
        await events.put({"type": "lifespan.shutdown"})
        await lifespan


async def run_ready_tasks() -> None:
    """Run everything that is ready."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_bridge_sign_ins_on_every_console_thread_leave_the_other_planes_free() -> None:
    """Guarantee: no number of anonymous sign-ins delays a request of the integration or the service plane."""
    held = Held()

    async def live() -> None:
        bridge = Bridge(held)
        async with living(bridge, held):
            sign_ins = [AsgiRequest(bridge, b"/admin/login/") for _ in range(12)]
            await held.arrive(2)
            await run_ready_tasks()
            assert (await AsgiRequest(bridge, b"/echo").answer())[::2] == (200, b"/echo")
            assert held.ran == ["/admin/login/", "/admin/login/", "/echo"]
            held.release()
            assert [(await each.answer())[0] for each in sign_ins] == [200] * 12

    asyncio.run(live())


@pytest.mark.parametrize("path", [b"/admin/login/", b"/%61dmin/login/", b"/admin%2flogin/"])
def test_bridge_console_is_recognized_by_the_path_that_django_routes(path: bytes) -> None:
    """Guarantee: no spelling of the console's address occupies the other planes' threads."""
    held = Held()

    async def live() -> None:
        bridge = Bridge(held, capacity=Capacity(threads=1, console_threads=1))
        async with living(bridge, held):
            AsgiRequest(bridge, path)
            await held.arrive(1)
            assert (await AsgiRequest(bridge, b"/echo").answer())[0] == 200

    asyncio.run(live())


def test_bridge_full_queue_answers_a_problem_with_retry_after() -> None:
    held = Held()

    async def live() -> None:
        bridge = Bridge(held, capacity=Capacity(threads=1, queue=1))
        async with living(bridge, held):
            runs = AsgiRequest(bridge, b"/runs")
            await held.arrive(1)
            waits = AsgiRequest(bridge, b"/waits")
            await run_ready_tasks()
            status, headers, body = await AsgiRequest(bridge, b"/refused").answer()
            assert refused((status, list(headers.items()), body, 0)) == (503, "dependency_unavailable")
            assert headers[b"retry-after"] == b"1"
            status, headers, _ = await AsgiRequest(bridge, b"/v1/authorize/nginx").answer()
            told = [headers.get(name) for name in (b"x-auth-status", b"x-auth-code", b"retry-after")]
            assert (status, told) == (403, [b"503", b"dependency_unavailable", b"1"]), "nginx fails on a 503"
            assert (await AsgiRequest(bridge, b"/admin/echo").answer())[0] == 200
            held.release()
            assert [(await each.answer())[2] for each in (runs, waits)] == [b"/runs", b"/waits"]
        assert "/refused" not in held.ran

    asyncio.run(live())


def test_bridge_verdict_from_memory_needs_no_thread() -> None:
    """Guarantee: verification continues from memory while every thread is held and every queue is full."""
    held = Held()
    known = HttpResponse(200, b"known", "r" * 22)

    async def live() -> None:
        bridge = Bridge(held, lambda *_: known, Capacity(threads=1, queue=0, console_threads=1, console_queue=0))
        async with living(bridge, held):
            for path in (b"/held", b"/admin/held"):
                AsgiRequest(bridge, path)
                await held.arrive(1)
            headers = ((b"host", b"127.0.0.1:8000"), (b"authorization", b"x"), (b"content-length", b"2"), JSON)
            verify = AsgiRequest(bridge, b"/v1/keys/verify", *headers)
            await verify.events.put(chunk(b"{}"))
            assert (await verify.answer())[::2] == (200, b"known")

    asyncio.run(live())


def test_bridge_full_console_queue_answers_a_page() -> None:
    held = Held()

    async def live() -> None:
        bridge = Bridge(held, capacity=Capacity(console_threads=1, console_queue=0))
        async with living(bridge, held):
            AsgiRequest(bridge, b"/admin/login/")
            await held.arrive(1)
            status, headers, body = await AsgiRequest(bridge, b"/admin/login/").answer()
            assert (status, headers[b"content-type"]) == (503, b"text/html; charset=utf-8")
            assert (headers[b"retry-after"], headers[b"cache-control"]) == (b"1", b"no-store")
            assert int(headers[b"content-length"]) == len(body)
            assert headers[b"x-request-id"] in body

    asyncio.run(live())


@pytest.mark.parametrize("body", [(), (chunk(b"a", more=True), chunk(b"b"))], ids=["no body", "body"])
def test_bridge_request_of_a_disconnected_client_never_runs(body: tuple[Message, ...]) -> None:
    """Guarantee: a client that disconnects leaves the queue, and its request is not executed."""
    held = Held()

    async def live() -> None:
        bridge = Bridge(held, capacity=Capacity(threads=1, queue=2))
        async with living(bridge, held):
            runs = AsgiRequest(bridge, b"/runs")
            await held.arrive(1)
            headers = ((b"content-length", b"2"),) if body else ()
            gone, stays = AsgiRequest(bridge, b"/gone", *headers), AsgiRequest(bridge, b"/stays", *headers)
            for client in (gone, stays):
                for message in body or (EMPTY,):
                    await client.events.put(message)
            await run_ready_tasks()
            assert (await AsgiRequest(bridge, b"/refused").answer())[0] == 503
            await gone.events.put(GONE)
            await asyncio.wait_for(gone.task, 60)
            assert gone.sent == []
            late = AsgiRequest(bridge, b"/late")
            await run_ready_tasks()
            held.release()
            assert [(await each.answer())[2] for each in (runs, stays, late)] == [b"/runs", b"/stays", b"/late"]
        assert held.ran == ["/runs", "/stays", "/late"]

    asyncio.run(live())


def test_bridge_client_that_disconnects_at_its_turn_frees_the_thread() -> None:
    held = Held()

    async def live() -> None:
        bridge = Bridge(held, capacity=Capacity(threads=1))
        async with living(bridge, held):
            runs = AsgiRequest(bridge, b"/runs")
            await held.arrive(1)
            gone, late = AsgiRequest(bridge, b"/gone"), AsgiRequest(bridge, b"/late")
            await run_ready_tasks()
            # In one turn of the loop, its thread becomes free and its client disconnects.
            held.release()
            runs.task.add_done_callback(lambda task: gone.events.put_nowait(GONE))
            assert [(await each.answer())[2] for each in (runs, late)] == [b"/runs", b"/late"]
            await asyncio.wait_for(gone.task, 60)

    asyncio.run(live())


def test_bridge_oversized_body_of_a_queued_request_is_left_unread() -> None:
    held = Held()

    async def live() -> None:
        bridge = Bridge(held, capacity=Capacity(threads=1))
        async with living(bridge, held):
            AsgiRequest(bridge, b"/runs")
            await held.arrive(1)
            large = AsgiRequest(bridge, b"/large", (b"content-length", b"65537"))
            await run_ready_tasks()
            held.release()
            assert ((await large.answer())[0], large.received) == (200, 0)

    asyncio.run(live())


def test_bridge_endless_body_is_answered_and_holds_no_thread() -> None:
    """Guarantee: a slow sender occupies one place among the requests in progress, for a bounded time, and nothing
    else.
    """
    held = Held()

    async def live() -> None:
        bridge = Bridge(held, capacity=Capacity(threads=1, queue=0, body_seconds=0.01))
        async with living(bridge, held):
            slow = AsgiRequest(bridge, b"/slow", (b"content-length", b"3"))
            await slow.events.put(chunk(b"a", more=True))
            status, headers, body = await slow.answer()
            assert refused((status, list(headers.items()), body, 0)) == (408, "request_timeout")
            assert headers[b"connection"] == b"close"
            assert json.loads(body)["detail"].startswith("The body did not arrive within 0.01 s.")
        assert held.ran == []

    asyncio.run(live())


def test_bridge_requests_in_progress_are_bounded_including_arriving_bodies() -> None:
    """Guarantee: the memory that bodies take is bounded, however Granian is started."""
    held = Held()

    async def live() -> None:
        bridge = Bridge(held, capacity=Capacity(requests=1))
        async with living(bridge, held):
            slow = AsgiRequest(bridge, b"/echo", (b"content-length", b"2"))
            await slow.events.put(chunk(b"a", more=True))
            await run_ready_tasks()
            refused_one = AsgiRequest(bridge, b"/echo", (b"content-length", b"2"))
            assert ((await refused_one.answer())[0], refused_one.received) == (503, 0)
            assert (await AsgiRequest(bridge, b"/healthz").answer())[0] == 200, (
                "a busy process must pass its liveness probe"
            )
            await slow.events.put(chunk(b"b"))
            assert (await slow.answer())[0] == 200
            assert (await AsgiRequest(bridge, b"/echo").answer())[0] == 200

    asyncio.run(live())


def test_bridge_at_shutdown_answers_queued_requests_and_refuses_new_ones() -> None:
    held = Held()

    async def live() -> None:
        bridge = Bridge(held, capacity=Capacity(threads=1))
        async with living(bridge, held) as events:
            runs = AsgiRequest(bridge, b"/runs")
            await held.arrive(1)
            waits = AsgiRequest(bridge, b"/waits")
            await run_ready_tasks()
            await events.put({"type": "lifespan.shutdown"})
            await run_ready_tasks()
            assert (await AsgiRequest(bridge, b"/new").answer())[0] == 503
            held.release()
            assert [(await each.answer())[0] for each in (runs, waits)] == [200, 200]

    asyncio.run(live())
