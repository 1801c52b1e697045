"""Every Prometheus metric of the service, without ids. `docs/metrics.md` is generated from this module.

The metrics of a host's processes are aggregated through files in PROMETHEUS_MULTIPROC_DIR, if that variable is set.
A label has few values, all of them from this program: no merchant, key, address or text of a client.
"""

import threading
import time
from bisect import bisect_left
from collections.abc import Mapping
from datetime import datetime

from prometheus_client import Counter, Gauge, Histogram

_FAST = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_CALLS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_TASKS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 30.0, 60.0)
_PROOF = (60, 600, 3_600, 6 * 3_600, 86_400, 3 * 86_400, 7 * 86_400, 14 * 86_400, 30 * 86_400)

# --- verification ------------------------------------------------------------------------------------------------

_verifications = Counter(
    "keyvault_verifications",
    "Verdicts on requests with a key. `source`: `memory`, from cached records; `database`, from a key read for the "
    "request; `rules`, every rule was evaluated.",
    ["entry_point", "outcome", "source"],
)
_denials = Counter(
    "keyvault_denials",
    "Denied requests by the code of the answer: of merchants (`integration`), of `verify` and the gateways with a key, "
    "and of callers of the `service` plane and the `console`.",
    ["entry_point", "code"],
)
_slow_path = Histogram(
    "keyvault_slow_path_duration_seconds",
    "Duration of verify and forward-auth requests that the fast path did not answer, without the transfer.",
    buckets=_FAST,
)
_reads = Histogram(
    "keyvault_verifier_read_duration_seconds",
    "Duration of a verifier's reads of keys from PostgreSQL; one read serves all requests that wait for it.",
    buckets=_FAST,
)
_feed_age = Gauge(
    "keyvault_change_feed_age_seconds",
    "Seconds since the process confirmed the change feed; above KEYVAULT_MAX_STALENESS it reads the database.",
    multiprocess_mode="liveall",
)
_known_keys = Gauge("keyvault_remembered_keys", "Keys in the memory of the verifiers.", multiprocess_mode="livesum")
_limit_store_lost = Gauge(
    "keyvault_limit_store_lost",
    "1 while a process cannot reach Redis and counts limits by itself, up to a share of each.",
    multiprocess_mode="livemax",
)
_limit_store_losses = Counter("keyvault_limit_store_losses", "How often a process lost Redis for its limits.")

# --- requests and tasks ------------------------------------------------------------------------------------------

_requests = Histogram(
    "keyvault_http_request_duration_seconds",
    "Duration of requests that Django answered: all but verify and forward-auth.",
    ["plane", "status"],
    buckets=_CALLS,
)
_tasks = Histogram(
    "keyvault_task_duration_seconds", "Duration of a worker's tasks.", ["task", "outcome"], buckets=_TASKS
)
_process_seen = Gauge(
    "keyvault_process_seen_timestamp_seconds",
    "When a process of this kind, a worker or a beat, last reported that it runs.",
    ["kind"],
    multiprocess_mode="livemax",
)
_lost_processes = Gauge(
    "keyvault_lost_processes",
    "Workers and beats that stopped reporting without a shutdown and did not return.",
    multiprocess_mode="livemostrecent",
)
_database_seen = Gauge(
    "keyvault_database_seen_timestamp_seconds",
    "When the process last measured the installation, which needs the database.",
    multiprocess_mode="livemax",
)
_queue_rows = Gauge(
    "keyvault_queue_due",
    "Rows of a queue that are due and wait for a worker, counted up to 10,000.",
    ["queue"],
    multiprocess_mode="livemostrecent",
)
_queue_age = Gauge(
    "keyvault_queue_age_seconds",
    "Seconds since the oldest waiting row of a queue became due.",
    ["queue"],
    multiprocess_mode="livemostrecent",
)
_messages = Gauge(
    "keyvault_broker_messages",
    "Messages in a queue of the broker; Redis only.",
    ["queue"],
    multiprocess_mode="livemostrecent",
)
_broker_down = Gauge(
    "keyvault_broker_down",
    "1 while Redis does not answer as the broker; Redis only.",
    multiprocess_mode="livemostrecent",
)

# --- rotations ---------------------------------------------------------------------------------------------------

_rotations = Gauge(
    "keyvault_rotations",
    "Open and stalled rotations, each state counted up to 10,000.",
    ["state"],
    multiprocess_mode="livemostrecent",
)
_transitions = Counter("keyvault_rotation_transitions", "Transitions of rotations, by the state entered.", ["state"])
_proof = Histogram(
    "keyvault_rotation_proof_seconds",
    "Time from the delivery of a replacement to the proof that it is used.",
    buckets=_PROOF,
)

