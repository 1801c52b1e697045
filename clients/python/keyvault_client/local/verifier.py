"""LocalVerifier: asks the service once per key string, and decides from memory while the change feed vouches for it."""

import os
import ssl
import weakref
from collections.abc import Generator
from dataclasses import replace
from typing import Any, Self

from keyvault.domain.plaintext import Plaintext
from keyvault_client.decisions import Decision, Question
from keyvault_client.local.memory import Memory, with_cost
from keyvault_client.local.reader import FeedReader
from keyvault_client.transport import AsyncFace, SyncFace
from keyvault_client.verifier import ServiceAddress, VerifierLogic


class _Local:
    """What both faces share: the memory, and the threads that keep it up to date."""

    def __init__(self, address: ServiceAddress, tls: ssl.SSLContext | None) -> None:
        self._environment = address.environment
        self._face = SyncFace(tls, address.socket)
        self.memory = Memory(address.environment)
        self.reader = FeedReader(address, self._face, self.memory)
        own = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _restart(own))

    def steps(self, question: Question) -> Generator[Question, Decision, Decision]:
        """Decide, where each yielded question is to be asked."""
        self.reader.start()
        found = self.memory.decide(question)
        if isinstance(found, Decision):
            return found
        decision = yield with_cost(question, found.cost)
        if found.cost > 1 and decision.status == 429:
            # There are fewer tokens, maybe enough for this request.
            found = replace(found, cost=1)
            decision = yield question
        self.memory.learn(found, decision)
        if self.memory.needs_reading:
            self.reader.wake()
        return decision

    def close(self) -> None:
        self.reader.close()
        self._face.close()

    def restart(self) -> None:
        self.memory = Memory(self._environment)
        self.reader.restart(self.memory)


def _restart(reference: "weakref.ref[_Local]") -> None:
    local = reference()
    if local is not None:
        local.restart()


class LocalVerifier:
    """A Verifier that answers most requests from memory. Its arguments are those of Verifier.

    The service token needs the permissions `keys:verify` and `keys:replicate`. The memory is used while the change feed
    vouches for it: at most the token's staleness bound after the feed was read. Then every request is a question to the
    service, as with Verifier. A reader counts in receipts, and its reports in rotations.

    `close()` reports the last uses. A process that is killed loses the uses of a second, and rotations wait for it.
    """

    def __init__(
        self,
        url: str,
        environment: str,
        service_token: str | Plaintext,
        *,
        timeout: float = 2,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        address = ServiceAddress(url, environment, service_token)
        self._local = _Local(address, tls)
        self._logic = VerifierLogic(address, timeout)
        self._face = SyncFace(tls, address.socket)

    @property
    def is_stale(self) -> bool:
        """Whether every request is asked now, because the change feed is older than the bound."""
        return not self._local.memory.is_vouched

    def verify(self, question: Question) -> Decision:
        """Return the decision. Without a complete one before the deadline, it is a refusal with status 503."""
        steps = self._local.steps(question)
        asked = _first(steps)
        while isinstance(asked, Question):
            asked = _next(steps, self._face.run(self._logic.verify(asked)))
        return asked

    def close(self) -> None:
        self._local.close()
        self._face.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class AsyncLocalVerifier:
    """LocalVerifier for asyncio and trio. Its threads read the feed; questions to the service do not block the loop."""

    def __init__(
        self,
        url: str,
        environment: str,
        service_token: str | Plaintext,
        *,
        timeout: float = 2,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        address = ServiceAddress(url, environment, service_token)
        self._local = _Local(address, tls)
        self._logic = VerifierLogic(address, timeout)
        self._face = AsyncFace(tls, address.socket)

    @property
    def is_stale(self) -> bool:
        """Whether every request is asked now, because the change feed is older than the bound."""
        return not self._local.memory.is_vouched

    async def verify(self, question: Question) -> Decision:
        """Return the decision. Without a complete one before the deadline, it is a refusal with status 503."""
        steps = self._local.steps(question)
        asked = _first(steps)
        while isinstance(asked, Question):
            asked = _next(steps, await self._face.run(self._logic.verify(asked)))
        return asked

    async def close(self) -> None:
        """Report the last uses, which may block the loop for a moment, and close the connections."""
        self._local.close()
        await self._face.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


_Asking = Generator[Question, Decision, Decision]


def _first(steps: _Asking) -> Question | Decision:
    try:
        return next(steps)
    except StopIteration as done:
        return _decision(done)


def _next(steps: _Asking, decision: Decision) -> Question | Decision:
    try:
        return steps.send(decision)
    except StopIteration as done:
        return _decision(done)


def _decision(done: StopIteration) -> Decision:
    result: Any = done.value
    if not isinstance(result, Decision):
        raise TypeError("the steps end with a decision")
    return result
