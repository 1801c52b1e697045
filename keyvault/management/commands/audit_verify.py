"""Verify the audit chains and their signed checkpoints, and name the first broken one."""

import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError, CommandParser

from keyvault.domain.audit_records import gather_kept, parse_public_keys
from keyvault.domain.checkpoints import KeptCheckpoints, PublicKeys
from keyvault.management.json_command import JsonCommand
from keyvault.services.audit.checkpoints import ScopeReport, gather_public_keys, verify_checkpoints
from keyvault.services.recording.audit_chain import verify_audit


class Command(JsonCommand):
    help = (
        "Verify every audit chain and checkpoint, and compare them with the newest checkpoint that is recorded outside "
        "the database; exit 1 when one is broken or missing, or when entries have been unsigned for more than an hour."
    )

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("--public-key", type=Path, help="file of public keys (manage.py show_audit_keys)")
        parser.add_argument("--checkpoints", type=Path, help="file of checkpoints of earlier exports, to compare with")

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        keys, unchecked = gather_public_keys(_read_keys(options["public_key"]))
        kept = _read_kept(options["checkpoints"], keys, unchecked)
        scopes = verify_checkpoints(keys, kept, unchecked, self.now)
        report = verify_audit()
        found = [report.first_broken, *(scope.broken for scope in scopes)]
        broken = next((each for each in found if each is not None), None)
        overdue = next((scope.overdue for scope in scopes if scope.overdue is not None), None)
        self.is_fine = broken is None and overdue is None
        return {
            "entries": report.entries,
            "intact": broken is None,
            "first_broken": None if broken is None else asdict(broken),
            "unsigned": overdue,
            "checkpoints": {scope.scope: self._scope(scope) for scope in scopes},
        }

    def format_text(self, answer: Mapping[str, Any]) -> str:
        text = super().format_text({**answer, "checkpoints": None}).rpartition("\n")[0]
        return "\n".join(
            [
                text,
                *(
                    f"checkpoints of {scope}: {_format_scope(report)}"
                    for scope, report in answer["checkpoints"].items()
                ),
            ]
        )

    def handle(self, *args: Any, **options: Any) -> None:
        super().handle(*args, **options)
        if not self.is_fine:
            sys.exit(1)

    def _scope(self, report: ScopeReport) -> dict[str, Any]:
        newest = report.newest
        at = None if newest is None else newest.at
        return {
            "count": report.checkpoints,
            "newest": None if newest is None else newest.number,
            "newest_at": at,
            "newest_age_seconds": None if at is None else int((self.now - at).total_seconds()),
            "signer": None if newest is None else newest.signer,
            "key_version": None if newest is None else newest.key_version,
            "unsigned_entries": report.unsigned,
            "signatures": "checked" if report.unchecked is None else f"not checked: {report.unchecked}",
            "recorded_newest": "compared" if report.unmarked is None else f"not compared: {report.unmarked}",
            "late": report.late,
            "first_late": report.first_late,
            "broken": None if report.broken is None else asdict(report.broken),
        }


def _read_keys(path: Path | None) -> PublicKeys:
    """Raises CommandError."""
    try:
        return {} if path is None else parse_public_keys(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CommandError(f"{path}: {error}") from error


def _read_kept(path: Path | None, keys: PublicKeys, unchecked: Mapping[str, str]) -> KeptCheckpoints:
    """Raises CommandError."""
    if path is None:
        return {}
    try:
        with path.open("rb") as lines:
            return gather_kept(lines, keys, unchecked)
    except (OSError, ValueError) as error:
        raise CommandError(f"{path}: {error}") from error


def _format_scope(scope: Mapping[str, Any]) -> str:
    if scope["newest"] is None:
        text = f"none, {scope['unsigned_entries']} entries unsigned"
    else:
        text = (
            f"{scope['count']}, the newest is {scope['newest']} of {scope['newest_at']:%Y-%m-%d %H:%M:%S} UTC "
            f"({scope['newest_age_seconds']} s old, {scope['signer']} version {scope['key_version']}), "
            f"{scope['unsigned_entries']} entries after it; signatures {scope['signatures']}; newest checkpoint "
            f"outside the database {scope['recorded_newest']}"
        )
        if scope["late"]:
            text += f"; LATE: {scope['late']} sign entries older than an hour, the first: {scope['first_late']}"
    return (
        text
        if scope["broken"] is None
        else f"{text}; BROKEN at {scope['broken']['sequence']}: {scope['broken']['why']}"
    )
