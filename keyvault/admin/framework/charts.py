"""Charts as SVG that the server renders: lines, stacked areas and sparklines. Colors are classes of the stylesheet."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, floor, log10
from typing import Any

from django.template.loader import render_to_string
from django.utils.html import format_html_join
from django.utils.safestring import SafeString

from keyvault.admin.framework.components import Component

GRID_LINES = 4
"""Number of horizontal lines above zero."""

_WIDTH = 1000
_HEIGHT = 1000
"""Size of the plot's coordinates, which the browser stretches to the size of the plot."""


_LABEL_LINES = 4
_LABEL_WIDTH = 0.3
"""Part of the plot's width that the label of a marker needs."""

_LABEL_TOP, _LABEL_HEIGHT = 8, 14
"""Place of the first line of labels, and height of a line, in pixels."""


@dataclass(frozen=True, slots=True)
class Series:
    """Values of one line, at equal distances. `color`: 1 blue, 2 red, 3 amber, 4 gray, 5 green."""

    label: str
    values: Sequence[float]
    color: int = 1


@dataclass(frozen=True, slots=True)
class _Placed:
    """A label at a moment; `place` is 0 for the first value and 1 for the last one."""

    place: float
    label: str

    @property
    def percent(self) -> str:
        return _percent(self.place)


class Tick(_Placed):
    """A label of the time axis."""

    @property
    def anchor(self) -> str:
        return "start" if self.place <= 0 else "end" if self.place >= 1 else "middle"


class Marker(_Placed):
    """A vertical line with a label, such as `delivered`."""

    @property
    def anchor(self) -> str:
        return "end" if self.place > 0.75 else "start"

    @property
    def offset(self) -> int:
        return -6 if self.anchor == "end" else 6


@dataclass(frozen=True)
class _Chart(Component):
    """Base of a chart.

    Args:
        title: for screen readers.
        moments: label of each value, such as `14:00`.
        ticks: labels of the axis; by default the first, the last and three between.
    """

    title: str
    series: Sequence[Series]
    moments: Sequence[str]
    ticks: Sequence[Tick] = ()
    markers: Sequence[Marker] = ()

    template_name = "console/component_chart.html"
    has_areas = False

    @property
    def legend(self) -> SafeString:
        """The names and colors of the series, for the head of the chart's card."""
        return render_to_string("console/component_legend.html", {"series": self.series})

    def _top(self) -> float:
        raise NotImplementedError

    def _shapes(self, maximum: float) -> list[tuple[int, str]]:
        raise NotImplementedError

    def context(self) -> dict[str, Any]:
        maximum = _round_up(self._top())
        count = len(self.moments)
        width = _WIDTH / max(count, 1)
        return {
            "title": self.title,
            "series": self.series,
            "has_areas": self.has_areas,
            "shapes": self._shapes(maximum),
            "grid": [
                (_percent(1 - line / GRID_LINES), _short(maximum * line / GRID_LINES)) for line in range(GRID_LINES + 1)
            ],
            "ticks": self.ticks or default_ticks(self.moments),
            "markers": _place_labels(self.markers),
            # Not in the template, whose loops over a hundred moments would be a tenth of the overview's cost.
            "hits": format_html_join(
                "",
                '<rect class="hit" x="{}" y="0" width="{}" height="1000"><title>{}</title></rect>',
                (
                    (f"{index * width:.1f}", f"{width:.1f}", _describe(moment, self.series, index))
                    for index, moment in _numbered(self)
                ),
            ),
            "rows": format_html_join(
                "",
                '<tr><th scope="row">{}</th>' + '<td class="number">{}</td>' * len(self.series) + "</tr>",
                (
                    (moment, *(f"{each.values[index]:,.0f}" for each in self.series))
                    for index, moment in _numbered(self)
                ),
            ),
        }


@dataclass(frozen=True)
class LineChart(_Chart):
    """One line for each series."""

    def _top(self) -> float:
        return max((value for each in self.series for value in each.values), default=0)

    def _shapes(self, maximum: float) -> list[tuple[int, str]]:
        return [(each.color, _points(each.values, maximum)) for each in self.series]


@dataclass(frozen=True)
class StackedChart(_Chart):
    """Areas on top of each other, the first series at the bottom."""

    has_areas = True

    def _sums(self) -> list[list[float]]:
        """Return the upper edge of each area."""
        columns = [list(accumulate(values)) for values in zip(*(each.values for each in self.series), strict=True)]
        return [[column[index] for column in columns] for index in range(len(self.series))]

    def _top(self) -> float:
        return max(self._sums()[-1], default=0) if self.series else 0

    def _shapes(self, maximum: float) -> list[tuple[int, str]]:
        edges = self._sums()
        lower = [[0.0] * len(self.moments), *edges]
        return [
            (each.color, f"{_points(upper, maximum)} {_points(below, maximum, is_reversed=True)}")
            for each, upper, below in zip(self.series, edges, lower, strict=False)
        ]


@dataclass(frozen=True)
class Sparkline(Component):
    """A small line for a table. `label`: for screen readers, such as `requests of the last 24 hours`."""

    values: Sequence[float]
    label: str
    color: int = 1

    template_name = "console/component_sparkline.html"

    def context(self) -> dict[str, Any]:
        top = max(self.values, default=0) or 1
        return {"points": _points(self.values, top), "label": self.label, "color": self.color}


def default_ticks(moments: Sequence[str]) -> list[Tick]:
    """Return ticks for the first and the last value, and for three between."""
    last = len(moments) - 1
    if last < 1:
        return [Tick(0, moment) for moment in moments]
    places = sorted({round(last * part / 4) for part in range(5)})
    return [Tick(place / last, moments[place]) for place in places]


def _place_labels(markers: Sequence[Marker]) -> list[tuple[Marker, int]]:
    """Pair each marker with the height of its label, so that labels near each other are in different lines."""
    placed: list[tuple[Marker, int]] = []
    ends = [-1.0] * _LABEL_LINES
    for marker in sorted(markers, key=lambda marker: marker.place):
        line = next((line for line, end in enumerate(ends) if marker.place - end > _LABEL_WIDTH), 0)
        ends[line] = marker.place
        placed.append((marker, _LABEL_TOP + line * _LABEL_HEIGHT))
    return placed


def _numbered(chart: _Chart) -> list[tuple[int, str]]:
    return list(enumerate(chart.moments))


def _describe(moment: str, series: Sequence[Series], index: int) -> str:
    return f"{moment}: " + ", ".join(f"{each.label} {each.values[index]:,.0f}" for each in series)


def _points(values: Sequence[float], maximum: float, *, is_reversed: bool = False) -> str:
    last = max(len(values) - 1, 1)
    points = [
        f"{index * _WIDTH / last:.1f},{_HEIGHT * (1 - value / maximum):.1f}" for index, value in enumerate(values)
    ]
    return " ".join(reversed(points) if is_reversed else points)


def _percent(part: float) -> str:
    return f"{100 * part:.2f}%"


def _round_up(value: float) -> float:
    """Return the top of the axis: at least the value, and 1, 2, 4, 6 or 8 times a power of ten."""
    if value <= GRID_LINES:
        return GRID_LINES
    power = 10.0 ** floor(log10(value))
    steps = (1, 2, 4, 6, 8, 10)
    return next(step for step in steps if step >= ceil(value / power * 10) / 10) * power


def _short(value: float) -> str:
    """Format a number for the axis, such as `16k`."""
    for size, letter in ((1_000_000, "M"), (1_000, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"
