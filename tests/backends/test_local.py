"""The embedded keystore: its master key, the content of its files, and that a record opens only at its own place."""

import base64
import json
import os
import sqlite3
import stat
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from hypothesis import given
from hypothesis import strategies as st

from keyvault.backends import local
from keyvault.backends.base import (
    BackendInvalidError,
    BackendMissingError,
    BackendUnavailableError,
    Mount,
    VersionState,
)
from keyvault.backends.local import LocalKeystore, parse_master_key
from keyvault.domain.plaintext import Plaintext

from .stores import read_line, send_cue, start_process

BOX = Mount.SANDBOX
KEY = bytes(range(224, 256))
"""Contains characters that the two base64 alphabets encode differently."""
KEY_TEXT = base64.b64encode(KEY).decode()
OTHER_KEY_TEXT = base64.b64encode(bytes(32)).decode()
SECRET = "a-secret-that-nobody-must-find-on-the-disk"


def put(store: LocalKeystore, text: str = SECRET, after: int = 0, path: str = "a", mount: Mount = BOX) -> int:
    return store.put(mount, path, Plaintext(text), {"label": f"of {text}"}, expected_version=after)


@contextmanager
def database(folder: Path) -> Iterator[sqlite3.Connection]:
    """Open the keystore's file as an attacker with access to the disk."""
    with closing(sqlite3.connect(folder / "keystore.sqlite3", isolation_level=None)) as connection:
        yield connection


def alter(folder: Path, statement: str, *values: object) -> None:
    with database(folder) as connection:
        connection.execute("PRAGMA ignore_check_constraints=ON")
        assert connection.execute(statement, values).rowcount == 1


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- binding to the place ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "mount", "path", "version"),
    [
        ("path = 'b'", BOX, "b", 1),
        ("path = 'a '", BOX, "a ", 1),
        ("path = ''", BOX, "", 1),
        ("mount = 'production'", Mount.PRODUCTION, "a", 1),
        ("mount = 'peppers'", Mount.PEPPERS, "a", 1),
        ("version = 2", BOX, "a", 2),
        ("version = 11", BOX, "a", 11),
    ],
)
def test_record_moved_to_another_place_does_not_open(
    change: str, mount: Mount, path: str, version: int, tmp_path: Path
) -> None:
    """Mount, path and version are authenticated: a sandbox secret cannot be moved to production on disk."""
    store = LocalKeystore(tmp_path)
    put(store)
    alter(tmp_path, f"UPDATE records SET {change}")  # noqa: S608  the test's own SQL
    with pytest.raises(BackendInvalidError):
        store.read(mount, path, version)


@pytest.mark.parametrize(("mount", "path", "version"), [(Mount.PRODUCTION, "a", 1), (BOX, "b", 1), (BOX, "a", 2)])
def test_record_copied_over_another_does_not_open(mount: Mount, path: str, version: int, tmp_path: Path) -> None:
    """An old version cannot replace a new one, nor one credential's secret another's."""
    store = LocalKeystore(tmp_path)
    put(store)
    for after in range(version):
        if (mount, path, after) != (BOX, "a", 0):
            put(store, "another", after, path, mount)
    alter(
        tmp_path,
        "UPDATE records SET (nonce, sealed) = (SELECT nonce, sealed FROM records WHERE mount = 'sandbox' "
        "AND path = 'a' AND version = 1) WHERE mount = ? AND path = ? AND version = ?",
        *(mount, path, version),
    )
    with pytest.raises(BackendInvalidError):
        store.read(mount, path, version)
    assert store.read(BOX, "a", 1).secret.reveal() == SECRET


def test_record_place_is_unambiguous() -> None:
    """No two places have the same associated data, whatever characters a path contains."""
    paths = ["a", "a\0", "a\x001", "a\x001\x001", "\0a", "a/1", ""]
    places = {
        local.associated_data(mount, path, version) for mount in Mount for path in paths for version in (1, 11, 111)
    }
    assert len(places) == len(Mount) * len(paths) * 3


