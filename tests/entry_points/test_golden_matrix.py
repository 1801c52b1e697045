"""The golden matrix: one reviewed table of verdicts that every entry point must give.

`KEYVAULT_TEST_REWRITE=matrix pytest tests/entry_points/test_golden_matrix.py` rewrites golden_matrix.txt; review the
diff.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from django.db import transaction
from pytest_django import DjangoDbBlocker

from keyvault.domain.environments import Environment
from keyvault.services.catalog.policy_snapshot import read_rules
from keyvault.services.limits.limiter import FailedProofs, Limiter
from keyvault.services.limits.stores import LocalStore
from keyvault.services.usage.recorder import UsageLog
from keyvault.services.verification.refusals import RefusalLog
from tests.access.folding import folded
from tests.entry_points.engine_clients import CLIENTS, EngineClient, LoopClient, Response, WsgiClient
from tests.entry_points.golden import STATUS, Row, matrix, reaches_requests, sample
from tests.entry_points.golden_entry_points import (
    ENTRY_POINTS,
    EntryPoint,
    Nginx,
    PlacedCase,
    Traefik,
    Verify,
    VerifyBatch,
    in_batches,
)
from tests.entry_points.golden_rows import Rows, make_rows, other
from tests.environment import chosen_database

pytestmark = pytest.mark.django_db

GOLDEN = Path(__file__).with_name("golden_matrix.txt")
READERS = {"verify", "integration", "explain"}
"""The entry points that read the database each in their own way; the others share the verifier's."""

ENGINES = [each for each in ENTRY_POINTS if each.name not in {"integration", "explain"}]
"""Entry points that the verification engine serves."""

DIALECTS = [each for each in ENTRY_POINTS if each.name not in READERS and each.batch_size == 1]
"""Entry points that ask the engine for one verdict at a time. They differ in how they name the request."""

IS_SQLITE = chosen_database() == "sqlite"

WIDE, NARROW = (500, 2), (150, 1)
"""Sizes of a sample: the minimum number of cases, and the number of words of a case that occur in every combination."""

FINAL = {"deactivated", "revoked", "compromised", "destroyed"}
"""States that a key never leaves for a usable one."""

FAILED_PROOFS = (
    "keyvault.hotpath.adapters.assembly",
    "keyvault.hotpath.adapters.stores",
    "tests.entry_points.engine_clients",
)
"""Modules through which the engine counts failed proofs."""

HEADING = """\
# The verdict that every entry point gives, by credential, request and circumstances. `*`: any value; `a|b`: one of
# these; `!a|b`: any but these. Operators add the endpoints from payouts.list on. test_golden_matrix.py generates this
# file; golden.py defines the words, and golden_entry_points.py defines where an entry point differs, and why. Review a
# change of this file as a diff.
#
# status and code           kind  environment  state  merchant  endpoint  origin  bearer  store
"""


@pytest.fixture(scope="module")
def demanded() -> dict[Row, str]:
    return matrix()


