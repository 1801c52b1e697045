"""A full disk: revocations are written, keys are verified, and the console answers with a page."""

import errno
import json
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from django.db import OperationalError, connection
from django.test import Client

from keyvault.access.permissions import Permission as P
from keyvault.domain.revocation import RevocationReason
from keyvault.domain.revocation_log import Ended
from keyvault.models import Key
from keyvault.services.keys.lifecycle import revoke_key
from keyvault.services.recording.revocation_log import read_lines
from keyvault.services.secrets.backend import secret_backend
from keyvault.services.work.disk_space import NEEDED_BYTES, RESERVE_BYTES, RESERVE_NAME, keep_reserve
from tests.admin.desk import Desk, address, browser, set_up_desk, text_of
from tests.factories import PASSWORD, grant, issue, renew_revocation_log
from tests.fuzz.served import serving
from tests.project.test_supervisor import eventually

ROOT = Path(__file__).resolve().parents[2]
DISK_BYTES = 96 * 1024 * 1024


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own; the test is skipped where this user may not mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    options = f"size={DISK_BYTES},mode=0700"
    mount = ["mount", "-t", "tmpfs", "-o", options, "keyvault-test", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no small file system can be mounted: there is no mount command")
    if done.returncode != 0:
        pytest.skip(f"no small file system can be mounted: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        unmount = ["umount", "--lazy", str(folder)]
        subprocess.run(unmount, check=True)


def fill(disk: Path) -> Path:
    """Write to a file until the disk has no free byte."""
    path = disk / "filler"
    with path.open("ab", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))
    assert os.statvfs(disk).f_bavail == 0
    return path


def ended_keys() -> list[str]:
    return [line.id for _, line in read_lines() if isinstance(line, Ended)]


# --- the disk of the revocation log -------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path: Path, settings: Any) -> Path:
    secret_backend()  # of this process, for its other tests too
    settings.DATA_DIR = tmp_path / "own"
    settings.DATA_DIR.mkdir()
    settings.REVOCATION_LOG = settings.DATA_DIR / "revocation_log"
    renew_revocation_log(settings.REVOCATION_LOG)
    keep_reserve()
    return Path(settings.REVOCATION_LOG)


def fill_disk(monkeypatch: pytest.MonkeyPatch, is_full: Callable[[], bool]) -> None:
    """Refuse each `os.write` for lack of space while the disk is full."""
    write = os.write

    def write_if_space(descriptor: int, text: bytes) -> int:
        if is_full():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, text)

    monkeypatch.setattr(os, "write", write_if_space)


def revoke(desk: Desk) -> Key:
    key, _ = issue(desk.sandbox)
    revoke_key(grant(desk.admin, P.KEYS_REVOKE, desk.sandbox), key, RevocationReason.KEY_COMPROMISE)
    return key


