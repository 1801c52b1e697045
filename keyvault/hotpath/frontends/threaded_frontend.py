"""The door of threads: whoever asks waits for the database in its own thread."""

from collections.abc import Mapping
from typing import Protocol

from keyvault.access.limits import Bucket, Spend
from keyvault.access.policy_snapshot import PolicySnapshot
from keyvault.domain.errors import DependencyUnavailableError
from keyvault.hotpath.engine.engine import Engine
from keyvault.hotpath.messages.questions import KEY, RULES, DataRequirements, Found, Headers, Payment, PendingRequest
from keyvault.hotpath.messages.responses import HttpResponse
from keyvault.hotpath.slow_path.slow_path import SlowPath


class StoreAwayError(Exception):
    """The database did not answer: nothing is known of what was asked for."""


class Store(Protocol):
    """The primary database. Raises StoreAwayError."""

    def find(self, kind: str, ids: frozenset[str], address: str | None) -> Mapping[str, Found]:
        """Those that there are, by id."""

    def read_rules(self, known: PolicySnapshot | None) -> PolicySnapshot:
        """`known` itself when nothing has changed since."""


class BlockingBudgets(Protocol):
    def spend(self, buckets: tuple[Bucket, ...], cost: int, *, refuse_on_loss: bool) -> Spend: ...


class ThreadedFrontend:
    """One for each process; threads share it."""

    def __init__(self, engine: Engine, store: Store, budgets: BlockingBudgets) -> None:
        self._engine = engine
        self.verify_known = engine.verify_known
        """What needs no database; for whatever else it gives than an Answer, ask `answer`."""
        self._answering = SlowPath(engine)
        self._store = store
        self._budgets = budgets

    def answer(self, method: str, target: str, headers: Headers, body: bytes | None) -> HttpResponse:
        """The whole way. Never raises. `target` is path and query as they were sent."""
        question = self._answering.ask(method, target, headers, body)
        try:
            while isinstance(found := self._answering.step(question), DataRequirements):
                self._read(question, found)
        except Exception:  # noqa: BLE001  whatever it was: told to the log, never to the client
            return self._answering.break_off(question)
        return found

    def _read(self, question: PendingRequest, needs: DataRequirements) -> None:
        for kind, ids in needs.ids.items():
            stamp = self._answering.stamp()
            try:
                if kind == RULES:
                    question.rules = self._store.read_rules(self._engine.rules)
                    self._answering.admit_rules(question.rules, stamp)
                else:
                    found = whole(ids, self._store.find(kind, ids, needs.address if kind == KEY else None))
                    self._answering.admit(kind, found, stamp)
                    question.found |= {(kind, identity): record for identity, record in found.items()}
            except StoreAwayError as error:
                lack(question, kind, ids, error)
        for payment in needs.payments:
            question.paid[payment.number] = self._pay(payment)

    def _pay(self, payment: Payment) -> Spend | Exception:
        try:
            return self._budgets.spend(payment.buckets, payment.cost, refuse_on_loss=payment.refuse_on_loss)
        except DependencyUnavailableError as error:
            return error


def whole(ids: frozenset[str], found: Mapping[str, Found]) -> dict[str, Found | None]:
    """None for each that there is not."""
    return {identity: found.get(identity) for identity in ids}


def lack(question: PendingRequest, kind: str, ids: frozenset[str], error: Exception) -> None:
    """Nothing is known of these: that is an answer too."""
    if kind == RULES:
        question.rules = error
    else:
        question.found |= dict.fromkeys(((kind, identity) for identity in ids), error)
