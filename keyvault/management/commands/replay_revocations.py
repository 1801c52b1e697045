"""Reapply the revocations in the revocation log; exit 1 when something is left to do."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from django.conf import settings
from django.core.management.base import CommandError, CommandParser

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.access.principals import HOST
from keyvault.domain.ids import Subject
from keyvault.domain.revocation_export import RevocationExport
from keyvault.domain.timestamps import format_timestamp
from keyvault.management.json_command import JsonCommand
from keyvault.services.recording.authorization import authorize
from keyvault.services.revocations.log_export import (
    add_export,
    count_missing,
    list_exported,
    read_export,
    require_recent,
)
from keyvault.services.revocations.log_opening import (
    Recovery,
    accept_loss,
    is_lost,
    preview_replay,
    recover_revocation_log,
)
from keyvault.services.revocations.replay import Replay, replay_revocations
from keyvault.services.startup.startup_checks import format_log_damage, format_log_loss


class Command(JsonCommand):
    help = (
        "After restoring a backup or a failover to a replica: reapply the revocations in this host's revocation log, "
        "and advance the sequence of changes. The service does not start before that. Repeatable. A lost or old "
        "log is completed from the revocation anchor first, and with --from from a file of export_revocations. Without "
        "either, --accept-loss creates a new log; revoke by hand what was revoked since the backup."
    )

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("--dry-run", action="store_true", help="report the changes without applying them")
        parser.add_argument(
            "--from", dest="export", metavar="FILE", type=Path, help="add a file of export_revocations to the log first"
        )
        parser.add_argument("--accept-loss", action="store_true", help="create a new revocation log for a lost one")
        parser.add_argument("--by", metavar="NAME", help="with --accept-loss: the responsible operator")
        parser.add_argument("--approved-by", metavar="NAME", help="with --accept-loss: a second operator")
        parser.add_argument("--reason", metavar="WHY", help="with --accept-loss: cause of the loss, for the audit log")

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        is_accepting: bool = options["accept_loss"]
        if any(is_accepting != bool(options[name]) for name in ("by", "approved_by", "reason")):
            raise CommandError(
                "--accept-loss, --by NAME, --approved-by NAME and --reason WHY go together", returncode=2
            )
        if is_accepting and options["dry_run"]:
            raise CommandError("--accept-loss cannot be combined with --dry-run", returncode=2)
        if is_accepting and options["export"]:
            raise CommandError("--accept-loss cannot be combined with --from, which replaces the log", returncode=2)
        grant = authorize(HOST, Permission.REVOCATIONS_REPLAY, now=self.now)
        self.export: tuple[RevocationExport, int] | None = None
        try:
            if is_accepting:
                operator, approver = (self.unlimited_operator(options[name]) for name in ("by", "approved_by"))
                accept_loss(grant, operator, approver, options["reason"])
            with _open_if_any(options["export"]) as file:
                replay, recovery = self._preview(file) if options["dry_run"] else self._replay(grant, file)
        except OSError as error:
            raise CommandError(
                f"the revocation log {settings.REVOCATION_LOG} cannot be used: {error.strerror}"
            ) from error
        found, unread = replay.found, recovery.unread
        self.is_repaired = not (replay.left or found.damaged or unread or replay.counter < found.highest)
        return {
            "ok": self.is_repaired,
            "accepted": is_accepting,
            "journal": str(settings.REVOCATION_LOG),
            "lines": found.lines,
            "replayed": _named(replay.replayed),
            "left": _named(replay.left),
            "unknown": _named(sorted(found.unknown)),
            "damaged": found.damaged,
            "anchored": recovery.has_anchor,
            "anchor_unread": unread,
            "newest_revocation": found.newest_at,
            "export": None if self.export is None else {"at": self.export[0].at, "added": self.export[1]},
            "journal_sequence": found.highest,
            "sequence_before": found.counter,
            "sequence": replay.counter,
        }

    def _preview(self, file: BinaryIO | None) -> tuple[Replay, Recovery]:
        export = None if file is None else read_export(file)
        preview = preview_replay(() if file is None or export is None else list_exported(file, export))
        if preview.is_lost and export is None:
            raise CommandError(format_log_loss(preview.unread))
        if file is not None and export is not None:
            self.export = (export, count_missing(file, export))
            if preview.is_lost:
                require_recent(export)
        found = preview.found
        recovery = Recovery(has_anchor=preview.has_anchor, unread=preview.unread)
        return Replay(found, [], list(found.lost), found.counter), recovery

    def _replay(self, grant: Grant, file: BinaryIO | None) -> tuple[Replay, Recovery]:
        recovery = recover_revocation_log(self.now)
        if file is not None:
            self.export = add_export(grant, file)
        if is_lost():
            raise CommandError(format_log_loss(recovery.unread))
        return replay_revocations(grant), recovery

    def format_text(self, answer: Mapping[str, Any]) -> str:
        lines = ["the loss is accepted, with an audit entry and an alarm; a new log is created"] * answer["accepted"]
        lines += [f"{answer['journal']}: {answer['lines']} lines, up to change {answer['journal_sequence']}"]
        if export := answer["export"]:
            at = format_timestamp(export["at"])
            lines.append(f"the export of {at} had {export['added']} revocations that the log did not have")
        lines += [f"revoked again: {each['kind']} {each['id']}" for each in answer["replayed"]]
        lines += [f"STILL ACTIVE: {each['kind']} {each['id']}" for each in answer["left"]]
        if answer["unknown"]:
            lines.append(f"{len(answer['unknown'])} are not in the database, so they are not valid (--json lists them)")
        if answer["damaged"]:
            lines.append(f"DAMAGED: {format_log_damage(answer['damaged'])}")
        if answer["anchor_unread"]:
            lines.append(f"the revocation anchor was NOT compared: {answer['anchor_unread']}")
        elif not answer["anchored"]:
            newest = answer["newest_revocation"]
            until = (
                "it has no revocation" if newest is None else f"its newest revocation is of {format_timestamp(newest)}"
            )
            lines.append(
                f"there is no revocation anchor, so nothing shows whether this log is complete: {until}. After a "
                "restore revoke by hand what was revoked later"
            )
        before, now = answer["sequence_before"], answer["sequence"]
        lines.append(f"the sequence of changes is {now}" + (f", it was {before}" if now != before else ""))
        is_behind = answer["left"] or answer["damaged"] or now < answer["journal_sequence"]
        done = "the database is BEHIND the log" if is_behind else "the database is not behind the log"
        return "\n".join([*lines, done])

    def handle(self, *args: Any, **options: Any) -> None:
        super().handle(*args, **options)
        if not self.is_repaired:
            sys.exit(1)


@contextmanager
def _open_if_any(path: Path | None) -> Iterator[BinaryIO | None]:
    if path is None:
        yield None
        return
    try:
        file = path.open("rb")
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from error
    with file:
        yield file


def _named(subjects: Iterable[Subject]) -> list[dict[str, str]]:
    return [{"kind": kind, "id": name} for kind, name in subjects]
