"""The embedded secret backend: an AES-256-GCM keystore in one SQLite file, for one host.

Each record is encrypted under the master key. Its mount, path and version are associated data (NIST SP 800-38D), so
that a record copied to another path cannot be decrypted. Each record has a nonce of 96 random bits; versions are
written once.

Every open keystore holds a shared lock on a file beside it. `local_rekeying` takes it exclusively while it changes the
master key, so that no process writes or reads with a former one.
"""

import base64
import binascii
import fcntl
import json
import os
import sqlite3
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from django.core.exceptions import ImproperlyConfigured

from keyvault.backends.base import (
    EVIDENCE_VERSIONS,
    BackendConflictError,
    BackendInvalidError,
    BackendMissingError,
    BackendUnavailableError,
    Health,
    Mount,
    StoredSecret,
    StoredVersion,
    VersionState,
)
from keyvault.backends.private_files import ensure_private_file, read_or_make_master_key
from keyvault.domain.plaintext import Plaintext

KEYSTORE_NAME: Final = "keystore.sqlite3"
NONCE_BYTES: Final = 12
CHECK: Final = b"keyvault/keystore-check/v1"
TEXT: Final = b"keyvault/text/v1"
"""Associated data of a text that its caller stores."""
_BUSY_SECONDS: Final = 20
ALTERED: Final = (InvalidTag, ValueError, TypeError)
"""Errors of an altered nonce or ciphertext, including a wrong length or type."""

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS master_key_check (
    only INTEGER PRIMARY KEY CHECK (only = 1),
    nonce BLOB NOT NULL,
    sealed BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS records (
    mount TEXT NOT NULL,
    path TEXT NOT NULL,
    version INTEGER NOT NULL CHECK (version > 0),
    state TEXT NOT NULL CHECK (state IN ('live', 'deleted', 'destroyed')),
    nonce BLOB,
    sealed BLOB,
    PRIMARY KEY (mount, path, version),
    CHECK ((state = 'destroyed') = (sealed IS NULL))
);
CREATE TABLE IF NOT EXISTS master_key_rotation (
    only INTEGER PRIMARY KEY CHECK (only = 1),
    nonce BLOB NOT NULL,
    sealed BLOB NOT NULL,
    mount TEXT NOT NULL,
    path TEXT NOT NULL,
    version INTEGER NOT NULL
);
"""
"""`master_key_rotation`: one row while a rotation is unfinished: the check of the new key, and the record done last."""


class WrongMasterKeyError(ImproperlyConfigured):
    """The master key is not the one that the keystore was made with."""


def parse_master_key(text: str) -> bytes:
    """Decode 32 bytes from base64, either alphabet. Raises ImproperlyConfigured, which does not contain the text."""
    try:
        key = base64.b64decode(text.replace("-", "+").replace("_", "/"), validate=True)
    except (ValueError, binascii.Error):
        key = b""
    if len(key) != 32:
        raise ImproperlyConfigured("the master key must be 32 bytes in base64 (openssl rand -base64 32)")
    return key


class LocalKeystore:
    """A `SecretBackend` on this machine's disk; safe for threads and processes.

    `unwrap` converts the stored text, which may be wrapped, into the master key. Raises ImproperlyConfigured when the
    master key is missing or is not the one that sealed the data, and the errors of `unwrap`.
    """

    def __init__(self, folder: Path, master_key_text: str = "", unwrap: Callable[[str], str] = str) -> None:
        self._file = folder / KEYSTORE_NAME
        # Connecting never creates the file: a keystore that disappeared is an outage, not an empty keystore.
        self._uri = f"{self._file.absolute().as_uri()}?mode=rw"
        # SQLite would create it with the process's umask.
        ensure_private_file(self._file)
        self._close_lock = weakref.finalize(self, os.close, _lock_shared(folder))
        with self._connection() as connection:
            if not _retry_while_busy(lambda: _use_write_ahead_log(connection)):
                raise BackendUnavailableError("The local keystore is busy. Try again.", internal=f"{self._file}: busy")
            connection.executescript(SCHEMA)
            check = connection.execute("SELECT nonce, sealed FROM master_key_check").fetchone()
            if connection.execute("SELECT only FROM master_key_rotation").fetchone() is not None:
                raise ImproperlyConfigured(
                    f"a rotation of the master key of {self._file} is unfinished; "
                    "run again: manage.py rotate_master_key"
                )
        text = master_key_text or read_or_make_master_key(folder / "master.key", may_make=check is None)
        self._cipher = AESGCM(parse_master_key(unwrap(text)))
        self._check_master_key(check)

    # --- SecretBackend ------------------------------------------------------------------------------------

    def put(
        self,
        mount: Mount,
        path: str,
        secret: Plaintext,
        labels: Mapping[str, str],
        *,
        expected_version: int,
    ) -> int:
        version = expected_version + 1
        body = json.dumps({"secret": secret.reveal(), "labels": dict(labels)}).encode()
        nonce = os.urandom(NONCE_BYTES)
        sealed = self._cipher.encrypt(nonce, body, associated_data(mount, path, version))
        with self._transaction() as connection:
            if _newest_version(connection, mount, path) != expected_version:
                raise BackendConflictError(
                    "Another writer changed the secret meanwhile.",
                    internal=f"check-and-set failed at {mount}/{path}, expected version {expected_version}",
                )
            connection.execute(
                "INSERT INTO records (mount, path, version, state, nonce, sealed) VALUES (?, ?, ?, 'live', ?, ?)",
                (mount, path, version, nonce, sealed),
            )
            if mount is Mount.EVIDENCE:
                connection.execute(
                    "DELETE FROM records WHERE mount = ? AND path = ? AND version <= ?",
                    (mount, path, version - EVIDENCE_VERSIONS),
                )
        return version

    def read(self, mount: Mount, path: str, version: int | None = None) -> StoredSecret:
        with self._connection() as connection:
            chosen = _newest_version(connection, mount, path) if version is None else version
            row = connection.execute(
                "SELECT nonce, sealed FROM records WHERE mount = ? AND path = ? AND version = ? AND state = 'live'",
                (mount, path, chosen),
            ).fetchone()
        if row is None:
            raise BackendMissingError("No readable secret is stored there.", internal=f"{mount}/{path}@{chosen}")
        try:
            body = json.loads(self._cipher.decrypt(row[0], row[1], associated_data(mount, path, chosen)))
        except ALTERED:
            raise BackendInvalidError(
                "A stored secret was altered, or is at the wrong path.",
                internal=f"{mount}/{path}@{chosen} cannot be decrypted with the master key",
            ) from None
        return StoredSecret(chosen, Plaintext(body["secret"]), body["labels"])

    def soft_delete(self, mount: Mount, path: str, version: int) -> None:
        self._set_state(mount, path, version, VersionState.LIVE, VersionState.DELETED)

    def undelete(self, mount: Mount, path: str, version: int) -> None:
        self._set_state(mount, path, version, VersionState.DELETED, VersionState.LIVE)
        if StoredVersion(version, VersionState.LIVE) not in self.versions(mount, path):
            raise BackendMissingError("The version was destroyed.", internal=f"{mount}/{path}@{version}")

    def destroy(self, mount: Mount, path: str, version: int) -> None:
        with self._transaction() as connection:
            connection.execute(
                "UPDATE records SET state = 'destroyed', nonce = NULL, sealed = NULL "
                "WHERE mount = ? AND path = ? AND version = ?",
                (mount, path, version),
            )
        with self._connection() as connection:
            # The write-ahead log keeps the old page until no reader needs it.
            is_erased = _retry_while_busy(lambda: empty_write_ahead_log(connection))
        if not is_erased:
            raise BackendUnavailableError(
                "The local keystore is busy, so the secret may not be erased yet. Try again.",
                internal=f"{mount}/{path}@{version}: readers hold the write-ahead log of {self._file}",
            )

    def versions(self, mount: Mount, path: str) -> Sequence[StoredVersion]:
        with self._connection() as connection:
            rows = connection.execute(
                "SELECT version, state FROM records WHERE mount = ? AND path = ? ORDER BY version",
                (mount, path),
            ).fetchall()
        return [StoredVersion(version, VersionState(state)) for version, state in rows]

    def forget(self, mount: Mount, path: str) -> None:
        for stored in self.versions(mount, path):
            self.destroy(mount, path, stored.version)
        with self._transaction() as connection:
            connection.execute("DELETE FROM records WHERE mount = ? AND path = ?", (mount, path))

    def list_paths(self, mount: Mount) -> Iterator[str]:
        with self._connection() as connection:
            rows = connection.execute("SELECT DISTINCT path FROM records WHERE mount = ?", (mount,)).fetchall()
        yield from (str(row[0]) for row in rows)

    def encrypt(self, text: Plaintext) -> str:
        nonce = os.urandom(NONCE_BYTES)
        sealed = self._cipher.encrypt(nonce, text.reveal().encode(), TEXT)
        return base64.b64encode(nonce + sealed).decode()

    def decrypt(self, ciphertext: str) -> Plaintext:
        try:
            sealed = base64.b64decode(ciphertext, validate=True)
            return Plaintext(self._cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], TEXT).decode())
        except ALTERED:
            raise BackendInvalidError(
                "An encrypted text was altered, or belongs to another master key.",
                internal="the text cannot be decrypted with the master key",
            ) from None

    def health(self) -> Health:
        try:
            with self._connection() as connection:
                connection.execute("SELECT only FROM master_key_check").fetchone()
        except BackendUnavailableError as error:
            return Health(False, error.internal)
        return Health(True, "the local keystore answers")

    # --- internals ----------------------------------------------------------------------------------------

    def _check_master_key(self, check: tuple[bytes, bytes] | None) -> None:
        if check is None:
            nonce = os.urandom(NONCE_BYTES)
            with self._transaction() as connection:
                # A concurrent first run may have inserted its row first. Then that row is checked.
                connection.execute(
                    "INSERT OR IGNORE INTO master_key_check (only, nonce, sealed) VALUES (1, ?, ?)",
                    (nonce, self._cipher.encrypt(nonce, CHECK, CHECK)),
                )
                check = connection.execute("SELECT nonce, sealed FROM master_key_check").fetchone()
        try:
            self._cipher.decrypt(check[0], check[1], CHECK)
        except ALTERED:
            # The file may be of a rotation that was killed before it put the new key in place, or of a refused one.
            is_rotating = self._file.with_name("master.key.new").exists()
            first = "if a rotation of it is unfinished, run again: manage.py rotate_master_key; otherwise "
            raise WrongMasterKeyError(
                f"the master key is not the one that {self._file} was made with; {first if is_rotating else ''}restore "
                "the right one (KEYVAULT_MASTER_KEY, or master.key beside it)"
            ) from None

    def _set_state(self, mount: Mount, path: str, version: int, before: VersionState, after: VersionState) -> None:
        with self._transaction() as connection:
            connection.execute(
                "UPDATE records SET state = ? WHERE mount = ? AND path = ? AND version = ? AND state = ?",
                (after, mount, path, version, before),
            )

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """Open a connection for one call: none is shared with a forked process or another thread."""
        try:
            connection = sqlite3.connect(self._uri, uri=True, timeout=_BUSY_SECONDS, isolation_level=None)
            try:
                # Overwrite destroyed material with zeros instead of only freeing its page.
                connection.execute("PRAGMA secure_delete=ON")
                connection.execute("PRAGMA synchronous=FULL")
                yield connection
            finally:
                connection.close()
        except sqlite3.Error as error:
            raise BackendUnavailableError(
                "The local keystore is unavailable.", internal=f"{self._file}: {error}"
            ) from error

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._connection() as connection, write_transaction(connection):
            yield connection


@contextmanager
def write_transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Commit at the end, or write nothing. Raises sqlite3.Error."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # After some errors, such as a full disk, SQLite has rolled back already.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def open_lock(folder: Path) -> int:
    """Return a descriptor of the file that open keystores lock."""
    return os.open(folder / f"{KEYSTORE_NAME}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _lock_shared(folder: Path) -> int:
    """Return a descriptor with the shared lock. Forked children share it. Raises ImproperlyConfigured."""
    descriptor = open_lock(folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ImproperlyConfigured("the master key is being rotated; start again when that has ended") from None
    return descriptor


def _use_write_ahead_log(connection: sqlite3.Connection) -> bool:
    """Switch to the write-ahead log; False when the database is busy, such as in concurrent first runs."""
    try:
        connection.execute("PRAGMA journal_mode=WAL")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
            raise
        return False
    return True


def empty_write_ahead_log(connection: sqlite3.Connection) -> bool:
    """Empty the write-ahead log; False when a reader or another checkpoint blocks it."""
    return not connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]


def _retry_while_busy(attempt: Callable[[], bool]) -> bool:
    """Retry for _BUSY_SECONDS an operation for which SQLite's busy timeout does not always apply."""
    until = time.monotonic() + _BUSY_SECONDS
    while not attempt():
        if time.monotonic() >= until:
            return False
        time.sleep(0.01)
    return True


def _newest_version(connection: sqlite3.Connection, mount: Mount, path: str) -> int:
    row = connection.execute(
        "SELECT coalesce(max(version), 0) FROM records WHERE mount = ? AND path = ?", (mount, path)
    ).fetchone()
    return int(row[0])


def associated_data(mount: Mount, path: str, version: int) -> bytes:
    """Return the associated data, unambiguous because neither mount nor number contains a zero byte."""
    return b"\0".join((b"keyvault/keystore/v1", mount.encode(), path.encode(), str(version).encode()))
