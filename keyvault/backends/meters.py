"""What there is to watch about secrets, peppers and the signed log, as Prometheus counters and gauges; no ids.

Processes of one host add up through files in PROMETHEUS_MULTIPROC_DIR, where whoever starts them sets it.
"""

import time
from datetime import datetime

from prometheus_client import Counter, Gauge

_calls = Counter("keyvault_vault_calls", "Calls to the secrets manager.", ["login", "outcome"])
_lease_ends = Gauge(
    "keyvault_vault_lease_ends_timestamp_seconds",
    "When the token of a login ends, unless it is renewed; 0: it does not.",
    ["login"],
    multiprocess_mode="livemin",
)
_sealed = Gauge("keyvault_vault_sealed", "1 while the secrets manager is sealed or away.", multiprocess_mode="livemax")
_pepper = Gauge(
    "keyvault_pepper_version",
    "The pepper version that new digests are made with.",
    ["set"],
    multiprocess_mode="livemin",
)


_checkpoint = Gauge(
    "keyvault_audit_checkpoint_timestamp_seconds",
    "When the newest checkpoint of the audit log was signed.",
    ["scope"],
    multiprocess_mode="livemax",
)


def note_call(login: str, outcome: str) -> None:
    """`outcome`: ok, unavailable, denied, conflict, missing, invalid, or not_asked while the breaker is open."""
    _calls.labels(login, outcome).inc()


def note_lease(login: str, seconds: float | None) -> None:
    _lease_ends.labels(login).set(0 if seconds is None else time.time() + seconds)


def note_ready(is_ready: bool) -> None:
    _sealed.set(0 if is_ready else 1)


def note_pepper(pepper_set: str, version: int) -> None:
    _pepper.labels(pepper_set).set(version)


def note_checkpoint(scope: str, at: datetime) -> None:
    _checkpoint.labels(scope).set(at.timestamp())
