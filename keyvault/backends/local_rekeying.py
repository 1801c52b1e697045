"""Encrypt the local keystore again, under a new master key, in batches that each are one transaction.

No process may have the keystore open meanwhile. A run that was killed is continued with the same two keys: the keystore
records which record it has done last. Until `finish` the former key stays the keystore's, and a process that opens it
is refused.
"""

import base64
import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from keyvault.backends.base import BackendInvalidError, BackendUnavailableError, Mount
from keyvault.backends.local import (
    ALTERED,
    CHECK,
    KEYSTORE_NAME,
    NONCE_BYTES,
    SCHEMA,
    TEXT,
    associated_data,
    empty_write_ahead_log,
    open_lock,
    parse_master_key,
    write_transaction,
)
from keyvault.domain.errors import StateConflictError

BATCH: Final = 500
"""Records of one transaction."""


class Rekeying:
    """Two master keys and the keystore of a folder, which no other process has open. See `rekeying`."""

    def __init__(self, connection: sqlite3.Connection, old_key: str, new_key: str) -> None:
        self._connection = connection
        self._old, self._new = AESGCM(parse_master_key(old_key)), AESGCM(parse_master_key(new_key))
        if parse_master_key(old_key) == parse_master_key(new_key):
            raise StateConflictError("The new master key is the present one. Create another: openssl rand -base64 32")

    def is_finished(self) -> bool:
        """Whether the keystore is under the new key. Raises StateConflictError if it is under neither key."""
        check = self._fetch("SELECT nonce, sealed FROM master_key_check")
        if check is None:
            raise StateConflictError("The keystore is empty: there is nothing to rotate. Run manage.py setup first.")
        if _opens(self._new, check):
            return True
        if not _opens(self._old, check):
            raise StateConflictError(
                "The keystore is under neither of the two master keys. Set KEYVAULT_MASTER_KEY (or master.key) to its "
                "key."
            )
        return False

    def is_begun(self) -> bool:
        """Whether a run was killed after `begin`. Raises StateConflictError if it had another new key."""
        begun = self._fetch("SELECT nonce, sealed FROM master_key_rotation")
        if begun is not None and not _opens(self._new, begun):
            raise StateConflictError("An unfinished rotation has another new master key. Continue it with that key.")
        return begun is not None

    def require_readable(self) -> None:
        """Decrypt all records with the former key before `begin`, and write nothing. Raises BackendInvalidError."""
        records = "SELECT mount, path, version, nonce, sealed FROM records WHERE sealed IS NOT NULL"
        for record in self._connection.execute(records):
            self._decrypt_record(*record)

    def begin(self) -> None:
        """Record the new key's check. From now on no process opens the keystore before `finish`."""
        nonce = os.urandom(NONCE_BYTES)
        check = nonce, self._new.encrypt(nonce, CHECK, CHECK)
        with write_transaction(self._connection):
            self._connection.execute("INSERT INTO master_key_rotation VALUES (1, ?, ?, '', '', 0)", check)

    def encrypt_batch(self) -> int:
        """Encrypt the next records again. Return how many; 0: all are done. Raises BackendInvalidError."""
        with write_transaction(self._connection):
            rows = self._connection.execute(
                "SELECT mount, path, version, nonce, sealed FROM records WHERE (mount, path, version) >"
                " (SELECT mount, path, version FROM master_key_rotation) ORDER BY mount, path, version LIMIT ?",
                (BATCH,),
            ).fetchall()
            for mount, path, version, nonce, sealed in rows:
                if sealed is not None:
                    self._encrypt_record(mount, path, version, nonce, sealed)
            if rows:
                self._connection.execute(
                    "UPDATE master_key_rotation SET mount = ?, path = ?, version = ?", rows[-1][:3]
                )
        return len(rows)

    def _encrypt_record(self, mount: str, path: str, version: int, nonce: bytes, sealed: bytes) -> None:
        body = self._decrypt_record(mount, path, version, nonce, sealed)
        nonce = os.urandom(NONCE_BYTES)
        sealed = self._new.encrypt(nonce, body, associated_data(Mount(mount), path, version))
        self._connection.execute(
            "UPDATE records SET nonce = ?, sealed = ? WHERE mount = ? AND path = ? AND version = ?",
            (nonce, sealed, mount, path, version),
        )

    def _decrypt_record(self, mount: str, path: str, version: int, nonce: bytes, sealed: bytes) -> bytes:
        try:
            return self._old.decrypt(nonce, sealed, associated_data(Mount(mount), path, version))
        except ALTERED:
            raise BackendInvalidError(
                "A stored secret was altered, or is at the wrong path. Restore the keystore from a backup.",
                internal=f"{mount}/{path}@{version} cannot be decrypted with the former master key",
            ) from None

    def encrypt_text(self, ciphertext: str) -> str:
        """Return a text that its caller stores, under the new key; unchanged if it is. Raises BackendInvalidError."""
        try:
            sealed = base64.b64decode(ciphertext, validate=True)
            nonce, sealed = sealed[:NONCE_BYTES], sealed[NONCE_BYTES:]
            if _opens(self._new, (nonce, sealed), TEXT):
                return ciphertext
            body = self._old.decrypt(nonce, sealed, TEXT)
        except ALTERED:
            raise BackendInvalidError("An encrypted text was altered, or belongs to another master key.") from None
        nonce = os.urandom(NONCE_BYTES)
        return base64.b64encode(nonce + self._new.encrypt(nonce, body, TEXT)).decode()

    def finish(self) -> None:
        """Make the new key the keystore's."""
        with write_transaction(self._connection):
            self._connection.execute(
                "UPDATE master_key_check SET (nonce, sealed) = (SELECT nonce, sealed FROM master_key_rotation)"
            )
            self._connection.execute("DELETE FROM master_key_rotation")
        empty_write_ahead_log(self._connection)

    def _fetch(self, statement: str) -> tuple[bytes, bytes] | None:
        row: tuple[bytes, bytes] | None = self._connection.execute(statement).fetchone()
        return row


@contextmanager
def rekeying(folder: Path, old_key: str, new_key: Callable[[], str]) -> Iterator[Rekeying]:
    """Open a folder's keystore exclusively. `new_key` is called after that, so that a refused run makes no key.

    Raises StateConflictError while another process has it open, or if there is none, and BackendUnavailableError if it
    cannot be read or written.
    """
    file = folder / KEYSTORE_NAME
    if not file.exists():
        raise StateConflictError(f"There is no keystore {file}. Run manage.py setup first.")
    descriptor = open_lock(folder)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StateConflictError(
                "Other processes have the keystore open. Stop every server, verifier, worker, beat and command of this "
                "host, and run it again."
            ) from None
        uri = f"{file.absolute().as_uri()}?mode=rw"
        with closing(sqlite3.connect(uri, uri=True, timeout=20, isolation_level=None)) as connection:
            connection.execute("PRAGMA secure_delete=ON")
            connection.execute("PRAGMA synchronous=FULL")
            # A keystore of an earlier release lacks the table of the rotation.
            connection.executescript(SCHEMA)
            yield Rekeying(connection, old_key, new_key())
    except sqlite3.Error as error:
        raise BackendUnavailableError(
            "The keystore cannot be written. Run the command again.", internal=f"{file}: {error}"
        ) from error
    finally:
        os.close(descriptor)


def _opens(cipher: AESGCM, sealed: tuple[bytes, bytes], data: bytes = CHECK) -> bool:
    try:
        cipher.decrypt(sealed[0], sealed[1], data)
    except InvalidTag:
        return False
    return True
