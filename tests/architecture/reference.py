"""Generated pages of the reference: the REST API from OpenAPI, the options of each command, and the events."""

import ast
import re
from argparse import SUPPRESS, Action, BooleanOptionalAction
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from django.core.management import get_commands, load_command_class
from django.core.management.base import BaseCommand, CommandParser

from keyvault.domain.notifications import ALARMS, INTERNAL, NoticeKind
from tests.environment import ROOT

FOLDER = ROOT / "docs" / "reference"
WRITTEN_BY = "`python -m tests.architecture.test_docs` writes this page"
REFUSED = frozenset({"changepassword", "createsuperuser", "flush", "loaddata"})
"""Commands of Django that are refused."""

EVENT = re.compile(r"[a-z_]+\.[a-z_]+")


def pages() -> Mapping[Path, Callable[[], str]]:
    """Return each page with the function that writes its text."""
    return {
        FOLDER / "rest-api.md": rest_api_page,
        FOLDER / "command-options.md": command_options_page,
        FOLDER / "events.md": events_page,
    }


# --- REST -------------------------------------------------------------------------------------------------------


def rest_api_page() -> str:
    # `python -m tests.architecture.test_docs` imports this module before it sets Django up.
    from keyvault.api.views.docs import openapi_page

    page = openapi_page()
    tags: dict[str, list[str]] = {}
    for path, item in page["paths"].items():
        for method, operation in item.items():
            tags.setdefault(operation["tags"][0], []).append(_write_operation(page, method, path, operation))
    chapters = ["\n\n".join([f"## {tag.replace('-', ' ').capitalize()}", *tags[tag]]) for tag in sorted(tags)]
    text = "\n\n".join(chapters)
    return (
        f"# REST API reference\n\n{WRITTEN_BY} from the service's OpenAPI description, which a running service has at "
        "`/v1/openapi.json`, with all schemas. [REST API](../api.md) explains what this page does not, and "
        f"[errors](../errors.md) lists every code.\n\n{text}\n"
    )


def _write_operation(page: dict[str, Any], method: str, path: str, operation: dict[str, Any]) -> str:
    lines = [f"### {method.upper()} {path}", "", _text(operation["summary"]), "", _text(operation["description"])]
    credentials = [" and ".join(f"`{name}`" for name in way) for way in operation.get("security", []) if way]
    lines += ["", f"Operation `{operation['operationId']}`. Credential: {' or '.join(credentials) or 'none'}."]
    parameters = [
        [f"`{each['name']}`", each["in"], _yes(each.get("required")), _text(each.get("description", ""))]
        for each in (_resolve(page, parameter) for parameter in operation.get("parameters", []))
    ]
    if parameters:
        lines += ["", _table(["parameter", "in", "required", "meaning"], parameters)]
    for body in _resolve(page, operation.get("requestBody", {})).get("content", {}).values():
        if fields := list(_list_fields(page, body["schema"])):
            lines += ["", _table(["member of the body", "type", "required", "meaning"], fields)]
        break
    answers = []
    for status, answer in operation["responses"].items():
        answer = _resolve(page, answer)
        codes = ", ".join(f"[`{code}`](../errors.md)" for code in _list_codes(answer))
        answers.append([status, codes or _text(answer.get("description", ""))])
    return "\n".join([*lines, "", _table(["status", "codes"], answers)])


def _list_fields(page: dict[str, Any], schema: dict[str, Any]) -> Iterator[list[str]]:
    schema = _resolve(page, schema)
    for name, field in schema.get("properties", {}).items():
        field = _resolve(page, field)
        required = _yes(name in schema.get("required", ()))
        yield [f"`{name}`", _name_type(page, field), required, _text(field.get("description", ""))]


def _name_type(page: dict[str, Any], field: dict[str, Any]) -> str:
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    for choices in ("oneOf", "anyOf", "allOf"):
        if choices in field:
            return " or ".join(_name_type(page, _resolve(page, each)) for each in field[choices])
    kinds = field.get("type", "any")
    if kinds == "array":
        return f"list of {_name_type(page, _resolve(page, field.get('items', {})))}"
    return kinds if isinstance(kinds, str) else " or ".join(kinds)


