"""Alert rules and the dashboard name existing metrics and pages, and `promtool` accepts the rules."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client import Counter, Gauge, Histogram

from keyvault.backends import meters
from tests.architecture.deployment import processes
from tests.architecture.pages import ALERT_RULES, alert_rules
from tests.environment import ROOT, required_servers
from tests.faults.alert_deployment import SHORTER, shorten_rules
from tests.faults.alert_faults import PARTS

RULE_TESTS = ALERT_RULES.with_name("keyvault.test.yml")
DASHBOARD = ROOT / "deploy" / "grafana" / "keyvault.json"
_SUFFIXES = {Counter: ("_total",), Gauge: ("",), Histogram: ("_bucket", "_count", "_sum")}


def series() -> dict[str, set[str]]:
    """Return the labels of each exposed series."""
    found = {}
    for meter in vars(meters).values():
        if isinstance(meter, Counter | Gauge | Histogram):
            (family,) = meter.describe()
            for suffix in _SUFFIXES[type(meter)]:
                more = {"le"} if suffix == "_bucket" else {"pid"} if family.type == "gauge" else set()
                found[f"{family.name}{suffix}"] = {*meter._labelnames, *more, "job", "instance"}
    return found


def panels() -> Iterator[dict[str, Any]]:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        if panel["type"] != "row":
            yield panel


def expressions() -> list[str]:
    rules = [rule["expr"] for rule in alert_rules()]
    return [*rules, *(target["expr"] for panel in panels() for target in panel["targets"])]


def test_each_rule_is_fired_by_a_fault_experiment() -> None:
    """Guarantee: an experiment of `make faults ARGS=alerts` fires each rule."""
    fired = {alert for faults in PARTS.values() for fault in faults.values() for alert in fault.alerts}
    assert fired == {rule["alert"] for rule in alert_rules()}


def test_experiments_shorten_each_rule_that_waits_for_longer() -> None:
    """Guarantee: the experiments evaluate each shipped rule, and a shortened one only fires earlier."""
    names = {rule["alert"] for rule in alert_rules()}
    assert names >= SHORTER.keys()
    (group,) = yaml.safe_load(shorten_rules(names))["groups"]
    for shipped, short in zip(alert_rules(), group["rules"], strict=True):
        assert short.get("for", "0s") in {"0s", "10s", "30s"}, shipped["alert"]
        assert {**short, "expr": "", "for": ""} == {**shipped, "expr": "", "for": ""}
        assert re.sub(r"\d+\w*", "", short["expr"]) == re.sub(r"\d+\w*", "", shipped["expr"])


def test_expressions_name_existing_metrics_and_labels() -> None:
    known = series()
    assert len(expressions()) > 60
    for expression in expressions():
        names = re.findall(r"\bkeyvault_\w+", expression)
        assert set(names) <= known.keys(), expression
        labels = {label for name in names for label in known[name]} | {"job", "alertname", "alertstate"}
        grouped = re.findall(r"(?:by|without) \(([\w, ]+)\)", expression)
        used = {label for group in grouped for label in group.split(", ")}
        used |= set(re.findall(r"(\w+)(?:=~|!=|!~|=)\"", expression))
        assert used <= labels, expression


def test_dashboard_shows_every_metric() -> None:
    """Every metric has a panel: without one, operators do not see it."""
    text = "\n".join(expressions())
    missing = {
        family.name
        for meter in vars(meters).values()
        if isinstance(meter, Counter | Gauge | Histogram)
        for family in meter.describe()
        if family.name not in text
    }
    assert missing == set()


def test_dashboard_has_no_member_that_grafana_does_not_know() -> None:
    """Guarantee: the types that Grafana's project generates from its schemas read the file and lose nothing of it."""
    register_default_plugins()
    shipped = json.loads(DASHBOARD.read_text())
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(shipped)))
    assert list(find_lost(shipped, read)) == []


def find_lost(sent: Any, read: Any, at: str = "") -> Iterator[str]:
    """Yield the place of each value that was lost or changed. What reading adds, such as defaults, is ignored."""
    if isinstance(sent, dict) and isinstance(read, dict):
        for name in sent:
            yield from find_lost(sent[name], read.get(name), f"{at}/{name}")
    elif isinstance(sent, list) and isinstance(read, list) and len(sent) == len(read):
        for number, (one, other) in enumerate(zip(sent, read, strict=True)):
            yield from find_lost(one, other, f"{at}/{number}")
    elif sent != read:
        yield at


def test_legends_of_the_dashboard_use_labels_of_their_expression() -> None:
    for panel in panels():
        for target in panel["targets"]:
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert label in target["expr"] or label in {"instance", "pid"}, target


def test_sample_scrapes_every_process() -> None:
    sample = yaml.safe_load(ALERT_RULES.with_name("prometheus.yml").read_text())
    found = {job["job_name"]: job["static_configs"][0]["targets"] for job in sample["scrape_configs"]}
    assert found == {f"keyvault-{row.name}": [f"127.0.0.1:{row.metrics}"] for row in processes() if row.metrics}
    assert all(row.metrics or row.once for row in processes())


def test_rules_name_their_runbook() -> None:
    names = [rule["alert"] for rule in alert_rules()]
    assert len(set(names)) == len(names)
    for rule in alert_rules():
        page, _, heading = rule["annotations"]["runbook"].partition("#")
        assert heading in _headings(ROOT / page), rule["alert"]
        assert rule["labels"]["severity"] in {"critical", "warning"}


def _headings(page: Path) -> set[str]:
    """Return the anchors of a page, as GitHub derives them from its headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_rule_tests_name_existing_rules_and_series() -> None:
    names, known = {rule["alert"] for rule in alert_rules()}, series()
    for test in yaml.safe_load(RULE_TESTS.read_text())["tests"]:
        assert {case["alertname"] for case in test["alert_rule_test"]} <= names
        for given in test["input_series"]:
            name = given["series"].partition("{")[0]
            assert name == "up" or name in known, name


@pytest.fixture
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        if "prometheus" in required_servers():
            pytest.fail("promtool is required, but not installed")
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    return found


@pytest.mark.parametrize("arguments", [("check", "rules", ALERT_RULES), ("test", "rules", RULE_TESTS)])
def test_promtool_accepts_the_rules(promtool: str, arguments: tuple[str, str, Path]) -> None:
    done = subprocess.run([promtool, *map(str, arguments)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
