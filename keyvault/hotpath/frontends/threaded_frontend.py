"""The frontend for threads: each request waits for the database in its own thread."""

from collections.abc import Mapping
from typing import Protocol

from keyvault.access.limits import Bucket, Spend
from keyvault.access.policy_snapshot import PolicySnapshot
from keyvault.domain.errors import DependencyUnavailableError
from keyvault.hotpath.engine.engine import Engine
from keyvault.hotpath.messages.pending_requests import (
    KEY,
    RULES,
    DataRequirements,
    Found,
    Headers,
    PendingRequest,
    PendingSpend,
)
from keyvault.hotpath.messages.responses import HttpResponse
from keyvault.hotpath.slow_path.slow_path import SlowPath


class StoreUnavailableError(Exception):
    """The database did not answer: the requested data is unknown."""


class Store(Protocol):
    """The primary database. Methods raise StoreUnavailableError."""

    def find(self, kind: str, ids: frozenset[str], address: str | None) -> Mapping[str, Found]:
        """Return the existing records by id."""

    def read_rules(self, known: PolicySnapshot | None) -> PolicySnapshot:
        """Return the policy snapshot; `known` itself if nothing has changed since."""


class BlockingBudgets(Protocol):
    def spend(self, buckets: tuple[Bucket, ...], cost: int, *, refuse_on_loss: bool) -> Spend: ...


class ThreadedFrontend:
    """The frontend of one process. Threads share it."""

    def __init__(self, engine: Engine, store: Store, budgets: BlockingBudgets) -> None:
        self._engine = engine
        self.verify_known = engine.verify_known
        """The fast path. Call `answer` when it returns anything but an HttpResponse."""
        self._slow_path = SlowPath(engine)
        self._store = store
        self._budgets = budgets

    def answer(self, method: str, target: str, headers: Headers, body: bytes | None) -> HttpResponse:
        """Answer by the slow path. Never raises. `target` is path and query as sent."""
        pending = self._slow_path.open_request(method, target, headers, body)
        try:
            while isinstance(found := self._slow_path.step(pending), DataRequirements):
                self._read(pending, found)
        except Exception:  # noqa: BLE001  any error is logged and never shown to the client
            return self._slow_path.answer_failure(pending)
        return found

    def _read(self, pending: PendingRequest, needs: DataRequirements) -> None:
        for kind, ids in needs.ids.items():
            stamp = self._slow_path.stamp()
            try:
                if kind == RULES:
                    pending.rules = self._store.read_rules(self._engine.rules)
                    self._slow_path.admit_rules(pending.rules, stamp)
                else:
                    found = with_absent(ids, self._store.find(kind, ids, needs.address if kind == KEY else None))
                    self._slow_path.admit(kind, found, stamp)
                    pending.found |= {(kind, identity): record for identity, record in found.items()}
            except StoreUnavailableError as error:
                record_failure(pending, kind, ids, error)
        for spend in needs.spends:
            pending.spent[spend.number] = self._spend(spend)

    def _spend(self, spend: PendingSpend) -> Spend | Exception:
        try:
            return self._budgets.spend(spend.buckets, spend.cost, refuse_on_loss=spend.refuse_on_loss)
        except DependencyUnavailableError as error:
            return error


def with_absent(ids: frozenset[str], found: Mapping[str, Found]) -> dict[str, Found | None]:
    """Return all ids with their records; None for those that do not exist."""
    return {identity: found.get(identity) for identity in ids}


def record_failure(pending: PendingRequest, kind: str, ids: frozenset[str], error: Exception) -> None:
    """Record that these could not be read."""
    if kind == RULES:
        pending.rules = error
    else:
        pending.found |= dict.fromkeys(((kind, identity) for identity in ids), error)
