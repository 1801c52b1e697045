"""Exports of the revocations: a lost log is replaced by an intact export of this installation, and by nothing else."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.db import transaction

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST
from keyvault.domain.errors import RequestInvalidError
from keyvault.domain.keys import KeyState
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.revocation import RevocationReason
from keyvault.domain.revocation_export import end_line, parse_end_line
from keyvault.domain.revocation_log import Ended, Opened, line_bytes
from keyvault.models import AuditEntry, Key, Notice
from keyvault.services.keys import lifecycle
from keyvault.services.recording.authorization import authorize
from keyvault.services.recording.revocation_log import append_lines, read_lines
from keyvault.services.revocations import log_export
from keyvault.services.revocations.replay import read_counter
from keyvault.services.startup.startup_checks import require_current
from keyvault.services.tokens import service_tokens
from tests.factories import INSTALLATION, grant, issue, make_token, now, renew_revocation_log
from tests.services.conftest import Scene, make_scene
from tests.services.keys.test_lifecycle import verdict
from tests.services.rows import dump_tables, last_body
from tests.services.tokens.test_customer_tokens import token_of

pytestmark = [pytest.mark.database, pytest.mark.django_db]


@pytest.fixture(autouse=True)
def path(tmp_path: Path, settings: Any) -> Path:
    """A log of the test's own."""
    settings.REVOCATION_LOG = tmp_path / "revocation_log"
    renew_revocation_log(settings.REVOCATION_LOG)
    return Path(settings.REVOCATION_LOG)


@pytest.fixture
def scene(db: None) -> Scene:
    return make_scene()


def export(path: Path) -> Any:
    return run("export_revocations", "--to", str(path))


def run(*command: str) -> Any:
    output = io.StringIO()
    call_command(*command, "--json", stdout=output)
    return json.loads(output.getvalue())


def report_leak(scene: Scene, key: Key) -> None:
    lifecycle.report_compromise(grant(scene.admin, P.KEYS_REVOKE, scene.sandbox), key)


def revoke(scene: Scene, key: Key) -> None:
    lifecycle.revoke_key(grant(scene.admin, P.KEYS_REVOKE, scene.sandbox), key, RevocationReason.SUPERSEDED)


def state(key: Key) -> str:
    return str(Key.objects.get(pk=key.pk).state)


def test_export_replaces_a_lost_log_so_that_a_compromised_key_stays_refused(
    scene: Scene, path: Path, tmp_path: Path
) -> None:
    """Guarantee: issue, back up, report as compromised, restore, lose the log: nothing starts; replay from an export,
    and the key is refused.
    """
    key, text = issue(scene.sandbox)
    customer_token, _ = token_of(issue(scene.sandbox, label="other")[0])
    service_token, _ = make_token()
    backup = transaction.savepoint()
    report_leak(scene, key)
    service_tokens.revoke_service_token(grant(scene.admin, P.TOKENS_WRITE), service_token)
    made, sequence = export(tmp_path / "export"), read_counter()
    assert (made["count"], made["sequence"], made["installation"]) == (2, sequence, INSTALLATION)
    transaction.savepoint_rollback(backup)
    path.unlink()
    assert verdict(text) is None, "the restored database accepts the key"
    with pytest.raises(ImproperlyConfigured, match=r"is missing or empty.* replay_revocations --from FILE"):
        require_current()
    tables = dump_tables()
    with pytest.raises(SystemExit):
        run("replay_revocations", "--from", str(tmp_path / "export"), "--dry-run")
    assert (dump_tables(), path.exists()) == (tables, False)

    answer = run("replay_revocations", "--from", str(tmp_path / "export"))
    assert {each["id"] for each in answer["replayed"]} == {key.key_id, service_token.token_id}
    assert answer["export"] == {"at": made["at"], "added": 2}
    assert (state(key), verdict(text)) == (KeyState.COMPROMISED, "key_revoked")
    assert read_counter() > sequence, "no receipt goes back"
    require_current()
    details = last_body("journal.rebuilt")["details"]
    assert (details["exported_at"], details["digest"]) == (made["at"], made["digest"])
    notice = Notice.objects.get(kind=NoticeKind.REVOCATION_LOG_LOSS_ACCEPTED)
    assert (notice.is_alarm, made["at"] in notice.payload["why"]) == (True, True)

    tables, lines = dump_tables(), path.read_bytes()
    again = run("replay_revocations", "--from", str(tmp_path / "export"))
    assert (again["replayed"], again["export"]["added"]) == ([], 0)
    assert (dump_tables(), path.read_bytes()) == (tables, lines), "the command is repeatable"
    assert not customer_token.has_ended()


