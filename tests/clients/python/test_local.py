"""LocalVerifier authorizes only what the service would, and by no data older than a confirmed change."""

import hmac
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import anyio
import pytest
from keyvault_client import Decision, Identity, Question
from keyvault_client.effects import HttpReply, SendRequest
from keyvault_client.keystrings import as_plaintext
from keyvault_client.local import AsyncLocalVerifier, LocalVerifier
from keyvault_client.local.memory import LocalMemory, LocalMiss, clock
from keyvault_client.local.reader import LocalFeedReader
from keyvault_client.transport import SyncRunner
from keyvault_client.verifier import ServiceAddress

from .feed_service import ENDPOINTS, TOKEN, FeedService, feed_service, key_string

KEY = key_string(1)


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def question(key: str = KEY, **changes: object) -> Question:
    named = {"key": key, "method": "POST", "path": "/merchants/orders?a=1", "client_ip": "192.0.2.1"} | changes
    return Question(**named)  # type: ignore[arg-type]  # each test gives what the member takes


@pytest.fixture
def served() -> Iterator[tuple[FeedService, str]]:
    with feed_service() as found:
        yield found


@pytest.fixture
def service(served: tuple[FeedService, str]) -> FeedService:
    return served[0]


@pytest.fixture
def verifier(served: tuple[FeedService, str]) -> Iterator[LocalVerifier]:
    with LocalVerifier(served[1], "sandbox", TOKEN, timeout=30) as found:
        yield found


def is_local(verifier: LocalVerifier, service: FeedService, asked: Question) -> bool:
    """Whether the next decision comes from memory."""
    before = len(service.asked)
    assert verifier.verify(asked).allowed
    return len(service.asked) == before


def warm(verifier: LocalVerifier, service: FeedService, key: str = KEY) -> None:
    """Ask until the key is decided from memory."""
    until(lambda: is_local(verifier, service, question(key)))


def give_tokens(memory: LocalMemory) -> None:
    """Add tokens of every endpoint. Tokens are valid for a second: these, in an hour."""
    with memory._lock:
        for endpoint in ENDPOINTS:
            memory._leases.add(("acme", str(endpoint["name"])), 100, clock() + 3600)


def known_memory(asked: Question | None = None) -> LocalMemory:
    """Return a memory without a reader that decides a question, by default `question()`, for an hour."""
    asked = question() if asked is None else asked
    service, memory = FeedService(), LocalMemory("sandbox")
    kind = "public" if as_plaintext(asked.key or "").reveal().startswith("kv_pub") else "private"
    record = service.record(KEY[11:27]) | {"kind": kind}
    version = memory.begin_rules()
    assert version is not None
    memory.end_rules(version, service._get_v1_snapshot({}, {})[1])
    memory.set_current_until(clock() + 3600)
    missed = memory.decide(asked)
    assert isinstance(missed, LocalMiss)
    names = ("key_id", "credential_id", "kind", "merchant_id", "environment")
    memory.learn(missed, Decision(Identity(**{name: record[name] for name in names}), 200))
    memory.end_fetch(memory.begin_fetch(1), [record])
    give_tokens(memory)
    assert isinstance(memory.decide(asked), Decision)
    return memory


def test_local_second_question_is_decided_from_memory(verifier: LocalVerifier, service: FeedService) -> None:
    warm(verifier, service)
    decision = verifier.verify(question())
    assert decision.identity is not None
    assert (decision.identity.merchant_id, decision.identity.key_id) == ("acme", KEY[11:27])
    assert not verifier.is_stale


def test_local_denies_a_revoked_key_after_the_receipt(verifier: LocalVerifier, service: FeedService) -> None:
    """Guarantee: no decision that begins after the reader has confirmed a revocation authorizes the key."""
    keys = [key_string(number) for number in range(20)]
    for key in keys:
        warm(verifier, service, key)
    confirmed: set[str] = set()
    stop = threading.Event()

    def decide() -> list[str]:
        """Decide until a whole round began after the last receipt. Return the keys that were wrongly authorized."""
        wrong = []
        while True:
            is_last = stop.is_set()
            for key in keys:
                is_over = key in confirmed
                if verifier.verify(question(key)).allowed and is_over:
                    wrong.append(key)
            if is_last:
                return wrong

    with ThreadPoolExecutor(3) as pool:
        deciding = [pool.submit(decide) for _ in range(3)]
        try:
            for key in keys:
                service.revoke(key)
                assert service.receipt.wait(60)
                confirmed.add(key)
        finally:
            stop.set()
        assert [each.result() for each in deciding] == [[], [], []]


def test_local_record_that_changed_while_it_was_read_is_not_kept(verifier: LocalVerifier, service: FeedService) -> None:
    """Guarantee: a record that was read before a change, and arrives after it, is never used."""
    warm(verifier, service, key_string(2))
    old = service.record(KEY[11:27])

    def revoke_and_confirm() -> None:
        service.revoke(KEY)
        assert service.receipt.wait(60)
        service.record = lambda key_id: old  # type: ignore[method-assign]  # the answer was computed before
        reset.set()

    reset = threading.Event()
    service.before["/v1/snapshot/keys"] = revoke_and_confirm
    assert verifier.verify(question()).allowed
    assert reset.wait(60)
    del service.record
    until(lambda: not verifier._logic.memory.needs_reading)
    assert verifier.verify(question()).code == "key_revoked"


