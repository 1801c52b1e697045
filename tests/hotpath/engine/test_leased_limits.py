"""An engine whose limits are leased from a shared store: each request is charged once."""

import json
from typing import Any, cast

import pytest
from django.db.models import QuerySet

from keyvault.access.limits import MAX_SECONDS
from keyvault.hotpath.adapters.stores import DatabaseStore
from keyvault.hotpath.frontends.threaded_frontend import ThreadedFrontend
from keyvault.hotpath.messages.pending_requests import BATCH, VERIFY
from keyvault.models import Account
from keyvault.services.limits.budgets import LeasedBudgets
from keyvault.services.limits.limiter import Limiter
from keyvault.services.limits.stores import LocalStore, RedisStore
from tests.hotpath.conftest import Stage
from tests.hotpath.priming import Primed, prime
from tests.services.limits.test_token_leases import SharedStore

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("usage")]

BURST = 120


def _ask(primed: Primed, stage: Stage, size: int) -> list[bool]:
    if size == 1:
        return [json.loads(primed.ask(stage.token, stage.asked, VERIFY).body)["allowed"]]
    asked: dict[str, Any] = {"requests": [stage.asked] * size}
    return [each["allowed"] for each in json.loads(primed.ask(stage.token, asked, BATCH).body)["decisions"]]


@pytest.mark.parametrize("size", [1, 7], ids=["single", "batch"])
def test_engine_with_leased_limits_admits_exactly_the_burst(stage: Stage, size: int) -> None:
    """Guarantee: a request that renews a lease is charged once. The clocks stand still, so nothing is refilled."""
    QuerySet(Account).update(limit_count=BURST, limit_seconds=MAX_SECONDS)
    shared = SharedStore()
    store = cast(RedisStore, shared)
    budgets = LeasedBudgets(Limiter(LocalStore(), None, 100), store, shared.leases())
    engine = prime(budgets=budgets).engine
    primed = Primed(engine, ThreadedFrontend(engine, DatabaseStore(), budgets), may_remember=True)
    decided = [allowed for _ in range(BURST // size + 5) for allowed in _ask(primed, stage, size)]
    assert sum(decided) == BURST
    assert shared.calls < BURST, "no lease was used"
