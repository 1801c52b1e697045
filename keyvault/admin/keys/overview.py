"""The overview: what needs the operator, the numbers of the last day, and the state of the system. Eight queries."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from time import monotonic
from typing import Any

from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from keyvault.access.permissions import Permission as P
from keyvault.admin.framework.charts import Series, StackedChart, Tick
from keyvault.admin.framework.components import Card, EmptyState, Meter, Tile
from keyvault.admin.framework.enforcement import may, operator_of
from keyvault.admin.framework.overview import format_bounded, format_number, format_share
from keyvault.admin.framework.shown_environment import environment_of, shown_scope
from keyvault.admin.framework.widgets import counted, duration, link
from keyvault.backends.base import Health
from keyvault.domain.errors import KeyvaultError
from keyvault.domain.keys import KeyState
from keyvault.models import Key, Refusal
from keyvault.models.usage import UseOutcome
from keyvault.services.secrets.backend import secret_backend
from keyvault.services.startup.system_health import Seen, find_system_health
from keyvault.services.usage.totals import SLOT, read_totals, start_of_slot

REFRESH_SECONDS = 5
"""Interval between two updates of the overview, in seconds."""

MAX_KEYS = 20_000
"""Maximum active keys that are counted."""

MAX_DENIALS = 5_000
"""Maximum refusals of which the codes are counted: the newest of the last day."""

_MAX_CODES = 6
_DAY = timedelta(days=1)
_SLOTS = int(_DAY / SLOT)
_BACKEND_SECONDS = 15

_NOT_USED = EmptyState("No verifications in the last 24 hours", "Each use of a key is counted here within a minute.")


def overview_context(request: HttpRequest) -> dict[str, Any]:
    """Return what the overview shows of the environments that the operator has chosen."""
    now = datetime.now(UTC)
    chosen = environment_of(request)
    where = "all environments" if chosen is None else f"{chosen} only"
    is_installation = operator_of(request).scope.merchants is None
    context: dict[str, Any] = {"lead": f"Last 24 hours, {where}"}
    if is_installation and may(request, P.KEYS_READ):
        context |= _usage_context(request, now)
    if may(request, P.VERDICTS_EXPLAIN):
        context["denials"] = _denials(request, now)
    if is_installation:
        context["system"] = _system_rows(request, now)
    return context


def _usage_context(request: HttpRequest, now: datetime) -> dict[str, Any]:
    scope = shown_scope(request)
    end = start_of_slot(now) - SLOT  # the last complete slot
    slots = [end - SLOT * back for back in reversed(range(_SLOTS))]
    totals = read_totals(scope.environments, end - 2 * _DAY)
    allowed = [totals.get(slot, {}).get(UseOutcome.ALLOWED, 0) for slot in slots]
    denied = [totals.get(slot, {}).get(UseOutcome.DENIED, 0) for slot in slots]
    refused = [totals.get(slot, {}).get(UseOutcome.REFUSED, 0) for slot in slots]
    moments = [f"{slot:%H:%M}" for slot in slots]
    chart = StackedChart(
        "Uses of keys in the last 24 hours, by 15 minutes (UTC)",
        [
            Series("Allowed", allowed, 1),
            Series("Denied", denied, 2),
            Series("Suspended key", refused, 3),
        ],
        moments,
        ticks=[
            Tick(place / (_SLOTS - 1), "now" if place == _SLOTS - 1 else moments[place])
            for place in (0, 24, 48, 72, _SLOTS - 1)
        ],
    )
    total, bad = sum(allowed) + sum(denied) + sum(refused), sum(denied) + sum(refused)
    before = sum(sum(counts.values()) for at, counts in totals.items() if at < slots[0])
    return {
        "usage_card": Card("Verifications", chart, chart.legend) if total else Card("Verifications", _NOT_USED),
        "tiles": [
            Tile("Verifications of valid keys", format_number(total), _compare(total, before)),
            Tile("Denied", format_share(bad, total), _peak(denied, refused, allowed, moments)),
            _active_keys(request),
        ],
    }


def _compare(total: int, before: int) -> str:
    if not before:
        return "no data of the day before"
    change = 100 * (total - before) / before
    if abs(change) < 1:
        return "as the day before"
    return f"{'▲' if change > 0 else '▼'} {abs(change):.0f} % vs the day before"


def _peak(denied: Sequence[int], refused: Sequence[int], allowed: Sequence[int], moments: Sequence[str]) -> str:
    shares = [
        ((bad + held) / (bad + held + good), moment)
        for bad, held, good, moment in zip(denied, refused, allowed, moments, strict=True)
        if bad + held
    ]
    if not shares:
        return "none in 24 hours"
    share, moment = max(shares)
    return f"peak {100 * share:.1f} % at {moment} UTC"


def _active_keys(request: HttpRequest) -> Tile:
    scope = shown_scope(request)
    active = Key.objects.filter(account_environment__in=scope.environments, state=KeyState.ACTIVE)
    count = active.order_by("account_environment", "activated_at").values("pk")[: MAX_KEYS + 1].count()
    url = reverse("admin:keyvault_key_changelist") + "?state__exact=active"
    return Tile("Active keys", format_bounded(count, MAX_KEYS), link(url, "Show keys"))


def _denials(request: HttpRequest, now: datetime) -> dict[str, Any]:
    """Return the codes of the newest denials, most frequent first."""
    scope = shown_scope(request)
    rows = Refusal.objects.filter(environment__in=scope.environments, at__gte=now - _DAY)
    if scope.merchants is not None:
        rows = rows.filter(merchant_id__in=scope.merchants)
    codes = list(rows.order_by("-at").values_list("code", flat=True)[: MAX_DENIALS + 1])
    counts = Counter(codes[:MAX_DENIALS]).most_common(_MAX_CODES)
    most = counts[0][1] if counts else 0
    page = reverse("admin:keyvault_refusal_changelist")
    return {
        "note": f"of the newest {MAX_DENIALS:,}" if len(codes) > MAX_DENIALS else "click to explain",
        "rows": [
            (link(f"{page}?code={code}", code), Meter(count, most, f"{count:,} times", _tone(code)), f"{count:,}")
            for code, count in counts
        ],
    }


def _tone(code: str) -> str:
    return "wait" if code == "rate_limited" else "bad"


# --- the system ---------------------------------------------------------------------------------------------


def _system_rows(request: HttpRequest, now: datetime) -> list[tuple[str, SafeString]]:
    health = find_system_health(now)
    backend = _backend_health(int(monotonic() / _BACKEND_SECONDS))
    signed_at = health.signed_at
    return [
        ("Secret backend", _state("ready" if backend.ready else backend.detail, "good" if backend.ready else "bad")),
        ("Verifiers", _describe_verifiers(health.verifiers, now)),
        ("Workers and scheduler", _describe_processes(health.processes, now)),
        (
            "Audit chain",
            _state("not signed yet", "wait")
            if signed_at is None
            else _state(_describe_signed(now - signed_at), "good"),
        ),
        (
            "Webhook delivery",
            _state("no endpoint failing", "good")
            if not health.failing_endpoints
            else _state(counted(health.failing_endpoints, "endpoint") + " failing", "wait"),
        ),
    ]


@lru_cache(maxsize=1)
def _backend_health(period: int) -> Health:
    """Return the health of the secret backend, asked once per period."""
    try:
        return secret_backend().health()
    except KeyvaultError as error:
        return Health(ready=False, detail=error.detail)


def _describe_verifiers(verifiers: Sequence[Seen], now: datetime) -> SafeString:
    if not verifiers:
        return _state("none; the database answers", "dim")
    current = [each for each in verifiers if each.is_current]
    oldest = min((each.seen_at for each in current), default=None)
    is_late = oldest is not None and now - oldest >= timedelta(minutes=1)
    behind = f", seen {duration(now - oldest)} ago" if oldest is not None and is_late else ""
    tone = "good" if len(current) == len(verifiers) else "bad" if not current else "wait"
    return _state(f"{len(current)} of {len(verifiers)} current{behind}", tone)


def _describe_processes(processes: Sequence[Seen], now: datetime) -> SafeString:
    kinds: Mapping[str, list[Seen]] = {
        kind: [each for each in processes if each.name.startswith(f"{kind} ")] for kind in ("worker", "beat")
    }
    missing = [
        name
        for kind, name in (("worker", "worker"), ("beat", "scheduler"))
        if not any(each.is_current for each in kinds[kind])
    ]
    if missing:
        last = max((each.seen_at for each in processes), default=None)
        when = "" if last is None else f", last seen {duration(now - last)} ago"
        return _state(f"no {' and no '.join(missing)} runs{when}", "bad")
    lost = sum(not each.is_current for each in processes)
    return _state("running" if not lost else f"running, {lost} lost", "good" if not lost else "wait")


def _state(text: str, tone: str) -> SafeString:
    return format_html('<span class="badge badge-{}">{}</span>', tone, text)


def _describe_signed(age: timedelta) -> str:
    return "signed just now" if age < timedelta(minutes=1) else f"signed {duration(age)} ago"
