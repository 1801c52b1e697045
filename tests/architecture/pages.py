"""Generated documentation: the errors page, and the tables between markers in other pages."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import django
import yaml
from django.apps import apps
from prometheus_client import Counter, Gauge, Histogram

from keyvault.backends import meters
from keyvault.project.configuration import SETTINGS, settings_table
from keyvault.project.log_events import log_events_table
from keyvault.wire.problems import problems_page
from rotation.domain.events import OPEN, OUTCOMES, Event, RotationState, Stays
from rotation.domain.plan_fields import FARTHEST, FIELDS, NUMBERS, FieldType
from rotation.domain.runbook import runbook_markdown
from tests.bench.figures import Met
from tests.bench.results import FOLDER, targets_table
from tests.environment import ROOT
from tests.environment import SETTINGS as SETTINGS_MODULE

ERRORS = ROOT / "docs" / "errors.md"


@dataclass(frozen=True, slots=True)
class Part:
    """The text of `page` between `<!-- name -->` and `<!-- /name -->`."""

    page: Path
    name: str
    text: str

    def read(self) -> str:
        return self._cut()[1]

    def write(self) -> None:
        before, _, after = self._cut()
        self.page.write_text(f"{before}{self.text}{after}")

    def _cut(self) -> tuple[str, str, str]:
        """Split the page into what precedes the part, the part, and what follows. A part may be empty."""
        opening, closing = f"<!-- {self.name} -->\n", f"<!-- /{self.name} -->"
        before, rest = self.page.read_text().split(opening)
        inside, after = rest.split(closing)
        return before + opening, inside.removesuffix("\n"), f"\n{closing}{after}"


def parts() -> list[Part]:
    docs, rotation = ROOT / "docs", ROOT / "rotation" / "README.md"
    return [
        Part(ROOT / "README.md", "figures", figures_table()),
        Part(docs / "settings.md", "settings", settings_table()),
        Part(docs / "metrics.md", "metrics", metrics_table()),
        Part(docs / "metrics.md", "alerts", alerts_table()),
        Part(docs / "logs.md", "log_events", log_events_table()),
        Part(docs / "retention.md", "retention", retention_table()),
        Part(rotation, "events", events_table()),
        Part(rotation, "plan_fields", plan_fields_table()),
        Part(rotation, "runbook", runbook_markdown().rstrip("\n")),
    ]


RECORDED = (FOLDER / "2026-11-28-intel-xeon-x2.json", FOLDER / "2026-11-28-amd-epyc-x2.json")
"""The runs of `make bench` whose figures the README shows."""

_SHOWN = (
    "verifier / uvicorn hello",
    "known keys in new requests / own hello",
    "verifier / drf-api-key on PostgreSQL",
    "p99 at 80 % of own maximum, open loop",
    'stale "valid" after revoke returned, same host',
    "commit → last of 4 verifiers evicted, loaded, p99",
    "look-up p50 at 1 million / 10 thousand keys",
)


def figures_table() -> str:
    """Write the figures of the benchmark that the README shows, with the date, commit and machine of each run."""
    heads, rows = ["figure", "required"], [[title] for title in _SHOWN]
    for path in RECORDED:
        recorded = json.loads(path.read_text())
        verify, machine = recorded["verify"], recorded["verify"]["machine"]
        heads.append(f"{verify['at'][:10]}, commit {machine['commit']}, {machine['cpu']}, {machine['memory']}")
        cells = [line.strip("| ").split(" | ") for line in targets_table(recorded)[2:]]
        for row in rows:
            _, bound, _, measured, met, *_ = next(cell for cell in cells if cell[0].startswith(row[0]))
            if len(row) == 1:
                row.append(bound if bound.startswith("at most") else f"at least {bound}")
            row.append(f"{measured}, missed" if met == Met.NO else measured)
    return _table(heads, rows)


def errors_page() -> str:
    return f"{problems_page()}\n"


def retention_table() -> str:
    """Write a row for each table. This needs Django's models, which `python -m tests.architecture.test_docs` lacks."""
    if not apps.ready:
        os.environ |= {"DJANGO_SETTINGS_MODULE": SETTINGS_MODULE, "KEYVAULT_DATA_DIR": mkdtemp()}
        django.setup()
    from keyvault.services import retention as keyvault_retention
    from rotation.services import retention as rotation_retention

    defaults = {setting.name: setting.unset for setting in SETTINGS}
    rows = [
        [
            f"`{rule.table._meta.db_table}`",
            rule.kept.format(days=defaults.get(rule.setting)),
            f"`{rule.setting}`" if rule.setting else "-",
        ]
        for rule in (*keyvault_retention.RULES, *rotation_retention.RULES)
    ]
    return _table(["table", "kept", "setting"], rows)


def metrics_table() -> str:
    """List every metric by its exposed name. A counter's ends in `_total`."""
    rows = []
    for meter in vars(meters).values():
        if isinstance(meter, Counter | Gauge | Histogram):
            (family,) = meter.describe()
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = ", ".join(f"`{label}`" for label in meter._labelnames) or "-"
            rows.append([f"`{name}`", family.type, labels, family.documentation])
    return _table(["metric", "type", "labels", "meaning"], rows)


ALERT_RULES = ROOT / "deploy" / "prometheus" / "keyvault.rules.yml"


def alert_rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERT_RULES.read_text())["groups"]
    return list(group["rules"])


def alerts_table() -> str:
    rows = []
    for rule in alert_rules():
        notes = rule["annotations"]
        rows.append([f"`{rule['alert']}`", rule["labels"]["severity"], notes["summary"], f"`{notes['runbook']}`"])
    return _table(["alert", "severity", "meaning", "what to do"], rows)


def events_table() -> str:
    """Write a row for each event. States with the same outcomes share a column."""
    columns: dict[tuple[object, ...], list[RotationState]] = {}
    for state in OPEN:
        columns.setdefault(tuple(OUTCOMES[event][state] for event in Event), []).append(state)
    heads = [", ".join(f"`{state}`" for state in states) for states in columns.values()]
    rows = [[f"`{event}`", *(_cell(column[place]) for column in columns)] for place, event in enumerate(Event)]
    return _table(["event", *heads], rows)


_OTHER = {FieldType.FLAG: "yes or no", FieldType.WINDOW: "weekdays and hours in a time zone"}


def plan_fields_table() -> str:
    rows = []
    for each in FIELDS.values():
        if each.type in NUMBERS:
            accepted = each.describe_bounds()
        elif each.type is FieldType.TEXT:
            accepted = f"at most {each.most} {each.unit}"
        elif each.type is FieldType.NAMES:
            accepted = f"at most {each.most} {each.unit}, by name"
        elif each.type is FieldType.INSTANT:
            accepted = f"a time in the next {FARTHEST.days} days"
        else:
            accepted = ", ".join(f"`{choice}`" for choice in each.choices) or _OTHER[each.type]
        omitted = "" if each.type is FieldType.TEXT else each.describe_omitted()
        rows.append([f"`{each.name}`", each.help, accepted, omitted])
    return _table(["field", "meaning", "accepted", "if omitted"], rows)


def _cell(outcome: object) -> str:
    return "·" if outcome is Stays.STAYS else str(outcome)


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
