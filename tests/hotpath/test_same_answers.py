"""Answers from the cache and from the database, by name and by path, alone and in batches, are byte-identical.

Only the request id differs.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
from django.db import transaction
from hypothesis import HealthCheck, given, settings
from pytest_django import DjangoDbBlocker

from keyvault.access.limits import Limit
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST
from keyvault.access.roles import Role
from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind
from keyvault.domain.keystring import StringScope
from keyvault.hotpath.messages.pending_requests import BATCH
from keyvault.services.limits.limiter import FailedProofs
from keyvault.services.limits.overrides import set_endpoint_limit
from keyvault.services.recording.transaction import recorded
from tests.entry_points.golden import ADDRESS, BEARERS, ENDPOINTS, STORED, UNPROVED, Row
from tests.entry_points.golden_rows import Rows, make_rows
from tests.factories import account, grant, issue, make_token, the_operator

from .priming import Primed, masked, prime, unnumbered

pytestmark = [pytest.mark.database, pytest.mark.django_db, pytest.mark.usefixtures("usage")]


@dataclass(frozen=True)
class RequestParts:
    rows: Rows
    others: list[str]
    """Keys of another merchant, whose account has another limit."""
    services: list[str]


@pytest.fixture(scope="module")
def world(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[RequestParts]:
    """Make the rows once for all tests, and roll them back after the module."""
    with django_db_blocker.unblock(), transaction.atomic():
        rows = make_rows()
        place = account("globex")
        with recorded(grant(HOST, P.MERCHANTS_WRITE, place), P.MERCHANTS_WRITE, "test.limited", account=place):
            place.compare_and_swap(limit_count=50_000, limit_seconds=60)
        admin = the_operator("admin", Role.KEY_ADMINISTRATOR)
        for environment in Environment:
            set_endpoint_limit(grant(admin, P.LIMITS_WRITE), environment, "orders.create", Limit(700_000, 60))
        yield RequestParts(
            rows,
            [issue(place, kind=kind, label=f"{kind} {n}")[1].reveal() for kind in KeyKind for n in range(2)],
            [
                rows.service,
                make_token(P.KEYS_VERIFY, scope=StringScope.ALL, merchants=["globex"])[1].reveal(),
                make_token(P.KEYS_VERIFY, scope=StringScope.SANDBOX, name="sandbox alone")[1].reveal(),
                make_token(P.KEYS_VERIFY, scope=StringScope.ALL, name="probe", is_probe=True)[1].reveal(),
                make_token(P.KEYS_READ, name="reader")[1].reveal(),
            ],
        )
        transaction.set_rollback(True)


class Asking:
    """Draws requests that are mostly valid, with occasional faults."""

    def __init__(self, world: RequestParts, data: st.DataObject) -> None:
        self._world = world
        self._data = data

    def choose(self, *values: Any) -> Any:
        return self._data.draw(st.sampled_from(values))

    def mostly(self, usual: Any, *values: Any) -> Any:
        return usual if self.choose(True, True, True, False) else self.choose(*values)

    def question(self) -> dict[str, Any]:
        rows = self._world.rows
        home = self.choose(*Environment)
        state = self.mostly("active", *STORED, *UNPROVED)
        row = Row(
            self.choose("private", "public"),
            "own",
            state,
            self.mostly("unnamed", "own", "other"),
            self.mostly(self.choose("orders.create", "payouts.list", "rates.read", "client.configuration"), *ENDPOINTS),
            "no_origin",
            self.mostly("no_bearer", *BEARERS),
            "no_store",
        )
        asked: dict[str, Any] = {"key": rows.key(home, row), "environment": home.value}
        if self.choose(True, True, False):
            asked["endpoint"] = row.endpoint
        else:
            method, path = rows.path(home, row)
            asked |= {"method": method, "path": self.choose(path, f"/{home}{path}", f"/{home}{path}?x=1")}
        if self.mostly(False, True):
            asked |= {"key": self.choose(*self._world.others), "environment": "sandbox"}
        may_have = {
            "merchant": rows.merchant(row),
            "customer_token": rows.bearer(home, row),
            "origin": self.mostly(None, "https://shop.example", ""),
            "store": self.mostly(None, "store-1", "  "),
            "client_ip": self.mostly(ADDRESS, None, OVER_ITS_LIMIT),
            "user_agent": self.mostly(None, "shop/1 \u00e9", ""),
        }
        asked |= {
            name: value for name, value in may_have.items() if value is not None or self.choose(True, False, False)
        }
        more: dict[str, Any] = self.mostly({}, {"cost": 3}, {"cost": 700_001}, {"dry_run": True}, {"dry_run": False})
        return asked | more


OVER_ITS_LIMIT = "2001:db8::1"
"""The client address that is over its limit of failed proofs."""


def _note(proofs: FailedProofs, address: str | None) -> int | None:
    """Count no failed proof: both engines share the real counts, which time gives back, so their answers may differ."""
    return 1 if address == OVER_ITS_LIMIT else None


@pytest.fixture(scope="module")
def pair(world: RequestParts) -> Iterator[tuple[Primed, Primed]]:
    """A caching engine and one without a cache; the limits of both give nothing back and are spent alike."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FailedProofs, "note", _note)
        yield prime(full=False), prime(full=False, may_remember=False)


