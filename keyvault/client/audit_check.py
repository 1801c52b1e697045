"""Checks an exported audit log on a machine that the service's owner does not control.

    manage.py export_audit > log.jsonl            on the service's host
    python -m keyvault.client.audit_check log.jsonl --public-key keys.json [--kept kept.jsonl]

It needs Python, the package `cryptography`, and the folders keyvault/domain and keyvault/client; no Django, no
database, no network. `keys.json` is what `manage.py audit_public_key` printed; an auditor who has a login of his own
compares it with what the Vault says (`bao read <prefix>-anchor-<scope>/keys/audit`). `kept.jsonl` holds checkpoints of
earlier exports; to keep some, `manage.py export_audit --newest >> kept.jsonl` now and then. Whoever asked for an
export with `--scope` or `--since` says `--partial`: otherwise one that leaves something out is refused.

What it proves: nobody without the signing key has edited, reordered, put in or taken away an entry up to the newest
checkpoint of its scope. What it does not: entries after that checkpoint are chained, not signed; that the newest
checkpoints were not taken away together with their entries, only `--kept` shows; and that an entry was true when it was
written, nothing does.

Exit 0: everything holds. 1: something does not. 2: the files or the arguments are no good.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from keyvault.client.export_check import ExportCheck, ExportError, ScopeCheck
from keyvault.domain.audit_records import gather_kept, parse_public_keys, parse_record

PROVES = "Nobody without the signing key has edited, reordered, added or removed an entry that a checkpoint signs."
LIMITS = (
    "Entries after a scope's newest checkpoint are chained, but not signed yet.",
    "Newest checkpoints removed together with their entries are found only with --kept.",
    "The public keys are taken as given: compare them with those of the Vault.",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code. Reads the export line by line; what it remembers does not grow with the log."""
    options = _parser().parse_args(arguments)
    try:
        check = _check(options.export, options.public_key, options.kept)
        if not any(scope.entries for scope in check.scopes.values()):
            raise ValueError(f"{options.export}: it holds no entries, so there is nothing to check")
        if check.is_partial and not options.partial:
            raise ValueError(
                f"{options.export}: it says that it leaves scopes or a beginning out; if that was asked for: --partial"
            )
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    answer = _answer(check)
    sys.stdout.write((json.dumps(answer) if options.json else _words(check, answer)) + "\n")
    return 0 if answer["intact"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m keyvault.client.audit_check", description="Checks an exported audit log.", epilog=PROVES
    )
    parser.add_argument("export", type=Path, help="what manage.py export_audit wrote")
    parser.add_argument("--public-key", type=Path, required=True, help="what manage.py audit_public_key printed")
    parser.add_argument("--kept", type=Path, help="checkpoints of earlier exports")
    parser.add_argument("--partial", action="store_true", help="the export was asked for with --scope or --since")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    return parser


def _check(export: Path, public_key: Path, kept: Path | None) -> ExportCheck:
    """Raises OSError, and ValueError that names the file and the line."""
    with _naming(public_key):
        keys = parse_public_keys(public_key.read_bytes())
    with _naming(kept):
        known = {} if kept is None else gather_kept(_lines(kept), keys)
    check = ExportCheck(keys, known)
    number = 0
    with _naming(export):
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


class _naming:  # noqa: N801  read as a statement
    """What is wrong inside a file is told with its name."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValueError):
            raise ValueError(f"{self.path}: {error}") from None


def _answer(check: ExportCheck) -> dict[str, Any]:
    broken = check.first_broken
    return {
        "entries": sum(scope.entries for scope in check.scopes.values()),
        "intact": broken is None,
        "first_broken": None if broken is None else asdict(broken),
        "exported_at": None if check.start is None else check.start.at.isoformat(),
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
        "begins_with": None if scope.walk.first is None else scope.walk.first.number,
        "newest_checkpoint": None if newest is None else newest.number,
        "newest_checkpoint_at": None if newest is None else newest.at.isoformat(),
        "signer": None if signed is None else signed.signer,
        "key_version": None if signed is None else signed.key_version,
        "unsigned_entries": scope.unsigned,
        "broken": None if scope.broken is None else asdict(scope.broken),
    }


def _words(check: ExportCheck, answer: dict[str, Any]) -> str:
    lines: list[str] = []
    for name, told in answer["scopes"].items():
        lines += _scope_words(name, told, check.exported_at)
    if check.kept:
        lines.append(
            f"Kept checkpoints: {answer['kept_compared']} compared, {answer['kept_not_compared']} outside this export."
        )
    else:
        lines.append("No kept checkpoints were given (--kept): whether the log was set back is not known.")
    if answer["intact"]:
        lines += ["The audit log holds.", PROVES, "Not proven:"]
    else:
        lines += ["THE AUDIT LOG DOES NOT HOLD.", "Whatever holds, this is never proven:"]
    return "\n".join([*lines, *(f"  - {limit}" for limit in LIMITS)])


def _scope_words(name: str, told: dict[str, Any], exported_at: datetime | None) -> Iterator[str]:
    yield f"{name}: {told['entries']} entries in {told['chains']} chains, {told['checkpoints']} checkpoints."
    if (told["begins_with"] or 1) > 1:
        yield f"  It begins with checkpoint {told['begins_with']}; what that one signs is not in this file."
    if told["newest_checkpoint"] is not None:
        yield (
            f"  Newest checkpoint: {told['newest_checkpoint']} of {told['newest_checkpoint_at']}"
            f"{_age(told['newest_checkpoint_at'], exported_at)}, signed by {told['signer']} (key version "
            f"{told['key_version']}). Entries after it: {told['unsigned_entries']}."
        )
    if told["broken"] is not None:
        broken = told["broken"]
        yield f"  BROKEN at {broken['chain']} {broken['sequence']}: {broken['why']}."


def _age(at: str, exported_at: datetime | None) -> str:
    if exported_at is None:
        return ""
    minutes = int((exported_at - datetime.fromisoformat(at)).total_seconds() // 60)
    return f", {minutes} min before the export"


if __name__ == "__main__":
    sys.exit(main())