def _list_codes(answer: dict[str, Any]) -> list[str]:
    problem = answer.get("content", {}).get("application/problem+json")
    return [] if problem is None else list(problem["schema"]["properties"]["code"]["enum"])


def _resolve(page: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in part:
        found: Any = page
        for step in part["$ref"].removeprefix("#/").split("/"):
            found = found[step]
        part = found
    return part


# --- commands ---------------------------------------------------------------------------------------------------


def command_options_page() -> str:
    ours = sorted(
        name for name, app in get_commands().items() if app in ("keyvault", "rotation") and name not in REFUSED
    )
    chapters = [_write_command(name) for name in ours]
    return (
        f"# Options of the commands\n\n{WRITTEN_BY} from the commands themselves. [Commands](../commands.md) says what "
        "each one is for. Every command also has Django's common options.\n\n" + "\n\n".join(chapters) + "\n"
    )


def _write_command(name: str) -> str:
    command = load_command_class(get_commands()[name], name)
    common = {option for action in _new_parser()._actions for option in action.option_strings}
    parser = command.create_parser("manage.py", name)
    rows = [
        [_name_option(action), _yes(action.required), _text((action.help or "").replace("%%", "%"))]
        for action in parser._actions
        if action.help != SUPPRESS and not common & set(action.option_strings)
    ]
    table = _table(["option", "required", "meaning"], rows) if rows else "No options."
    return f"## {name}\n\n{_text(command.help)}\n\n{table}"


def _new_parser() -> CommandParser:
    return BaseCommand().create_parser("manage.py", "any")


def _name_option(action: Action) -> str:
    if not action.option_strings:
        return f"`{action.metavar or action.dest.upper()}`"
    value = ""
    if action.choices:
        value = " " + "\\|".join(map(str, action.choices))
    elif action.nargs != 0:
        value = f" {action.metavar or action.dest.upper()}"
    if isinstance(action, BooleanOptionalAction):
        return ", ".join(f"`{option}`" for option in action.option_strings)
    return f"`{action.option_strings[-1]}{value}`"


# --- events -----------------------------------------------------------------------------------------------------


def events_page() -> str:
    messages = [
        [f"`{kind}`", "operators" if kind in INTERNAL else "the merchant and operators", _yes(kind in ALARMS)]
        for kind in NoticeKind
    ]
    subjects = [[f"`{noun}`", events] for noun, events in _list_audit_events().items()]
    return (
        f"# Events\n\n{WRITTEN_BY} from the code. Published names never change.\n\n"
        "## Messages and alarms\n\n"
        "Merchants receive their messages by [webhook](../../deploy/webhooks.md), which describes each of them. "
        "Operators see all of them in the inbox of the console. An alarm stays there until an operator has seen it.\n\n"
        f"{_table(['event', 'for', 'alarm'], messages)}\n\n"
        "## Audit log\n\n"
        "The events of audit entries, and of the messages that some of them cause. An entry has the actor, the "
        "permission, the account and the ids of the event. It is written in the transaction of the change.\n\n"
        f"{_table(['subject', 'events'], subjects)}\n"
    )


def _list_audit_events() -> dict[str, str]:
    found: dict[str, set[str]] = {}
    for folder in ("keyvault/services", "rotation/services"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for event in _list_event_names(ast.parse(path.read_text())):
                noun, _, what = event.partition(".")
                found.setdefault(noun, set()).add(f"`{what}`")
    return {noun: ", ".join(sorted(found[noun])) for noun in sorted(found)}


def _list_event_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names that are written as text in a call or as a value of a table."""
    for node in ast.walk(tree):
        values: list[ast.expr] = []
        if isinstance(node, ast.Call):
            values = [*node.args, *(keyword.value for keyword in node.keywords)]
        elif isinstance(node, ast.Dict):
            values = node.values
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            values = [node.value]
        for value in values:
            for each in (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,):
                if isinstance(each, ast.Constant) and isinstance(each.value, str) and EVENT.fullmatch(each.value):
                    yield each.value


# --- text -------------------------------------------------------------------------------------------------------


def _yes(value: object) -> str:
    return "yes" if value else "no"


def _text(text: str) -> str:
    """Return one line, which may be a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
