"""Uses that the fast path counts are all written, each in the first report after it."""

import time
from collections import Counter
from datetime import UTC, datetime
from typing import Any

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.domain.keys import KeyKind
from keyvault.hotpath.adapters.assembly import uses_of
from keyvault.hotpath.engine import engine as engine_module
from keyvault.hotpath.messages.pending_requests import BATCH
from keyvault.models import Key, KeyUse, UseBucket, UseContext
from keyvault.models.usage import UseOutcome
from keyvault.services.usage.recorder import UsageLog, Uses
from tests.factories import account, issue, make_merchant, make_token
from tests.starting_rows import start_with

from .priming import Primed, prime

pytestmark = [pytest.mark.database, pytest.mark.django_db]


@pytest.fixture
def keys(db: None) -> dict[KeyKind, tuple[Key, str]]:
    return start_with(_make_keys)


def _make_keys() -> dict[KeyKind, tuple[Key, str]]:
    make_merchant("acme")
    made = {kind: issue(account(), kind=kind) for kind in KeyKind}
    return {kind: (key, text.reveal()) for kind, (key, text) in made.items()}


@pytest.fixture
def token(db: None) -> str:
    return make_token(P.KEYS_VERIFY)[1].reveal()


@pytest.fixture
def primed(db: None, usage: UsageLog) -> Primed:
    made = prime()
    usage.add_counter(lambda: uses_of(made.engine))
    return made


def question(text: str, **more: Any) -> dict[str, Any]:
    return {"key": text, "environment": "sandbox", "endpoint": "orders.create", **more}


def written() -> Counter[tuple[str, ...]]:
    found: Counter[tuple[str, ...]] = Counter()
    for row in UseBucket.objects.select_related("context"):
        use = row.context
        found[use.key_id, use.source, use.user_agent, use.endpoint, use.origin, use.outcome] += row.count
    return found


def test_uses_of_the_fast_path_are_written_exactly(
    keys: dict[KeyKind, tuple[Key, str]], token: str, primed: Primed, usage: UsageLog
) -> None:
    """Uses are counted by key, source, user agent, endpoint and, for public keys, origin, on both paths."""
    private, public = keys[KeyKind.PRIVATE], keys[KeyKind.PUBLIC]
    expected: Counter[tuple[str, ...]] = Counter()
    from_memory = 0
    for round_number in range(7):
        for agent in ("shop/1", "shop/2", ""):
            for address in ("192.0.2.1", "192.0.2.2"):
                asked = question(private[1], user_agent=agent, client_ip=address)
                assert b'"allowed":true' in primed.ask(token, asked).body
                expected[private[0].key_id, address, agent, "orders.create", "", "allowed"] += 1
        for origin in ("https://shop.example", "https://other.example"):
            asked = question(public[1], endpoint="client.configuration", origin=origin, client_ip="192.0.2.1")
            assert b'"allowed":true' in primed.ask(token, asked).body
            expected[public[0].key_id, "192.0.2.1", "", "client.configuration", origin, "allowed"] += 1
        several = [question(private[1], client_ip="192.0.2.3")] * 5
        primed.ask(token, {"requests": several}, BATCH)
        expected[private[0].key_id, "192.0.2.3", "", "orders.create", "", "allowed"] += 5
        if round_number % 3 == 0:
            from_memory += primed.from_memory  # which is counted anew after each report
            usage.flush()
    assert from_memory + primed.from_memory > 50
    usage.flush()
    assert written() == expected
    counts = dict(KeyUse.objects.values_list("key_id", "count"))
    for key, _ in keys.values():
        assert counts[key.key_id] == sum(count for (key_id, *_), count in expected.items() if key_id == key.key_id)
    usage.flush()
    assert written() == expected


def test_uses_without_an_address_are_the_token_s(
    keys: dict[KeyKind, tuple[Key, str]], primed: Primed, usage: UsageLog
) -> None:
    row, token = make_token(P.KEYS_VERIFY)
    for _ in range(4):
        primed.ask(token.reveal(), question(keys[KeyKind.PRIVATE][1]))
    usage.flush()
    assert set(UseBucket.objects.values_list("context__source", "count")) == {(f"token:{row.token_id}", 4)}


def test_uses_of_the_fast_path_are_kept_for_a_successor_once_per_report(
    keys: dict[KeyKind, tuple[Key, str]], token: str, usage: UsageLog
) -> None:
    """Each bucket is kept after it was counted, so that no report can take it in between."""
    counted: list[bool] = []

    def note(*entry: Any) -> None:
        counted.append(made.engine._uses[entry[:6]][:6] == [*entry[:6]])

    made = prime(note_new_use=note)
    usage.add_counter(lambda: uses_of(made.engine))
    for _ in range(3):
        for address in ("192.0.2.1", "192.0.2.2"):
            made.ask(token, question(keys[KeyKind.PRIVATE][1], client_ip=address))
    before = len(counted)
    usage.flush()
    made.ask(token, question(keys[KeyKind.PRIVATE][1], client_ip="192.0.2.1"))
    assert (before, len(counted), all(counted)) == (2, 3, True)


def test_uses_of_a_probe_are_not_counted(keys: dict[KeyKind, tuple[Key, str]], primed: Primed, usage: UsageLog) -> None:
    """A probe is no use of a key, from the cache and from the database."""
    _, probe = make_token(P.KEYS_VERIFY, is_probe=True)
    for _ in range(5):
        primed.ask(probe.reveal(), question(keys[KeyKind.PRIVATE][1]))
    assert primed.from_memory
    usage.flush()
    assert set(UseBucket.objects.values_list("context__outcome", "count")) == {(UseOutcome.PROBED, 5)}
    assert not KeyUse.objects.exists()


