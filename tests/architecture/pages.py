"""The parts of the pages that are written from code: each stands between markers named for it."""

from dataclasses import dataclass, fields
from pathlib import Path

from keyvault.domain.environments import Environment
from keyvault.project.configuration import settings_table
from rotation.domain.events import OPEN, OUTCOMES, Event, RotationState, Stays
from rotation.domain.policy import DEFAULTS, Defaults
from rotation.domain.runbook import runbook_markdown
from tests.environment import ROOT


@dataclass(frozen=True, slots=True)
class Part:
    """What stands in `page` between `<!-- name -->` and `<!-- /name -->`."""

    page: Path
    name: str
    text: str

    def read(self) -> str:
        return self._cut()[1]

    def write(self) -> None:
        before, _, after = self._cut()
        self.page.write_text(f"{before}{self.text}{after}")

    def _cut(self) -> tuple[str, str, str]:
        """An empty part may stand on no line at all."""
        opening, closing = f"<!-- {self.name} -->\n", f"<!-- /{self.name} -->"
        before, rest = self.page.read_text().split(opening)
        inside, after = rest.split(closing)
        return before + opening, inside.removesuffix("\n"), f"\n{closing}{after}"


def parts() -> list[Part]:
    rotation = ROOT / "rotation" / "README.md"
    return [
        Part(ROOT / "README.md", "settings", settings_table()),
        Part(rotation, "events", events_table()),
        Part(rotation, "defaults", defaults_table()),
        Part(rotation, "runbook", runbook_markdown().rstrip("\n")),
    ]


def events_table() -> str:
    """A row for each event; states in which all of them do the same share a column."""
    columns: dict[tuple[object, ...], list[RotationState]] = {}
    for state in OPEN:
        columns.setdefault(tuple(OUTCOMES[event][state] for event in Event), []).append(state)
    heads = [", ".join(f"`{state}`" for state in states) for states in columns.values()]
    rows = [[f"`{event}`", *(_cell(column[place]) for column in columns)] for place, event in enumerate(Event)]
    return _table(["event", *heads], rows)


def defaults_table() -> str:
    rows = [
        [f"`{each.name}`", *(f"{getattr(DEFAULTS[environment], each.name):,}" for environment in Environment)]
        for each in fields(Defaults)
    ]
    return _table(["", *Environment], rows)


def _cell(outcome: object) -> str:
    return "·" if outcome is Stays.STAYS else str(outcome)


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
