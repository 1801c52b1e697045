"""A clock that tests control, and a verifier that reports by it."""

from datetime import UTC, datetime

import pytest

from keyvault.models import UsageReporter
from keyvault.services.usage.recorder import UsageLog
from tests.clocks import Clock
from tests.rotation.copies import DelayedKeystore


@pytest.fixture
def clock() -> Clock:
    return Clock(datetime(2026, 11, 21, 12, tzinfo=UTC))


@pytest.fixture
def keystore(monkeypatch: pytest.MonkeyPatch) -> DelayedKeystore:
    return DelayedKeystore(monkeypatch)


@pytest.fixture
def verifier(clock: Clock, db: None) -> UsageLog:
    """Return a live reporter; `flush` reports all uses up to the clock's time."""
    log = UsageLog(now=clock)
    UsageReporter.objects.create(
        reporter_id=log.reporter_id, started_at=clock(), flushed_through_at=clock(), peppers={}
    )
    return log
