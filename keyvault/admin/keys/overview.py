"""The overview: what needs the operator, the numbers of the last day, and the state of the system. Eight queries."""

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from django.http import HttpRequest
from django.urls import reverse

from keyvault.access.permissions import Permission as P
from keyvault.admin.framework.charts import Series, StackedChart, Tick
from keyvault.admin.framework.components import Card, EmptyState, Meter, Tile
from keyvault.admin.framework.enforcement import may, operator_of
from keyvault.admin.framework.overview import format_bounded, format_number, format_share
from keyvault.admin.framework.shown_environment import environment_of, shown_scope
from keyvault.admin.framework.widgets import link
from keyvault.admin.oversight.health import describe_system
from keyvault.domain.keys import KeyState
from keyvault.models import Key, Refusal
from keyvault.models.usage import UseOutcome
from keyvault.services.usage.totals import SLOT, read_totals, start_of_slot

REFRESH_SECONDS = 5
"""Interval between two updates of the overview, in seconds."""

ACTIVE_KEYS = "Active keys"
"""Label of the tile with the number of active keys."""

MAX_KEYS = 20_000
"""Maximum active keys that are counted."""

MAX_DENIALS = 2_000
"""Maximum refusals of which the codes are counted: the newest of the last day."""

_MAX_CODES = 6
_DAY = timedelta(days=1)
_SLOTS = int(_DAY / SLOT)

_NOT_USED = EmptyState(
    "No verifications in the last 24 hours", "Uses of keys are added at the end of each quarter of an hour."
)


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
        context["system"] = describe_system(now)
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
            Tick(place / (_SLOTS - 1), f"{end + SLOT:%H:%M}" if place == _SLOTS - 1 else moments[place])
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
    return Tile(ACTIVE_KEYS, format_bounded(count, MAX_KEYS), link(url, "Show keys"))


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
