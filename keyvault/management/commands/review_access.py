"""Print the access review."""

from collections.abc import Mapping
from typing import Any

from keyvault.management.json_command import JsonCommand
from keyvault.services.access_review import export_lines, format_csv


class Command(JsonCommand):
    help = (
        "Print who may do what: each operator's roles with their permissions, when each was granted and last used, and "
        "the last sign-in, as CSV or with --json. A role is unused after 90 days without use."
    )

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {"lines": list(export_lines(self.now))}

    def format_text(self, answer: Mapping[str, Any]) -> str:
        return "".join(format_csv(answer["lines"])).rstrip("\n")
