"""The usage reports of a regional verifier."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from keyvault.backends.central import CentralRefusedError, CentralService, CentralUnavailableError
from keyvault.domain.plaintext import Plaintext
from keyvault.hotpath.adapters.region import CentralSink
from keyvault.services.change_feed.readers import OLDEST_USE
from keyvault.services.usage.recorder import Report, Uses

AT = datetime(2026, 1, 1, tzinfo=UTC)


class RefusingCentral(CentralService):
    """Refuses the bodies that name a key of `refused`, and keeps the others."""

    def __init__(self, refused: Mapping[str, str]) -> None:
        super().__init__("http://192.0.2.1", Plaintext("unused"))
        self.refused: Mapping[str, str] = refused
        self.stored: list[Mapping[str, Any]] = []

    def post(self, path: str, body: Mapping[str, Any], **options: Any) -> Any:
        found = [(number, self.refused.get(use["key_id"])) for number, use in enumerate(body["uses"])]
        if pointers := [pointer.format(number) for number, pointer in found if pointer is not None]:
            raise CentralRefusedError(400, "request_invalid", pointers)
        self.stored.append(body)


def report_of(*key_ids: str, at: datetime, number: int = 7) -> Report:
    times = at.timestamp(), at.timestamp()
    rows: Sequence[Uses] = [(key_id, "orders.list", "192.0.2.1", "", "", "allowed", 1, *times) for key_id in key_ids]
    return Report("reporter", number=number, through=at, is_final=False, counted=[rows], used=set())


@pytest.mark.django_db
def test_uses_that_are_refused_for_good_are_dropped_and_the_others_stored(caplog: pytest.LogCaptureFixture) -> None:
    """Guarantee: a use that the central service never takes, as of a key that it lacks, does not stop all reports."""
    central = RefusingCentral({"b": "/uses/{}/key_id", "d": "/uses/{}/outcome"})
    assert CentralSink(central, "reader").store(report_of("a", "b", "c", "d", at=datetime.now(UTC)))
    assert [use["key_id"] for body in central.stored for use in body["uses"]] == ["a", "c"]
    (line,) = [record for record in caplog.records if "dropped" in record.message]
    assert line.__dict__["count"] == 2


@pytest.mark.django_db
@pytest.mark.parametrize("pointer", ["/uses/{}", "/flushed_through", "/uses/7/key_id", "/number"])
def test_report_that_is_refused_for_its_times_is_kept_whole(pointer: str) -> None:
    """Guarantee: while the clocks differ no uses are lost; they are sent once the clocks agree."""
    central = RefusingCentral({"a": pointer})
    with pytest.raises(CentralUnavailableError):
        CentralSink(central, "reader").store(report_of("a", "b", at=datetime.now(UTC)))
    assert central.stored == []


@pytest.mark.django_db
def test_uses_from_before_a_long_outage_are_reported_with_the_oldest_accepted_time() -> None:
    """Guarantee: uses older than the central service takes neither stop the reports nor leave a key silent."""
    central, now = RefusingCentral({}), datetime.now(UTC)
    CentralSink(central, "reader").store(report_of("a", at=now - timedelta(days=3)))
    ((use,),) = [body["uses"] for body in central.stored]
    assert now - OLDEST_USE < datetime.fromisoformat(use["first_at"]) <= datetime.fromisoformat(use["last_at"]) < now


@pytest.mark.django_db
def test_report_of_long_uses_fits_into_the_largest_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: a client that sends long user agents cannot make a report too large for the service to read."""
    sent: list[Mapping[str, Any]] = []
    central = CentralService("http://192.0.2.1", Plaintext("unused"))
    monkeypatch.setattr(central, "post", lambda path, body: sent.append(body))
    times = AT.timestamp() - 60, AT.timestamp() - 1
    rows = [
        (f"{number:016d}", "e" * 100, "192.0.2.1", "\N{EURO SIGN}" * 120, '"' * 120, "allowed", 1, *times)
        for number in range(300)
    ]
    report = Report("reporter", number=7, through=AT, is_final=True, counted=[rows], used=set())
    CentralSink(central, "reader").store(report)
    assert [use["key_id"] for body in sent for use in body["uses"]] == [row[0] for row in rows]
    assert all(len(json.dumps(body)) < 65_536 for body in sent)
    numbers = [body["number"] for body in sent]
    assert numbers == sorted(set(numbers))
    # Only the last one says that everything was reported.
    assert [body["is_final"] for body in sent] == [False] * (len(sent) - 1) + [True]
    assert [body["flushed_through"] == sent[-1]["flushed_through"] for body in sent[:-1]] == [False] * (len(sent) - 1)


@pytest.mark.django_db
def test_report_of_any_size_has_numbers_below_those_of_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: uses that were kept during a long fault do not block those after them."""
    monkeypatch.setattr("keyvault.hotpath.adapters.region.MAX_USES", 1)
    central, at = RefusingCentral({}), datetime.now(UTC)
    sink = CentralSink(central, "reader")
    sink.store(report_of(*(f"key_{number}" for number in range(1_100)), at=at, number=1))
    sink.store(report_of("a", "b", at=at, number=2))
    numbers = [body["number"] for body in central.stored]
    assert numbers == list(range(1, 1_103))


@pytest.mark.django_db
def test_report_that_is_sent_again_keeps_the_numbers_of_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: a piece that was stored before the connection ended is not counted twice."""
    monkeypatch.setattr("keyvault.hotpath.adapters.region.MAX_USES", 1)
    central, at = RefusingCentral({"b": "/flushed_through"}), datetime.now(UTC)
    sink = CentralSink(central, "reader")
    with pytest.raises(CentralUnavailableError):
        sink.store(report_of("a", "b", "c", at=at, number=1))
    central.refused = {}
    sink.store(report_of("a", "b", "c", at=at, number=1))
    sink.store(report_of("d", at=at, number=2))
    sent = [(body["number"], body["uses"][0]["key_id"]) for body in central.stored]
    assert sent == [(1, "a"), (1, "a"), (2, "b"), (3, "c"), (4, "d")]
