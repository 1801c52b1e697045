"""Components of console pages: each is a value that a template prints, `{{ component }}`, and has one template.

`widgets` has the smaller parts: badge, time, identifier and link. `charts` has the charts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from django.template.loader import render_to_string
from django.utils.safestring import SafeString

from keyvault.admin.framework.widgets import Link, Step


class Component:
    """Base of a component, a dataclass whose fields its template reads."""

    template_name = ""

    def context(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]  # a dataclass

    def __html__(self) -> SafeString:
        return render_to_string(self.template_name, self.context())

    __str__ = __html__


@dataclass(frozen=True)
class Meter(Component):
    """A bar that shows a part of a whole.

    Args:
        label: for screen readers, such as `610 of 4,210`.
        tone: empty, `good`, `wait` or `bad`.
    """

    value: float
    maximum: float
    label: str
    tone: str = ""

    template_name = "console/component_meter.html"

    def context(self) -> dict[str, Any]:
        part = 0 if self.maximum <= 0 else min(max(self.value / self.maximum, 0), 1)
        return {**super().context(), "percent": f"{100 * part:.1f}"}


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a whole; `color` as for a series of a chart, and 6 for what has not begun."""

    label: str
    count: int
    color: int


@dataclass(frozen=True)
class Shares(Component):
    """A bar that shows the parts of a whole side by side, with their numbers below. Parts without a count are left out.

    Args:
        title: for screen readers.
    """

    title: str
    shares: Sequence[Share]

    template_name = "console/component_shares.html"

    def context(self) -> dict[str, Any]:
        shown = [share for share in self.shares if share.count]
        total = sum(share.count for share in shown)
        bars, place = [], 0
        for share in shown:
            bars.append((f"{100 * place / total:.2f}", f"{100 * share.count / total:.2f}", share.color))
            place += share.count
        return {"title": self.title, "bars": bars, "shown": shown}


@dataclass(frozen=True)
class Segments(Component):
    """A short row of segments for a table, one for each step; `steps` as for the stepper."""

    steps: Sequence[Step]

    template_name = "console/component_segments.html"

    def context(self) -> dict[str, Any]:
        done = sum(step.place == "done" for step in self.steps)
        return {"steps": self.steps, "label": f"{done} of {len(self.steps)} steps are done"}


@dataclass(frozen=True)
class Stepper(Component):
    """The steps of a process. The `note` of a step is one line below it, such as who did it or what it waits for."""

    steps: Sequence[Step]

    template_name = "console/component_stepper.html"


@dataclass(frozen=True, slots=True)
class FeedEntry:
    """One event of a feed, as a sentence.

    Args:
        tone: `good`, `info`, `wait` or `bad`; empty: gray.
        detail: text or HTML of `widgets` behind the time.
    """

    sentence: str
    at: datetime | None
    detail: Any = ""
    url: str = ""
    tone: str = ""


@dataclass(frozen=True)
class Feed(Component):
    """Events as sentences, newest first."""

    entries: Sequence[FeedEntry]
    empty: str = "No events yet."

    template_name = "console/component_feed.html"


@dataclass(frozen=True, slots=True)
class EvidenceItem:
    """One item of evidence; `state` is `done`, `current`, `ahead` or `failed`. `when`: text or HTML of `widgets`."""

    title: str
    state: str
    detail: Any = ""
    when: Any = ""

    @property
    def state_name(self) -> str:
        return {"done": "Done", "current": "In progress", "failed": "Failed"}.get(self.state, "Not yet")


@dataclass(frozen=True)
class Checks(Component):
    """Evidence: what holds, and what is waited for."""

    checks: Sequence[EvidenceItem]

    template_name = "console/component_checks.html"


@dataclass(frozen=True, slots=True)
class Day:
    """A day of a month grid.

    Args:
        label: for screen readers after the number, such as `November: 12 rotations`.
        count: number on the day; empty: none.
        load: 0 to 4, the tone of its background.
        notes: short texts about the day, such as a blackout.
    """

    number: int
    url: str
    label: str
    count: str = ""
    load: int = 0
    is_today: bool = False
    is_chosen: bool = False
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class MonthGrid(Component):
    """A month, Monday first. A day of `weeks` is None if it belongs to another month."""

    title: str
    weeks: Sequence[Sequence[Day | None]]
    earlier: Link
    later: Link
    note: str = ""

    template_name = "console/component_month.html"


@dataclass(frozen=True)
class EmptyState(Component):
    """What would be here, and the button that creates it."""

    title: str
    text: str = ""
    button: Link | None = None

    template_name = "console/component_empty.html"


@dataclass(frozen=True)
class Banner(Component):
    """The state of a page in one sentence, and the one next action.

    Args:
        lead: the sentence, in bold.
        text: what it means for the operator.
        tone: empty, `good`, `wait` or `bad`.
        buttons: links, or HTML of `widgets.copy_button`.
    """

    lead: str
    text: Any = ""
    tone: str = ""
    buttons: Sequence[Any] = ()

    template_name = "console/component_banner.html"

    def context(self) -> dict[str, Any]:
        parts = [(part, isinstance(part, Link)) for part in self.buttons]
        return {**super().context(), "parts": parts}


@dataclass(frozen=True)
class Card(Component):
    """A titled card around another component. `aside`: text or HTML in its head, such as the legend of a chart."""

    title: str
    body: Any
    aside: Any = ""

    template_name = "console/component_card.html"


@dataclass(frozen=True)
class Columns(Component):
    """Sections side by side: a wide and a narrow one, or equal ones. Below each other on a narrow screen."""

    sections: Sequence[Any]
    are_even: bool = False

    template_name = "console/component_columns.html"


@dataclass(frozen=True)
class Stack(Component):
    """Sections below each other, in one of the columns. `environment`: of which all of them are; empty: of none."""

    sections: Sequence[Any]
    environment: str = ""

    template_name = "console/component_stack.html"


@dataclass(frozen=True)
class Fold(Component):
    """Sections that are hidden until the operator opens them. `note`: text or HTML beside the title."""

    title: str
    sections: Sequence[Any]
    note: Any = ""

    template_name = "console/component_fold.html"


@dataclass(frozen=True)
class Tiles(Component):
    """Numbers side by side."""

    tiles: Sequence["Tile"]

    template_name = "console/component_tiles.html"


@dataclass(frozen=True)
class Tile(Component):
    """A number with its label and one line about it. `note`: text or HTML of `widgets`."""

    label: str
    number: str
    note: Any = ""
    url: str = ""

    template_name = "console/component_tile.html"
