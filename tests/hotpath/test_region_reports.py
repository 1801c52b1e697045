"""The usage reports of a regional verifier."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

from keyvault.backends.central import CentralService
from keyvault.domain.plaintext import Plaintext
from keyvault.hotpath.adapters.region import CentralSink
from keyvault.services.usage.recorder import Report

AT = datetime(2026, 1, 1, tzinfo=UTC)


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