def test_local_is_stale_without_the_feed_and_asks(verifier: LocalVerifier, service: FeedService) -> None:
    """Guarantee: when the feed is older than the bound, every request is a question to the service."""
    service.staleness = 1
    warm(verifier, service)
    service.cut.add("/v1/changes")
    until(lambda: verifier.is_stale)
    assert not is_local(verifier, service, question())
    service.cut.clear()
    warm(verifier, service)


def test_local_starts_again_when_the_service_has_forgotten_it(verifier: LocalVerifier, service: FeedService) -> None:
    """Guarantee: after 410 the memory is dropped, and what changed in between is not missed."""
    warm(verifier, service)
    with service.lock:
        service.is_reader_known = False
        service.revoked.add(KEY[11:27])
        service.lock.notify_all()
    until(lambda: service.registrations == 2)
    until(lambda: not verifier.verify(question()).allowed)


def test_local_repeats_a_refused_registration_after_a_pause(
    verifier: LocalVerifier, service: FeedService, caplog: pytest.LogCaptureFixture
) -> None:
    """The service refuses it while receipts still wait for the reader. Meanwhile the service decides every request."""
    warm(verifier, service)
    with service.lock:
        service.is_reader_known = False
        service.refused_registrations = 2
        service.lock.notify_all()
    until(lambda: service.refused_registrations == 1)
    assert not is_local(verifier, service, question())
    warm(verifier, service)
    assert service.registrations == 2
    assert "the change feed cannot be read" in caplog.text


@pytest.mark.parametrize("kind", ["credential", "account", "merchant", "something_new"])
def test_local_reads_keys_again_after_a_change_above_them(
    verifier: LocalVerifier, service: FeedService, kind: str
) -> None:
    """Guarantee: after the receipt of a change above a key, or of an unknown kind, its old record is not used."""
    warm(verifier, service)
    identity = {"credential": f"crd_{KEY[11:27]}", "account": "acme/sandbox", "merchant": "acme"}.get(kind, "x")
    service.change(kind, identity, lambda: service.revoked.add(KEY[11:27]))
    assert service.receipt.wait(60)
    assert not verifier.verify(question()).allowed


@pytest.mark.parametrize("kind", ["endpoint", "limit"])
def test_local_reads_rules_again_after_a_change(verifier: LocalVerifier, service: FeedService, kind: str) -> None:
    """Guarantee: after the receipt of a change of rules, the earlier rules authorize nothing."""
    warm(verifier, service)
    blocked = threading.Event()
    service.before["/v1/snapshot"] = partial(blocked.wait, 60)
    service.change(kind, "orders.create")
    assert service.receipt.wait(60)
    assert not is_local(verifier, service, question())
    blocked.set()
    warm(verifier, service)


@pytest.mark.parametrize(
    "changes",
    [
        {"customer_token": f"kv_cat_sbx_{'c' * 65}"},
        {"origin": "https://shop.example"},
        {"path": f"/merchants/orders?key={KEY}"},
        {"path": f"/merchants/orders?key={KEY.replace('_', '%5F')}"},
        {"path": "/merchants//orders"},
        {"method": "DELETE"},
        {"merchant": "globex"},
        {"cost": 2},
        {"key": f"{KEY},{KEY}"},
        {"path": f"/merchants/orders?{'a' * 8192}"},
        {"path": "/merchants/orders?\0"},
        {"endpoint": "orders.create"},
        {"method": None, "endpoint": "orders.create", "path": "/elsewhere"},
        {"method": "POST", "path": None, "endpoint": "orders.create"},
        {"client_ip": ""},
        {"client_ip": "192.0.2.1:80"},
        {"client_ip": "fe80::1%eth0"},
        {"client_ip": "1" * 100},
        {"user_agent": "a" * 8193},
        {"user_agent": "shop\0"},
        {"user_agent": "shop\ud800"},
        {"merchant": ""},
        {"store": "s" * 129},
    ],
)
def test_local_asks_what_only_the_service_may_decide(
    verifier: LocalVerifier, service: FeedService, changes: dict[str, object]
) -> None:
    """Guarantee: the service decides, and records, every request that the memory cannot authorize."""
    warm(verifier, service)
    give_tokens(verifier._logic.memory)
    assert is_local(verifier, service, question())
    before = len(service.asked)
    verifier.verify(question(**{"key": KEY, **changes}))  # type: ignore[arg-type]  # a member of each type
    assert len(service.asked) == before + 1