def test_export_completes_an_older_log_and_weakens_no_compromise(scene: Scene, path: Path, tmp_path: Path) -> None:
    keys = [issue(scene.sandbox, label=f"key {number}")[0] for number in range(3)]
    backup, older = transaction.savepoint(), path.read_bytes()
    for key in keys[:2]:
        revoke(scene, key)
    export(tmp_path / "export")
    transaction.savepoint_rollback(backup)
    leaked = Ended(1, now(), "key", keys[0].key_id, "compromised", "key_compromise")
    path.write_bytes(older + line_bytes(leaked))
    command = ("replay_revocations", "--from", str(tmp_path / "export"))
    output = io.StringIO()
    with pytest.raises(SystemExit):
        call_command(*command, "--dry-run", stdout=output)
    assert "had 1 revocations that the log did not have" in output.getvalue()
    for added in (1, 0):
        assert run(*command)["export"]["added"] == added
    assert [state(key) for key in keys] == ["compromised", "deactivated", "active"]
    assert not Notice.objects.filter(kind=NoticeKind.REVOCATION_LOG_LOSS_ACCEPTED).exists()


def _cut(lines: list[bytes]) -> list[bytes]:
    return lines[:-1]


def _without_first(lines: list[bytes]) -> list[bytes]:
    return lines[1:]


def _another_key(lines: list[bytes]) -> list[bytes]:
    return [line_bytes(Ended(1, now(), "key", "Unknown1", "deactivated", "superseded")), *lines[1:]]


def _changed_end(**changes: Any) -> Callable[[list[bytes]], list[bytes]]:
    def change(lines: list[bytes]) -> list[bytes]:
        signed = parse_end_line(lines[-1])
        return [*lines[:-1], end_line(replace(signed, export=replace(signed.export, **changes)))]

    return change


def _malformed_end(old: bytes, new: bytes) -> Callable[[list[bytes]], list[bytes]]:
    def change(lines: list[bytes]) -> list[bytes]:
        assert old in lines[-1]
        return [*lines[:-1], lines[-1].replace(old, new)]

    return change


REFUSED = {
    "cut": (_cut, "not the end of an export: it was cut or altered"),
    "cut within a line": (lambda lines: [*lines[:-1], lines[-1][:-9]], "not the end of an export"),
    "without a line": (_without_first, "its 1 revocations are not the 2 that were signed"),
    "another key": (_another_key, "its 2 revocations are not the 2 that were signed"),
    "lines in another order": (lambda lines: [*lines[1::-1], lines[2]], "were signed"),
    "later sequence": (_changed_end(sequence=10**9), "its signature is not the signer's"),
    "fewer lines": (_changed_end(count=1), "its signature is not the signer's"),
    "another installation": (_changed_end(installation="another"), "belongs to installation another, this database to"),
    "no key version": (_malformed_end(b'"key_version":1', b'"key_version":[]'), "not the end of an export"),
    "no signer": (_malformed_end(b'"signer":"local"', b'"signer":{}'), "not the end of an export"),
    "no UTC time": (_malformed_end(b'"at":"', b'"at":"0001-01-01T00:00:00+14:00","_":"'), "not the end of an export"),
    "a revocation log": (lambda lines: [line_bytes(Opened(INSTALLATION, now()))], "another kind of file"),
    "empty": (lambda lines: [], "another kind of file"),
}


def test_export_that_was_cut_altered_or_is_foreign_is_refused(scene: Scene, path: Path, tmp_path: Path) -> None:
    """Guarantee: it changes neither the database nor the log, and the message says what is wrong."""
    keys = [issue(scene.sandbox, label=f"key {number}")[0] for number in range(2)]
    backup = transaction.savepoint()
    for key in keys:
        revoke(scene, key)
    export(tmp_path / "export")
    transaction.savepoint_rollback(backup)
    whole, log = (tmp_path / "export").read_bytes().splitlines(keepends=True), path.read_bytes()
    tables = dump_tables()
    for is_lost in (False, True):
        path.unlink(missing_ok=True) if is_lost else path.write_bytes(log)
        for name, (alter, message) in REFUSED.items():
            (tmp_path / "altered").write_bytes(b"".join(alter(whole)))
            for more in ((), ("--dry-run",)):
                with pytest.raises(CommandError, match="no intact export of this installation") as refused:
                    run("replay_revocations", "--from", str(tmp_path / "altered"), *more)
                assert message in str(refused.value), name
                assert "Use a file that manage.py export_revocations" in str(refused.value)
            assert (dump_tables(), path.exists()) == (tables, not is_lost), name
    with pytest.raises(CommandError, match="absent: No such file"):
        run("replay_revocations", "--from", str(tmp_path / "absent"))


class _ChangingFile(io.BytesIO):
    """A file with another content when it is read for the second time."""

    def __init__(self, *contents: bytes) -> None:
        super().__init__()
        self.contents = list(contents)

    def seek(self, *position: int) -> int:
        super().__init__(self.contents.pop(0))
        return 0


