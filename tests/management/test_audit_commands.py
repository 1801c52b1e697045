"""The audit log on its way to an auditor: verified here, exported, and checked there by a program without Django."""

import io
import json
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection

from keyvault.models import AuditChain, AuditCheckpoint, AuditEntry
from keyvault.models.triggers import drop_triggers, ensure_triggers
from keyvault.services.audit.checkpoints import CHECKPOINT_EVERY, sign_due
from tests.factories import account, issue, make_merchant, now, own_keystore

pytestmark = [pytest.mark.database, pytest.mark.django_db]

ROOT = Path(__file__).resolve().parents[2]
CHAIN = "account:acme/sandbox"


def printed(*words: str) -> str:
    output = io.StringIO()
    call_command(*words, stdout=output, stderr=io.StringIO())
    return output.getvalue()


def saved(folder: Path, name: str, *words: str) -> str:
    path = folder / name
    path.write_text(printed(*words))
    return str(path)


def check(*words: str) -> "subprocess.CompletedProcess[str]":
    """In a process of its own, where Django is nowhere to be found."""
    code = (
        "import sys; sys.modules['django'] = None\n"
        "from keyvault.client.audit_check import main; sys.exit(main(sys.argv[1:]))"
    )
    return subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture
def signed(db: None) -> None:
    """Two checkpoints of the sandbox, with entries before, between and after them."""
    make_merchant("acme")
    for turn in range(2):
        issue(account("acme"), label=f"key {turn}")
        sign_due(now() + turn * CHECKPOINT_EVERY)
    issue(account("acme"), label="the last")


@pytest.fixture
def files(signed: None, tmp_path: Path) -> tuple[str, str, str]:
    """An export, the public keys, and checkpoints to keep."""
    return (
        saved(tmp_path, "log.jsonl", "export_audit"),
        saved(tmp_path, "keys.json", "audit_public_key"),
        saved(tmp_path, "kept.jsonl", "export_audit", "--newest"),
    )


def _cut_tail() -> None:
    """Entries, head and newest checkpoint go back together."""
    drop_triggers(connection)
    rows = AuditCheckpoint.objects.filter(scope="sandbox")
    rows.filter(number=2).delete()
    last = AuditEntry.objects.filter(chain_id=CHAIN).order_by("sequence")[5]
    AuditEntry.objects.filter(chain_id=CHAIN, sequence__gt=6).delete()
    AuditChain.objects.filter(name=CHAIN).update(sequence=6, head_hash=last.hash)
    ensure_triggers(connection)


# --- off the host ----------------------------------------------------------------------------------------------


def test_audit_check_of_a_whole_export_says_what_it_proves_and_what_not(files: tuple[str, str, str]) -> None:
    export, keys, kept = files
    done = check(export, "--public-key", keys, "--kept", kept)
    assert (done.returncode, done.stderr) == (0, "")
    assert "The audit log is intact." in done.stdout
    assert "Entries after it: 6." in done.stdout
    assert "chained, but not signed yet" in done.stdout
    assert "2 compared, 0 outside" in done.stdout


def test_audit_check_as_json_counts_by_scope(files: tuple[str, str, str]) -> None:
    export, keys, _ = files
    answer = json.loads(check(export, "--public-key", keys, "--json").stdout)
    assert (answer["intact"], answer["first_broken"]) == (True, None)
    assert answer["entries"] == AuditEntry.objects.count()
    sandbox = answer["scopes"]["sandbox"]
    assert (sandbox["checkpoints"], sandbox["signer"], sandbox["unsigned_entries"]) == (2, "local", 6)


def test_audit_check_of_an_altered_entry_names_it(files: tuple[str, str, str], tmp_path: Path) -> None:
    """Exit 1, and the place in plain words."""
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


def test_audit_check_of_a_log_set_back_is_found_with_kept_checkpoints(
    files: tuple[str, str, str], tmp_path: Path
) -> None:
    """The one thing that nothing inside the database can show."""
    _, keys, kept = files
    _cut_tail()
    export = saved(tmp_path, "later.jsonl", "export_audit")
    assert check(export, "--public-key", keys).returncode == 0
    done = check(export, "--public-key", keys, "--kept", kept)
    assert done.returncode == 1
    assert "the log was rolled back" in done.stdout


