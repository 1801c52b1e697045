"""Verify an exported audit log on a machine that the service's owner does not control.

    manage.py export_audit > log.jsonl            on the service's host
    python -m keyvault_client.audit_check log.jsonl --public-key keys.json [--kept kept.jsonl]

Requires this package with its extra `audit` (`pip install keyvault_client[audit]`); no Django, no database, no network.

- `keys.json`: the output of `manage.py show_audit_keys`. Auditors with a Vault login compare it with the Vault's own
  copy (`bao read <prefix>-anchor-<scope>/keys/audit`).
- `kept.jsonl`: checkpoints of earlier exports. To add some, run `manage.py export_audit --newest >> kept.jsonl`
  regularly.
- `--partial`: required for an export made with `--scope` or `--since`. An incomplete export is refused otherwise.

It proves that no entry was edited, moved, added or removed after a checkpoint signed it, except by a holder of the
signing key. It proves nothing about the time before: a checkpoint that signs an entry older than an hour is reported as
late. Nor does it prove that an entry was true when it was written. Entries after the newest checkpoint are chained, not
signed. Only `--kept` detects a log whose checkpoints were removed, and which was then cut, or rewritten and signed
again. On the service's host, `manage.py audit_verify` compares with the newest checkpoint outside the database.

Exit status 0: the log is intact. 1: it is not. 2: the files or the arguments are invalid.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from keyvault.domain.audit_records import gather_kept, parse_public_keys, parse_record
from keyvault.domain.timestamps import format_timestamp
from keyvault_client.export_check import ExportCheck, ExportError, ScopeCheck

PROVES = (
    "No entry was edited, moved, added or removed after a checkpoint signed it, except by a holder of the signing key."
)
LIMITS = (
    "Entries after a scope's newest checkpoint are chained, but not signed yet.",
    "Until a checkpoint signs an entry, a person who can write to the database can change it.",
    "Only --kept detects that checkpoints were removed and the log was cut, or rewritten and signed again.",
    "The public keys are trusted as given: compare them with those of the Vault.",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status. Reads line by line; memory use does not grow with the log."""
    options = _parser().parse_args(arguments)
    try:
        check = _check(options.export, options.public_key, options.kept)
        if not any(scope.entries for scope in check.scopes.values()):
            raise ValueError(f"{options.export}: the export has no entries to verify")
        if check.is_partial and not options.partial:
            raise ValueError(
                f"{options.export}: the export omits scopes or earlier entries; if this is intended, use --partial"
            )
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    answer = _answer(check)
    sys.stdout.write((json.dumps(answer) if options.json else _format_report(check, answer)) + "\n")
    return 0 if answer["intact"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m keyvault_client.audit_check", description="Verify an exported audit log.", epilog=PROVES
    )
    parser.add_argument("export", type=Path, help="file written by manage.py export_audit")
    parser.add_argument(
        "--public-key", type=Path, required=True, help="file with the output of manage.py show_audit_keys"
    )
    parser.add_argument("--kept", type=Path, help="checkpoints of earlier exports")
    parser.add_argument("--partial", action="store_true", help="accept an export made with --scope or --since")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _check(export: Path, public_key: Path, kept: Path | None) -> ExportCheck:
    """Verify the export. Raises OSError, and ValueError that names the file and the line."""
    with _prefix_errors(public_key):
        keys = parse_public_keys(public_key.read_bytes())
    with _prefix_errors(kept):
        known = {} if kept is None else gather_kept(_lines(kept), keys)
    check = ExportCheck(keys, known)
    with _prefix_errors(export):
        for number, line in enumerate(_lines(export), 1):
            try:
                check.take(parse_record(line))
            except ValueError as error:
                raise ExportError(f"line {number}: {error}") from None
        check.finish()
    return check


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from file


@contextmanager
def _prefix_errors(path: Path | None) -> Iterator[None]:
    """Prefix a ValueError with the name of the file."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _answer(check: ExportCheck) -> dict[str, Any]:
    broken = check.first_broken
    return {
        "entries": sum(scope.entries for scope in check.scopes.values()),
        "intact": broken is None,
        "first_broken": None if broken is None else asdict(broken),
        "exported_at": None if check.start is None else format_timestamp(check.start.at),
        "since": None if check.since is None else format_timestamp(check.since),
        "scopes": {name: _scope_answer(scope) for name, scope in check.scopes.items()},
        "kept_compared": sum(len(digests) for digests in check.kept.values()) - check.count_uncompared(),
        "kept_not_compared": check.count_uncompared(),
        "proves": PROVES if broken is None else None,
        "limits": list(LIMITS),
    }


def _scope_answer(scope: ScopeCheck) -> dict[str, Any]:
    newest, signed = scope.walk.newest, scope.walk.newest_signed
    return {
        "entries": scope.entries,
        "chains": len(scope.positions),
        "checkpoints": scope.walk.count,
        "begins_with": scope.begins_with,
        "newest_checkpoint": None if newest is None else newest.number,
        "newest_checkpoint_at": None if newest is None else format_timestamp(newest.at),
        "signer": None if signed is None else signed.signer,
        "key_version": None if signed is None else signed.key_version,
        "unsigned_entries": scope.unsigned,
        "late": scope.walk.late,
        "first_late": scope.walk.first_late,
        "broken": None if scope.broken is None else asdict(scope.broken),
    }


def _format_report(check: ExportCheck, answer: dict[str, Any]) -> str:
    lines: list[str] = []
    if answer["since"] is not None:
        lines.append(f"Without the entries that were signed until {answer['since']}: compare this with --since.")
    for name, scope in answer["scopes"].items():
        lines += _format_scope(name, scope, check.exported_at)
    if check.kept:
        lines.append(
            f"Kept checkpoints: {answer['kept_compared']} compared, {answer['kept_not_compared']} outside this export."
        )
    else:
        lines.append("Without kept checkpoints (--kept), it is unknown whether the log was rolled back.")
    if answer["intact"]:
        lines += ["The audit log is intact.", PROVES, "Not proven:"]
    else:
        lines += ["THE AUDIT LOG IS NOT INTACT.", "Never proven:"]
    return "\n".join([*lines, *(f"  - {limit}" for limit in LIMITS)])


def _format_scope(name: str, scope: dict[str, Any], exported_at: datetime | None) -> Iterator[str]:
    yield f"{name}: {scope['entries']} entries in {scope['chains']} chains, {scope['checkpoints']} checkpoints."
    if scope["begins_with"] is not None:
        yield f"  It begins after checkpoint {scope['begins_with']}; entries signed until then are not in this file."
    if scope["newest_checkpoint"] is not None:
        yield (
            f"  Newest checkpoint: {scope['newest_checkpoint']} of {scope['newest_checkpoint_at']}"
            f"{_age(scope['newest_checkpoint_at'], exported_at)}, signed by {scope['signer']} (key version "
            f"{scope['key_version']}). Entries after it: {scope['unsigned_entries']}."
        )
    if scope["late"]:
        yield f"  LATE: {scope['late']} checkpoints sign entries older than an hour. The first: {scope['first_late']}."
    if scope["broken"] is not None:
        broken = scope["broken"]
        yield f"  BROKEN at {broken['chain']} {broken['sequence']}: {broken['why']}."


def _age(at: str, exported_at: datetime | None) -> str:
    if exported_at is None:
        return ""
    minutes = int((exported_at - datetime.fromisoformat(at)).total_seconds() // 60)
    return f", {minutes} min before the export"


if __name__ == "__main__":
    sys.exit(main())