@pytest.mark.parametrize("column", ["nonce", "sealed"])
def test_record_with_any_byte_altered_does_not_open(column: str, tmp_path: Path) -> None:
    """AES-GCM authenticates every byte on disk."""
    store = LocalKeystore(tmp_path)
    put(store, "s")
    with database(tmp_path) as connection:
        whole = connection.execute(f"SELECT {column} FROM records").fetchone()[0]  # noqa: S608  the test's own SQL
    for at in range(len(whole)):
        altered = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        alter(tmp_path, f"UPDATE records SET {column} = ?", altered)  # noqa: S608  the test's own SQL
        with pytest.raises(BackendInvalidError):
            store.read(BOX, "a")
    alter(tmp_path, f"UPDATE records SET {column} = ?", whole)  # noqa: S608  the test's own SQL
    assert store.read(BOX, "a").secret.reveal() == "s"


@pytest.mark.parametrize("column", ["nonce", "sealed"])
@pytest.mark.parametrize("value", [b"", b"x", b"x" * 7, b"x" * 15, b"x" * 200, "text", 7, 1.5, None], ids=repr)
def test_record_with_a_mangled_column_is_reported_as_unreadable(column: str, value: object, tmp_path: Path) -> None:
    """A wrong length or type is reported like any other alteration and does not end the worker."""
    store = LocalKeystore(tmp_path)
    put(store)
    alter(tmp_path, f"UPDATE records SET {column} = ?", value)  # noqa: S608  the test's own SQL
    with pytest.raises(BackendInvalidError):
        store.read(BOX, "a")


def test_record_destroyed_cannot_be_marked_live(tmp_path: Path) -> None:
    """The ciphertext is gone, whatever the state column says."""
    store = LocalKeystore(tmp_path)
    put(store)
    store.destroy(BOX, "a", 1)
    alter(tmp_path, "UPDATE records SET state = 'live'")
    with pytest.raises(BackendInvalidError):
        store.read(BOX, "a")


def test_records_of_the_same_secret_look_different(tmp_path: Path) -> None:
    """Every record has a fresh nonce, so equal secrets are not recognizable."""
    store = LocalKeystore(tmp_path)
    for number in range(50):
        put(store, path=f"path {number}")
    with database(tmp_path) as connection:
        rows = connection.execute("SELECT nonce, sealed FROM records").fetchall()
    assert len({nonce for nonce, _ in rows}) == 50
    assert len({sealed for _, sealed in rows}) == 50
    assert {len(nonce) for nonce, _ in rows} == {12}


# --- content of the files ---------------------------------------------------------------------------------


def spellings(text: str) -> list[bytes]:
    """Yield every encoding in which a program may have written the text."""
    raw = text.encode()
    return [
        raw,
        raw[::-1],
        raw.hex().encode(),
        text.encode("utf-16-le"),
        text.encode("utf-16-be"),
        base64.b64encode(raw),
        *(base64.b64encode(b"-" * shift + raw)[4:-4] for shift in (1, 2)),
        base64.b85encode(raw),
    ]


def test_files_never_contain_a_secret_or_its_labels(tmp_path: Path) -> None:
    """Neither database nor log file holds plaintext: while open, after closing, and after destruction."""
    store = LocalKeystore(tmp_path)
    with database(tmp_path) as held:
        held.execute("SELECT count(*) FROM records").fetchone()
        for after in range(5):
            put(store, after=after)
        store.read(BOX, "a")
        store.soft_delete(BOX, "a", 1)
        assert {"keystore.sqlite3", "keystore.sqlite3-wal", "master.key"} <= set(files(tmp_path))
        _expect_nothing(tmp_path)
        store.destroy(BOX, "a", 2)
        _expect_nothing(tmp_path)
    _expect_nothing(tmp_path)


def _expect_nothing(folder: Path) -> None:
    for name, content in files(folder).items():
        for spelling in spellings(SECRET):
            assert spelling not in content, name
        assert b"of a-secret" not in content, name


def test_destroy_erases_every_byte_of_the_sealed_record(tmp_path: Path) -> None:
    """Not even an attacker with the master key finds the record, in free pages or in the log."""
    store = LocalKeystore(tmp_path)
    with database(tmp_path) as held:
        held.execute("SELECT count(*) FROM records").fetchone()
        put(store, SECRET * 300)  # Longer than a page, so that it has overflow pages.
        put(store, after=1)
        rows = held.execute("SELECT nonce, sealed FROM records ORDER BY version").fetchall()
        pieces = [piece for nonce, sealed in rows for piece in (nonce, sealed[:64], sealed[-64:])]
        assert all(any(piece in content for content in files(tmp_path).values()) for piece in pieces)
        store.destroy(BOX, "a", 1)
        store.soft_delete(BOX, "a", 2)
        store.destroy(BOX, "a", 2)
        for piece in pieces:
            assert not [name for name, content in files(tmp_path).items() if piece in content]