@pytest.mark.parametrize(
    ("spoil", "said"),
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
def test_audit_check_of_a_spoilt_file_is_refused_with_the_reason(
    files: tuple[str, str, str], tmp_path: Path, spoil: Any, said: str
) -> None:
    """Exit 2: nothing is said of the log when the file is no export."""
    export, keys, _ = files
    spoilt = tmp_path / "spoilt.jsonl"
    spoilt.write_bytes(spoil(Path(export).read_bytes()))
    done = check(str(spoilt), "--public-key", keys)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_audit_check_of_a_part_of_the_log_is_refused_unless_it_was_asked_for(
    files: tuple[str, str, str], tmp_path: Path
) -> None:
    """Whoever hands over less than was asked for does not get a "holds" for it."""
    _, keys, kept = files
    for words in (["--scope", "sandbox"], ["--since", now().isoformat()]):
        part = saved(tmp_path, "part.jsonl", "export_audit", *words)
        done = check(part, "--public-key", keys)
        assert (done.returncode, done.stdout) == (2, "")
        assert "--partial" in done.stderr
        assert check(part, "--public-key", keys, "--partial", "--kept", kept).returncode == 0


def test_audit_check_runs_from_its_two_folders_alone(files: tuple[str, str, str], tmp_path: Path) -> None:
    """What the auditor takes along: keyvault/domain and keyvault/client, nothing else of ours."""
    export, keys, _ = files
    for folder in ("domain", "client"):
        shutil.copytree(ROOT / "keyvault" / folder, tmp_path / "taken" / "keyvault" / folder)
    command = [sys.executable, "-m", "keyvault.client.audit_check", export, "--public-key", keys]
    done = subprocess.run(command, cwd=tmp_path / "taken", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_audit_check_without_usable_files_is_refused(files: tuple[str, str, str], tmp_path: Path) -> None:
    export, keys, kept = files
    assert check(export).returncode == 2
    assert check(str(tmp_path / "none"), "--public-key", keys).returncode == 2
    assert "not the output of manage.py audit_public_key" in check(export, "--public-key", export).stderr
    forged = Path(kept).read_text().replace('"key_version": 1', '"key_version": 2')
    Path(kept).write_text(forged)
    assert "there is no public key of local (version 2)" in check(export, "--public-key", keys, "--kept", kept).stderr


# --- on the host -----------------------------------------------------------------------------------------------


def test_audit_verify_tells_of_the_checkpoints_too(signed: None) -> None:
    answer = json.loads(printed("audit_verify", "--json"))
    assert (answer["intact"], answer["first_broken"], answer["entries"]) == (True, None, AuditEntry.objects.count())
    sandbox = answer["checkpoints"]["sandbox"]
    assert (sandbox["count"], sandbox["newest"], sandbox["unsigned_entries"]) == (2, 2, 6)
    assert sandbox["signatures"] == "checked"
    assert answer["checkpoints"]["production"]["count"] == 0
    words = printed("audit_verify")
    assert "intact: True" in words
    assert "checkpoints of sandbox: 2, the newest is 2 of" in words
    assert "checkpoints of production: none, 0 entries unsigned" in words


def test_audit_verify_of_a_database_set_back_is_broken_with_kept_checkpoints(files: tuple[str, str, str]) -> None:
    """Exit 1, in the same words and the same JSON as a broken chain."""
    _, keys, kept = files
    _cut_tail()
    assert json.loads(printed("audit_verify", "--json"))["intact"]
    output = io.StringIO()
    with pytest.raises(SystemExit) as ended:
        call_command("audit_verify", "--json", "--checkpoints", kept, "--public-key", keys, stdout=output)
    answer = json.loads(output.getvalue())
    assert ended.value.code == 1
    assert not answer["intact"]
    assert (answer["first_broken"]["chain"], answer["first_broken"]["sequence"]) == ("checkpoints:sandbox", 2)
    assert answer["first_broken"] == answer["checkpoints"]["sandbox"]["broken"]


def test_audit_verify_with_no_usable_files_is_refused(files: tuple[str, str, str], tmp_path: Path) -> None:
    export, keys, _ = files
    for words in (["--public-key", export], ["--checkpoints", keys], ["--checkpoints", str(tmp_path / "none")]):
        with pytest.raises(CommandError):
            call_command("audit_verify", *words)


def test_export_audit_takes_scopes_and_a_beginning(signed: None) -> None:
    lines = [json.loads(line) for line in printed("export_audit", "--scope", "service").splitlines()]
    assert {line["record"] for line in lines} == {"export", "entry", "checkpoint", "head", "end"}
    assert {line["chain"] for line in lines if "chain" in line} == {"platform"}
    since = (now() + timedelta(days=1)).isoformat()
    later = [json.loads(line) for line in printed("export_audit", "--scope", "sandbox", "--since", since).splitlines()]
    assert [line["number"] for line in later if line["record"] == "checkpoint"] == [2]
    assert sum(line["record"] == "entry" for line in later) == 6
    with pytest.raises(CommandError):
        call_command("export_audit", "--since", "yesterday")


def test_audit_public_key_before_the_first_signature_says_so(db: None, tmp_path: Path) -> None:
    """The file that an auditor gets is never one without keys."""
    with own_keystore(tmp_path), pytest.raises(CommandError, match="there is no public key yet"):
        call_command("audit_public_key")


def test_audit_public_key_in_both_forms_is_the_same_file(signed: None) -> None:
    assert json.loads(printed("audit_public_key")) == json.loads(printed("audit_public_key", "--json"))
