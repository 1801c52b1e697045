"""The audit log for an auditor: verified on the host, exported, and checked elsewhere by a program without Django."""

import io
import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.core.management import CommandError, call_command
from django.db import connection

from keyvault.access.roles import Role
from keyvault.models import AuditChain, AuditCheckpoint, AuditEntry
from keyvault.models.triggers import drop_triggers, ensure_triggers
from keyvault.services.audit.checkpoints import CHECKPOINT_EVERY, sign_due
from tests.clients.python.wheel import load_bundle
from tests.factories import account, issue, make_merchant, make_operator, now, own_keystore
from tests.services.audit.test_checkpoints import lose_marks
from tests.starting_rows import start_with

pytestmark = [pytest.mark.database, pytest.mark.django_db]

ROOT = Path(__file__).resolve().parents[2]
CHAIN = "account:acme/sandbox"


def printed(*arguments: str) -> str:
    output = io.StringIO()
    call_command(*arguments, stdout=output, stderr=io.StringIO())
    return output.getvalue()


def saved(folder: Path, name: str, *arguments: str) -> str:
    path = folder / name
    path.write_text(printed(*arguments))
    return str(path)


def check(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the check in a separate process that cannot import Django."""
    code = (
        "import sys; sys.modules['django'] = None\n"
        "from keyvault_client.audit_check import main; sys.exit(main(sys.argv[1:]))"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "clients/python")},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def signed(db: None) -> None:
    """Create two checkpoints of the sandbox, with entries before, between and after them."""
    start_with(_sign_twice)


def _sign_twice() -> None:
    make_merchant("acme")
    for turn in range(2):
        issue(account("acme"), label=f"key {turn}")
        sign_due(now() + turn * CHECKPOINT_EVERY)
    issue(account("acme"), label="the last")


@pytest.fixture
def files(signed: None, tmp_path: Path) -> tuple[str, str, str]:
    """Return an export, the public keys, and checkpoints kept outside the host."""
    return (
        saved(tmp_path, "log.jsonl", "export_audit"),
        saved(tmp_path, "keys.json", "show_audit_keys"),
        saved(tmp_path, "kept.jsonl", "export_audit", "--newest"),
    )


def _cut_tail() -> None:
    """Roll back entries, head and newest checkpoint together."""
    drop_triggers(connection)
    rows = AuditCheckpoint.objects.filter(scope="sandbox")
    rows.filter(number=2).delete()
    last = AuditEntry.objects.filter(chain_id=CHAIN).order_by("sequence")[5]
    AuditEntry.objects.filter(chain_id=CHAIN, sequence__gt=6).delete()
    # As in an older copy of the database, in which no entry was signed.
    signed = {"signed_in": 0, "signed_sequence": 0, "unsigned_since": last.at}
    AuditChain.objects.filter(name=CHAIN).update(sequence=6, head_hash=last.hash, **signed)
    ensure_triggers(connection)


# --- outside the host ------------------------------------------------------------------------------------------


def test_audit_check_of_a_whole_export_reports_what_it_proves(files: tuple[str, str, str]) -> None:
    export, keys, kept = files
    done = check(export, "--public-key", keys, "--kept", kept)
    assert (done.returncode, done.stderr) == (0, "")
    assert "The audit log is intact." in done.stdout
    assert "Entries after it: 6." in done.stdout
    assert "chained, but not signed yet" in done.stdout
    assert "2 compared, 0 outside" in done.stdout


@pytest.mark.sqlite
def test_audit_check_as_json_counts_by_scope(files: tuple[str, str, str]) -> None:
    export, keys, _ = files
    answer = json.loads(check(export, "--public-key", keys, "--json").stdout)
    assert (answer["intact"], answer["first_broken"]) == (True, None)
    assert answer["entries"] == AuditEntry.objects.count()
    sandbox = answer["scopes"]["sandbox"]
    assert (sandbox["checkpoints"], sandbox["signer"], sandbox["unsigned_entries"]) == (2, "local", 6)


@pytest.mark.sqlite
def test_audit_check_of_an_altered_entry_names_it(files: tuple[str, str, str], tmp_path: Path) -> None:
    """The exit code is 1, and the message names the place."""
    export, keys, _ = files
    records = [json.loads(line) for line in Path(export).read_text().splitlines()]
    entry = next(each for each in records if each.get("chain") == CHAIN and each["sequence"] == 3)
    entry["body"] = next(each for each in records if each.get("chain") == CHAIN and each["sequence"] == 2)["body"]
    altered = tmp_path / "altered.jsonl"
    altered.write_text("".join(json.dumps(each) + "\n" for each in records))
    done = check(str(altered), "--public-key", keys)
    assert done.returncode == 1
    assert f"BROKEN at {CHAIN} 3: its bytes do not match its hash." in done.stdout
    assert "THE AUDIT LOG IS NOT INTACT." in done.stdout


@pytest.mark.sqlite
def test_audit_check_of_a_rolled_back_log_fails_with_kept_checkpoints(
    files: tuple[str, str, str], tmp_path: Path
) -> None:
    """Nothing inside the database can reveal a rollback; checkpoints kept elsewhere do."""
    _, keys, kept = files
    _cut_tail()
    export = saved(tmp_path, "later.jsonl", "export_audit")
    assert check(export, "--public-key", keys).returncode == 0
    done = check(export, "--public-key", keys, "--kept", kept)
    assert done.returncode == 1
    assert "the log was rolled back" in done.stdout


@pytest.mark.sqlite
@pytest.mark.parametrize(
    ("damage", "reported"),
    [
        (lambda whole: whole[: len(whole) // 2], "not a complete line of JSON: the file was truncated or altered"),
        (
            lambda whole: whole[: whole.rindex(b"\n", 0, -1) + 1],
            "the file is truncated: the end of the export is missing",
        ),
        (lambda whole: b"", "the file is truncated: the end of the export is missing"),
        (lambda whole: whole + b"\xff\xfe garbage\n", "not a complete line of JSON"),
        (lambda whole: whole.replace(b'"record": "head"', b'"record": "hat"', 1), "not a record of an audit export"),
        (lambda whole: whole.replace(b'"sequence": 1,', b'"sequence": "1",', 1), "a field missing or malformed"),
        (lambda whole: b"[" * 200_000 + b"\n", "line 1: not a complete line of JSON"),
    ],
)
def test_audit_check_of_a_damaged_file_is_refused_with_the_reason(
    files: tuple[str, str, str], tmp_path: Path, damage: Any, reported: str
) -> None:
    """The exit code is 2: a damaged file is no statement about the log."""
    export, keys, _ = files
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_bytes(damage(Path(export).read_bytes()))
    done = check(str(damaged), "--public-key", keys)
    assert (done.returncode, done.stdout) == (2, "")
    assert reported in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.sqlite
def test_audit_check_of_a_partial_export_is_refused_unless_requested(
    files: tuple[str, str, str], tmp_path: Path
) -> None:
    """An export of fewer scopes than expected does not pass as intact."""
    _, keys, kept = files
    for arguments in (["--scope", "sandbox"], ["--since", now().isoformat()]):
        part = saved(tmp_path, "part.jsonl", "export_audit", *arguments)
        done = check(part, "--public-key", keys)
        assert (done.returncode, done.stdout) == (2, "")
        assert "--partial" in done.stderr
        accepted = check(part, "--public-key", keys, "--partial", "--kept", kept)
        assert accepted.returncode == 0
        assert ("Without the entries that were signed until" in accepted.stdout) == (arguments[0] == "--since")


@pytest.mark.sqlite
def test_audit_check_needs_only_the_client_package(files: tuple[str, str, str], tmp_path: Path) -> None:
    """Guarantee: an auditor needs the client package only, as its wheel has it."""
    export, keys, _ = files
    load_bundle().write_files(tmp_path / "taken")
    command = [sys.executable, "-m", "keyvault_client.audit_check", export, "--public-key", keys]
    done = subprocess.run(command, cwd=tmp_path / "taken", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.sqlite
def test_audit_check_without_usable_files_is_refused(files: tuple[str, str, str], tmp_path: Path) -> None:
    export, keys, kept = files
    assert check(export).returncode == 2
    assert check(str(tmp_path / "none"), "--public-key", keys).returncode == 2
    assert "not the output of manage.py show_audit_keys" in check(export, "--public-key", export).stderr
    forged = Path(kept).read_text().replace('"key_version": 1', '"key_version": 2')
    Path(kept).write_text(forged)
    assert "there is no public key of local (version 2)" in check(export, "--public-key", keys, "--kept", kept).stderr


# --- on the host -----------------------------------------------------------------------------------------------


def test_audit_verify_reports_the_checkpoints(signed: None) -> None:
    answer = json.loads(printed("audit_verify", "--json"))
    assert (answer["intact"], answer["first_broken"], answer["entries"]) == (True, None, AuditEntry.objects.count())
    sandbox = answer["checkpoints"]["sandbox"]
    assert (sandbox["count"], sandbox["newest"], sandbox["unsigned_entries"]) == (2, 2, 6)
    assert sandbox["signatures"] == "checked"
    assert answer["checkpoints"]["production"]["count"] == 0
    text = printed("audit_verify")
    assert "intact: True" in text
    assert "checkpoints of sandbox: 2, the newest is 2 of" in text
    assert "checkpoints of production: none, 0 entries unsigned" in text


def test_audit_verify_of_a_rolled_back_database_fails_with_kept_checkpoints(files: tuple[str, str, str]) -> None:
    """The exit code, texts and JSON equal those of a broken chain."""
    _, keys, kept = files
    _cut_tail()
    lose_marks()
    assert json.loads(printed("audit_verify", "--json"))["intact"]
    output = io.StringIO()
    with pytest.raises(SystemExit) as ended:
        call_command("audit_verify", "--json", "--checkpoints", kept, "--public-key", keys, stdout=output)
    answer = json.loads(output.getvalue())
    assert ended.value.code == 1
    assert not answer["intact"]
    assert (answer["first_broken"]["chain"], answer["first_broken"]["sequence"]) == ("checkpoints:sandbox", 2)
    assert answer["first_broken"] == answer["checkpoints"]["sandbox"]["broken"]


@pytest.mark.sqlite
def test_audit_verify_with_no_usable_files_is_refused(files: tuple[str, str, str], tmp_path: Path) -> None:
    export, keys, _ = files
    for arguments in (["--public-key", export], ["--checkpoints", keys], ["--checkpoints", str(tmp_path / "none")]):
        with pytest.raises(CommandError):
            call_command("audit_verify", *arguments)


def test_export_audit_selects_scopes_and_start(signed: None) -> None:
    lines = [json.loads(line) for line in printed("export_audit", "--scope", "service").splitlines()]
    assert {line["record"] for line in lines} == {"export", "entry", "checkpoint", "head", "end"}
    assert {line["chain"] for line in lines if "chain" in line} == {"platform"}
    since = (now() + timedelta(days=1)).isoformat()
    later = [json.loads(line) for line in printed("export_audit", "--scope", "sandbox", "--since", since).splitlines()]
    assert [line["number"] for line in later if line["record"] == "checkpoint"] == [1, 2]
    assert sum(line["record"] == "entry" for line in later) == 6
    with pytest.raises(CommandError):
        call_command("export_audit", "--since", "yesterday")


def test_show_audit_keys_before_the_first_signature_is_refused(db: None, tmp_path: Path) -> None:
    """An auditor never receives a file without keys."""
    with own_keystore(tmp_path), pytest.raises(CommandError, match="there is no public key yet"):
        call_command("show_audit_keys")


@pytest.mark.sqlite
def test_show_audit_keys_in_both_formats_is_the_same_key(signed: None) -> None:
    assert json.loads(printed("show_audit_keys")) == json.loads(printed("show_audit_keys", "--json"))


# --- a restored backup -----------------------------------------------------------------------------------------

ACCEPT = ("--by", "admin", "--approved-by", "approver", "--reason", "restored")


def test_audit_verify_and_accept_audit_rollback_after_a_restore(signed: None) -> None:
    """Verification fails below the recorded checkpoint until an operator accepts the rollback."""
    make_operator("admin")
    make_operator("approver", Role.APPROVER)
    _cut_tail()
    with pytest.raises(SystemExit):
        printed("audit_verify")
    accepted = json.loads(printed("accept_audit_rollback", *ACCEPT, "--json"))
    assert "sandbox" in accepted["accepted"]
    answer = json.loads(printed("audit_verify", "--json"))
    assert answer["intact"]
    assert answer["checkpoints"]["sandbox"]["recorded_newest"] == "compared"
    with pytest.raises(CommandError, match="was not set back"):
        printed("accept_audit_rollback", *ACCEPT)


def test_accept_audit_rollback_without_the_revocation_log_is_refused(signed: None) -> None:
    make_operator("admin")
    make_operator("approver", Role.APPROVER)
    settings.REVOCATION_LOG.unlink()
    with pytest.raises(CommandError, match="revocation log"):
        printed("accept_audit_rollback", *ACCEPT)