def test_destroy_that_cannot_erase_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that holds the log keeps the old page there, so destruction is not reported as done."""
    monkeypatch.setattr(local, "_BUSY_SECONDS", 0.05)
    store = LocalKeystore(tmp_path)
    put(store)
    with database(tmp_path) as reader:
        reader.execute("BEGIN")
        nonce = reader.execute("SELECT nonce FROM records").fetchone()[0]
        with pytest.raises(BackendUnavailableError):
            store.destroy(BOX, "a", 1)
        reader.execute("COMMIT")
        store.destroy(BOX, "a", 1)
        assert not [name for name, content in files(tmp_path).items() if nonce in content]
    assert [each.state for each in store.versions(BOX, "a")] == [VersionState.DESTROYED]


def test_files_with_any_umask_are_owner_only(tmp_path: Path) -> None:
    """Covers the database's log files too."""
    before = os.umask(0)
    try:
        store = LocalKeystore(tmp_path)
        with database(tmp_path) as held:
            held.execute("SELECT count(*) FROM records").fetchone()
            put(store)
            modes = {path.name: mode(path) for path in tmp_path.iterdir()}
    finally:
        os.umask(before)
    parts = ("", "-wal", "-shm", ".lock")
    assert set(modes) == {*(f"keystore.sqlite3{part}" for part in parts), "master.key"}
    assert set(modes.values()) == {0o600}


def test_errors_of_an_altered_record_contain_nothing_of_it(tmp_path: Path) -> None:
    store = LocalKeystore(tmp_path, KEY_TEXT)
    put(store)
    alter(tmp_path, "UPDATE records SET path = 'b'")
    with pytest.raises(BackendInvalidError) as raised:
        store.read(BOX, "b")
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__
    text = f"{raised.value!r} {raised.value.detail} {raised.value.internal}"
    assert SECRET not in text
    assert KEY_TEXT not in text


# --- the master key ---------------------------------------------------------------------------------------


def test_master_key_is_created_at_the_first_run_only(tmp_path: Path) -> None:
    put(LocalKeystore(tmp_path))
    text = (tmp_path / "master.key").read_text()
    assert len(base64.b64decode(text, validate=True)) == 32
    assert mode(tmp_path / "master.key") == 0o600
    again = LocalKeystore(tmp_path)
    assert (tmp_path / "master.key").read_text() == text
    assert again.read(BOX, "a").secret.reveal() == SECRET


