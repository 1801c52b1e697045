"""Pipelined calls of one Redis script from asyncio: calls of the same loop iteration go in one batch.

One batch is in flight at a time, and later calls join the next one. Load therefore makes batches larger and never opens
a second connection, not even to a server that hangs.
"""

import asyncio
from asyncio import AbstractEventLoop, Future, Task
from collections.abc import Sequence
from hashlib import sha1
from typing import Any, NamedTuple

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError

_MAX_BATCH = 500
"""Maximum calls per batch. They take about 50 ms of the 250 ms timeout, so that load alone cannot exceed it."""


class _Call(NamedTuple):
    keys: Sequence[str]
    args: Sequence[int]
    answer: "Future[Any]"


class LimitPipeline:
    """Batches calls over one connection of the running event loop."""

    def __init__(self, url: str, script: str, timeout_seconds: float) -> None:
        self._url = url
        self._script = script
        self._sha = sha1(script.encode(), usedforsecurity=False).hexdigest()  # identifies the script in EVALSHA
        self._timeout_seconds = timeout_seconds
        self._loop: AbstractEventLoop | None = None
        self._client: Redis | None = None
        self._queue: list[_Call] = []
        self._task: Task[None] | None = None

    async def run(self, keys: Sequence[str], args: Sequence[int]) -> Any:
        """Return the script's result. Raises RedisError or OSError; a call is never executed twice."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._client, self._queue, self._task = loop, None, [], None
        if self._client is None:
            self._client = self._connect()
        call = _Call(keys, args, loop.create_future())
        self._queue.append(call)
        if self._task is None:
            self._task = loop.create_task(self._send_batches(self._client))
        return await call.answer

    async def close(self) -> None:
        if self._client is not None and self._loop is asyncio.get_running_loop():
            await self._client.aclose()
        self._loop = self._client = None

    def _connect(self) -> Redis:
        return Redis.from_url(
            self._url,
            socket_timeout=self._timeout_seconds,
            socket_connect_timeout=self._timeout_seconds,
            retry=Retry(NoBackoff(), 0),
        )

    async def _send_batches(self, client: Redis) -> None:
        batch: list[_Call] = []
        why = "the event loop ended"
        try:
            while self._queue:
                batch, self._queue = self._queue[:_MAX_BATCH], self._queue[_MAX_BATCH:]
                async with asyncio.timeout(self._timeout_seconds):
                    answers = await self._send(client, batch)
                for call, answer in zip(batch, answers, strict=True):
                    _deliver(call, answer)
        except (RedisError, OSError) as error:
            why = f"{type(error).__name__}: {error}"
        finally:
            # Fail the waiting calls too, so that they do not each wait for another timeout.
            for call in [*batch, *self._queue]:
                _deliver(call, RedisConnectionError(why))
            self._queue, self._task = [], None

    async def _send(self, client: Redis, batch: Sequence[_Call]) -> list[Any]:
        answers = await self._evaluate(client, batch)
        not_run = [index for index, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if not_run:
            await client.script_load(self._script)
            retried = await self._evaluate(client, [batch[index] for index in not_run])
            for index, answer in zip(not_run, retried, strict=True):
                answers[index] = answer
        return answers

    async def _evaluate(self, client: Redis, batch: Sequence[_Call]) -> list[Any]:
        pipeline = client.pipeline(transaction=False)
        for call in batch:
            pipeline.evalsha(self._sha, len(call.keys), *call.keys, *call.args)
        return await pipeline.execute(raise_on_error=False)


def _deliver(call: _Call, answer: Any) -> None:
    if call.answer.done():
        return
    if isinstance(answer, Exception):
        call.answer.set_exception(answer)
    else:
        call.answer.set_result(answer)
