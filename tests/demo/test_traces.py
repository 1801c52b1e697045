"""The demo's search for secrets finds them: otherwise "0 found" would mean nothing."""

import secrets
from pathlib import Path

import pytest

from keyvault.domain.keystring import StringKind, StringScope, mint_keystring
from keyvault.domain.plaintext import Plaintext
from rotation.management.demo.report import DemoReport
from rotation.management.demo.traces import find_logged_errors, find_secrets


@pytest.fixture
def secret() -> Plaintext:
    return mint_keystring("kv", StringKind.PRIVATE, StringScope.SANDBOX, secrets.token_bytes).text


def test_traces_clean_files_and_public_handles_are_no_find(tmp_path: Path, secret: Plaintext) -> None:
    (tmp_path / "log").write_text(f"{secret.reveal()[:27]} {secret.reveal()[:27]}*** {'x' * 49}")
    assert list(find_secrets(tmp_path, [secret])) == []


@pytest.mark.parametrize(("start", "end"), [(0, None), (27, None), (11, None)])
def test_traces_secret_with_or_without_its_handle_is_found(
    tmp_path: Path, secret: Plaintext, start: int, end: int | None
) -> None:
    folder = tmp_path / "broker" / "messages"
    folder.mkdir(parents=True)
    (folder / "message").write_bytes(b"\x00\xff" + secret.reveal()[start:end].encode() + b"\x00")
    found = list(find_secrets(tmp_path, [secret]))
    assert found
    assert all(place.startswith("broker/messages/message: ") for place in found)
    assert all(secret.reveal()[27:] not in place for place in found)


def test_traces_key_string_that_nobody_named_is_found(tmp_path: Path, secret: Plaintext) -> None:
    """Guarantee: a key that the demo does not know of, such as a burned one, is noticed too."""
    (tmp_path / "database").write_bytes(b"\x00" + secret.reveal().encode())
    assert len(list(find_secrets(tmp_path, []))) == 1


def test_traces_trouble_in_a_log_is_found(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text('{"level": "INFO"}\n{"level": "WARNING"}\n')
    assert list(find_logged_errors(tmp_path)) == []
    (tmp_path / "worker.log").write_text('Traceback (most recent call last):\n{"level": "ERROR", "message": "no"}\n')
    assert [line.partition(":")[0] for line in find_logged_errors(tmp_path)] == ["worker.log", "worker.log"]


def test_report_shows_no_secret(secret: Plaintext, capsys: pytest.CaptureFixture[str]) -> None:
    """Guarantee: all terminal output goes through the redactor."""
    report = DemoReport()
    report.step(f"collected {secret.reveal()}")
    with report.waiting(secret.reveal()):
        report.now(secret.reveal())
    shown = capsys.readouterr().out
    assert f"collected {secret.reveal()[:27]}***" in shown
    assert secret.reveal()[27:] not in shown