def test_local_reports_every_use_once_in_spite_of_lost_answers(verifier: LocalVerifier, service: FeedService) -> None:
    """Guarantee: uses are counted exactly once, and none is reported after a report that says it has all until then."""
    warm(verifier, service)

    service.lost = ["/v1/usage-reports"] * 2
    # The decision that ended the warming was one from memory.
    local = 1
    for _ in range(2_000):
        before = len(service.asked)
        assert verifier.verify(question()).allowed
        local += len(service.asked) == before
    until(lambda: service.lost == [])
    verifier.close()
    assert sum(use["count"] for report in service.reports.values() for use in report["uses"]) == local
    assert service.reports[max(service.reports)]["is_final"] is True
    assert sorted(service.reports) == list(range(1, len(service.reports) + 1))
    flushed_through = ""
    for _, report in sorted(service.reports.items()):
        assert all(use["first_at"] >= flushed_through for use in report["uses"])
        flushed_through = report["flushed_through"]


def test_local_uses_no_more_tokens_than_it_has_leased(verifier: LocalVerifier, service: FeedService) -> None:
    """Guarantee: the limit holds: each allowed decision has a token that the service has spent."""
    warm(verifier, service)
    with service.lock:
        service.tokens = 100
        service.asked.clear()
    decisions = [verifier.verify(question()) for _ in range(500)]
    allowed = sum(decision.allowed for decision in decisions)
    # Tokens of the batch before were leased before the count began.
    assert allowed <= 100 + service.count // 10
    assert decisions[-1].status == 429
    assert decisions[-1].header("Retry-After") == "1"
    assert any(body.get("cost", 1) > 1 for body in service.asked)


def test_local_asks_again_without_a_batch_that_exceeds_a_lowered_limit(
    verifier: LocalVerifier, service: FeedService
) -> None:
    """Guarantee: no request is refused because the verifier asked for more tokens than a limit has."""
    warm(verifier, service)
    service.largest_cost = 1
    with service.lock:
        service.asked.clear()

    def has_asked_for_a_batch() -> bool:
        assert verifier.verify(question()).allowed
        return any(body.get("cost", 1) > 1 for body in service.asked)

    until(has_asked_for_a_batch)


@pytest.mark.parametrize("origin", ["o" * 501, "o\0", "\ud800"])
def test_local_asks_about_an_origin_that_the_service_refuses(origin: str) -> None:
    """Guarantee: the memory accepts an origin only if the service does."""
    asked = Question(key=key_string(1, "pub"), endpoint="client.configuration", origin="https://shop.example")
    memory = known_memory(asked)
    asked.origin = origin
    assert isinstance(memory.decide(asked), LocalMiss)


def test_local_reports_an_address_in_the_form_that_the_service_records() -> None:
    """Guarantee: a rotation sees one source, whether the memory or the service decided."""
    memory = known_memory()
    assert isinstance(memory.decide(question(client_ip="::FFFF:192.0.2.1")), Decision)
    memory.begin_report()
    assert [(row["source"], row["count"]) for row in memory.next_report().rows] == [("192.0.2.1", 2)]


def test_local_async_face_decides_from_the_same_memory(served: tuple[FeedService, str]) -> None:
    service, url = served

    async def run() -> Decision:
        async with AsyncLocalVerifier(url, "sandbox", TOKEN, timeout=30) as verifier:
            with anyio.fail_after(60):
                while True:
                    before = len(service.asked)
                    decision = await verifier.verify(question())
                    if len(service.asked) == before:
                        return decision

    assert anyio.run(run).allowed


def test_local_keeps_no_key_string(verifier: LocalVerifier, service: FeedService) -> None:
    """Guarantee: the memory has HMACs under a random key of the process, and no key string."""
    warm(verifier, service)
    memory = verifier._logic.memory
    assert KEY[27:] not in repr([memory._key_ids, memory._held, memory._endpoints, vars(memory)])
    assert list(memory._key_ids) == [hmac.digest(memory._process_key, KEY.encode(), "sha256")]
    assert LocalMemory("sandbox")._process_key != memory._process_key


def test_local_answer_of_the_feed_after_the_end_does_not_make_the_memory_current(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guarantee: a closed verifier never authorizes from memory again: nothing would report the use."""
    memory, runner = known_memory(), SyncRunner()

    def answer_after_the_end(request: SendRequest) -> HttpReply:
        reader.close()
        members = {"sequence": 1, "waited_seconds": 0, "staleness_seconds": 60, "changes": []}
        return HttpReply(200, {}, json.dumps(members).encode())

    monkeypatch.setattr(runner, "send", answer_after_the_end)
    reader = LocalFeedReader(ServiceAddress("http://127.0.0.1:1", "sandbox", TOKEN), runner, memory)
    reader._read(1)
    assert not memory.is_current
    assert isinstance(memory.decide(question()), LocalMiss)


def test_local_use_that_the_last_report_would_miss_is_not_authorized() -> None:
    """Guarantee: a decision that began before the end is in the last report, or is not made from memory."""
    memory = known_memory()
    free = memory._lock

    class ClosesFirst:
        """Closes the memory and takes the last report, just before the lock is taken."""

        def __enter__(self) -> None:
            memory._lock = free
            memory.close()
            memory.begin_report()
            free.acquire()

        def __exit__(self, *exception: object) -> None:
            free.release()

    memory._lock = ClosesFirst()  # type: ignore[assignment]  # what `with` needs
    assert isinstance(memory.decide(question()), LocalMiss)
    assert sum(row["count"] for row in memory.next_report().rows) == 1
