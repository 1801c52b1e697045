"""Rotation of the key that signs the console's sessions."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from keyvault.backends import private_files
from keyvault.models import AuditEntry
from keyvault.services.secrets.backend import secret_backend
from keyvault.services.sessions import session_key
from tests.admin.desk import Desk, address, browser, set_up_desk
from tests.killing import KilledError
from tests.management.command_line import run_command_line

pytestmark = pytest.mark.django_db

ROOT = Path(__file__).resolve().parents[3]
FORMER = "f" * 60


@pytest.fixture
def folder(tmp_path: Path, settings: Any) -> Path:
    secret_backend()  # It is opened once in a process: not in the folder of this test, which is deleted.
    settings.DATA_DIR, settings.SECRET_KEY, settings.IS_SESSION_KEY_SET = tmp_path, FORMER, False
    path = tmp_path / "django.key"
    path.touch(mode=0o600)
    path.write_text(FORMER)
    return tmp_path


@pytest.fixture
def desk(db: None) -> Desk:
    return set_up_desk()


def restart(folder: Path, settings: Any) -> None:
    """Read the keys as a process does at its start."""
    code = (
        "from django.conf import settings as s; import json; print(json.dumps([s.SECRET_KEY, s.SECRET_KEY_FALLBACKS]))"
    )
    environ = {name: text for name, text in os.environ.items() if not name.startswith("KEYVAULT_")}
    environ |= {"KEYVAULT_DATA_DIR": str(folder), "DJANGO_SETTINGS_MODULE": "keyvault.project.settings"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, check=True)
    settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = json.loads(done.stdout)


def test_session_key_rotation_keeps_sessions_for_as_long_as_they_last(
    folder: Path, desk: Desk, settings: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guarantee: a routine rotation ends no session, and the former key verifies none after eight hours."""
    client = browser(desk.admin)
    page = address("keyvault_merchant_changelist")
    assert client.get(page).status_code == 200
    assert run_command_line("rotate_session_key", "--json") == 0
    assert json.loads(capsys.readouterr().out)["ends_sessions"] is False
    restart(folder, settings)
    assert settings.SECRET_KEY != FORMER
    assert settings.SECRET_KEY_FALLBACKS == [FORMER]
    assert (folder / "django.key").stat().st_mode & 0o777 == 0o600
    assert (folder / "django.key.previous").stat().st_mode & 0o777 == 0o600
    assert client.get(page).status_code == 200
    assert client.get(page).status_code == 200, "the session is under the new key now"
    settings.SECRET_KEY_FALLBACKS = []
    assert client.get(page).status_code == 200
    long_ago = time.time() - 9 * 3600
    os.utime(folder / "django.key.previous", (long_ago, long_ago))
    restart(folder, settings)
    assert settings.SECRET_KEY_FALLBACKS == []
    assert AuditEntry.objects.filter(event="session_key.rotated").count() == 1


def test_session_key_rotation_can_end_all_sessions(
    folder: Path, desk: Desk, settings: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guarantee: after a leak of the key no session and no cookie signed with it is accepted, on any host."""
    client = browser(desk.admin)
    assert run_command_line("rotate_session_key") == 0
    assert "copy django.key and django.key.previous to the data folder of each\n" in capsys.readouterr().out
    assert run_command_line("rotate_session_key", "--end-sessions") == 0
    assert "copy django.key to the data folder of each, and delete django.key.previous there" in capsys.readouterr().out
    restart(folder, settings)
    assert settings.SECRET_KEY_FALLBACKS == []
    assert client.get(address("keyvault_merchant_changelist")).status_code == 302


def test_session_key_rotation_is_not_repeated_while_sessions_of_the_former_key_last(
    folder: Path, settings: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guarantee: a run that is started again, because its end was not seen, ends no session."""
    assert run_command_line("rotate_session_key") == 0
    key, previous = folder / "django.key", folder / "django.key.previous"
    rotated = key.read_text()
    assert run_command_line("rotate_session_key") == 1
    assert "--end-sessions" in capsys.readouterr().err
    assert (key.read_text(), previous.read_text()) == (rotated, FORMER)
    assert AuditEntry.objects.filter(event="session_key.rotated").count() == 1
    long_ago = time.time() - 9 * 3600
    os.utime(previous, (long_ago, long_ago))
    assert run_command_line("rotate_session_key") == 0
    assert previous.read_text() == rotated


@contextmanager
def killed_after(calls: int) -> Iterator[None]:
    """Kill the run after this many writes of files."""
    done: list[Any] = []

    def wrap(real: Any) -> Any:
        def act(*arguments: Any) -> None:
            if len(done) == calls:
                raise KilledError
            real(*arguments)
            done.append(real)

        return act

    with (
        mock.patch.object(session_key, "write_private_file", wrap(private_files.write_private_file)),
        mock.patch.object(session_key, "remove_private_file", wrap(private_files.remove_private_file)),
    ):
        yield


@pytest.mark.parametrize("calls", [0, 1])
@pytest.mark.parametrize("options", [(), ("--end-sessions",)], ids=["keeping", "ending"])
def test_session_key_rotation_killed_midway_is_run_again(
    options: tuple[str, ...], calls: int, folder: Path, desk: Desk, settings: Any
) -> None:
    """Guarantee: killed between its files, the key is still the former one, and there is an audit entry."""
    client = browser(desk.admin)
    with killed_after(calls), pytest.raises(KilledError):
        run_command_line("rotate_session_key", *options)
    assert (folder / "django.key").read_text() == FORMER
    assert AuditEntry.objects.filter(event="session_key.rotated").count() == 1
    restart(folder, settings)
    page = address("keyvault_merchant_changelist")
    assert client.get(page).status_code == 200
    assert run_command_line("rotate_session_key", *options) == 0
    restart(folder, settings)
    assert settings.SECRET_KEY != FORMER
    assert client.get(page).status_code == (302 if options else 200)


def test_session_key_of_the_environment_is_changed_by_hand(
    folder: Path, settings: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    settings.IS_SESSION_KEY_SET = True
    assert run_command_line("rotate_session_key") == 1
    refusal = capsys.readouterr().err
    assert "KEYVAULT_SECRET_KEY_FALLBACK" in refusal
    [length] = re.findall(r"openssl rand -base64 (\d+)", refusal)
    assert 50 <= int(length) * 4 / 3 <= 64, "long enough for the setting, and one line of openssl"
    assert (folder / "django.key").read_text() == FORMER
    assert not AuditEntry.objects.filter(event="session_key.rotated").exists()


def read_keys(**environ: str) -> subprocess.CompletedProcess[str]:
    code = "from django.conf import settings as s; print(s.SECRET_KEY_FALLBACKS)"
    inherited = {name: text for name, text in os.environ.items() if name not in ("KEYVAULT_SECRET_KEY",)}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**inherited, **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def test_session_key_fallback_of_the_environment_is_read() -> None:
    assert read_keys(KEYVAULT_SECRET_KEY="n" * 60, KEYVAULT_SECRET_KEY_FALLBACK=FORMER).stdout == f"['{FORMER}']\n"
    refused = read_keys(KEYVAULT_SECRET_KEY_FALLBACK=FORMER)
    assert "KEYVAULT_SECRET_KEY_FALLBACK: without effect" in refused.stderr
