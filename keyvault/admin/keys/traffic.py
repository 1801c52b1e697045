"""Charts of the uses of keys."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta

from django.utils.html import format_html
from django.utils.safestring import SafeString

from keyvault.admin.framework.charts import LineChart, Marker, Series, Sparkline, Tick, default_ticks
from keyvault.admin.framework.components import Card
from keyvault.admin.framework.widgets import counted, duration
from keyvault.domain.revocation import RevocationReason
from keyvault.models import Key
from keyvault.models.usage import EXPOSURES, UseOutcome
from keyvault.services.usage.reports import TRACES
from keyvault.services.usage.series import Traffic, choose_step, count_uses, read_traffic

_DAY = timedelta(days=1)
_COLORS = (1, 4, 5)
_SPARK_STEP = timedelta(hours=1)


EVERY_TRACE = (*TRACES, *EXPOSURES)


def day_traffic(keys: Sequence[Key], outcomes: Collection[UseOutcome]) -> Traffic:
    """Read the uses of the first three keys in the last 24 hours, and their users with these outcomes at any time."""
    now = datetime.now(UTC)
    step = choose_step(now - _DAY, now, now)
    ids = [key.key_id for key in keys[: len(_COLORS)]]
    return read_traffic(ids, now - _DAY, now, step, users_of=ids, outcomes=outcomes)


def day_card(keys: Sequence[Key], traffic: Traffic) -> Card | None:
    """Return the chart of `day_traffic` with what happened to the keys; None: the keys were not used."""
    shown = keys[: len(_COLORS)]
    lines = [(key, "", color) for key, color in zip(shown, _COLORS, strict=False)]
    return traffic_card(lines, traffic, [event for key in shown for event in _events_of(key)], is_now=True)


def _events_of(key: Key) -> Iterable[tuple[datetime | None, str]]:
    name = f"…{key.key_id[-6:]}"
    yield key.activated_at, f"{name} issued"
    yield key.suspended_at, f"{name} suspended"
    is_rotated = key.reason == RevocationReason.SUPERSEDED
    yield key.deactivated_at, f"{name} {'rotated' if is_rotated else key.get_retirement_display()}"
    yield key.compromised_at, f"{name} compromised"


def traffic_card(
    lines: Sequence[tuple[Key, str, int]],
    traffic: Traffic,
    events: Sequence[tuple[datetime | None, str]] = (),
    *,
    is_now: bool,
) -> Card | None:
    """Return a chart with the uses of keys in a period; None: they were not used.

    Args:
        lines: each key with the beginning of its label, and the color of its line.
        events: times that the chart marks, with their labels; those outside the period are left out.
        is_now: whether the period ends now.
    """
    step, begin, until, counts = traffic.step, traffic.begin, traffic.until, traffic.counts
    if is_now and _have_earlier(counts.values()):
        counts = {key_id: each[:-1] for key_id, each in counts.items()}
    series = [Series(f"{label} …{key.key_id[-6:]}".strip(), counts[key.key_id], color) for key, label, color in lines]
    if not any(any(each.values) for each in series):
        return None
    count = len(series[0].values)
    form = "%-d %b" if step >= _DAY else "%-d %b %H:%M" if until - begin > _DAY + step else "%H:%M"
    moments = [f"{begin + step * index:{form}}" for index in range(count)]
    ticks = default_ticks(moments)
    if is_now:
        ticks = [*ticks[:-1], Tick(1, "now")]
    whole = max((count - 1) * step, step)
    markers = [
        Marker(min((at - begin) / whole, 1), label) for at, label in events if at is not None and begin <= at <= until
    ]
    title = f"Requests per {_name_step(step)} (UTC)"
    chart = LineChart(title, series, moments, ticks, markers)
    return Card(title, chart, chart.legend)


def _have_earlier(counts: Iterable[Sequence[int]]) -> bool:
    """Whether a chart leaves out the current step. It is not complete: its few uses would look like a fall."""
    return any(any(each[:-1]) for each in counts)


def sparklines_of(keys: Mapping[str, Collection[str]]) -> dict[str, Sparkline]:
    """Return a line of the hourly uses in the last 24 hours for each entry. `keys`: the ids of the keys in its sum."""
    counts = _count_hourly([key_id for ids in keys.values() for key_id in ids])
    return {
        each: _sparkline([sum(hour) for hour in zip(*(counts[key_id] for key_id in ids), strict=True)])
        for each, ids in keys.items()
    }


def day_uses(key: Key) -> SafeString:
    """Return the uses of a key in the last 24 hours: their number, and a line of each hour."""
    hours = _count_hourly([key.key_id])[key.key_id]
    return format_html("{} {}", counted(sum(hours), "request"), _sparkline(hours))


def _count_hourly(key_ids: Collection[str]) -> dict[str, list[int]]:
    now = datetime.now(UTC)
    return count_uses(key_ids, now - _DAY, now, _SPARK_STEP)


def _sparkline(hours: Sequence[int]) -> Sparkline:
    label = f"requests of each hour in the last 24 hours: {sum(hours):,} in total"
    return Sparkline(hours[:-1] if _have_earlier([hours]) else hours, label)


def _name_step(step: timedelta) -> str:
    single = {timedelta(minutes=1): "minute", timedelta(hours=1): "hour", _DAY: "day"}
    return single.get(step) or duration(step)
