"""The golden matrix: one table of verdicts, read by people, and demanded of every door.

`KEYVAULT_TEST_REWRITE=matrix pytest tests/entry_points/test_golden_matrix.py` writes golden_matrix.txt anew; the diff
is the review.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from django.db import transaction
from pytest_django import DjangoDbBlocker

from keyvault.domain.environments import Environment
from keyvault.services.limits.limiter import failed_proofs
from keyvault.services.usage.recorder import UsageLog
from keyvault.services.verification.refusals import RefusalLog
from tests.access.folding import folded
from tests.entry_points.engine_clients import CLIENTS, EngineClient, LoopClient, Response, WsgiClient
from tests.entry_points.golden import STATUS, Row, matrix, reaches_requests, sample
from tests.entry_points.golden_entry_points import DOORS, Asked, Door, Nginx, Traefik, Verify, VerifyBatch, in_batches
from tests.entry_points.golden_rows import Rows, make_rows, other

pytestmark = [pytest.mark.database, pytest.mark.django_db]

GOLDEN = Path(__file__).with_name("golden_matrix.txt")
ENGINES = [door for door in DOORS if door.name not in {"integration", "explain"}]
LEAST = 500
"""Cases of each door."""

ENDED = {"deactivated", "revoked", "compromised", "destroyed"}
"""States that no key ever leaves for a living one."""

HEADING = """\
# The verdict that every door gives, by credential, request and circumstances. `*`: whatever it is, the answer is the
# same; `a|b`: the same for these; `!a|b`: the same for all but these. Endpoints from payouts.list on are added by
# operators. Made by test_golden_matrix.py; golden.py says what each word stands for, golden_doors.py where a door
# answers otherwise, and why. Review a change of this file as a diff, against the table of verdicts in design/API.md.
#
# status and code           kind  environment  state  merchant  endpoint  origin  bearer  store
"""


@pytest.fixture(scope="module")
def demanded() -> dict[Row, str]:
    return matrix()


@pytest.fixture(scope="module")
def rows(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[Rows]:
    """Made once for all doors, and gone with the module."""
    with django_db_blocker.unblock(), transaction.atomic():
        yield make_rows()
        transaction.set_rollback(True)


@pytest.fixture(autouse=True)
def quiet_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the doors note is not written: nothing here is about it."""
    monkeypatch.setattr(UsageLog, "start", lambda self: None)
    for door in ("hotpath.adapters.assembly", "api.integration"):
        monkeypatch.setattr(f"keyvault.{door}.usage_log", UsageLog())
        monkeypatch.setattr(f"keyvault.{door}.refusal_log", RefusalLog())


def test_matrix_is_the_one_that_was_reviewed(demanded: Mapping[Row, str]) -> None:
    text = HEADING + folded({tuple(row): f"{STATUS[code]} {code}" for row, code in demanded.items()})
    if os.environ.get("KEYVAULT_TEST_REWRITE") == "matrix":
        GOLDEN.write_text(text)
        pytest.skip(f"{GOLDEN.name} was written; read its diff")
    assert text == GOLDEN.read_text()


@pytest.mark.parametrize("door_type", DOORS, ids=lambda door: door.name)
def test_every_door_gives_the_verdicts_of_the_matrix(
    door_type: type[Door], rows: Rows, demanded: Mapping[Row, str]
) -> None:
    """One table of rules, seven ways to ask: no door is more lenient, or says it in another way."""
    expect_the_matrix(door_type(rows, demanded), demanded)


@pytest.mark.parametrize("client_type", CLIENTS)
@pytest.mark.parametrize("door_type", ENGINES, ids=lambda door: door.name)
def test_both_doors_of_the_verifier_give_the_verdicts_of_the_matrix(
    door_type: type[Door],
    client_type: type[EngineClient],
    rows: Rows,
    demanded: Mapping[Row, str],
) -> None:
    """What is remembered makes no door more lenient. (The doors of the test above ask the engine without memory.)"""
    client = client_type(may_remember=True)
    expect_the_matrix(door_type(rows, demanded, client), demanded)  # type: ignore[arg-type]  # asked like Django's
    assert bool(client.engine.answered_from_memory) is issubclass(door_type, Verify)


