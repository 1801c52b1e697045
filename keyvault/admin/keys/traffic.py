"""Charts of the uses of keys."""

from collections.abc import Collection, Sequence
from datetime import UTC, datetime, timedelta

from keyvault.admin.framework.charts import LineChart, Series, Sparkline, Tick, default_ticks
from keyvault.admin.framework.components import Card
from keyvault.models import Key
from keyvault.services.usage.series import choose_step, count_uses_by_key, floor

_DAY = timedelta(days=1)
_COLORS = (1, 4, 5)
_SPARK_STEP = timedelta(hours=1)


def traffic_card(keys: Sequence[Key]) -> Card | None:
    """Return the chart of the uses of the first three keys in the last 24 hours; None: they were not used."""
    until = datetime.now(UTC)
    step = choose_step(until - _DAY, until, until)
    since = floor(until - _DAY, step)
    shown = keys[: len(_COLORS)]
    counts = count_uses_by_key([key.key_id for key in shown], since, until, step)
    series = [
        Series(f"…{key.key_id[-6:]}", counts[key.key_id], color) for key, color in zip(shown, _COLORS, strict=False)
    ]
    if not any(any(each.values) for each in series):
        return None
    moments = [f"{since + step * index:%H:%M}" for index in range(len(series[0].values))]
    minutes = int(step.total_seconds() // 60)
    title = "Requests per hour" if minutes == 60 else f"Requests per {minutes} minutes"
    ticks = [*default_ticks(moments)[:-1], Tick(1, "now")]
    chart = LineChart(f"{title} in the last 24 hours (UTC)", series, moments, ticks)
    return Card(f"{title}, last 24 h (UTC)", chart, chart.legend)


def sparklines_of(key_ids: Collection[str]) -> dict[str, Sparkline]:
    """Return a line of the hourly uses in the last 24 hours for each key."""
    until = datetime.now(UTC)
    since = floor(until - _DAY, _SPARK_STEP)
    counts = count_uses_by_key(key_ids, since, until, _SPARK_STEP)
    label = "requests of each hour in the last 24 hours: {:,} in total"
    return {key_id: Sparkline(values, label.format(sum(values))) for key_id, values in counts.items()}
