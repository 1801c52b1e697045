"""Log lines of a process during an outage of its database."""

from collections.abc import Callable

import pytest
from django.db import OperationalError

from keyvault.hotpath.adapters import stores
from keyvault.hotpath.adapters.stores import DatabaseStore
from keyvault.hotpath.frontends.threaded_frontend import StoreUnavailableError
from keyvault.hotpath.messages.pending_requests import KEY

pytestmark = [pytest.mark.database, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Advance the clock of the outage log, which otherwise stands still."""
    now = [1000.0]
    monkeypatch.setattr(stores, "_outage", stores._Outage(lambda: now[0]))

    def tick(seconds: float) -> None:
        now[0] += seconds

    return tick


def test_outage_is_logged_once_a_second_under_any_load(
    clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line per request would fill the disk and delay the requests that the cache answers."""

    def fail(ids: frozenset[str]) -> dict[str, object]:
        raise OperationalError("away")

    monkeypatch.setitem(stores._FIND, KEY, fail)
    for expected in (1, 1, 2, 2, 3):
        for _ in range(20):
            with pytest.raises(StoreUnavailableError):
                DatabaseStore().find(KEY, frozenset({"x"}), None)
        lines = [record for record in caplog.records if record.msg == "the database cannot be read"]
        assert len(lines) == expected
        assert all(record.exc_info is None and str(record.__dict__["why"]) == "away" for record in lines)
        clock(0.6)