@pytest.mark.parametrize("door_type", [Verify, VerifyBatch, Traefik, Nginx], ids=lambda door: door.name)
def test_both_doors_of_the_verifier_answer_alike_to_the_byte(
    door_type: type[Door], rows: Rows, demanded: Mapping[Row, str]
) -> None:
    """Guarantee: one engine, two doors: status, headers and body are the same but for the request's id."""
    answers: list[list[Response]] = []
    for client_type in (WsgiClient, LoopClient):
        failed_proofs.cache_clear()
        client = _Keeping(client_type)
        door = door_type(rows, demanded, client)  # type: ignore[arg-type]  # asked like Django's
        cases = [_placed(row, number) for number, row in enumerate(sample(demanded, filter(door.can_ask, demanded), 1))]
        for batch in in_batches(cases, door.at_once):
            door.ask(batch)
        answers.append(client.kept)
    one, two = answers
    assert len(one) == len(two) > 1
    for first, second in zip(one, two, strict=True):
        assert _masked(first) == _masked(second)


@pytest.mark.parametrize("client_type", CLIENTS)
def test_both_doors_of_the_verifier_deny_what_has_ended_again_in_the_same_bytes(
    client_type: type[EngineClient], rows: Rows, demanded: Mapping[Row, str]
) -> None:
    """Whatever else is asked with such a key: the second answer is the first but for the request's id, headers and
    all, and comes from memory."""
    client = _Keeping(client_type)
    door = Verify(rows, demanded, client)  # type: ignore[arg-type]  # asked like Django's
    ended = [row for row in demanded if row.state in ENDED and row.environment == "own" and door.can_ask(row)]
    chosen = sample(demanded, ended, 150)
    for number, row in enumerate(chosen):
        for _ in range(2):
            assert door.ask([_placed(row, number)]) == [door.demand(row)]
        first, second = client.kept[-2:]
        assert _masked(first) == _masked(second)
        assert first["X-Request-Id"] != second["X-Request-Id"]
    assert {row.state for row in chosen} == ENDED
    assert client.from_memory >= len(chosen) > 100


class _Keeping:
    """Keeps every answer of a client that remembers."""

    def __init__(self, client_type: type[EngineClient]) -> None:
        self._client = client_type(may_remember=True)
        self.kept: list[Response] = []

    @property
    def from_memory(self) -> int:
        return self._client.engine.answered_from_memory

    def get(self, *given: Any, **named: Any) -> Response:
        self.kept.append(self._client.get(*given, **named))
        return self.kept[-1]

    def post(self, *given: Any, **named: Any) -> Response:
        self.kept.append(self._client.post(*given, **named))
        return self.kept[-1]


def _masked(response: Response) -> tuple[int, list[tuple[str, str]], bytes]:
    request_id = response["X-Request-Id"]
    headers = {**response.headers, "x-request-id": "*"}
    return response.status_code, sorted(headers.items()), response.content.replace(request_id.encode(), b"*")


def expect_the_matrix(door: Door, demanded: Mapping[Row, str]) -> None:
    sampled = sample(demanded, filter(door.can_ask, demanded), LEAST)
    assert len(sampled) >= LEAST
    assert {demanded[row] for row in sampled} == {demanded[row] for row in demanded if door.can_ask(row)}
    assert sum(map(reaches_requests, sampled)) > LEAST // 3
    cases = [_placed(row, number) for number, row in enumerate(sampled)]
    wrong = []
    for batch in in_batches(cases, door.at_once):
        before = transaction.savepoint()
        answers = door.ask(batch)
        transaction.savepoint_rollback(before)
        wrong += [
            f"{case.row} of {case.home}: {answer}, not {door.demand(case.row)}"
            for case, answer in zip(batch, answers, strict=True)
            if answer != door.demand(case.row)
        ]
    assert not wrong, "\n".join([f"{len(wrong)} of {len(cases)}", *wrong[:20]])


def _placed(row: Row, number: int) -> Asked:
    """Both environments are somebody's home in turn."""
    home = list(Environment)[number % 2]
    return Asked(row, home, home if row.environment == "own" else other(home))
