"""LocalVerifier: answers from memory while the change feed is current, and asks the service otherwise."""

import os
import weakref
from dataclasses import replace

from keyvault_client.decisions import Decision, Question
from keyvault_client.effects import Steps
from keyvault_client.local.memory import LocalMemory, with_cost
from keyvault_client.local.reader import LocalFeedReader
from keyvault_client.transport import SyncRunner
from keyvault_client.verifier import AsyncVerifier, ServiceAddress, Verifier, VerifierLogic


class LocalLogic(VerifierLogic):
    """Decides from memory, or as VerifierLogic does. It has the memory, and the threads that keep it up to date."""

    def __init__(self, address: ServiceAddress, timeout: float) -> None:
        super().__init__(address, timeout)
        self._feed_runner = SyncRunner(address.tls, address.socket)
        self.memory = LocalMemory(address.environment)
        self.reader = LocalFeedReader(address, self._feed_runner, self.memory)
        own = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _restart(own))

    def verify(self, question: Question) -> Steps[Decision]:
        self.reader.start()
        found = self.memory.decide(question)
        if isinstance(found, Decision):
            return found
        decision = yield from super().verify(with_cost(question, found.cost))
        if found.cost > 1 and decision.status in {400, 429}:
            # There are fewer tokens, or the limit was lowered below the batch. It may be enough for this request.
            found = replace(found, cost=1)
            decision = yield from super().verify(question)
        self.memory.learn(found, decision)
        if self.memory.needs_reading:
            self.reader.wake()
        return decision

    def close(self) -> None:
        self.reader.close()
        self._feed_runner.close()

    def restart(self) -> None:
        self.memory = LocalMemory(self._address.environment)
        self.reader.restart(self.memory)


def _restart(reference: "weakref.ref[LocalLogic]") -> None:
    logic = reference()
    if logic is not None:
        logic.restart()


class LocalVerifier(Verifier):
    """A Verifier that answers most requests from memory. Its arguments are those of Verifier.

    The service token needs the permissions `keys:verify` and `keys:replicate`. The memory is used while the change feed
    is current: at most the token's staleness bound after the feed was read. After that, the service decides every
    request, as with Verifier. A LocalVerifier counts in receipts, and its reports in rotations.

    `close()` reports the last uses. A process that is killed loses the uses of a second, and rotations wait for it.
    """

    _logic_type = LocalLogic
    _logic: LocalLogic

    @property
    def is_stale(self) -> bool:
        """Whether the service decides every request now, because the change feed is older than the bound."""
        return not self._logic.memory.is_current

    def close(self) -> None:
        self._logic.close()
        super().close()


class AsyncLocalVerifier(AsyncVerifier):
    """LocalVerifier for asyncio and trio. Its threads read the feed; questions to the service do not block the loop."""

    _logic_type = LocalLogic
    _logic: LocalLogic

    @property
    def is_stale(self) -> bool:
        """Whether the service decides every request now, because the change feed is older than the bound."""
        return not self._logic.memory.is_current

    async def close(self) -> None:
        """Report the last uses, which may block the loop for a moment, and close the connections."""
        self._logic.close()
        await super().close()
