"""Print every error code with its status, cause and remedy: the reference page for client developers."""

from collections.abc import Mapping
from typing import Any

from keyvault.management.json_command import JsonCommand
from keyvault.wire.problems import PROBLEM_TYPES, problems_page


class Command(JsonCommand):
    help = "Print every error code with its status, cause and remedy. Without --json: a Markdown page."

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "errors": [
                {
                    "code": code.value,
                    "status": kind.status,
                    "title": kind.title,
                    "check": kind.check,
                    "cause": kind.cause,
                    "cure": kind.remedy,
                }
                for code, kind in PROBLEM_TYPES.items()
            ]
        }

    def format_text(self, answer: Mapping[str, Any]) -> str:
        return problems_page()
