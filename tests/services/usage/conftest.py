"""Fixtures: a key, a clock at noon, and a reporter without its thread; the test notes uses and flushes."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from keyvault.models import Key, UsageReporter
from keyvault.models.usage import UseOutcome
from keyvault.services.usage.recorder import UsageLog
from tests.clocks import Clock
from tests.factories import account, issue, make_merchant
from tests.starting_rows import start_with

NOON = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
SECOND = timedelta(seconds=1)


@pytest.fixture
def clock() -> Clock:
    return Clock(NOON)


@pytest.fixture
def key(db: None) -> Key:
    return make_key()


@pytest.fixture
def log(clock: Clock, db: None) -> UsageLog:
    return make_reporter(clock)


def make_key() -> Key:
    return start_with(_make_key)


def _make_key() -> Key:
    make_merchant("acme")
    return issue(account())[0]


def make_reporter(clock: Clock) -> UsageLog:
    log = UsageLog(now=clock)
    UsageReporter.objects.create(
        reporter_id=log.reporter_id, started_at=clock(), flushed_through_at=clock(), peppers={}
    )
    return log


def use(log: UsageLog, key: Key, times: int = 1, source: str = "192.0.2.1", **options: Any) -> None:
    fields = {"user_agent": "curl", "endpoint": "orders.create", "outcome": UseOutcome.ALLOWED, **options}
    for _ in range(times):
        log.note(key.key_id, source=source, **fields)
