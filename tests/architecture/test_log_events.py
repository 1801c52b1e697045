"""Every log line of the code has a stable event, and every event has a line."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from keyvault.project.log_events import EVENTS
from keyvault.services.verification.judging import _ALERTS
from tests.environment import ROOT

LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
INDIRECT = {
    "keyvault/services/verification/judging.py": "_ALERTS",
    "keyvault/services/work/background_thread.py": "log_failure",
}
"""Files that log a message by name; the messages are found where they are written."""


def sources() -> Iterator[tuple[str, ast.AST]]:
    for folder in ("keyvault", "rotation"):
        for path in sorted(Path(ROOT, folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def messages_of(file: str, tree: ast.AST) -> Iterator[str]:
    """Yield each logged message, and the constants that `log_failure` and flushing threads log."""
    for node in ast.walk(tree):
        given: list[ast.expr] = []
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
        ):
            if node.func.value.id in {"_log", "log"} and node.func.attr in {*LEVELS, "log"}:
                given = [node.args[node.func.attr == "log"]]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "log_failure":
            given = [node.args[1], *(each.value for each in node.keywords if each.arg == "outage")]
        elif isinstance(node, ast.AnnAssign | ast.Assign) and node.value is not None:
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            is_text = isinstance(node.value, ast.Constant) and bool(node.value.value)
            if is_text and any(isinstance(each, ast.Name) and each.id in {"failure", "outage"} for each in targets):
                given = [node.value]
        for each in given:
            if isinstance(each, ast.Constant) and isinstance(each.value, str):
                yield each.value
            else:
                assert file in INDIRECT or isinstance(each, ast.Name), f"{file}:{each.lineno} logs no constant"


def test_every_message_has_an_event_and_every_event_a_message() -> None:
    found = {message for file, tree in sources() for message in messages_of(file, tree)} | set(_ALERTS.values())
    assert found - EVENTS.keys() == set(), "give these messages an event in keyvault/project/log_events.py"
    assert EVENTS.keys() - found == set(), "no code logs these messages any more"


def test_events_are_named_alike() -> None:
    for event in EVENTS.values():
        assert re.fullmatch(r"[a-z_]+\.[a-z_]+", event), event
    assert len(set(EVENTS.values())) == len(EVENTS)
