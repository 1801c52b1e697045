"""Reconcile the secret backend with the database, like the nightly task."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from django.conf import settings
from django.core.management.base import CommandError, CommandParser

from keyvault.access.principals import WORKER, Channel
from keyvault.domain.environments import Environment
from keyvault.domain.free_text import escape_unprintable
from keyvault.management.json_command import JsonCommand
from keyvault.services.reconciliation.reconciliation import reconcile


class Command(JsonCommand):
    help = (
        "Compare every version in the secret backend with the database: destroy copies of revoked keys, repair "
        "incomplete changes, and report missing and unattributed copies. Unattributed copies are never changed."
    )

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("--environment", choices=settings.ENVIRONMENTS, help="only this environment")
        parser.add_argument("--dry-run", action="store_true", help="only report the changes")

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        host = replace(WORKER, channel=Channel.COMMAND_LINE)
        chosen = [options["environment"]] if options["environment"] else settings.ENVIRONMENTS
        reports = [
            reconcile(environment, is_dry_run=options["dry_run"], principal=host)
            for environment in map(Environment, chosen)
        ]
        self.unfinished: list[str] = [report.environment for report in reports if not report.is_complete]
        return {report.environment: report.as_json() for report in reports}

    def format_text(self, answer: Mapping[str, Any]) -> str:
        lines = []
        for environment, report in answer.items():
            counts = [f"{label} {report[name]}" for name, label in _COUNT_LABELS.items()]
            lines += [f"{environment}: {', '.join(counts)}", *(_format_finding(each) for each in report["findings"])]
        return "\n".join(lines)

    def handle(self, *args: Any, **options: Any) -> None:
        self.unfinished = []
        super().handle(*args, **options)
        if self.unfinished:
            raise CommandError(
                f"not finished, run again: {', '.join(self.unfinished)}; the backend was unavailable or denied access"
            )


_COUNT_LABELS = {
    "paths": "paths",
    "versions": "versions",
    "destroyed": "destroyed",
    "put_right": "repaired",
    "forgotten": "erased",
    "missing": "missing",
    "unattributed": "unattributed",
    "left": "skipped",
    "failed": "failed",
}
"""Labels of the report's counts, in the order of the output."""


def _format_finding(finding: Mapping[str, Any]) -> str:
    version = "" if finding["backend_version"] is None else f"@{finding['backend_version']}"
    more = [str(finding[name]) for name in ("key_id", "why") if finding.get(name)]
    line = f"{finding['what']}: {finding['path']}{version} {', '.join(more)}".rstrip()
    return f"  {escape_unprintable(line)}"
