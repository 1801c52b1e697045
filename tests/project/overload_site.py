"""The bridge with the capacity in `CAPACITY`, for Granian: its requests hold their threads until a test lets them go.

A request outside `…/echo` connects to the port in `GATE`, sends its path there, and runs until that connection is
closed. A disconnect that Granian reports is sent there too. So the test awaits both instead of guessing.
"""

import json
import os
import socket
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import django

django.setup()

from keyvault.project.asgi_wsgi_bridge import PROBES, Bridge, Capacity  # noqa: E402  models are there once Django is set up

Message = MutableMapping[str, Any]


def _report(what: str) -> socket.socket:
    gate = socket.create_connection(("127.0.0.1", int(os.environ["GATE"])))
    gate.sendall(f"{what}\n".encode())
    return gate


def _answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    path = environ["PATH_INFO"]
    if not path.endswith("/echo") and path not in PROBES:
        with _report(path) as gate:
            gate.recv(1)
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [path.encode()]


_bridge = Bridge(_answer, capacity=Capacity(**json.loads(os.environ["CAPACITY"])))


async def application(
    scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
) -> None:
    async def reporting_receive() -> Message:
        message = await receive()
        if message["type"] == "http.disconnect":
            _report("disconnect").close()
        return message

    await _bridge(scope, reporting_receive, send)
