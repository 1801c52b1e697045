"""Metrics of verification: each verdict is counted once, by outcome and source, and each denial by code."""

from unittest.mock import Mock

import pytest
from prometheus_client import REGISTRY

from keyvault.domain.errors import ErrorCode
from keyvault.hotpath.adapters.assembly import uses_of
from keyvault.services.usage.recorder import UsageLog
from keyvault.wire.entry_points import VerificationEntryPoint

from .conftest import Stage, revoke
from .priming import Primed, prime

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("usage")]


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0


def verdicts(primed: Primed, entry_point: str = "verify") -> dict[tuple[str, str], float]:
    """Return the exported verdicts, as a scrape after the next report has them."""
    uses_of(primed.engine)
    return {
        (outcome, source): value(
            "keyvault_verifications_total", entry_point=entry_point, outcome=outcome, source=source
        )
        for outcome in ("allowed", "denied")
        for source in ("memory", "database", "rules")
    }


def added(before: dict[tuple[str, str], float], after: dict[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    return {which: count - before[which] for which, count in after.items() if count != before[which]}


def test_allowed_verdicts_are_counted_by_source(stage: Stage) -> None:
    primed = prime()
    before = verdicts(primed)
    for _ in range(5):
        primed.ask(stage.token, stage.asked)
    counts = added(before, verdicts(primed))
    assert sum(counts.values()) == 5
    assert counts["allowed", "memory"] == 4


def test_denied_verdicts_are_counted_by_source_and_code(stage: Stage) -> None:
    """Guarantee: a denial repeated from memory is counted like the first one."""
    revoke(stage.key)
    primed = prime()
    before = verdicts(primed)
    denials = value("keyvault_denials_total", entry_point="verify", code="key_revoked")
    for _ in range(4):
        primed.ask(stage.token, stage.asked)
    assert added(before, verdicts(primed)) == {("denied", "rules"): 1, ("denied", "memory"): 3}
    assert value("keyvault_denials_total", entry_point="verify", code="key_revoked") == denials + 4


def test_verdict_on_a_key_read_for_it_is_counted(stage: Stage) -> None:
    primed = prime()
    primed.ask(stage.token, stage.asked)
    before = verdicts(primed)
    primed.engine.evict([("key", stage.key.key_id)])
    primed.ask(stage.token, stage.asked)
    assert added(before, verdicts(primed)) == {("allowed", "database"): 1}


@pytest.mark.parametrize("entry_point", ["verify", "nginx", "traefik", "envoy"])
def test_refused_callers_are_counted_by_entry_point(stage: Stage, entry_point: str) -> None:
    """Guarantee: a gateway whose token ended is visible at its own entry point."""
    path = {"verify": "/v1/keys/verify", "envoy": "/v1/authorize/envoy/orders"}.get(
        entry_point, f"/v1/authorize/{entry_point}"
    )
    before = value("keyvault_denials_total", entry_point=entry_point, code="service_token_invalid")
    primed = prime()
    token = "nonsense"
    headers = {"authorization": f"Bearer {token}", "x-service-token": token}
    primed.send("POST" if entry_point == "verify" else "GET", path, headers)
    after = value("keyvault_denials_total", entry_point=entry_point, code="service_token_invalid")
    assert after == before + 1


def test_denied_key_at_a_gateway_is_counted_once(stage: Stage) -> None:
    revoke(stage.key)
    primed = prime()
    before = value("keyvault_denials_total", entry_point="nginx", code=ErrorCode.KEY_REVOKED)
    headers = {
        "x-service-token": stage.token,
        "x-api-key": stage.text,
        "x-original-uri": "/sandbox/merchants/orders",
        "x-original-method": "POST",
        "x-original-host": "127.0.0.1",
        "x-original-address": "192.0.2.1",
    }
    answer = primed.send("GET", "/v1/authorize/nginx", headers)
    assert dict(answer.headers)["X-Auth-Code"] == ErrorCode.KEY_REVOKED
    assert value("keyvault_denials_total", entry_point="nginx", code=ErrorCode.KEY_REVOKED) == before + 1


def test_duration_of_the_slow_path_is_measured_once_for_each_request(stage: Stage, usage: UsageLog) -> None:
    primed = prime()
    uses_of(primed.engine)
    before = value("keyvault_slow_path_duration_seconds_count")
    for _ in range(3):  # the first one only
        primed.ask(stage.token, stage.asked)
    uses_of(primed.engine)
    assert value("keyvault_slow_path_duration_seconds_count") == before + 1


def test_report_of_an_idle_process_tries_a_lost_limit_store_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = Mock()
    monkeypatch.setattr("keyvault.hotpath.adapters.assembly.limiter", lambda: tried)
    uses_of(prime().engine)
    tried.retry_lost.assert_called_once_with()


@pytest.mark.parametrize("entry_point", sorted(set(VerificationEntryPoint) - {"integration"}))
def test_internal_errors_of_the_slow_path_are_counted_from_zero(entry_point: str) -> None:
    """Guarantee: the alert rule sees the first error: `rate` misses the event that a series begins with."""
    labels = {"entry_point": entry_point, "code": "internal_error"}
    assert REGISTRY.get_sample_value("keyvault_denials_total", labels) is not None
