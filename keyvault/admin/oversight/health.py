"""The state of the installation: what runs, what is stale or fails, and where to look. Six queries."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from time import monotonic
from typing import Any

from django.contrib.admin import AdminSite
from django.db.models import Max
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from keyvault.access.permissions import Permission as P
from keyvault.admin.framework.components import Banner, Columns
from keyvault.admin.framework.enforcement import may, operator_of
from keyvault.admin.framework.menu import ConsolePage
from keyvault.admin.framework.pages import live_page
from keyvault.admin.framework.scoping import in_scope
from keyvault.admin.framework.widgets import FactTable, Table, badge, counted, duration, link, moment, mono
from keyvault.backends.base import Health
from keyvault.domain.checkpoints import UNSIGNED_FOR
from keyvault.domain.errors import KeyvaultError
from keyvault.models import Change, Verifier, WebhookEndpoint
from keyvault.services.secrets.backend import secret_backend
from keyvault.services.startup.system_health import MAX_ROWS, Seen, SystemHealth, find_system_health
from keyvault.services.webhooks.endpoints import host_of

_REFRESH_SECONDS = 5
_BACKEND_SECONDS = 15
"""Interval between two requests for the state of the secret backend, in seconds."""

_SIGNED_WITHIN = timedelta(hours=2)
"""Age of an audit checkpoint above which it is marked as late. Nothing is signed while nothing changes."""

_PROCESSES = {"worker": "worker", "beat": "scheduler"}
"""The console's name of each kind of process."""


def describe_system(now: datetime) -> list[tuple[str, SafeString]]:
    """Return one line for each part of the installation, for the overview."""
    return [(label, _state(text, tone)) for label, text, tone in _judge(find_system_health(now), now)]


def _judge(health: SystemHealth, now: datetime) -> Iterator[tuple[str, str, str]]:
    """Yield each part with its state and the tone of it."""
    backend = _backend_health(int(monotonic() / _BACKEND_SECONDS))
    failing = len(health.failing_endpoints)
    yield "Secret backend", "ready" if backend.ready else backend.detail, "good" if backend.ready else "bad"
    yield "Verifiers", *_describe_verifiers(health.verifiers, now)
    yield "Workers and scheduler", *_describe_processes(health.processes, now)
    yield "Audit chain", *_describe_audit(health, now)
    if failing:
        yield "Webhook delivery", f"{counted(failing, 'endpoint')} failing", "wait"
    else:
        yield "Webhook delivery", "no endpoint failing", "good"


@lru_cache(maxsize=1)
def _backend_health(period: int) -> Health:
    """Return the health of the secret backend, asked once per period."""
    try:
        return secret_backend().health()
    except KeyvaultError as error:
        return Health(ready=False, detail=error.detail)


def _describe_verifiers(verifiers: Sequence[Seen], now: datetime) -> tuple[str, str]:
    if not verifiers:
        return "none; the database answers", "dim"
    current = [each for each in verifiers if each.is_current]
    oldest = min((each.seen_at for each in current), default=None)
    is_late = oldest is not None and now - oldest >= timedelta(minutes=1)
    behind = f", seen {duration(now - oldest)} ago" if oldest is not None and is_late else ""
    tone = "good" if len(current) == len(verifiers) else "bad" if not current else "wait"
    return f"{len(current)} of {len(verifiers)} current{behind}", tone


def _describe_processes(processes: Sequence[Seen], now: datetime) -> tuple[str, str]:
    kinds: Mapping[str, list[Seen]] = {
        kind: [each for each in processes if each.name.startswith(f"{kind} ")] for kind in _PROCESSES
    }
    missing = [kind for kind, found in kinds.items() if not any(each.is_current for each in found)]
    if missing:
        last = max((each.seen_at for kind in missing for each in kinds[kind]), default=None)
        when = "" if last is None else f", last seen {duration(now - last)} ago"
        return f"no {' and no '.join(_PROCESSES[kind] for kind in missing)} runs{when}", "bad"
    lost = sum(not each.is_current for each in processes)
    return "running" if not lost else f"running, {lost} lost", "good" if not lost else "wait"


def _describe_audit(health: SystemHealth, now: datetime) -> tuple[str, str]:
    if health.broken:
        return f"broken in {', '.join(sorted(health.broken))}; nothing is signed", "bad"
    if overdue := _find_overdue(health, now):
        return f"unsigned for {duration(now - min(overdue.values()))}", "bad"
    if health.signed_at is None:
        return "not signed yet", "wait"
    return _describe_signed(now - health.signed_at), "good"


def _find_overdue(health: SystemHealth, now: datetime) -> dict[str, datetime]:
    """Return when the oldest unsigned entry was written, for each scope that is unsigned for too long."""
    return {scope: since for scope, since in health.unsigned_since.items() if now - since > UNSIGNED_FOR}


def _state(text: str, tone: str) -> SafeString:
    return format_html('<span class="badge badge-{}">{}</span>', tone, text)


def _describe_signed(age: timedelta) -> str:
    return "signed just now" if age < timedelta(minutes=1) else f"signed {duration(age)} ago"


# --- the page -------------------------------------------------------------------------------------------------------