# --- notices -----------------------------------------------------------------------------------------------------

_webhooks = Counter(
    "keyvault_webhook_attempts",
    "Attempts to deliver to merchants' webhooks: `delivered`, `refused`, `no_reply`, or `gone`.",
    ["outcome"],
)
_webhooks_given_up = Counter("keyvault_webhook_given_up", "Webhook messages that will not be delivered any more.")
_alarms = Gauge(
    "keyvault_alarms_unacknowledged",
    "Alarms that no operator has marked as seen, counted up to 10,000.",
    multiprocess_mode="livemostrecent",
)
_alarm_messages = Counter(
    "keyvault_alarm_messages",
    "Messages about alarms to operators, by channel (`email`, `webhook`) and outcome (`delivered`, `failed`).",
    ["channel", "outcome"],
)
_sign_in_refusals = Counter(
    "keyvault_sign_in_refusals",
    "Refused sign-ins of operators. `locked`: too many failures, nothing was checked.",
    ["reason"],
)

# --- secret backend, audit log and revocation log ----------------------------------------------------------------

_calls = Counter("keyvault_vault_calls", "Calls to the secrets manager.", ["login", "outcome"])
_call_seconds = Histogram(
    "keyvault_vault_call_duration_seconds", "Duration of calls to the secrets manager.", ["login"], buckets=_CALLS
)
_lease_ends = Gauge(
    "keyvault_vault_lease_ends_timestamp_seconds",
    "Expiry of a login's token unless it is renewed; 0: it does not expire.",
    ["login"],
    multiprocess_mode="livemin",
)
_sealed = Gauge(
    "keyvault_vault_sealed", "1 while the secrets manager is sealed or unavailable.", multiprocess_mode="livemostrecent"
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
_log_failures = Counter(
    "keyvault_revocation_log_failures", "Revocations that could not be written to this host's revocation log."
)
_log_missing = Gauge(
    "keyvault_revocation_log_missing",
    "1 while this host's revocation log does not exist.",
    multiprocess_mode="livemostrecent",
)

# --- storage and clock -------------------------------------------------------------------------------------------

_table_rows = Gauge(
    "keyvault_table_rows",
    "Rows of a table, as PostgreSQL estimated them at its last ANALYZE or VACUUM; PostgreSQL only.",
    ["table"],
    multiprocess_mode="livemostrecent",
)
_table_bytes = Gauge(
    "keyvault_table_bytes",
    "Size of a table with its indexes in bytes; PostgreSQL only.",
    ["table"],
    multiprocess_mode="livemostrecent",
)
_disk_free = Gauge(
    "keyvault_disk_free_bytes",
    "Free space of the fullest disk that this host writes to: of the data folder, the revocation log, or SQLite.",
    multiprocess_mode="livemin",
)
_disk_full = Gauge(
    "keyvault_disk_full",
    "1 while a disk lacks the space for a revocation or for the reserve.",
    multiprocess_mode="livemostrecent",
)
_clock = Gauge(
    "keyvault_clock_difference_seconds",
    "This host's clock minus that of PostgreSQL; 0 on SQLite.",
    multiprocess_mode="livemostrecent",
)


# A counter that appears with its first event hides it from `increase`.
for _reason in ("password", "second_factor", "locked", "single_sign_on"):
    _sign_in_refusals.labels(_reason)
for _entry_point in ("verify", "traefik", "nginx", "envoy"):
    _denials.labels(_entry_point, "internal_error")
for _outcome in ("delivered", "refused", "no_reply", "gone"):
    _webhooks.labels(_outcome)
for _channel in ("email", "webhook"):
    for _outcome in ("delivered", "failed"):
        _alarm_messages.labels(_channel, _outcome)


class DurationTally:
    """Durations counted in plain integers, because `Histogram.observe` costs more than what it would measure.

    `flush` adds them to the histogram. The counts are those of one process; threads may share an instance.
    """

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._bounds = [bound for bound in histogram._upper_bounds if bound != float("inf")]
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._counts, self._seconds = [0] * (len(self._bounds) + 1), 0.0

    def note(self, seconds: float) -> None:
        with self._lock:
            self._counts[bisect_left(self._bounds, seconds)] += 1
            self._seconds += seconds

    def flush(self) -> None:
        with self._lock:
            counts, seconds = self._counts, self._seconds
            self._reset()
        for bucket, count in zip(self._histogram._buckets, counts, strict=True):
            if count:
                bucket.inc(count)
        if seconds:
            self._histogram._sum.inc(seconds)


slow_path = DurationTally(_slow_path)
reads = DurationTally(_reads)


# --- verification ------------------------------------------------------------------------------------------------


def note_verifications(counts: Mapping[tuple[str, str, str], int]) -> None:
    """Add verdicts by entry point, outcome and source."""
    for labels, count in counts.items():
        if count:
            _verifications.labels(*labels).inc(count)


def note_verification(entry_point: str, *, is_allowed: bool, source: str) -> None:
    _verifications.labels(entry_point, "allowed" if is_allowed else "denied", source).inc()


def note_denial(entry_point: str, code: str) -> None:
    _denials.labels(entry_point, code).inc()


def note_verifier(known_keys: int, feed_age_seconds: float) -> None:
    """Record a verifier's state, and the durations since the last call."""
    _known_keys.set(known_keys)
    _feed_age.set(feed_age_seconds)
    slow_path.flush()
    reads.flush()


def note_limit_store(*, is_lost: bool) -> None:
    """Record that a process lost Redis for its limits, or has it back."""
    _limit_store_lost.set(1 if is_lost else 0)
    if is_lost:
        _limit_store_losses.inc()


# --- requests and tasks ------------------------------------------------------------------------------------------


def note_request(plane: str, status: int, seconds: float) -> None:
    _requests.labels(plane, f"{status // 100}xx").observe(seconds)


def note_task(task: str, seconds: float, *, is_done: bool) -> None:
    _tasks.labels(task, "done" if is_done else "failed").observe(seconds)


def note_process(kind: str, seen_at: datetime) -> None:
    _process_seen.labels(kind).set(seen_at.timestamp())


def note_lost(count: int) -> None:
    _lost_processes.set(count)


def note_database(at: datetime) -> None:
    _database_seen.set(at.timestamp())


def note_queue(queue: str, rows: int, age_seconds: float | None = None) -> None:
    """Record the state of a queue. `age_seconds` None: the queue's rows store no due time."""
    _queue_rows.labels(queue).set(rows)
    if age_seconds is not None:
        _queue_age.labels(queue).set(age_seconds)


def note_messages(queue: str, count: int) -> None:
    _messages.labels(queue).set(count)


def note_broker(*, is_down: bool) -> None:
    _broker_down.set(1 if is_down else 0)


# --- rotations ---------------------------------------------------------------------------------------------------


def note_rotations(state: str, count: int) -> None:
    _rotations.labels(state).set(count)


def note_transition(state: str) -> None:
    _transitions.labels(state).inc()


def note_proof(seconds: float) -> None:
    _proof.observe(seconds)


# --- notices -----------------------------------------------------------------------------------------------------


def note_webhook(outcome: str) -> None:
    _webhooks.labels(outcome).inc()


def note_webhook_given_up() -> None:
    _webhooks_given_up.inc()


def note_alarms(count: int) -> None:
    _alarms.set(count)


def note_alarm_message(channel: str, *, is_delivered: bool) -> None:
    _alarm_messages.labels(channel, "delivered" if is_delivered else "failed").inc()


def note_sign_in_refusal(reason: str) -> None:
    _sign_in_refusals.labels(reason).inc()


# --- secret backend, audit log and revocation log ----------------------------------------------------------------


def note_call(login: str, outcome: str, seconds: float | None = None) -> None:
    """Count a call. `outcome`: ok, unavailable, denied, conflict, missing, invalid; not_asked: the breaker was open."""
    _calls.labels(login, outcome).inc()
    if seconds is not None:
        _call_seconds.labels(login).observe(seconds)


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


def note_log_failure() -> None:
    _log_failures.inc()


def note_log(*, is_missing: bool) -> None:
    _log_missing.set(1 if is_missing else 0)


# --- storage and clock -------------------------------------------------------------------------------------------


def note_table(table: str, rows: float, size_bytes: int) -> None:
    _table_rows.labels(table).set(rows)
    _table_bytes.labels(table).set(size_bytes)


def note_disk(free_bytes: int, *, is_full: bool) -> None:
    _disk_free.set(free_bytes)
    _disk_full.set(1 if is_full else 0)


def note_clock(difference_seconds: float) -> None:
    _clock.set(difference_seconds)