def test_export_that_changes_after_its_signature_was_verified_is_refused(
    scene: Scene, path: Path, tmp_path: Path
) -> None:
    """Guarantee: the revocations that are used are those that were signed, wherever the file is stored."""
    keys = [issue(scene.sandbox, label=f"key {number}")[0] for number in range(2)]
    backup = transaction.savepoint()
    for key in keys:
        revoke(scene, key)
    export(tmp_path / "export")
    transaction.savepoint_rollback(backup)
    whole = (tmp_path / "export").read_bytes().splitlines(keepends=True)
    renew_revocation_log(path)
    log, platform = path.read_bytes(), authorize(HOST, P.REVOCATIONS_REPLAY, now=now())
    for is_lost in (False, True):
        path.unlink() if is_lost else path.write_bytes(log)
        for altered in (_another_key(whole), whole[:1]):
            with pytest.raises(RequestInvalidError, match="it was changed while it was read"):
                log_export.add_export(platform, _ChangingFile(b"".join(whole), b"".join(altered)))
            assert not path.exists() if is_lost else path.read_bytes() == log


def test_export_that_is_older_than_the_database_does_not_replace_a_lost_log(
    scene: Scene, path: Path, tmp_path: Path
) -> None:
    """Guarantee: an old export is no way around the two persons who accept the loss of the log."""
    key, _ = issue(scene.sandbox)
    export(tmp_path / "export")
    revoke(scene, key)
    path.unlink()
    for more in ((), ("--dry-run",)):
        with pytest.raises(CommandError, match="is older than this database"):
            run("replay_revocations", "--from", str(tmp_path / "export"), *more)
    assert not path.exists()
    assert not AuditEntry.objects.filter(event="journal.rebuilt").exists()
    accepting = ("--accept-loss", "--by", "admin", "--approved-by", "approver", "--reason", "lost")
    with pytest.raises(CommandError, match="cannot be combined with --from") as usage:
        run("replay_revocations", "--from", str(tmp_path / "export"), *accepting)
    assert usage.value.returncode == 2


def test_export_of_a_database_that_may_lack_revocations_is_refused(scene: Scene, path: Path, tmp_path: Path) -> None:
    """Guarantee: nothing signs that a restored database names every revocation."""
    key, _ = issue(scene.sandbox)
    whole = path.read_bytes()
    behind = line_bytes(Ended(1, now(), "key", key.key_id, "deactivated", "superseded"))
    for log, message in ((whole + behind, "is behind"), (whole + b"garbage\n", "is damaged"), (b"", "is missing")):
        path.write_bytes(log)
        with pytest.raises(CommandError, match=f"Nothing was exported.*{message}"):
            export(tmp_path / "export")
    assert [each.name for each in tmp_path.iterdir()] == ["revocation_log"]


def test_export_killed_midway_leaves_no_file_and_replaces_none(scene: Scene, tmp_path: Path) -> None:
    with mock.patch.object(log_export, "_sign", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        export(tmp_path / "export")
    assert not (tmp_path / "export").exists()
    export(tmp_path / "export")
    assert (tmp_path / "export").stat().st_mode & 0o777 == 0o600
    before = (tmp_path / "export").read_bytes()
    with pytest.raises(CommandError, match="Name another one"):
        export(tmp_path / "export")
    assert (tmp_path / "export").read_bytes() == before


def test_export_added_to_a_log_and_killed_midway_is_repeatable(
    scene: Scene, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between two writes to the log, or after the audit entry and before the log exists."""
    monkeypatch.setattr(log_export, "_BATCH", 1)
    keys = [issue(scene.sandbox, label=f"key {number}")[0] for number in range(3)]
    backup, older = transaction.savepoint(), path.read_bytes()
    for key in keys:
        revoke(scene, key)
    assert export(tmp_path / "export")["count"] == 3, "every batch of rows is read"
    transaction.savepoint_rollback(backup)
    path.unlink()
    with (
        mock.patch.object(log_export, "create_revocation_log", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        run("replay_revocations", "--from", str(tmp_path / "export"))
    assert not path.exists()
    path.write_bytes(older)
    written: list[bool] = []

    def die_at_second(lines: Any) -> None:
        if written:
            raise KeyboardInterrupt
        append_lines(lines)
        written.append(True)

    with mock.patch.object(log_export, "append_lines", die_at_second), pytest.raises(KeyboardInterrupt):
        run("replay_revocations", "--from", str(tmp_path / "export"))
    assert run("replay_revocations", "--from", str(tmp_path / "export"))["export"]["added"] == 2
    assert {state(key) for key in keys} == {"deactivated"}
    # The replay logs the revocations of its own transactions, with a unit.
    assert len([line for _, line in read_lines() if isinstance(line, Ended) and not line.unit]) == 3
