"""The file of a backup: a ZIP file of encrypted members, written and read as streams of chunks.

Each archive has a random salt. Scrypt (RFC 7914) derives its key from the passphrase, and HKDF (RFC 5869) one key for
each member from it. Each chunk is sealed with AES-256-GCM. Its nonce is the number of the chunk and whether it is the
last one, so that no chunk can be moved, repeated or cut off. The manifest is the last member, so that an archive
without one is incomplete.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, Any, Final
from zipfile import BadZipFile, ZipFile, ZipInfo

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from keyvault.backends.private_files import new_private_file
from keyvault.domain.errors import IntegrityError, StateConflictError
from keyvault.domain.plaintext import Plaintext

CHUNK_BYTES: Final = 256 * 1024
"""Plaintext of a chunk. The memory that an archive takes does not depend on its length."""

_FORMAT: Final = "keyvault backup 1"
_HEADER: Final = "header.json"
_MANIFEST: Final = "manifest"
_MAX_MANIFEST_BYTES: Final = 1024 * 1024
_TAG_BYTES: Final = 16
_SALT_BYTES: Final = 32

_DAMAGED = "The passphrase is wrong, or the archive was altered or is incomplete. Check both, or use another archive."


@dataclass(frozen=True, slots=True)
class Member:
    """Length and digest of a member's plaintext."""

    size: int
    sha256: str


class ArchiveWriter:
    """`add` the members; `finish` writes the manifest, which lists them. Without one the archive is not valid."""

    def __init__(self, file: IO[bytes], passphrase: Plaintext) -> None:
        salt = os.urandom(_SALT_BYTES)
        self._zip = ZipFile(file, "w")
        self._zip.writestr(_HEADER, json.dumps({"format": _FORMAT, "salt": salt.hex()}))
        self._key = _derive_key(passphrase, salt)
        self.members: dict[str, Member] = {}

    def add(self, name: str, source: IO[bytes]) -> None:
        self.members[name] = self._write(name, source)

    def finish(self, manifest: Mapping[str, Any]) -> None:
        members = {name: asdict(member) for name, member in self.members.items()}
        self._write(_MANIFEST, BytesIO(json.dumps({**manifest, "members": members}).encode()))

    def close(self) -> None:
        self._zip.close()

    def _write(self, name: str, source: IO[bytes]) -> Member:
        cipher, digest, size, number = _cipher(self._key, name), hashlib.sha256(), 0, 0
        with self._zip.open(ZipInfo(name), "w", force_zip64=True) as target:
            chunk = source.read(CHUNK_BYTES)
            while True:
                following = source.read(CHUNK_BYTES) if chunk else b""
                digest.update(chunk)
                size += len(chunk)
                target.write(cipher.encrypt(_nonce(number, is_last=not following), chunk, None))
                if not following:
                    return Member(size, digest.hexdigest())
                chunk, number = following, number + 1


@contextmanager
def writing_archive(path: Path, passphrase: Plaintext) -> Iterator[ArchiveWriter]:
    """Write a new archive that only its owner can read; it has its name once it is whole and on the disk.

    Raises StateConflictError if there is such a file, and OSError.
    """
    try:
        with new_private_file(path) as file:
            archive = ArchiveWriter(file, passphrase)
            try:
                yield archive
            finally:
                archive.close()
    except FileExistsError:
        raise StateConflictError(f"The file {path} exists. Name another one: a backup replaces no file.") from None


class ArchiveReader:
    """An archive, whose manifest was decrypted. Raises IntegrityError if that fails, and OSError."""

    def __init__(self, path: Path, passphrase: Plaintext) -> None:
        with _explain_damage():
            self._zip = ZipFile(path)
            header = json.loads(self._zip.read(_HEADER))
            if header["format"] != _FORMAT:
                raise IntegrityError(
                    "The file is no backup that this release reads.", internal=f"its format is {header['format']!r}"
                )
            self._key = _derive_key(passphrase, bytes.fromhex(header["salt"]))
            if self._zip.getinfo(_MANIFEST).file_size > _MAX_MANIFEST_BYTES:
                raise IntegrityError(_DAMAGED)
            self.manifest: dict[str, Any] = json.loads(b"".join(self._decrypt(_MANIFEST)))
            self.members = {name: Member(**member) for name, member in self.manifest["members"].items()}

    def read(self, name: str) -> Iterator[bytes]:
        """Yield a member's plaintext in chunks, each authenticated. Raises IntegrityError, at the end at the latest."""
        digest, size = hashlib.sha256(), 0
        for chunk in self._decrypt(name):
            digest.update(chunk)
            size += len(chunk)
            yield chunk
        if Member(size, digest.hexdigest()) != self.members[name]:
            raise IntegrityError(_DAMAGED, internal=f"the digest of {name} differs from the manifest's")

    def check(self) -> None:
        """Decrypt every member and compare it with the manifest. Raises IntegrityError."""
        for name in self.members:
            for _ in self.read(name):
                pass

    def extract(self, name: str, target: IO[bytes]) -> None:
        for chunk in self.read(name):
            target.write(chunk)

    def close(self) -> None:
        self._zip.close()

    def _decrypt(self, name: str) -> Iterator[bytes]:
        with _explain_damage(), self._zip.open(name) as source:
            cipher, number = _cipher(self._key, name), 0
            sealed = source.read(CHUNK_BYTES + _TAG_BYTES)
            while True:
                following = source.read(CHUNK_BYTES + _TAG_BYTES)
                yield cipher.decrypt(_nonce(number, is_last=not following), sealed, None)
                if not following:
                    return
                sealed, number = following, number + 1


@contextmanager
def _explain_damage() -> Iterator[None]:
    try:
        yield
    except (InvalidTag, BadZipFile, EOFError, KeyError, ValueError, TypeError) as error:
        raise IntegrityError(_DAMAGED, internal=type(error).__name__) from None


def _derive_key(passphrase: Plaintext, salt: bytes) -> bytes:
    """Return the archive's key. Takes 128 MiB and some tenths of a second (OWASP, "Password Storage")."""
    return Scrypt(salt=salt, length=32, n=2**17, r=8, p=1).derive(passphrase.reveal().encode())


def _cipher(key: bytes, name: str) -> AESGCM:
    return AESGCM(HKDF(SHA256(), 32, salt=None, info=f"{_FORMAT}/{name}".encode()).derive(key))


def _nonce(number: int, *, is_last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([is_last])
