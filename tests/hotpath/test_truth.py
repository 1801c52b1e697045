"""The next request sees every change: each operation of the services against each tier of an engine's cache.

Before each operation three engines get every request. One, on the host of the operation, has cached every verdict,
alone and in batches. One on that host has read each record without a proof. One on another host gets changes from the
feed alone. After the operation each answers like an engine with an empty cache.
"""

import json
import logging
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.apps import apps

from keyvault.access.permissions import SERVICE_PERMISSIONS
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER
from keyvault.domain.environments import Environment
from keyvault.domain.keystring import STRING_SCOPE, KeyString, StringKind, StringScope, mint_keystring
from keyvault.hotpath.adapters.assembly import make_follower
from keyvault.hotpath.messages.pending_requests import BATCH
from keyvault.hotpath.messages.requests import MAX_BATCH_REQUESTS
from keyvault.hotpath.messages.responses import HttpResponse
from keyvault.models import Change
from keyvault.models.recording import RecordedModel
from keyvault.services.keys import lifecycle
from keyvault.services.recording.changes import FeedRewoundError
from keyvault.services.tokens import customer_tokens, service_tokens
from tests.entry_points.golden import forged
from tests.factories import grant, issue, make_token, now
from tests.services.conftest import Scene
from tests.services.recording.test_transaction import ACTIONS, DRAFT
from tests.services.rows import disable_triggers
from tests.services.tokens.test_customer_tokens import token_of

from .conftest import revoke
from .priming import Primed, Still, decision, encode, prime, unnumbered

pytestmark = [pytest.mark.database, pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("usage")]

MOVED = {
    "endpoint": "catalog.endpoints.withdraw_endpoint",
    "limit": "limits.overrides.set_endpoint_limit",
    "account": "merchants.merchants.suspend_account",
    "merchant": "merchants.merchants.suspend_merchant",
    "credential": "keys.credentials.restrict_credential",
    "key": "keys.lifecycle.revoke_key",
    "customer_token": "tokens.customer_tokens.revoke_customer_token",
    "service_token": "tokens.service_tokens.revoke_service_token",
}
"""For each kind of subject an operation that must change a verdict, so that the tests cover the kind."""

ALTERING = [
    # One operation of each kind of subject runs on PostgreSQL too: the feed carries subjects, whatever the operation.
    pytest.param(name, marks=() if name in MOVED.values() else pytest.mark.sqlite)
    for name, act in ACTIONS.items()
    if act.changes
]

Asked = tuple[str, dict[str, Any]]
"""A service token and a request with it."""