@pytest.mark.database
@pytest.mark.django_db(transaction=True)
def test_revocation_is_logged_from_the_reserve_when_a_write_finds_no_space(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: a full disk of the revocation log costs no line of it as long as there is a reserve."""
    desk, reserve = set_up_desk(), log.parent / RESERVE_NAME
    fill_disk(monkeypatch, lambda: reserve.stat().st_size == RESERVE_BYTES)
    key = revoke(desk)
    assert ended_keys() == [key.key_id]
    assert reserve.stat().st_size == RESERVE_BYTES, "what was released and not used is taken back"


@pytest.mark.database
@pytest.mark.django_db(transaction=True)
def test_revocation_is_logged_although_another_writer_takes_the_released_space(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: the line of a revocation is written as long as the reserve has space."""
    desk, reserve = set_up_desk(), log.parent / RESERVE_NAME
    fill_disk(monkeypatch, lambda: reserve.stat().st_size > RESERVE_BYTES - 3 * NEEDED_BYTES)
    key = revoke(desk)
    assert ended_keys() == [key.key_id]


@pytest.mark.database
@pytest.mark.django_db
def test_revocation_on_a_full_disk_releases_the_reserve_before_its_first_write(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: no write of a revocation comes before the space for it; SQLite writes large transactions early."""
    desk = set_up_desk()
    key, _ = issue(desk.sandbox)
    reserve, sizes = log.parent / RESERVE_NAME, []

    def note(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        if re.match(r"\s*(INSERT|UPDATE|DELETE)", sql):
            sizes.append(reserve.stat().st_size)
        return execute(sql, params, many, context)

    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=0, f_frsize=1))
    with connection.execute_wrapper(note):
        revoke_key(grant(desk.admin, P.KEYS_REVOKE, desk.sandbox), key, RevocationReason.SUPERSEDED)
    assert sizes[0] == RESERVE_BYTES - NEEDED_BYTES


@pytest.mark.database
@pytest.mark.django_db(transaction=True)
def test_revocation_is_logged_on_a_full_disk_of_its_own(disk: Path, settings: Any) -> None:
    """Guarantee: with the database on another disk, each revocation on a full one is in the log.

    Another writer takes each byte that a revocation leaves free.
    """
    settings.REVOCATION_LOG = disk / "revocation_log"
    renew_revocation_log(settings.REVOCATION_LOG)
    keep_reserve()
    desk = set_up_desk()
    keys = []
    for _ in range(RESERVE_BYTES // NEEDED_BYTES + 2):
        fill(disk)
        keys.append(revoke(desk))
    assert ended_keys() == [key.key_id for key in keys]
    assert (disk / RESERVE_NAME).stat().st_size > RESERVE_BYTES - NEEDED_BYTES


# --- the console --------------------------------------------------------------------------------------------


@contextmanager
def full_database() -> Iterator[None]:
    """Fail each statement that writes, as SQLite does on a full disk."""

    def refuse(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        if re.match(r"\s*(INSERT|UPDATE|DELETE)", sql):
            cause = sqlite3.OperationalError("database or disk is full")
            cause.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise OperationalError("database or disk is full") from cause
        return execute(sql, params, many, context)

    with connection.execute_wrapper(refuse):
        yield


@pytest.mark.django_db(transaction=True)
def test_console_on_a_full_disk_answers_each_write_with_a_page() -> None:
    """Guarantee: no write of the console on a full disk is a 500, and the page says what is full."""
    desk = set_up_desk()
    key, _ = issue(desk.sandbox)
    admin, anonymous = browser(desk.admin), Client(raise_request_exception=False)
    with full_database():
        assert anonymous.get("/admin/login/").status_code == 200
        assert admin.get("/admin/").status_code == 200
        written = [
            anonymous.post("/admin/login/", {"username": "tam", "password": PASSWORD}),
            admin.post(address("keyvault_key_revoke", key.pk), {"reason": "superseded", "confirm": "on"}),
            admin.post("/admin/logout/"),
        ]
    for answer in written:
        assert answer.status_code == 503
        assert answer["Content-Type"] == "text/html; charset=utf-8"
        assert "A disk of the service is full." in text_of(answer)
        assert answer["X-Request-Id"] in text_of(answer)
        assert "Retry-After" in answer


# --- the embedded default -----------------------------------------------------------------------------------


class SmallDiskInstallation:
    """A service whose database, keystore, revocation log, broker and metrics are on one small disk."""

    def __init__(self, disk: Path, folder: Path) -> None:
        self.data, self.folder = disk / "data", folder
        self.settings = {
            "KEYVAULT_DATA_DIR": str(self.data),
            "KEYVAULT_DATABASE_URL": "",
        }
        self.metrics = disk / "metrics"
        self.metrics.mkdir()

    def manage(self, *arguments: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "manage.py", *arguments, "--json"],
            cwd=ROOT,
            env={**os.environ, **self.settings},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def issue(self) -> dict[str, Any]:
        people = ("--requested-by", "tam", "--approved-by", "approver")
        place = ("--merchant", "acme", "--environment", "sandbox", "--kind", "private")
        return self.manage("issue_key", *place, *people, "--reveal")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_embedded_service_on_a_full_disk_revokes_verifies_and_recovers(disk: Path, tmp_path: Path) -> None:
    """Guarantee: on SQLite, with everything on one full disk, a key can be revoked and is refused immediately."""
    installation = SmallDiskInstallation(disk, tmp_path)
    installation.manage("seed_demo")
    keys = [installation.issue() for _ in range(4)]
    token = installation.manage(
        *("create_service_token", "full-disk", "--environment", "sandbox", "--reveal"),
        *("--permission", "keys:verify", "--permission", "keys:revoke"),
    )["token"]
    password = installation.manage("reset_operator_password", "admin", "--reveal")["password"]
    with serving(tmp_path, PROMETHEUS_MULTIPROC_DIR=str(installation.metrics), **installation.settings) as port:
        url = f"http://127.0.0.1:{port}"
        service = requests.Session()
        service.headers["Authorization"] = f"Bearer {token}"

        def verify(key: dict[str, Any]) -> str:
            body = {"key": key["key"], "environment": "sandbox", "endpoint": "orders.retrieve"}
            answer = service.post(f"{url}/v1/keys/verify", json=body, timeout=20)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["code"])

        def disk_state() -> str:
            answer = requests.get(f"{url}/readyz", timeout=20)
            assert (answer.status_code, answer.json()["status"]) == (200, "ready"), answer.text
            return str(answer.json()["checks"]["disk"])

        def revoke(key: dict[str, Any]) -> None:
            answer = service.post(f"{url}/v1/keys/{key['key_id']}/revoke", json={"reason": "superseded"}, timeout=20)
            assert answer.status_code == 202, answer.text

        assert disk_state() == "ok"
        assert [verify(key) for key in keys] == ["None"] * len(keys)
        filler = fill(disk)
        assert disk_state() == "failing"
        assert [verify(key) for key in keys] == ["None"] * len(keys)
        revoke(keys[0])
        assert verify(keys[0]) == "key_revoked"
        installation.manage("revoke_key", keys[1]["key_id"], "--reason", "superseded", "--by", "admin")
        assert verify(keys[1]) == "key_revoked"
        lines = (installation.data / "revocation_log").read_text()
        assert keys[0]["key_id"] in lines
        assert keys[1]["key_id"] in lines

        fill(disk)

        def sign_in() -> int:
            with requests.Session() as browser:
                page = browser.get(f"{url}/admin/login/", timeout=20)
                assert page.status_code == 200
                form = {"username": "admin", "password": password, "csrfmiddlewaretoken": find_csrf(page.text)}
                answer = browser.post(
                    f"{url}/admin/login/", data=form, headers={"Referer": url}, timeout=20, allow_redirects=False
                )
            assert answer.headers["content-type"] == "text/html; charset=utf-8"
            return answer.status_code

        # SQLite may find room in its own log: then the sign-in succeeds.
        assert sign_in() in {302, 503}
        metrics = requests.get(f"{url}/metrics", timeout=20)
        assert metrics.status_code == 200

        filler.unlink()
        eventually(lambda: disk_state() == "ok", seconds=30)
        reserve = installation.data / RESERVE_NAME
        eventually(lambda: reserve.stat().st_size == RESERVE_BYTES, seconds=30)
        assert sign_in() == 302
        revoke(keys[2])
        assert verify(keys[2]) == "key_revoked"
    # Nothing runs any more: the command opens SQLite's database first.
    filler = fill(disk)
    installation.manage("revoke_key", keys[3]["key_id"], "--reason", "superseded", "--by", "admin")
    assert keys[3]["key_id"] in (installation.data / "revocation_log").read_text()
    filler.unlink()
    assert installation.manage("audit_verify")
    log = (tmp_path / "server.log").read_text()
    assert not [key for key in keys if key["key"] in log]


def find_csrf(page: str) -> str:
    found = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', page)
    assert found is not None
    return found[1]
