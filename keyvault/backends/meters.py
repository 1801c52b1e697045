"""Prometheus metrics about verdicts, the secret backend, peppers and audit checkpoints, without ids.

The metrics of a host's processes are aggregated through files in PROMETHEUS_MULTIPROC_DIR, if that variable is set.
"""

import time
from datetime import datetime

from prometheus_client import Counter, Gauge

_calls = Counter("keyvault_vault_calls", "Calls to the secrets manager.", ["login", "outcome"])
_lease_ends = Gauge(
    "keyvault_vault_lease_ends_timestamp_seconds",
    "Expiry of a login's token unless it is renewed; 0: it does not expire.",
    ["login"],
    multiprocess_mode="livemin",
)
_sealed = Gauge(
    "keyvault_vault_sealed", "1 while the secrets manager is sealed or unavailable.", multiprocess_mode="livemax"
)
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

_unsigned = Gauge(
    "keyvault_audit_unsigned_since_timestamp_seconds",
    "When the oldest audit entry was written that no checkpoint signs; 0: there is none.",
    ["scope"],
    multiprocess_mode="livemostrecent",
)

_anchor = Gauge(
    "keyvault_revocation_anchor_timestamp_seconds",
    "Time up to which every revocation is in the revocation anchor; the age of this time is the anchor's lag.",
    multiprocess_mode="livemax",
)

_uncompared = Gauge(
    "keyvault_revocation_log_uncompared",
    "1 while a worker that started without the secret backend has not compared the revocation log with the anchor.",
    multiprocess_mode="livemax",
)

_from_memory = Counter("keyvault_verdicts_from_memory", "Verdicts from memory: allowed keys and repeated refusals.")
_denials = Counter("keyvault_denials", "Denied requests for an endpoint, by the code of the answer.", ["code"])
_feed_age = Gauge(
    "keyvault_change_feed_age_seconds",
    "Seconds since the process confirmed the change feed; above KEYVAULT_MAX_STALENESS it reads the database.",
    multiprocess_mode="livemax",
)
_known_keys = Gauge("keyvault_remembered_keys", "Keys in the memory of the verifiers.", multiprocess_mode="livesum")
_process_seen = Gauge(
    "keyvault_process_seen_timestamp_seconds",
    "When a process of this kind, a worker or a beat, last reported that it runs.",
    ["kind"],
    multiprocess_mode="livemax",
)
_lost_processes = Gauge(
    "keyvault_lost_processes",
    "Workers and beats that stopped reporting without a shutdown and did not return.",
    multiprocess_mode="livemax",
)
_queue_rows = Gauge(
    "keyvault_queue_due",
    "Rows of a queue that are due and wait for a worker, counted up to 10,000.",
    ["queue"],
    multiprocess_mode="livemax",
)
_queue_age = Gauge(
    "keyvault_queue_age_seconds",
    "Seconds since the oldest waiting row of a queue became due.",
    ["queue"],
    multiprocess_mode="livemax",
)
_messages = Gauge(
    "keyvault_broker_messages",
    "Messages in a queue of the broker; Redis only.",
    ["queue"],
    multiprocess_mode="livemax",
)


def note_process(kind: str, seen_at: datetime) -> None:
    _process_seen.labels(kind).set(seen_at.timestamp())


def note_lost(count: int) -> None:
    _lost_processes.set(count)


def note_queue(queue: str, rows: int, age_seconds: float | None = None) -> None:
    """Record the state of a queue. `age_seconds` None: the queue's rows store no due time."""
    _queue_rows.labels(queue).set(rows)
    if age_seconds is not None:
        _queue_age.labels(queue).set(age_seconds)


def note_messages(queue: str, count: int) -> None:
    _messages.labels(queue).set(count)


def note_verifier(from_memory: int, known_keys: int, feed_age_seconds: float) -> None:
    """Record a verifier's state; `from_memory` counts the verdicts from memory since the last call."""
    _from_memory.inc(from_memory)
    _known_keys.set(known_keys)
    _feed_age.set(feed_age_seconds)


def note_denial(code: str) -> None:
    _denials.labels(code).inc()


def note_call(login: str, outcome: str) -> None:
    """Count a call. `outcome`: ok, unavailable, denied, conflict, missing, invalid; not_asked: the breaker was open."""
    _calls.labels(login, outcome).inc()


def note_lease(login: str, seconds: float | None) -> None:
    _lease_ends.labels(login).set(0 if seconds is None else time.time() + seconds)


def note_ready(is_ready: bool) -> None:
    _sealed.set(0 if is_ready else 1)


def note_pepper(pepper_set: str, version: int) -> None:
    _pepper.labels(pepper_set).set(version)


def note_anchor(until: datetime) -> None:
    _anchor.set(until.timestamp())


def note_compared(is_compared: bool) -> None:
    _uncompared.set(0 if is_compared else 1)


def note_checkpoint(scope: str, at: datetime) -> None:
    _checkpoint.labels(scope).set(at.timestamp())


def note_unsigned(scope: str, since: datetime | None) -> None:
    _unsigned.labels(scope).set(0 if since is None else since.timestamp())
