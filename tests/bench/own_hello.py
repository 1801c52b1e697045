"""Keyvault's HTTP server with a constant response: `python -m tests.bench.own_hello PORT`."""

import sys

from keyvault.hotpath.http1 import server
from keyvault.hotpath.messages.responses import HttpResponse

BODY = b'{"hello":"world"}'


class Hello:
    """An application that ignores the request."""

    shortcut = None

    async def start(self) -> None:
        return

    async def stop(self) -> None:
        return

    def handle(
        self, method: bytes, target: bytes, headers: list[tuple[bytes, bytes]], body: bytes | None
    ) -> HttpResponse:
        return HttpResponse(200, BODY, "0" * 32)


if __name__ == "__main__":
    server.run(Hello, server.listen("127.0.0.1", int(sys.argv[1])), lambda: None)
