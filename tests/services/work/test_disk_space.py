"""The disk reserve: real blocks that a revocation on a full disk uses, and that return when there is space."""

import errno
import os
import sqlite3
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from django.db import OperationalError, connection, transaction
from django.test import Client

from keyvault.services.work.disk_space import (
    _LEFT_BYTES,
    MIN_FREE_BYTES,
    NEEDED_BYTES,
    RESERVE_BYTES,
    RESERVE_NAME,
    is_disk_full,
    is_out_of_space,
    keep_reserve,
    make_room,
    release_reserve,
)
from tests.factories import have_peppers
from tests.services.racing import race


@pytest.fixture
def folder(settings: Any, db: None) -> Path:
    """A data folder with the revocation log; the tests' database is on the same disk."""
    made = Path(mkdtemp(dir=settings.DATA_DIR))
    settings.DATA_DIR = made
    settings.REVOCATION_LOG = made / "revocation_log"
    return made


def free(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let the file system have this many free bytes."""
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=count, f_frsize=1))


def length(folder: Path) -> int:
    return (folder / RESERVE_NAME).stat().st_size


def test_reserve_has_real_blocks_of_its_owner(folder: Path) -> None:
    """Guarantee: the reserve is space on the disk; a sparse file would reserve nothing."""
    keep_reserve()
    status = (folder / RESERVE_NAME).stat()
    assert status.st_blocks * 512 >= status.st_size == RESERVE_BYTES
    assert status.st_mode & 0o077 == 0
    assert not is_disk_full()


def test_one_reserve_for_each_disk(folder: Path) -> None:
    """Folders on one disk share a reserve."""
    (folder / "elsewhere").mkdir()
    keep_reserve()
    assert [path.name for path in folder.rglob(RESERVE_NAME)] == [RESERVE_NAME]


def test_full_disk_releases_what_a_revocation_needs_and_no_more(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_reserve()
    for available, released in ((NEEDED_BYTES, 0), (NEEDED_BYTES - 4096, 4096), (0, NEEDED_BYTES)):
        before = length(folder)
        free(monkeypatch, available)
        make_room()
        assert before - length(folder) == released
    for _ in range(RESERVE_BYTES // NEEDED_BYTES + 1):
        make_room()
    assert length(folder) == 0
    assert is_disk_full()


def test_reserve_is_not_made_on_a_disk_that_it_would_fill(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guarantee: the reserve never takes the last free space. The log and the readiness say that there is none."""
    free(monkeypatch, RESERVE_BYTES + MIN_FREE_BYTES - 1)
    for _ in range(2):
        keep_reserve()
    assert not (folder / RESERVE_NAME).exists()
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["there is no disk reserve"]
    assert is_disk_full()
    assert not release_reserve()
    free(monkeypatch, RESERVE_BYTES + MIN_FREE_BYTES)
    assert not is_disk_full()
    keep_reserve()
    assert length(folder) == RESERVE_BYTES


def test_reserve_takes_back_what_the_disk_has(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: what a revocation left of the released space is free for no other writer."""
    keep_reserve()
    free(monkeypatch, 0)
    make_room()
    left = length(folder)
    for available, taken in (
        (_LEFT_BYTES, 0),
        (_LEFT_BYTES + 4096, 4096),
        (2 * NEEDED_BYTES, NEEDED_BYTES),
    ):
        free(monkeypatch, available)
        keep_reserve()
        assert length(folder) == left + taken


@pytest.mark.django_db(transaction=True)
def test_reserve_takes_nothing_back_while_a_revocation_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: no other process takes back the space between its release and the commit on SQLite."""
    keep_reserve()
    # The other process does not wait for the write lock, so that its attempt ends.
    monkeypatch.setitem(connection.settings_dict["OPTIONS"], "timeout", 0)
    with transaction.atomic():
        free(monkeypatch, 0)
        make_room()
        left = length(folder)
        free(monkeypatch, RESERVE_BYTES)
        assert race(keep_reserve) == [None]
        assert length(folder) == left
    keep_reserve()
    assert length(folder) == RESERVE_BYTES


def test_quota_releases_the_reserve_although_the_disk_has_space(folder: Path) -> None:
    keep_reserve()
    assert release_reserve()
    assert length(folder) == RESERVE_BYTES - NEEDED_BYTES


def test_reserve_that_cannot_be_used_is_logged_and_raises_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    keep_reserve()
    assert "the disk reserve could not be used" in caplog.text
    assert not release_reserve()
    make_room()


@pytest.mark.django_db
def test_readiness_names_a_full_disk_and_stays_ready(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: a load balancer keeps sending revocations to a host whose disk is full."""
    have_peppers()
    assert client.get("/readyz").json()["checks"]["disk"] == "ok"
    free(monkeypatch, 0)
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()["status"]) == (200, "ready")
    assert answer.json()["checks"]["disk"] == "failing"


def of(cause: Exception) -> OperationalError:
    error = OperationalError(str(cause))
    error.__cause__ = cause
    return error


def sqlite_error(code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize(
    ("error", "is_full"),
    [
        (OSError(errno.ENOSPC, "full"), True),
        (OSError(errno.EDQUOT, "quota"), True),
        (OSError(errno.EACCES, "denied"), False),
        (of(sqlite_error(sqlite3.SQLITE_FULL)), True),
        (of(sqlite_error(sqlite3.SQLITE_BUSY)), False),
        (of(psycopg.errors.DiskFull("no space left on device")), True),
        (of(psycopg.errors.AdminShutdown("bye")), False),
        (ValueError("x"), False),
    ],
)
def test_errors_of_a_full_disk_are_known_by_their_code(error: Exception, is_full: bool) -> None:
    assert is_out_of_space(error) is is_full
