"""Clients behind a load balancer: every request goes to one of the ports in service, and every answer is judged.

Requests are sent at a fixed rate, whether earlier ones have been answered or not. Most of them verify a key, at a
server or at a dedicated verifier; some read an order or create one. Beside them keys are issued, used, revoked, and
refused, one after the other.
"""

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from keyvault.management.service import ADDRESS

CONNECTIONS = 64
"""Maximum number of requests under way; a further one waits for its turn and is sent late."""

IDLE_SECONDS = 10.0
"""Age of an unused connection from which it is closed. The server closes it after 30 seconds."""

ANSWER_SECONDS = 30.0
LIFE_PAUSE_SECONDS = 1.0

CREATE_EVERY, READ_EVERY = 100, 10
"""One request in this many creates an order, or reads one."""

MOST_QUOTED = 20


@dataclass(frozen=True, slots=True)
class Installation:
    """What clients know. `issue` makes another key, and blocks; it returns the key's id and its string."""

    origin: str
    token: str
    keys: tuple[str, ...]
    orders: tuple[str, ...]
    issue: Callable[[], tuple[str, str]]


@dataclass(slots=True)
class Tally:
    """`failures` quotes the first ones."""

    requests: Counter[str] = field(default_factory=Counter)
    by_port: Counter[int] = field(default_factory=Counter)
    failed: int = 0
    failures: list[str] = field(default_factory=list)
    slowest_seconds: float = 0.0

    def fail(self, what: str) -> None:
        self.failed += 1
        if len(self.failures) < MOST_QUOTED:
            self.failures.append(what)


@dataclass(slots=True)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    used_at: float


