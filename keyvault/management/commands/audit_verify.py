"""Walks the audit chains and names the first entry that does not hold."""

import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from keyvault.management.answers import AnsweringCommand
from keyvault.services.audit import verify_audit


class Command(AnsweringCommand):
    help = "Checks every audit chain; exit 1 when one is broken or missing."

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        report = verify_audit()
        self.intact = report.first_broken is None
        broken = None if report.first_broken is None else asdict(report.first_broken)
        return {"entries": report.entries, "intact": broken is None, "first_broken": broken}

    def handle(self, *args: Any, **options: Any) -> None:
        super().handle(*args, **options)
        if not self.intact:
            sys.exit(1)
