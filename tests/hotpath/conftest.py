"""What the verifier's engine notes goes to logs without threads."""

import pytest

from keyvault.services.refusals import RefusalLog
from keyvault.services.usage import UsageLog
from tests.services.conftest import scene as scene


@pytest.fixture
def usage(monkeypatch: pytest.MonkeyPatch) -> UsageLog:
    """A test flushes it by hand."""
    log = UsageLog()
    monkeypatch.setattr("keyvault.hotpath.loader.usage_log", log)
    monkeypatch.setattr("keyvault.hotpath.loader.refusal_log", RefusalLog())
    return log