class Traffic:
    """Entered and left like a file; runs in a thread of its own until then.

    `ports`: of the servers; `verifiers`: ports that only verify. Both may be set at any time.
    `rate`: requests a second to be sent. `seconds`: how long they were sent, once it is left.
    """

    def __init__(
        self, installation: Installation, rate: int, ports: tuple[int, ...], verifiers: tuple[int, ...]
    ) -> None:
        self.ports, self.verifiers, self.tally, self.rate, self.seconds = ports, verifiers, Tally(), rate, 0.0
        self._installation, self._began = installation, 0.0
        self._idle: dict[int, list[_Connection]] = {}
        self._under_way: Counter[int] = Counter()
        self._numbers = count()
        self._dice = random.Random(7)  # noqa: S311  a test's own dice
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._loop: asyncio.AbstractEventLoop

    def __enter__(self) -> "Traffic":
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.seconds = time.monotonic() - self._began
        self._stopped.set()
        self._thread.join()

    def take_out(self, port: int) -> None:
        """Send no more requests to the port, as a load balancer does, wait until it has answered all, and hang up.

        A server that is started again at the port does not know the connections of the one before.
        """
        self.ports = tuple(other for other in self.ports if other != port)
        self.verifiers = tuple(other for other in self.verifiers if other != port)
        while self._under_way[port]:
            time.sleep(0.01)
        for connection in self._idle.pop(port, []):
            self._loop.call_soon_threadsafe(connection.writer.close)

    # --- in its thread ----------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            asyncio.run(self._run())
        except Exception as error:  # noqa: BLE001  the report names it
            self.tally.fail(f"the traffic ended: {error!r}")

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        turns = asyncio.Semaphore(CONNECTIONS)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._lead_lives())
            for number in count():
                await asyncio.sleep(max(0.0, self._began + number / self.rate - time.monotonic()))
                if self._stopped.is_set():
                    break
                await turns.acquire()
                group.create_task(self._send_one(number)).add_done_callback(lambda _: turns.release())
        for idle in self._idle.values():
            for connection in idle:
                connection.writer.close()

    async def _send_one(self, number: int) -> None:
        here = self._installation
        if number % CREATE_EVERY == CREATE_EVERY // 2:
            body = {"amount_minor": 1250, "currency": "EUR"}
            headers = {"X-Api-Key": here.keys[0], "Idempotency-Key": f"order-{next(self._numbers)}"}
            await self._send("create an order", "POST", "/sandbox/merchants/orders", headers, body)
        elif number % READ_EVERY == 0:
            path = f"/sandbox/merchants/orders/{self._dice.choice(here.orders)}"
            await self._send("read an order", "GET", path, {"X-Api-Key": self._dice.choice(here.keys)})
        else:
            await self._verify(self._dice.choice(here.keys))

    async def _lead_lives(self) -> None:
        """Issue a key, use it everywhere, revoke it somewhere, and see it refused everywhere."""
        while not self._stopped.is_set():
            key_id, key = await asyncio.to_thread(self._installation.issue)
            self.tally.requests["issue a key"] += 1
            await self._verify_everywhere(key)
            headers = {"Authorization": f"Bearer {self._installation.token}", "Prefer": "wait=5"}
            path = f"/v1/keys/{key_id}/revoke"
            await self._send("revoke a key", "POST", path, headers, {"reason": "superseded"})
            await self._verify_everywhere(key, "key_revoked")
            await asyncio.sleep(LIFE_PAUSE_SECONDS)

    async def _verify_everywhere(self, key: str, code: str | None = None) -> None:
        for port in self._verifying:
            if port in self._verifying:  # it may have been taken out since the loop began
                await self._verify(key, code, port)

    @property
    def _verifying(self) -> tuple[int, ...]:
        return (*self.ports, *self.verifiers)

    async def _verify(self, key: str, code: str | None = None, port: int | None = None) -> None:
        body = {"key": key, "environment": "sandbox", "endpoint": "orders.retrieve", "client_ip": "198.51.100.7"}
        headers = {"Authorization": f"Bearer {self._installation.token}"}
        chosen = port if port is not None else self._take_turn(self._verifying)
        answer = await self._send("verify a key", "POST", "/v1/keys/verify", headers, body, chosen)
        if answer is not None and answer["code"] != code:
            self.tally.fail(f"verify a key: the code is {answer['code']}, not {code}")

    async def _send(
        self,
        what: str,
        method: str,
        path: str,
        headers: dict[str, str],
        body: dict[str, Any] | None = None,
        port: int | None = None,
    ) -> dict[str, Any] | None:
        """Return the body of a 2xx; count everything else as a failure and return None."""
        chosen = port if port is not None else self._take_turn(self.ports)
        self._under_way[chosen] += 1
        sent_at = time.monotonic()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                status, text = await self._exchange(chosen, self._write(method, path, headers, body))
            if 200 <= status < 300:
                answer: dict[str, Any] = json.loads(text)
                return answer
            self.tally.fail(f"{what} at port {chosen}: {status} {text[:300]!r}")
        except (OSError, ValueError, EOFError) as error:
            self.tally.fail(f"{what} at port {chosen}: {type(error).__name__} {error}")
        finally:
            self._under_way[chosen] -= 1
            self.tally.requests[what] += 1
            self.tally.by_port[chosen] += 1
            self.tally.slowest_seconds = max(self.tally.slowest_seconds, time.monotonic() - sent_at)
        return None

    def _take_turn(self, ports: tuple[int, ...]) -> int:
        return ports[next(self._numbers) % len(ports)]

    def _write(self, method: str, path: str, headers: dict[str, str], body: dict[str, Any] | None) -> bytes:
        content = b"" if body is None else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self._installation.origin.partition('//')[2]}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
        return "\r\n".join([*lines, "", ""]).encode() + content

    async def _exchange(self, port: int, request: bytes) -> tuple[int, bytes]:
        connection = await self._connect(port)
        try:
            connection.writer.write(request)
            head = (await connection.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
            text = await connection.reader.readexactly(int(fields.get("content-length", 0)))
        except BaseException:
            connection.writer.close()
            raise
        if port in self._verifying and fields.get("connection", "") != "close":
            connection.used_at = time.monotonic()
            self._idle.setdefault(port, []).append(connection)
        else:
            connection.writer.close()
        return int(head[0].split(" ")[1]), text

    async def _connect(self, port: int) -> _Connection:
        idle = self._idle.setdefault(port, [])
        while idle:
            connection = idle.pop()
            if time.monotonic() - connection.used_at < IDLE_SECONDS:
                return connection
            connection.writer.close()
        return _Connection(*await asyncio.open_connection(ADDRESS, port), time.monotonic())
