"""However a question is answered, from memory or from the database, by name or by line, alone or with others:
the answer is the same to the byte but for the request's id."""

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
from keyvault.services.limits.overrides import set_endpoint_limit
from keyvault.services.recording.transaction import recorded
from tests.entry_points.golden import ADDRESS, BEARERS, ENDPOINTS, STORED, UNPROVED, Row
from tests.entry_points.golden_rows import Rows, make_rows
from tests.factories import account, grant, issue, make_token, the_operator

from .priming import Primed, masked, prime, unnumbered

pytestmark = [pytest.mark.database, pytest.mark.django_db, pytest.mark.usefixtures("usage")]


@dataclass(frozen=True)
class World:
    rows: Rows
    others: list[str]
    """Keys of the other merchant, whose account's limit is another one."""
    services: list[str]


@pytest.fixture(scope="module")
def world(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[World]:
    """Made once for all tests, and gone with the module."""
    with django_db_blocker.unblock(), transaction.atomic():
        rows = make_rows()
        place = account("globex")
        with recorded(grant(HOST, P.MERCHANTS_WRITE, place), P.MERCHANTS_WRITE, "test.limited", account=place):
            place.compare_and_swap(limit_count=50_000, limit_seconds=60)
        admin = the_operator("admin", Role.KEY_ADMINISTRATOR)
        for environment in Environment:
            set_endpoint_limit(grant(admin, P.LIMITS_WRITE), environment, "orders.create", Limit(700_000, 60))
        yield World(
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
    """Draws questions that are mostly good, with one thing or another about them that is not."""

    def __init__(self, world: World, data: st.DataObject) -> None:
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
            self.mostly("nobody", "own", "other"),
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
            "client_ip": self.mostly(ADDRESS, None, "2001:db8::1"),
            "user_agent": self.mostly(None, "shop/1 \u00e9", ""),
        }
        asked |= {
            name: value for name, value in may_have.items() if value is not None or self.choose(True, False, False)
        }
        more: dict[str, Any] = self.mostly({}, {"cost": 3}, {"cost": 700_001}, {"dry_run": True}, {"dry_run": False})
        return asked | more


@pytest.fixture(scope="module")
def pair(world: World) -> tuple[Primed, Primed]:
    """One that remembers, and one that never does; the limits of both stand still, and are spent from alike."""
    return prime(full=False), prime(full=False, may_remember=False)


SLOW = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@SLOW
@given(data=st.data())
def test_answers_from_memory_are_those_from_the_database_to_the_byte(
    world: World, pair: tuple[Primed, Primed], data: st.DataObject
) -> None:
    """Guarantee: memory says yes nowhere where the whole judgement says no, and says it in the same bytes; also for
    keys, callers and merchants that share what was worked out for others."""
    asking = Asking(world, data)
    quick, whole = pair
    for _ in range(data.draw(st.integers(1, 4))):
        service, asked = asking.mostly(*world.services[:1], *world.services), asking.question()
        for _ in range(2):
            assert masked(quick.ask(service, asked)) == masked(whole.ask(service, asked)), asked


@SLOW
@given(data=st.data())
def test_answers_of_a_batch_are_those_of_its_questions_one_by_one(
    world: World, pair: tuple[Primed, Primed], data: st.DataObject
) -> None:
    asking = Asking(world, data)
    quick, whole = pair
    several = [asking.question() for _ in range(data.draw(st.integers(1, 5)))]
    # The decision on a cost that is too high is an error of a call that asks for it alone.
    several = [{**asked, "cost": 2} if asked.get("cost", 1) > 1 else asked for asked in several]
    service = world.rows.service
    found = quick.ask(service, {"requests": several}, BATCH)
    # What is in memory is decided first, so that what is left of a limit counts down in another order.
    assert unnumbered(found) == unnumbered(whole.ask(service, {"requests": several}, BATCH))
    alone = [whole.ask(service, asked) for asked in several]
    for one in several:
        quick.ask(service, one)  # so that the limits of both have been spent from alike
    again = whole.ask(service, {"requests": several}, BATCH)
    assert unnumbered(quick.ask(service, {"requests": several}, BATCH)) == unnumbered(again)
    for one in several:  # all told the same was spent
        assert masked(quick.ask(service, one)) == masked(whole.ask(service, one))
    decisions = json.loads(found.body)["decisions"]
    assert [_verdict(each) for each in decisions] == [_verdict(json.loads(answer.body)) for answer in alone]


def _verdict(decision: dict[str, Any]) -> dict[str, Any]:
    return {name: decision.get(name) for name in ("allowed", "status", "code", "key_id", "customer_id")}


def test_answers_from_memory_are_given_at_all(world: World, pair: tuple[Primed, Primed]) -> None:
    """Otherwise nothing above was compared."""
    quick, whole = pair
    row = Row("private", "own", "active", "nobody", "orders.create", "no_origin", "no_bearer", "no_store")
    asked = {"key": world.rows.key(Environment.SANDBOX, row), "environment": "sandbox", "endpoint": "orders.create"}
    for _ in range(3):
        assert masked(quick.ask(world.rows.service, asked)) == masked(whole.ask(world.rows.service, asked))
    before = quick.from_memory
    assert quick.ask(world.rows.service, asked).status == 200
    assert quick.from_memory == before + 1
    assert whole.from_memory == 0