SLOW = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@SLOW
@given(data=st.data())
def test_cached_answers_equal_those_from_the_database(
    world: RequestParts, pair: tuple[Primed, Primed], data: st.DataObject
) -> None:
    """Guarantee: the cache allows nothing that the slow path denies, and both give the same bytes.

    This includes keys, clients and merchants that share cached results of others.
    """
    asking = Asking(world, data)
    quick, whole = pair
    for _ in range(data.draw(st.integers(1, 4))):
        service, asked = asking.mostly(*world.services[:1], *world.services), asking.question()
        for _ in range(2):
            assert masked(quick.ask(service, asked)) == masked(whole.ask(service, asked)), asked


@SLOW
@given(data=st.data())
def test_answers_of_a_batch_equal_those_of_single_requests(
    world: RequestParts, pair: tuple[Primed, Primed], data: st.DataObject
) -> None:
    asking = Asking(world, data)
    quick, whole = pair
    several = [asking.question() for _ in range(data.draw(st.integers(1, 5)))]
    # Alone, a cost above the burst is an error of the call; in a batch it is a decision.
    several = [{**asked, "cost": 2} if asked.get("cost", 1) > 1 else asked for asked in several]
    service = world.rows.service
    found = quick.ask(service, {"requests": several}, BATCH)
    # Cached requests are decided first, so the remaining limit counts down in another order.
    assert unnumbered(found) == unnumbered(whole.ask(service, {"requests": several}, BATCH))
    alone = [whole.ask(service, asked) for asked in several]
    for one in several:
        quick.ask(service, one)  # so that both engines have spent the same
    again = whole.ask(service, {"requests": several}, BATCH)
    assert unnumbered(quick.ask(service, {"requests": several}, BATCH)) == unnumbered(again)
    for one in several:  # in total both have spent the same
        assert masked(quick.ask(service, one)) == masked(whole.ask(service, one))
    decisions = json.loads(found.body)["decisions"]
    assert [_verdict(each) for each in decisions] == [_verdict(json.loads(answer.body)) for answer in alone]


def _verdict(decision: dict[str, Any]) -> dict[str, Any]:
    return {name: decision.get(name) for name in ("allowed", "status", "code", "key_id", "customer_id")}


def test_cached_answers_are_used(world: RequestParts, pair: tuple[Primed, Primed]) -> None:
    """The tests above compare cached answers only if the cache is used."""
    quick, whole = pair
    row = Row("private", "own", "active", "unnamed", "orders.create", "no_origin", "no_bearer", "no_store")
    asked = {"key": world.rows.key(Environment.SANDBOX, row), "environment": "sandbox", "endpoint": "orders.create"}
    for _ in range(3):
        assert masked(quick.ask(world.rows.service, asked)) == masked(whole.ask(world.rows.service, asked))
    before = quick.from_memory
    assert quick.ask(world.rows.service, asked).status == 200
    assert quick.from_memory == before + 1
    assert whole.from_memory == 0
