"""Traffic of a replacement as proof: exact, and at a cost that neither minutes nor addresses increase."""

from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from keyvault.access.catalog import ACKNOWLEDGEMENT
from keyvault.models import Key
from keyvault.models.usage import UseOutcome
from keyvault.services.usage.recorder import UsageLog
from rotation.domain.events import RotationState
from rotation.domain.silence import SourceFacts
from rotation.services.rotations import facts
from tests.clocks import Clock
from tests.rotation import scene, situation

pytestmark = [pytest.mark.database, pytest.mark.django_db]


@pytest.fixture
def key(clock: Clock) -> Key:
    return scene.issue(scene.account(), clock())[0]


def call(log: UsageLog, key: Key, source: str, endpoint: str = "orders.create", user_agent: str = "shop/1") -> None:
    log.note(key.key_id, source=source, user_agent=user_agent, endpoint=endpoint, outcome=UseOutcome.ALLOWED)
    log.flush()


def test_traffic_counts_calls_sources_and_minutes(key: Key, verifier: UsageLog, clock: Clock) -> None:
    began_at = clock()
    for source in ("192.0.2.1", "192.0.2.2", "198.51.100.1"):
        for endpoint in ("orders.create", "orders.retrieve"):
            call(verifier, key, source, endpoint)
        clock.tick(60)
    assert facts._traffic(key) == {"count": 6, "sources": 2, "minutes": 3, "first_used_at": began_at}


def test_traffic_has_no_acknowledgement(key: Key, verifier: UsageLog, clock: Clock) -> None:
    """An acknowledgement is another proof: it is no call, no source, and not the beginning of the soak time."""
    call(verifier, key, "198.51.100.1", ACKNOWLEDGEMENT)
    assert facts._traffic(key) == {}
    began_at = clock.tick(600)
    call(verifier, key, "192.0.2.1")
    call(verifier, key, "198.51.100.1", ACKNOWLEDGEMENT)
    found = facts._traffic(key)
    assert (found["count"], found["sources"], found["minutes"]) == (1, 1, 1)
    assert began_at <= found["first_used_at"] <= began_at + timedelta(minutes=1)


def test_traffic_of_many_clients_reads_a_bounded_number(
    key: Key, verifier: UsageLog, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of sources is then a lower bound, and proves no more than was seen."""
    monkeypatch.setattr(facts, "_MAX_CLIENTS", 3)
    for number in range(9):
        call(verifier, key, f"192.0.{number}.1")
    found = facts._traffic(key)
    assert (found["count"], found["sources"]) == (9, 3)


def test_traffic_is_read_without_the_buckets_of_its_minutes(key: Key, verifier: UsageLog, clock: Clock) -> None:
    """A key that is used all day has a row for each minute; a waiting rotation asks often."""
    call(verifier, key, "192.0.2.1")
    with CaptureQueriesContext(connection) as made:
        facts._traffic(key)
    assert [query["sql"] for query in made if "keyvault_usebucket" in query["sql"]] == []
    assert [query["sql"] for query in made if "usecontext" in query["sql"] and "LIMIT" not in query["sql"]] == []


@pytest.mark.parametrize(("count", "has_more"), [(2, False), (3, True)])
def test_evidence_of_silence_states_whether_it_names_all_sources(
    monkeypatch: pytest.MonkeyPatch, count: int, has_more: bool
) -> None:
    monkeypatch.setattr(facts, "_MAX_CITED", 2)
    sources = tuple(SourceFacts(f"192.0.{number}.0/24 shop", used_at=situation.NOW) for number in range(count))
    seen = facts.sources_seen("key_1", situation.facts(RotationState.OVERLAP, sources=sources), None)
    assert isinstance(seen["sources"], list)
    assert (len(seen["sources"]), seen["has_more_sources"]) == (2, has_more)