def test_master_keys_of_two_keystores_differ(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        LocalKeystore(tmp_path / name)
    assert (tmp_path / "one/master.key").read_text() != (tmp_path / "two/master.key").read_text()


@pytest.mark.parametrize("bits", [0o640, 0o620, 0o610, 0o604, 0o602, 0o601, 0o660, 0o644, 0o666, 0o777])
def test_master_key_accessible_by_others_is_refused(bits: int, tmp_path: Path) -> None:
    """A key that others could read is no secret: start is refused with a remedy."""
    LocalKeystore(tmp_path)
    (tmp_path / "master.key").chmod(bits)
    with pytest.raises(ImproperlyConfigured, match="chmod 600"):
        LocalKeystore(tmp_path)
    (tmp_path / "master.key").chmod(0o600)
    LocalKeystore(tmp_path)


@pytest.mark.parametrize("has_secret", [True, False])
def test_master_key_missing_with_existing_data_is_refused(has_secret: bool, tmp_path: Path) -> None:
    """A new key over existing data would make that data unreadable."""
    store = LocalKeystore(tmp_path)
    if has_secret:
        put(store)
    kept = (tmp_path / "master.key").read_bytes()
    (tmp_path / "master.key").unlink()
    for _ in range(2):
        with pytest.raises(ImproperlyConfigured, match="missing"):
            LocalKeystore(tmp_path)
        assert not (tmp_path / "master.key").exists()
    (tmp_path / "master.key").touch(0o600)
    (tmp_path / "master.key").write_bytes(kept)
    LocalKeystore(tmp_path)


@pytest.mark.parametrize("text", ["", "\n", "  "])
def test_master_key_file_without_content_is_refused(text: str, tmp_path: Path) -> None:
    LocalKeystore(tmp_path)
    (tmp_path / "master.key").write_text(text)
    with pytest.raises(ImproperlyConfigured, match="empty"):
        LocalKeystore(tmp_path)


def test_master_key_of_another_installation_is_refused(tmp_path: Path) -> None:
    """A wrong key of valid form is detected at start, before anything is written with it."""
    store = LocalKeystore(tmp_path, KEY_TEXT)
    put(store)
    before = files(tmp_path)["keystore.sqlite3"]
    for wrong in (OTHER_KEY_TEXT, base64.b64encode(KEY[::-1]).decode()):
        with pytest.raises(ImproperlyConfigured, match="not the one") as raised:
            LocalKeystore(tmp_path, wrong)
        assert wrong not in str(raised.value)
    assert files(tmp_path)["keystore.sqlite3"] == before
    assert LocalKeystore(tmp_path, KEY_TEXT).read(BOX, "a").secret.reveal() == SECRET


def test_master_key_file_of_another_keystore_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        LocalKeystore(tmp_path / name)
    (tmp_path / "one/master.key").write_bytes((tmp_path / "two/master.key").read_bytes())
    with pytest.raises(ImproperlyConfigured, match="not the one"):
        LocalKeystore(tmp_path / "one")


@pytest.mark.parametrize("column", ["nonce", "sealed"])
@pytest.mark.parametrize("value", [b"x", b"x" * 12, "text"], ids=repr)
def test_master_key_check_altered_is_refused(column: str, value: object, tmp_path: Path) -> None:
    LocalKeystore(tmp_path)
    alter(tmp_path, f"UPDATE master_key_check SET {column} = ?", value)  # noqa: S608  the test's own SQL
    with pytest.raises(ImproperlyConfigured, match="not the one"):
        LocalKeystore(tmp_path)


def test_master_key_from_the_environment_takes_precedence_and_creates_no_file(tmp_path: Path) -> None:
    """An installation that keeps the key elsewhere has no key file."""
    put(LocalKeystore(tmp_path, KEY_TEXT))
    assert not (tmp_path / "master.key").exists()
    (tmp_path / "master.key").touch(0o600)
    (tmp_path / "master.key").write_text(OTHER_KEY_TEXT)
    assert LocalKeystore(tmp_path, KEY_TEXT).read(BOX, "a").secret.reveal() == SECRET
    with pytest.raises(ImproperlyConfigured, match="not the one"):
        LocalKeystore(tmp_path)


def test_master_key_moved_from_the_file_to_the_environment_is_accepted(tmp_path: Path) -> None:
    put(LocalKeystore(tmp_path))
    text = (tmp_path / "master.key").read_text()
    (tmp_path / "master.key").unlink()
    assert LocalKeystore(tmp_path, text).read(BOX, "a").secret.reveal() == SECRET


@pytest.mark.parametrize("text", [base64.b64encode(KEY).decode(), base64.urlsafe_b64encode(KEY).decode()])
def test_master_key_in_either_base64_is_the_same_key(text: str, tmp_path: Path) -> None:
    assert parse_master_key(text) == KEY
    put(LocalKeystore(tmp_path, KEY_TEXT))
    assert LocalKeystore(tmp_path, text).read(BOX, "a").secret.reveal() == SECRET


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "hunter2",
        KEY_TEXT[:-1],
        KEY_TEXT + "A",
        KEY_TEXT * 2,
        KEY_TEXT.rstrip("="),
        f"{KEY_TEXT[:20]} {KEY_TEXT[20:]}",
        f"{KEY_TEXT}\x00",
        KEY.hex(),
        base64.b64encode(bytes(31)).decode(),
        base64.b64encode(bytes(33)).decode(),
        base64.b64encode(bytes(16)).decode(),
        base64.b32encode(KEY).decode(),
        "é" * 44,
        "\ud800" * 44,
    ],
    ids=lambda text: ascii(text[:12]) + str(len(text)),
)
def test_master_key_of_invalid_form_is_refused_and_not_repeated(text: str, tmp_path: Path) -> None:
    """Part of a key, a passphrase or hexadecimal: start is refused, and the message does not repeat the text."""
    with pytest.raises(ImproperlyConfigured, match="32 bytes in base64") as raised:
        LocalKeystore(tmp_path, text)
    assert text not in str(raised.value)
    assert raised.value.__cause__ is None
    assert raised.value.__context__ is None