class Minted:
    """Every string that the services have minted during the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.strings: list[KeyString] = []
        self.planned: list[KeyString] = []
        for module in (customer_tokens, lifecycle, service_tokens):
            monkeypatch.setattr(module, "mint_keystring", self._mint)

    def _mint(
        self, key_prefix: str, kind: StringKind, scope: StringScope, random_bytes: Callable[[int], bytes]
    ) -> KeyString:
        made = self.planned.pop() if self.planned else mint_keystring(key_prefix, kind, scope, random_bytes)
        self.strings.append(made)
        return made

    def texts(self, *kinds: StringKind) -> list[tuple[str, Environment]]:
        return [
            (each.text.reveal(), environment)
            for each in self.strings
            if each.kind in kinds
            for environment in Environment
            if each.scope in {STRING_SCOPE[environment], StringScope.ALL}
        ]

    def questions(self) -> Iterator[Asked]:
        """Return every request with these strings."""
        services = dict.fromkeys(text for text, _ in self.texts(StringKind.SERVICE_TOKEN))
        ours = next(iter(services))
        bearers = self.texts(StringKind.CUSTOMER_TOKEN)
        for key, environment in self.texts(StringKind.PRIVATE, StringKind.PUBLIC):
            asked = {"key": key, "environment": environment}
            by_name = {**asked, "endpoint": "orders.create"}
            yield from ((service, by_name) for service in services)
            yield from ((ours, {**asked, "endpoint": name}) for name in ("client.configuration", DRAFT.name))
            yield ours, {**asked, "method": "GET", "path": f"/{environment}/merchants/orders/ord_00000000000000000000"}
            yield ours, {**by_name, "client_ip": "192.0.2.9", "origin": "https://shop.example"}
            for bearer, of in bearers:
                if of is environment:
                    yield ours, {**asked, "endpoint": "customers.me", "customer_token": bearer}


@pytest.fixture
def minted(monkeypatch: pytest.MonkeyPatch) -> Minted:
    return Minted(monkeypatch)


def answers(primed: Primed, asked: list[Asked]) -> list[tuple[int, bytes]]:
    return [unnumbered(primed.ask(*each)) for each in asked]


def answers_together(primed: Primed, asked: list[Asked]) -> list[tuple[int, bytes]]:
    """Send the same requests in batches per service token, in the order of `asked`."""
    found: dict[int, tuple[int, bytes]] = {}
    for service in dict.fromkeys(service for service, _ in asked):
        numbers = [number for number, each in enumerate(asked) if each[0] == service]
        for start in range(0, len(numbers), MAX_BATCH_REQUESTS):
            part = numbers[start : start + MAX_BATCH_REQUESTS]
            answer = primed.ask(service, {"requests": [asked[number][1] for number in part]}, BATCH)
            if answer.status != 200:
                found |= dict.fromkeys(part, unnumbered(answer))
                continue
            decisions = json.loads(answer.body)["decisions"]
            for place, (number, decided) in enumerate(zip(part, decisions, strict=True)):
                request_id = f"{answer.request_id}-{place}"
                assert decided["request_id"] == request_id
                found[number] = unnumbered(HttpResponse(200, encode(decided), request_id))
    return [found[number] for number in range(len(asked))]


def fresh(asked: list[Asked]) -> list[tuple[int, bytes]]:
    return answers(prime(may_remember=False), asked)


def prove_nothing(primed: Primed, asked: list[Asked]) -> None:
    """Make the engine read every record, with strings that prove nothing."""
    for service, question in asked:
        wrong: dict[str, Any] = {name: forged(question[name]) for name in ("key", "customer_token") if name in question}
        primed.ask(forged(service), question)
        primed.ask(service, {**question, **wrong})
        if "customer_token" in wrong:
            primed.ask(service, {**question, "customer_token": wrong["customer_token"]})


@pytest.fixture
def no_log_of_verdicts(caplog: pytest.LogCaptureFixture) -> None:
    """Log no verdict: a line for each takes a fifth of the time of many requests."""
    caplog.set_level(logging.WARNING, "keyvault")


@pytest.mark.usefixtures("no_log_of_verdicts")
@pytest.mark.parametrize("name", ALTERING)
def test_engine_after_any_operation_answers_like_one_without_a_cache(scene: Scene, minted: Minted, name: str) -> None:
    """Guarantee: once an act has returned, no engine of its host answers from older data, whatever it had cached.

    The same holds for each engine of another host that has read the feed since.
    """
    make_token(*SERVICE_PERMISSIONS)
    token_of(issue(scene.sandbox)[0])
    ended, ended_text = issue(scene.sandbox)
    revoke(ended)
    act = ACTIONS[name].prepare(scene)
    asked = list(minted.questions())
    proved, read, elsewhere = prime(), prime(), prime(generation=Still())
    follower = make_follower(elsewhere.engine, "test")
    follower.poll_once()
    before = fresh(asked)
    for primed in (proved, elsewhere):
        assert answers(primed, asked) == answers(primed, asked) == answers(primed, asked) == before
        assert answers_together(primed, asked) == answers_together(primed, asked) == before
        assert primed.engine.memory.granted or not any(b'"allowed":true' in body for _, body in before)
        denied, from_memory = [each for each in asked if each[1]["key"] == ended_text.reveal()], primed.from_memory
        assert answers(primed, denied) == fresh(denied)
        assert primed.from_memory - from_memory >= 5, "with each service's token, and by other endpoints"
    assert proved.from_memory or not any(b'"allowed":true' in body for _, body in before)
    prove_nothing(read, asked)
    assert len(read.engine.memory.keys.by_id)
    assert not read.engine.memory.keys.by_tag

    act()

    follower.poll_once()
    asked = list(minted.questions())
    expected = fresh(asked)
    for primed in (proved, read, elsewhere):
        assert answers_together(primed, asked) == expected
        assert answers(primed, asked) == expected
        assert answers(primed, asked) == expected
    if name in MOVED.values():
        assert expected[: len(before)] != before


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_engine_expired_key_is_revoked_once_it_is_reported(scene: Scene, is_elsewhere: bool) -> None:
    """A revocation replaces the denial of an expired key."""
    _, service = make_token(*SERVICE_PERMISSIONS)
    key, text = issue(scene.sandbox, expires_in_days=30, at=now() - timedelta(days=40))
    lifecycle.expire_key(grant(WORKER, P.ROTATIONS_ADVANCE, scene.sandbox), key)
    asked = {"key": text.reveal(), "environment": "sandbox", "endpoint": "orders.create"}
    primed = prime(generation=Still()) if is_elsewhere else prime()
    follower = make_follower(primed.engine, "test")
    follower.poll_once()
    for _ in range(3):
        assert decision(primed.ask(service.reveal(), asked)) == (401, "key_expired")
    lifecycle.report_compromise(grant(scene.admin, P.KEYS_REPORT_COMPROMISE, scene.sandbox), key)
    follower.poll_once()
    for _ in range(3):
        assert decision(primed.ask(service.reveal(), asked)) == (401, "key_revoked")


def kinds() -> dict[str, type[RecordedModel]]:
    """The kinds of subjects that a row may alter."""
    found: dict[str, type[RecordedModel]] = {}
    for model in apps.get_models():
        if issubclass(model, RecordedModel):
            subject = model().alters()
            if subject is not None:
                found[subject[0]] = model
    return found


def test_engine_every_kind_of_subject_has_an_operation_that_changes_a_verdict() -> None:
    """Every kind of subject has a test here that it reaches the caches."""
    assert set(kinds()) == set(MOVED)
    for kind, name in MOVED.items():
        assert kind in ACTIONS[name].changes


def test_engine_every_kind_of_subject_is_evicted_by_its_name() -> None:
    """The memory evicts each kind of subject by name; an unknown kind clears the whole cache.

    A new kind without an eviction rule therefore fails this test.
    """
    for kind in kinds():
        primed = prime()
        primed.engine.memory.absent.put("key", "someone", 0.0)
        primed.engine.evict([(kind, "unrelated")])
        assert len(primed.engine.memory.absent) == 1, kind


@pytest.mark.postgres_once
@pytest.mark.parametrize("is_elsewhere", [False, True])
@pytest.mark.parametrize("kind", [StringKind.PRIVATE, StringKind.CUSTOMER_TOKEN, StringKind.SERVICE_TOKEN])
def test_engine_finds_a_key_that_was_issued_after_a_miss(
    scene: Scene, minted: Minted, kind: StringKind, is_elsewhere: bool
) -> None:
    """An id that was unknown is found once a key with this id is issued."""
    _, service = make_token(*SERVICE_PERMISSIONS)
    key, text = issue(scene.sandbox)
    primed = prime(generation=Still()) if is_elsewhere else prime()
    follower = make_follower(primed.engine, "test")
    follower.poll_once()
    planned = mint_keystring("kv", kind, STRING_SCOPE[Environment.SANDBOX], lambda size: bytes(range(7, 7 + size)))
    asked: dict[str, Any] = {"key": text.reveal(), "environment": "sandbox", "endpoint": "customers.me"}
    token = service.reveal()
    if kind is StringKind.PRIVATE:
        asked |= {"key": planned.text.reveal(), "endpoint": "orders.create"}
    elif kind is StringKind.CUSTOMER_TOKEN:
        asked["customer_token"] = planned.text.reveal()
    else:
        asked["endpoint"], token = "orders.create", planned.text.reveal()
    refused = primed.ask(token, asked)
    assert b'"allowed":true' not in refused.body
    assert len(primed.engine.memory.absent) == 1
    minted.planned.append(planned)
    if kind is StringKind.PRIVATE:
        issue(scene.sandbox, label="another")
    elif kind is StringKind.CUSTOMER_TOKEN:
        token_of(key)
    else:
        make_token(*SERVICE_PERMISSIONS, name="another", scope=StringScope.SANDBOX)
    assert not minted.planned
    if is_elsewhere:
        follower.poll_once()
    assert b'"allowed":true' in primed.ask(token, asked).body


def test_engine_whose_follower_detects_a_lost_feed_answers_nothing(scene: Scene) -> None:
    """Guarantee: after a fail-over to a replica that lacks a revocation, the key stays refused.

    The database that the slow path reads has the key as active again.
    """
    _, service = make_token(*SERVICE_PERMISSIONS)
    key, text = issue(scene.sandbox)
    asked = {"key": text.reveal(), "environment": "sandbox", "endpoint": "orders.create"}
    primed = prime(generation=Still())
    follower = make_follower(primed.engine, "test")
    follower.poll_once()
    assert b'"allowed":true' in primed.ask(service.reveal(), asked).body
    lost = Change.objects.create(subject_kind="key", subject_id=key.key_id, at=now())
    follower.poll_once()
    disable_triggers()
    lost.delete()
    with pytest.raises(FeedRewoundError):
        follower.poll_once()
    answer = primed.ask(service.reveal(), asked)
    assert (answer.status, json.loads(answer.body)["code"]) == (503, "verifier_stale")