@pytest.fixture(scope="module")
def rows(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[Rows]:
    """Make the rows once for all entry points, and roll them back after the module."""
    with django_db_blocker.unblock(), transaction.atomic():
        yield make_rows()
        transaction.set_rollback(True)


@pytest.fixture(autouse=True)
def quiet_logs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Keep usage and refusals in memory, and write no log of verdicts: no test here reads them."""
    caplog.set_level(logging.WARNING, "keyvault")
    monkeypatch.setattr(UsageLog, "start", lambda self: None)
    for module in ("hotpath.adapters.assembly", "api.integration"):
        monkeypatch.setattr(f"keyvault.{module}.usage_log", UsageLog())
        monkeypatch.setattr(f"keyvault.{module}.refusal_log", RefusalLog())


@pytest.fixture(autouse=True)
def rules_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the catalog and the limits once for each test, because no case changes them.

    An engine without a cache spends half of a request on them.
    """
    snapshot = cache(lambda: read_rules(None))
    monkeypatch.setattr("keyvault.hotpath.adapters.stores.read_rules", lambda known: snapshot())


def test_matrix_equals_the_reviewed_file(demanded: Mapping[Row, str]) -> None:
    text = HEADING + folded({tuple(row): f"{STATUS[code]} {code}" for row, code in demanded.items()})
    if os.environ.get("KEYVAULT_TEST_REWRITE") == "matrix":
        GOLDEN.write_text(text)
        pytest.skip(f"{GOLDEN.name} was rewritten; review its diff")
    assert text == GOLDEN.read_text()


@pytest.mark.parametrize(
    "entry_point_type",
    [
        pytest.param(each, id=each.name, marks=pytest.mark.database if each.name in READERS else ())
        for each in ENTRY_POINTS
    ],
)
def test_every_entry_point_gives_the_verdicts_of_the_matrix(
    entry_point_type: type[EntryPoint], rows: Rows, demanded: Mapping[Row, str]
) -> None:
    """Guarantee: no entry point is more lenient than another, and all report the same status and code."""
    expect_the_matrix(entry_point_type(rows, demanded), demanded)


@pytest.mark.long
@pytest.mark.parametrize("client_type", [None, *CLIENTS])
@pytest.mark.parametrize("entry_point_type", DIALECTS, ids=lambda each: each.name)
def test_every_dialect_gives_the_verdicts_of_the_wide_sample(
    entry_point_type: type[EntryPoint],
    client_type: type[EngineClient] | None,
    rows: Rows,
    demanded: Mapping[Row, str],
) -> None:
    """Guarantee: no dialect is more lenient for a combination of words, with the engine's cache and without it."""
    client = () if client_type is None else (client_type(may_remember=True),)
    expect_the_matrix(entry_point_type(rows, demanded, *client), demanded, WIDE)


@pytest.mark.parametrize("client_type", CLIENTS)
@pytest.mark.parametrize("entry_point_type", ENGINES, ids=lambda each: each.name)
def test_both_frontends_of_the_verifier_give_the_verdicts_of_the_matrix(
    entry_point_type: type[EntryPoint],
    client_type: type[EngineClient],
    rows: Rows,
    demanded: Mapping[Row, str],
) -> None:
    """Guarantee: a cached verdict is never more lenient. (The test above runs the engine without its cache.)"""
    client = client_type(may_remember=True)
    expect_the_matrix(entry_point_type(rows, demanded, client), demanded)  # type: ignore[arg-type]  # Django's interface
    assert bool(client.engine.answered_from_memory) is issubclass(entry_point_type, Verify)


@pytest.mark.parametrize("entry_point_type", [Verify, VerifyBatch, Traefik, Nginx], ids=lambda each: each.name)
def test_both_frontends_of_the_verifier_give_byte_identical_responses(
    entry_point_type: type[EntryPoint], rows: Rows, demanded: Mapping[Row, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: both frontends of one engine give the same status, headers and body, apart from the request id."""
    answers: list[list[Response]] = []
    for client_type in (WsgiClient, LoopClient):
        # Each reading of this clock is a minute later, so that no response has a Retry-After for failed proofs.
        minutes = count(0, 60 * 10**9)
        proofs = FailedProofs(Limiter(LocalStore(minutes.__next__), None, 100))
        for module in FAILED_PROOFS:
            monkeypatch.setattr(f"{module}.failed_proofs", lambda proofs=proofs: proofs)
        client = _RecordingClient(client_type)
        entry_point = entry_point_type(rows, demanded, client)  # type: ignore[arg-type]  # Django's interface
        cases = [_place(row, number) for number, row in enumerate(sample_for(entry_point, demanded))]
        for batch in in_batches(cases, entry_point.batch_size):
            entry_point.ask(batch)
        answers.append(client.kept)
    one, two = answers
    assert len(one) == len(two) > 1
    for first, second in zip(one, two, strict=True):
        assert _masked(first) == _masked(second)


@pytest.mark.parametrize("client_type", CLIENTS)
def test_both_frontends_of_the_verifier_repeat_the_denial_of_a_final_key_byte_for_byte(
    client_type: type[EngineClient], rows: Rows, demanded: Mapping[Row, str]
) -> None:
    """Guarantee: the second denial of such a key comes from the cache and equals the first, apart from the request id.

    This holds for every request with such a key.
    """
    client = _RecordingClient(client_type)
    entry_point = Verify(rows, demanded, client)  # type: ignore[arg-type]  # Django's interface
    final = [row for row in demanded if row.state in FINAL and row.environment == "own" and entry_point.can_ask(row)]
    chosen = sample(demanded, final, 150)
    for number, row in enumerate(chosen):
        for _ in range(2):
            assert entry_point.ask([_place(row, number)]) == [entry_point.demand(row)]
        first, second = client.kept[-2:]
        assert _masked(first) == _masked(second)
        assert first["X-Request-Id"] != second["X-Request-Id"]
    assert {row.state for row in chosen} == FINAL
    assert client.from_memory >= len(chosen) > 100


class _RecordingClient:
    """A client of a caching engine that keeps every response."""

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


def expect_the_matrix(
    entry_point: EntryPoint, demanded: Mapping[Row, str], size: tuple[int, int] | None = None
) -> None:
    """Send a sample of the cases, and compare every response with the matrix. `size`: other than `size_of`."""
    sampled = sample_for(entry_point, demanded, size)
    least, _ = size or size_of(entry_point)
    assert len(sampled) >= least
    assert sum(map(reaches_requests, sampled)) > least // 3
    cases = [_place(row, number) for number, row in enumerate(sampled)]
    wrong = []
    for batch in in_batches(cases, entry_point.batch_size):
        before = transaction.savepoint()
        answers = entry_point.ask(batch)
        transaction.savepoint_rollback(before)
        wrong += [
            f"{case.row} of {case.home}: {answer}, not {entry_point.demand(case.row)}"
            for case, answer in zip(batch, answers, strict=True)
            if answer != entry_point.demand(case.row)
        ]
    assert not wrong, "\n".join([f"{len(wrong)} of {len(cases)}", *wrong[:20]])


_samples: dict[Any, list[Row]] = {}
"""Samples by the rule of what an entry point can ask: several entry points share a rule."""


def sample_for(entry_point: EntryPoint, demanded: Mapping[Row, str], size: tuple[int, int] | None = None) -> list[Row]:
    """Return the entry point's sample of the cases, with each verdict that it can be asked for."""
    size = size or size_of(entry_point)
    wanted = type(entry_point).can_ask, size
    if wanted not in _samples:
        possible = list(filter(entry_point.can_ask, demanded))
        _samples[wanted] = sample(demanded, possible, *size)
        assert {demanded[row] for row in _samples[wanted]} == {demanded[row] for row in possible}
    return _samples[wanted]


def size_of(entry_point: EntryPoint) -> tuple[int, int]:
    """Return the size of the entry point's sample.

    Only entry points that read the database each in their own way, and batches, differ by combinations of words.
    PostgreSQL reads the same rows by the same rules. `make test-long` asks the dialects the wide sample, too.
    """
    return WIDE if IS_SQLITE and type(entry_point) not in DIALECTS else NARROW


def _place(row: Row, number: int) -> PlacedCase:
    """Place the case in one of the environments, in turn."""
    home = list(Environment)[number % 2]
    return PlacedCase(row, home, home if row.environment == "own" else other(home))
