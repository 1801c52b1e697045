"""The archive of a backup: encrypted, checked in every byte, and written and read in little memory."""

import hashlib
import io
import json
import tracemalloc
from pathlib import Path
from typing import Any
from unittest import mock
from zipfile import ZipFile

import pytest

from keyvault.backends import backup_archive
from keyvault.backends.backup_archive import CHUNK_BYTES, ArchiveReader, Member, writing_archive
from keyvault.domain.errors import IntegrityError, StateConflictError
from keyvault.domain.plaintext import Plaintext

PASSPHRASE = Plaintext("correct horse battery staple")
SECRET = b"a-row-that-nobody-must-find-in-the-file"


@pytest.fixture(autouse=True)
def cheap_key() -> Any:
    """Scrypt takes 128 MiB and some tenths of a second on purpose."""

    def derive(passphrase: Plaintext, salt: bytes) -> bytes:
        return hashlib.sha256(salt + passphrase.reveal().encode()).digest()

    with mock.patch.object(backup_archive, "_derive_key", derive):
        yield


def write(path: Path, **members: bytes) -> None:
    with writing_archive(path, PASSPHRASE) as archive:
        for name, content in members.items():
            archive.add(name, io.BytesIO(content))
        archive.finish({"at": "now"})


def read(path: Path, name: str, passphrase: Plaintext = PASSPHRASE) -> bytes:
    return b"".join(ArchiveReader(path, passphrase).read(name))


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES])
def test_archive_returns_what_was_written(size: int, tmp_path: Path) -> None:
    content = (SECRET * (size // len(SECRET) + 1))[:size]
    write(tmp_path / "archive", database=content, keystore=b"k")
    reader = ArchiveReader(tmp_path / "archive", PASSPHRASE)
    reader.check()
    assert b"".join(reader.read("database")) == content
    assert reader.members == {
        "database": Member(size, hashlib.sha256(content).hexdigest()),
        "keystore": Member(1, hashlib.sha256(b"k").hexdigest()),
    }
    assert reader.manifest["at"] == "now"


def test_archive_can_be_read_by_its_owner_only_and_contains_no_plaintext(tmp_path: Path) -> None:
    path = tmp_path / "archive"
    write(path, database=SECRET * 10_000)
    assert path.stat().st_mode & 0o777 == 0o600
    assert SECRET not in path.read_bytes()
    assert hashlib.sha256(SECRET * 10_000).hexdigest().encode() not in path.read_bytes()


def test_archive_under_another_passphrase_does_not_open(tmp_path: Path) -> None:
    write(tmp_path / "archive", database=SECRET)
    with pytest.raises(IntegrityError, match="passphrase is wrong"):
        ArchiveReader(tmp_path / "archive", Plaintext("incorrect horse battery"))


@pytest.mark.parametrize("part", range(16))
def test_archive_with_a_changed_byte_is_refused(part: int, tmp_path: Path) -> None:
    """Guarantee: no altered archive passes the check, wherever it was altered."""
    path = tmp_path / "archive"
    write(path, database=SECRET * 100)
    content = bytearray(path.read_bytes())
    with ZipFile(path) as archive:
        begin = archive.getinfo("database").header_offset + 60
    content[begin + part * 200] ^= 1
    path.write_bytes(content)
    with pytest.raises(IntegrityError):
        ArchiveReader(path, PASSPHRASE).check()


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_archive_that_was_cut_off_is_refused(share: float, tmp_path: Path) -> None:
    path = tmp_path / "archive"
    write(path, database=SECRET * 20_000)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(IntegrityError):
        ArchiveReader(path, PASSPHRASE).check()


def rebuild(path: Path, **changed: bytes) -> None:
    """Write the ZIP file again with other members, as an attacker without the passphrase can."""
    with ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with ZipFile(path, "w") as archive:
        for name, content in {**members, **changed}.items():
            archive.writestr(name, content)


def sealed(path: Path, name: str) -> bytes:
    with ZipFile(path) as archive:
        return archive.read(name)


def test_archive_with_chunks_dropped_swapped_or_moved_is_refused(tmp_path: Path) -> None:
    """Guarantee: chunks are bound to their place, their member and their archive."""
    path, other = tmp_path / "archive", tmp_path / "other"
    content = bytes(CHUNK_BYTES) + bytes(CHUNK_BYTES) + b"end"
    write(path, database=content, keystore=content)
    write(other, database=content, keystore=content)
    whole, length = sealed(path, "database"), CHUNK_BYTES + 16
    one, two, last = whole[:length], whole[length : 2 * length], whole[2 * length :]
    original = path.read_bytes()
    for fake in (one + two, two + one + last, one + last, one + one + last, sealed(other, "database"), one, b""):
        rebuild(path, database=fake)
        with pytest.raises(IntegrityError):
            ArchiveReader(path, PASSPHRASE).check()
        path.write_bytes(original)
    rebuild(path, database=sealed(path, "keystore"))
    with pytest.raises(IntegrityError):
        ArchiveReader(path, PASSPHRASE).check()
    path.write_bytes(original)
    rebuild(path, manifest=sealed(other, "manifest"))
    with pytest.raises(IntegrityError):
        ArchiveReader(path, PASSPHRASE).check()


def test_archive_of_another_format_is_named(tmp_path: Path) -> None:
    path = tmp_path / "archive"
    write(path, database=SECRET)
    rebuild(path, **{"header.json": json.dumps({"format": "keyvault backup 9", "salt": "00"}).encode()})
    with pytest.raises(IntegrityError, match="no backup that this release reads"):
        ArchiveReader(path, PASSPHRASE)


def test_archive_that_failed_leaves_no_file(tmp_path: Path) -> None:
    def fail() -> None:
        with writing_archive(tmp_path / "archive", PASSPHRASE) as archive:
            archive.add("database", io.BytesIO(SECRET))
            raise RuntimeError("the database is gone")

    with pytest.raises(RuntimeError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_archive_replaces_no_file(tmp_path: Path) -> None:
    path = tmp_path / "archive"
    path.write_text("kept")
    with pytest.raises(StateConflictError, match="exists"):
        write(path, database=SECRET)
    assert path.read_text() == "kept"
    path.unlink()

    def write_meanwhile() -> None:
        with writing_archive(path, PASSPHRASE) as archive:
            archive.finish({})
            path.write_text("made meanwhile")

    with pytest.raises(StateConflictError, match="exists"):
        write_meanwhile()
    assert path.read_text() == "made meanwhile"
    assert list(tmp_path.iterdir()) == [path]


class GeneratedStream(io.RawIOBase):
    """A stream of this many bytes that are made as they are read."""

    def __init__(self, size: int) -> None:
        self.left = size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), self.left)
        self.left -= count
        buffer[:count] = bytes(count)
        return count


def test_archive_takes_memory_that_does_not_depend_on_its_length(tmp_path: Path) -> None:
    """Guarantee: a large database needs no more memory than a small one."""
    size = 64 * CHUNK_BYTES
    tracemalloc.start()
    try:
        with writing_archive(tmp_path / "archive", PASSPHRASE) as archive:
            archive.add("database", io.BufferedReader(GeneratedStream(size), CHUNK_BYTES))
            archive.finish({})
        ArchiveReader(tmp_path / "archive", PASSPHRASE).check()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < size // 4