@given(st.text())
def test_master_key_of_any_text_is_32_bytes_or_refused(text: str) -> None:
    with suppress(ImproperlyConfigured):
        assert len(parse_master_key(text)) == 32


@pytest.mark.long
def test_first_run_by_several_processes_agrees_on_one_master_key(tmp_path: Path) -> None:
    """Server, worker and beat start together on an empty folder: none fails, and each reads the others' secrets."""
    for turn in range(4):
        folder = tmp_path / str(turn)
        folder.mkdir()
        processes = [start_process("local", folder, "first", str(who)) for who in range(5)]
        with ExitStack() as stack:
            for process in processes:
                stack.enter_context(process)
                stack.callback(process.kill)
            assert [read_line(process) for process in processes] == ["ready"] * 5
            for process in processes:
                send_cue(process)
            assert [read_line(process) for process in processes] == ["opened"] * 5
            for process in processes:
                send_cue(process)
            assert sorted(map(read_line, processes)) == ["conflict"] * 4 + ["won"]
        store = LocalKeystore(folder)
        assert store.read(BOX, "raced").secret.reveal().startswith("by ")
        assert mode(folder / "master.key") == 0o600
        assert {"master.key", "keystore.sqlite3"} <= set(files(folder))
        assert not [name for name in files(folder) if name.startswith("tmp")]


@pytest.mark.long
def test_first_run_killed_at_any_moment_is_repeatable(tmp_path: Path) -> None:
    """A killed first run leaves either no master key or a complete one; the next run continues."""
    for turn in range(6):
        folder = tmp_path / str(turn)
        folder.mkdir()
        with start_process("local", folder, "first", "a") as process:
            assert read_line(process) == "ready"
            send_cue(process)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(turn * 0.004)
            process.kill()
        put(LocalKeystore(folder))
        assert LocalKeystore(folder).read(BOX, "a").secret.reveal() == SECRET


# --- failures ---------------------------------------------------------------------------------------------


def test_health_of_a_vanished_keystore_is_reported_and_creates_none(tmp_path: Path) -> None:
    """An empty keystore is never taken for the real one that was moved away."""
    store = LocalKeystore(tmp_path)
    put(store)
    for path in tmp_path.glob("keystore.sqlite3*"):
        path.unlink()
    assert not store.health().ready
    with pytest.raises(BackendUnavailableError):
        store.read(BOX, "a")
    with pytest.raises(BackendUnavailableError):
        put(store, after=1)
    assert not (tmp_path / "keystore.sqlite3").exists()


def test_health_of_a_keystore_that_is_no_database_is_reported(tmp_path: Path) -> None:
    store = LocalKeystore(tmp_path)
    (tmp_path / "keystore.sqlite3").write_bytes(b"no database" * 1000)
    health = store.health()
    assert not health.ready
    assert "keystore.sqlite3" in health.detail
    with pytest.raises(BackendUnavailableError):
        store.read(BOX, "a")


def test_put_while_the_keystore_is_locked_waits_and_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock that is never released is an outage: retryable, and nothing is half written."""
    store = LocalKeystore(tmp_path)
    monkeypatch.setattr(local, "_BUSY_SECONDS", 0.05)
    with database(tmp_path) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(BackendUnavailableError):
            put(store)
        other.execute("ROLLBACK")
    with pytest.raises(BackendMissingError):
        store.read(BOX, "a")
    assert put(store) == 1


def test_put_on_a_full_disk_names_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite then ends the transaction itself, and a second end must not hide why."""
    store, connect = LocalKeystore(tmp_path), sqlite3.connect

    def connect_to_full(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*arguments, **options)
        connection.execute("PRAGMA max_page_count=1")  # which SQLite raises to the present size
        return connection

    with monkeypatch.context() as full:
        full.setattr(sqlite3, "connect", connect_to_full)
        with pytest.raises(BackendUnavailableError) as raised:
            put(store, "s" * 100_000)
    assert "disk is full" in raised.value.internal
    assert put(store) == 1


def test_repr_of_a_keystore_contains_no_key(tmp_path: Path) -> None:
    store = LocalKeystore(tmp_path, KEY_TEXT)
    shown = f"{store!r} {store} {json.dumps(vars(store), default=repr)}"
    assert KEY_TEXT not in shown
    assert KEY.hex() not in shown
    assert repr(KEY) not in shown
