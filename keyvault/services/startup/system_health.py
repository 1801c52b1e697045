"""The state of the installation's processes and work, for the console: one query, and no call of another system."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from keyvault.models import Verifier
from keyvault.services.audit.checkpoints import signing_lease
from keyvault.services.peppers.ring import list_served_sets
from keyvault.services.startup.processes import LOST_AFTER

MAX_ROWS = 200
"""Maximum rows that are read of each kind."""

_LATE_AFTER = timedelta(minutes=5)
"""Time for which an undelivered webhook may be due before its endpoint counts as failing."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A process and when it last reported. `is_current`: recently enough to be relied on."""

    name: str
    seen_at: datetime
    is_current: bool


@dataclass(frozen=True, slots=True)
class SystemHealth:
    """What runs, and what fails.

    Args:
        processes: workers and beats.
        signed: when the newest audit checkpoint of each served scope was signed; None: never.
        broken: served scopes whose audit log does not match its checkpoints, as the worker found at its last signature.
        unsigned_since: when the oldest unsigned audit entry of each served scope that has one was written.
        failing_endpoints: ids of webhook endpoints with late deliveries or disabled after failures, of at most
            MAX_ROWS.
    """

    verifiers: Sequence[Seen]
    processes: Sequence[Seen]
    signed: Mapping[str, datetime | None]
    broken: Set[str]
    unsigned_since: Mapping[str, datetime]
    failing_endpoints: Set[str]

    @property
    def signed_at(self) -> datetime | None:
        """When the oldest of the newest audit checkpoints was signed; None: no scope has one.

        A scope that was never used has nothing to sign.
        """
        return min((at for at in self.signed.values() if at is not None), default=None)


_PART = """
    SELECT * FROM (
        SELECT '{}' AS kind, CAST({} AS text) AS verifier_id, {} AS seen_at, {} AS staleness_ms
        FROM keyvault_{} LIMIT %s
    ) AS part
"""
"""The kind, name, time and number of some rows, as columns of a verifier."""

_VERIFIERS = _PART.format("verifier", "verifier_id", "seen_at", "staleness_ms", "verifier WHERE stopped_at IS NULL")
_PROCESSES = _PART.format("process", "name", "seen_at", 0, "serviceprocess")
_DISABLED = _PART.format(
    "endpoint", "id", "created_at", 0, "webhookendpoint WHERE disabled_at IS NOT NULL AND disabled_why <> ''"
)
_LATE = _PART.format(
    "endpoint",
    "endpoint_id",
    "due_at",
    0,
    "webhookdelivery WHERE is_urgent IN (TRUE, FALSE) AND state = 'due' AND due_at < %s",
)
_CHECKPOINT = _PART.format("checkpoint", "scope", "at", 0, "auditcheckpoint WHERE scope = %s ORDER BY number DESC")
_UNSIGNED = _PART.format(
    "unsigned",
    "scope",
    "unsigned_since",
    0,
    "auditchain WHERE scope = %s AND unsigned_since IS NOT NULL ORDER BY unsigned_since",
)
_BROKEN = _PART.format("broken", "subject", "due_at", 0, "worklease WHERE subject = %s AND last_error <> ''")


def find_system_health(now: datetime) -> SystemHealth:
    """Return the state of the installation.

    Django would take longer to compile the query than the database to run it.
    """
    scopes = [scope.value for scope in list_served_sets()]
    leases = {signing_lease(scope): scope for scope in scopes}
    parts: list[tuple[str, list[Any]]] = [
        (_VERIFIERS, [MAX_ROWS]),
        (_PROCESSES, [MAX_ROWS]),
        (_DISABLED, [MAX_ROWS]),
        (_LATE, [now - _LATE_AFTER, MAX_ROWS]),
        *((_CHECKPOINT, [scope, 1]) for scope in scopes),
        *((_UNSIGNED, [scope, 1]) for scope in scopes),
        *((_BROKEN, [lease, 1]) for lease in leases),
    ]
    query = " UNION ALL ".join(part for part, _ in parts)
    rows: Any = Verifier.objects.raw(query, [value for _, values in parts for value in values])
    found = [(row.kind, row.verifier_id, row.seen_at, row.staleness_ms) for row in rows]
    signed = {name: at for kind, name, at, _ in found if kind == "checkpoint"}
    return SystemHealth(
        verifiers=[
            Seen(name, at, at >= now - max(timedelta(milliseconds=staleness), LOST_AFTER))
            for kind, name, at, staleness in found
            if kind == "verifier"
        ],
        processes=[Seen(name, at, at >= now - LOST_AFTER) for kind, name, at, _ in found if kind == "process"],
        signed={scope: signed.get(scope) for scope in scopes},
        broken={leases[name] for kind, name, _, _ in found if kind == "broken"},
        unsigned_since={name: at for kind, name, at, _ in found if kind == "unsigned"},
        failing_endpoints={name for kind, name, _, _ in found if kind == "endpoint"},
    )
