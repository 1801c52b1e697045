"""The state of the installation's processes and work, for the console: one query, and no call of another system."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import CharField, F, IntegerField, QuerySet, TextField, Value
from django.db.models.functions import Cast

from keyvault.models import (
    AuditChain,
    AuditCheckpoint,
    DeliveryState,
    ServiceProcess,
    Verifier,
    WebhookDelivery,
    WebhookEndpoint,
    WorkLease,
)
from keyvault.models.union_parts import limit_part
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
        unsigned_since: when the oldest unsigned audit entry of all served scopes was written; None: all are signed.
        failing_endpoints: ids of webhook endpoints with late deliveries or disabled after failures, of at most
            MAX_ROWS.
    """

    verifiers: Sequence[Seen]
    processes: Sequence[Seen]
    signed: Mapping[str, datetime | None]
    broken: Set[str]
    unsigned_since: datetime | None
    failing_endpoints: Set[str]

    @property
    def signed_at(self) -> datetime | None:
        """When the oldest of the newest audit checkpoints was signed; None: no scope has one.

        A scope that was never used has nothing to sign.
        """
        return min((at for at in self.signed.values() if at is not None), default=None)


def find_system_health(now: datetime) -> SystemHealth:
    """Return the state of the installation."""
    scopes = [scope.value for scope in list_served_sets()]
    verifiers = Verifier.objects.filter(stopped_at__isnull=True)
    late = WebhookDelivery.objects.filter(state=DeliveryState.DUE, due_at__lt=now - _LATE_AFTER)
    chains = AuditChain.objects.filter(unsigned_since__isnull=False)
    leases = {signing_lease(scope): scope for scope in scopes}
    parts = [
        _rows("verifier", verifiers, "verifier_id", "seen_at", "staleness_ms"),
        _rows("process", ServiceProcess.objects.all(), "name", "seen_at"),
        _rows("endpoint", WebhookEndpoint.objects.filter(disabled_at__isnull=False).exclude(disabled_why="")),
        _rows("endpoint", late.filter(is_urgent__in=(True, False)), "endpoint_id", "due_at"),
        *(
            _rows("checkpoint", AuditCheckpoint.objects.filter(scope=scope).order_by("-number"), "scope", "at", most=1)
            for scope in scopes
        ),
        *(
            _rows("unsigned", chains.filter(scope=scope).order_by("unsigned_since"), "scope", "unsigned_since", most=1)
            for scope in scopes
        ),
        _rows("broken", WorkLease.objects.filter(subject__in=leases).exclude(last_error=""), "subject", "due_at"),
    ]
    found = list(parts[0].union(*parts[1:], all=True))
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
        unsigned_since=min((at for kind, _, at, _ in found if kind == "unsigned"), default=None),
        failing_endpoints={name for kind, name, _, _ in found if kind == "endpoint"},
    )


def _rows(
    kind: str, rows: QuerySet[Any], name: str = "pk", at: str = "created_at", number: str = "", *, most: int = MAX_ROWS
) -> QuerySet[Any, Any]:
    """Select the kind, name, time and number of the first rows."""
    rows_as_tuples: QuerySet[Any, Any] = (
        limit_part(rows, most)
        .annotate(
            row_kind=Value(kind, CharField()),
            row_name=Cast(name, TextField()),
            row_at=F(at),
            row_number=F(number) if number else Value(0, IntegerField()),
        )
        .values_list("row_kind", "row_name", "row_at", "row_number")
    )
    return rows_as_tuples
