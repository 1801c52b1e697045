"""Two servers that respond with the request as they read it: ours, and a stock one (Granian on hyper) as the oracle.

python -m tests.fuzz.echo SOCKET                                            ours
granian --interface asgi --uds SOCKET tests.fuzz.echo:application           the oracle
"""

import asyncio
import hashlib
import json
import socket
import sys
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import uvloop

from keyvault.hotpath.http1.server import BACKLOG, Http1Server
from keyvault.hotpath.messages.responses import HttpResponse

UNREAD = "unread"
"""Value in place of a digest, for a request that was answered before its body was read."""


def understood(
    method: bytes, target: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes | None
) -> tuple[str, bytes]:
    """Return the digest of the request, which fits into a response to HEAD, and its text.

    The order of headers counts within one name only, and `/a?` equals `/a`: the oracle shows no more.
    """
    path, _, query = target.partition(b"?")
    target = path + b"?" + query if query else path
    named = sorted(((name.lower(), value) for name, value in headers), key=lambda header: header[0])
    text = json.dumps(
        [part.decode("latin-1") for part in (method, target, body or b"")]
        + [f"{name.decode('latin-1')}={value.decode('latin-1')}" for name, value in named]
    )
    return UNREAD if body is None else hashlib.blake2b(text.encode(), digest_size=12).hexdigest(), text.encode()


def handle(method: bytes, target: bytes, headers: list[tuple[bytes, bytes]], body: bytes | None) -> HttpResponse:
    digest, text = understood(method, target, headers, body)
    return HttpResponse(200, text, "0" * 22, (("X-Echo", digest),))


Scope = MutableMapping[str, Any]


async def application(
    scope: Scope,
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
    send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
) -> None:
    if scope["type"] != "http":
        raise ValueError(scope["type"])
    parts, more = [], True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            return
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    target = scope["raw_path"].partition(b"?")[0] + b"?" + scope["query_string"]
    digest, text = understood(scope["method"].encode(), target, scope["headers"], b"".join(parts))
    if scope["http_version"] != "1.1":
        others = [header for header in scope["headers"] if header[0] != b"host"]
        digest += "/" + understood(scope["method"].encode(), target, others, b"".join(parts))[0]
    headers = [(b"x-echo", digest.encode()), (b"content-length", b"%d" % len(text))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": text})


async def _serve(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(BACKLOG)
        server = Http1Server(handle)
        await server.start([listening])
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1]))