def test_uses_of_dry_runs_and_of_refusals_are_not_counted(
    keys: dict[KeyKind, tuple[Key, str]], token: str, primed: Primed, usage: UsageLog
) -> None:
    text = keys[KeyKind.PRIVATE][1]
    for _ in range(3):
        primed.ask(token, question(text))
    usage.flush()
    UseBucket.objects.all().delete()
    for _ in range(3):
        primed.ask(token, question(text, dry_run=True))
        primed.ask(token, question(text[:-6] + "000000"))
    usage.flush()
    assert not UseBucket.objects.exists()


@pytest.mark.parametrize("is_remembered", [False, True])
def test_uses_keep_no_secret_and_no_overlong_text(
    keys: dict[KeyKind, tuple[Key, str]], token: str, usage: UsageLog, is_remembered: bool
) -> None:
    """What a client reports about itself is bounded, from the cache and from the slow path."""
    primed = prime(may_remember=is_remembered)
    usage.add_counter(lambda: uses_of(primed.engine))
    secret, text = "Bearer 0123456789abcdefABCDEF", keys[KeyKind.PUBLIC][1]
    for agent, origin in ((f"{secret} one", f"{secret} two"), ("u" * 200, "o" * 200)):
        asked = question(text, endpoint="client.configuration", user_agent=agent, origin=origin)
        for _ in range(3):
            assert b'"allowed":true' in primed.ask(token, asked).body
    assert (primed.from_memory > 0) is is_remembered
    usage.flush()
    kept = set(UseContext.objects.values_list("user_agent", "origin"))
    assert kept == {("Bearer *** one", "Bearer *** two"), ("u" * 120, "o" * 120)}


def test_uses_beyond_the_bound_are_still_counted(
    keys: dict[KeyKind, tuple[Key, str]], token: str, primed: Primed, usage: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a flood of sources only the first are distinguished; the total stays exact."""
    monkeypatch.setattr(engine_module, "_MAX_USES", 10)
    key, text = keys[KeyKind.PRIVATE]
    for number in range(200):
        primed.ask(token, question(text, user_agent=f"shop/{number}", client_ip=f"192.0.2.{number}"))
        assert len(primed.engine._uses) <= 12
    assert primed.from_memory > 150
    usage.flush()
    assert sum(UseBucket.objects.values_list("count", flat=True)) == 200
    assert KeyUse.objects.get().count == 200
    assert KeyUse.objects.get().key_id == key.key_id


def test_uses_whose_report_failed_are_in_the_next(
    keys: dict[KeyKind, tuple[Key, str]], token: str, primed: Primed, usage: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(5):
        primed.ask(token, question(keys[KeyKind.PRIVATE][1]))
    with monkeypatch.context() as patch:
        patch.setattr("keyvault.services.usage.recorder._write", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            usage.flush()
    primed.ask(token, question(keys[KeyKind.PRIVATE][1]))
    usage.flush()
    assert KeyUse.objects.get().count == 6


def test_uses_are_never_older_than_a_report_that_was_given_without_them(
    keys: dict[KeyKind, tuple[Key, str]], token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: a claim of silence is true. Each use is in the first report whose watermark is later than its time.

    This holds for concurrent reports and uses.
    """
    clock = [time.time()]

    def tick() -> float:
        clock[0] += 0.001
        return clock[0]

    def now() -> datetime:
        return datetime.fromtimestamp(tick(), UTC)

    log = UsageLog(now=now)
    monkeypatch.setattr("keyvault.hotpath.adapters.assembly.usage_log", log)
    primed = prime(wall=tick, may_remember=False)
    text = keys[KeyKind.PRIVATE][1]
    taken: list[Uses] = []

    def take() -> list[Uses]:
        # A use between the watermark and this line is in this report as well, which is harmless.
        ask()
        taken[:] = uses_of(primed.engine)
        return taken

    def ask() -> None:
        primed.engine.freshness.confirm(time.monotonic(), clock[0])
        assert b'"allowed":true' in primed.ask(token, question(text)).body

    log.add_counter(take)
    for _ in range(3):
        ask()
    log.flush()
    for _ in range(10):
        ask()
        assert primed.from_memory == 1, "this is about the fast way"
        asked_before = now()
        log.flush()
        ((*_, times, first, _),) = taken
        assert (times, first < asked_before.timestamp()) == (2, True)
        assert not uses_of(primed.engine), "all that was noted before is in the report"
        ask()
        ((*_, late, _),) = uses_of(primed.engine)
        assert late > asked_before.timestamp()


def test_uses_keep_in_memory_no_text_that_was_masked(
    keys: dict[KeyKind, tuple[Key, str]], token: str, primed: Primed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of the other masked texts is bounded, and so is the length of each."""
    monkeypatch.setattr(engine_module, "_MAX_CLEAN_TEXTS", 3)
    for agent in ("Bearer 0123456789abcdefABCDEF", "u" * 513, *(f"shop/{number}" for number in range(8))):
        for _ in range(2):
            primed.ask(token, question(keys[KeyKind.PRIVATE][1], user_agent=agent))
        assert len(primed.engine._clean_texts) <= 3
        assert all(len(text) <= 512 and "0123456789" not in text for text in primed.engine._clean_texts)
    assert primed.engine._clean_texts
