"""Ends again what the journal of revocations says has ended; exit 1 when something is left to do."""

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from django.conf import settings
from django.core.management.base import CommandError, CommandParser

from keyvault.access.permissions import Permission
from keyvault.access.principals import HOST
from keyvault.management.json_command import JsonCommand
from keyvault.models.recording import Subject
from keyvault.services.recording.authorization import authorize
from keyvault.services.revocations.log_opening import accept_loss, is_lost
from keyvault.services.revocations.replay import Replay, compare_journal, replay_revocations
from keyvault.services.startup.startup_checks import format_journal_damage, format_journal_loss


class Command(JsonCommand):
    help = (
        "After a restored backup or a failed-over replica: revokes again whatever this host's journal says was "
        "revoked, and moves the sequence of changes on. Start is refused until then. Repeatable. Where the journal is "
        "lost for good, --accept-loss makes a new one: what was revoked since the backup has to be revoked by hand."
    )

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("--dry-run", action="store_true", help="say what it would do, and change nothing")
        parser.add_argument("--accept-loss", action="store_true", help="this host's journal is lost: make a new one")
        parser.add_argument("--by", metavar="NAME", help="with --accept-loss: the operator who answers for it")
        parser.add_argument("--reason", metavar="WHY", help="with --accept-loss: how it was lost, for the audit log")

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        is_accepting: bool = options["accept_loss"]
        if is_accepting != bool(options["by"]) or is_accepting != bool(options["reason"]):
            raise CommandError("--accept-loss takes --by NAME and --reason WHY; nothing else does", returncode=2)
        if is_accepting and options["dry_run"]:
            raise CommandError("--accept-loss: not with --dry-run", returncode=2)
        grant = authorize(HOST, Permission.REVOCATIONS_REPLAY, now=self.now)
        try:
            if is_accepting:
                accept_loss(grant, self.operator(options["by"]), options["reason"])
            if is_lost():
                raise CommandError(format_journal_loss())
            if options["dry_run"]:
                found = compare_journal()
                replay = Replay(found, [], list(found.lost), found.counter)
            else:
                replay = replay_revocations(grant)
        except OSError as error:
            raise CommandError(f"the revocation journal {settings.JOURNAL} cannot be used: {error.strerror}") from error
        found = replay.found
        self.is_mended = not (replay.left or found.damaged or replay.counter < found.highest)
        return {
            "ok": self.is_mended,
            "accepted": is_accepting,
            "journal": str(settings.JOURNAL),
            "lines": found.lines,
            "replayed": _named(replay.replayed),
            "left": _named(replay.left),
            "unknown": _named(sorted(found.unknown)),
            "damaged": found.damaged,
            "journal_sequence": found.highest,
            "sequence_before": found.counter,
            "sequence": replay.counter,
        }

    def words(self, answer: Mapping[str, Any]) -> str:
        lines = ["the loss is accepted, in the audit log and the inbox; a new journal is made"] * answer["accepted"]
        lines += [f"{answer['journal']}: {answer['lines']} lines, up to change {answer['journal_sequence']}"]
        lines += [f"revoked again: {each['kind']} {each['id']}" for each in answer["replayed"]]
        lines += [f"STILL LIVES: {each['kind']} {each['id']}" for each in answer["left"]]
        if answer["unknown"]:
            lines.append(
                f"{len(answer['unknown'])} are in no row, so that they are good for nothing (--json names them)"
            )
        if answer["damaged"]:
            lines.append(f"DAMAGED: {format_journal_damage(answer['damaged'])}")
        before, now = answer["sequence_before"], answer["sequence"]
        lines.append(f"the sequence of changes stands at {now}" + (f", it was {before}" if now != before else ""))
        done = "the database is not behind the journal" if answer["ok"] else "the database is BEHIND the journal"
        return "\n".join([*lines, done])

    def handle(self, *args: Any, **options: Any) -> None:
        super().handle(*args, **options)
        if not self.is_mended:
            sys.exit(1)


def _named(subjects: Iterable[Subject]) -> list[dict[str, str]]:
    return [{"kind": kind, "id": name} for kind, name in subjects]