def health_view(site: AdminSite, request: HttpRequest) -> HttpResponse:
    """Show the state of the installation; to an operator of some merchants only that of their webhook endpoints."""
    now = datetime.now(UTC)
    health = find_system_health(now)
    is_installation = operator_of(request).scope.merchants is None
    context = {
        "title": "Verifiers and health",
        "banner": _banner(list(_judge(health, now))) if is_installation else None,
        "sections": [
            *(_installation_sections(request, health, now) if is_installation else []),
            Columns([_endpoints_table(request, health), *([_backend_facts(request)] if is_installation else [])]),
        ],
    }
    return live_page(site, request, "health", context, seconds=_REFRESH_SECONDS)


def _banner(parts: Sequence[tuple[str, str, str]]) -> Banner:
    bad = [f"{label}: {text}." for label, text, tone in parts if tone == "bad"]
    late = [f"{label}: {text}." for label, text, tone in parts if tone == "wait"]
    if bad:
        return Banner("Something does not run.", " ".join([*bad, *late]), "bad")
    if late:
        return Banner("Something needs attention.", " ".join(late), "wait")
    return Banner("Everything runs.", "Nothing is needed from you.", "good")


def _installation_sections(request: HttpRequest, health: SystemHealth, now: datetime) -> list[Any]:
    return [
        _verifiers_table(health),
        Columns([_processes_table(health.processes), _audit_table(request, health, now)], are_even=True),
    ]


def _verifiers_table(health: SystemHealth) -> Table:
    """List the verifiers with their staleness: behind by changes, and the age of their last report."""
    newest = Change.objects.aggregate(newest=Max("sequence"))["newest"] or 0
    is_current = {each.name: each.is_current for each in health.verifiers}
    rows = Verifier.objects.filter(stopped_at__isnull=True).order_by("verifier_id")[:MAX_ROWS]
    return Table(
        "Verifiers",
        ["verifier", "entry point", "state", "behind", "last report", "staleness bound", "started"],
        [
            [
                mono(row.verifier_id),
                row.entry_point,
                badge("current" if is_current.get(row.verifier_id) else "stale"),
                counted(max(newest - row.confirmed_sequence, 0), "change"),
                moment(row.seen_at),
                f"{row.staleness_ms / 1000:g} s",
                moment(row.started_at),
            ]
            for row in rows
        ],
        "No verifiers. Processes that decide from memory appear here; without them, verdicts use the database.",
        f"newest change {newest:,}",
    )


def _processes_table(processes: Sequence[Seen]) -> Table:
    return Table(
        "Workers and scheduler",
        ["process", "state", "last report"],
        [
            [mono(each.name), badge("running" if each.is_current else "lost"), moment(each.seen_at)]
            for each in sorted(processes, key=lambda each: (each.is_current, each.name))
        ],
        "No worker and no scheduler has reported. Start them: manage.py run, or the processes of your deployment.",
    )


def _audit_table(request: HttpRequest, health: SystemHealth, now: datetime) -> Table:
    url = reverse("admin:keyvault_auditentry_changelist")
    return Table(
        "Audit chain",
        ["scope", "state", "newest checkpoint"],
        [
            [scope, _signed_badge(health, scope, now), moment(at, missing="not signed yet")]
            for scope, at in sorted(health.signed.items())
        ],
        "This process serves no scope.",
        link(url, "Audit log") if may(request, P.AUDIT_READ) else "",
    )


def _signed_badge(health: SystemHealth, scope: str, now: datetime) -> SafeString:
    at = health.signed[scope]
    if scope in health.broken:
        return badge("broken")
    if scope in _find_overdue(health, now):
        return badge("unsigned")
    if at is None:
        return badge("waiting")
    return badge("signed", "good" if now - at < _SIGNED_WITHIN else "dim")


def _backend_facts(request: HttpRequest) -> FactTable:
    backend = _backend_health(int(monotonic() / _BACKEND_SECONDS))
    rows: list[tuple[str, Any]] = [
        ("State", _state("ready" if backend.ready else "not ready", "good" if backend.ready else "bad")),
        *([("Detail", backend.detail)] if backend.detail else []),
    ]
    if may(request, P.PEPPERS_READ):
        rows.append(("Peppers", link(reverse("admin:keyvault_pepperversion_changelist"), "Pepper versions")))
    return FactTable("Secret backend", rows)


def _endpoints_table(request: HttpRequest, health: SystemHealth) -> Table:
    scope = operator_of(request).scope
    rows = WebhookEndpoint.objects.filter(in_scope(scope, "account"), pk__in=list(health.failing_endpoints))
    return Table(
        "Webhook endpoints that fail",
        ["endpoint", "account", "state"],
        [
            [
                link(reverse("admin:keyvault_webhookendpoint_change", args=[row.pk]), host_of(row)),
                str(row.account),
                badge("late", "wait") if row.disabled_at is None else badge("disabled"),
            ]
            for row in rows.select_related("account").order_by("pk")[:MAX_ROWS]
        ],
        "None. Endpoints with late deliveries, and those that were disabled after failures, appear here.",
    )


PAGES = (ConsolePage("health", "health/", "Health", "Verifiers and health", (P.KEYS_READ,), health_view),)
