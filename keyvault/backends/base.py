"""The interface of a secret backend, which stores secret material that must be readable again.

A backend stores numbered versions of a secret at a path inside a mount. Calls are I/O to another machine and must not
happen inside a database transaction. After an ambiguous reply to a write, the caller reads back and compares the
`labels` to find out whose write succeeded.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from keyvault.domain.errors import DependencyUnavailableError, ErrorCode, KeyvaultError
from keyvault.domain.plaintext import Plaintext


class Mount(StrEnum):
    """Separate stores that share nothing: one for each environment's keys, one for the peppers, one for evidence.

    `evidence` has data that must outlive the database, and nothing secret. Its paths begin with a scope.
    `audit` has the keys that sign the audit log and exists in the local keystore only. In a Vault they are in Transit.
    """

    SANDBOX = "sandbox"
    PRODUCTION = "production"
    PEPPERS = "peppers"
    EVIDENCE = "evidence"
    AUDIT = "audit"


EVIDENCE_VERSIONS: Final = 10
"""Maximum versions per path of evidence; the backend erases older ones."""


class VersionState(StrEnum):
    LIVE = "live"
    DELETED = "deleted"
    DESTROYED = "destroyed"


@dataclass(frozen=True, slots=True)
class StoredSecret:
    """One readable version. `labels` identify its owner (key id, credential id, …) and are not secret."""

    version: int
    secret: Plaintext
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """A version's number and state, without its secret."""

    version: int
    state: VersionState


@dataclass(frozen=True, slots=True)
class Health:
    """`ready`: the backend can read and write; `detail` is a description for people."""

    ready: bool
    detail: str


class BackendError(KeyvaultError):
    """Base class of backend errors.

    `status`: the HTTP status of the reply, if there was one. `may_be_applied`: the backend may have received a write,
    and may carry it out even after this error.
    """

    def __init__(
        self,
        detail: str,
        *,
        internal: str = "",
        status: int | None = None,
        may_be_applied: bool = False,
        **more: int,
    ) -> None:
        super().__init__(detail, internal=internal, **more)
        self.status = status
        self.may_be_applied = may_be_applied


class BackendUnavailableError(BackendError, DependencyUnavailableError):
    """No reply, or an ambiguous one. Retry; after a write that may be applied, read back first."""


class BackendDeniedError(BackendError):
    """The backend denies access: a policy or a login is wrong. Retrying does not help."""

    code = ErrorCode.DEPENDENCY_UNAVAILABLE


class BackendConflictError(BackendError):
    """Check-and-set failed: another writer was first. Read its version and adopt it or stop; never overwrite it."""

    code = ErrorCode.STATE_CONFLICT


class BackendMissingError(BackendError):
    """No readable version: never written, soft-deleted or destroyed."""

    code = ErrorCode.NOT_FOUND


class BackendInvalidError(BackendError):
    """The stored data is malformed, was moved or altered, or belongs to another master key."""


class SecretBackend(Protocol):
    """Every method may raise BackendUnavailableError or BackendDeniedError."""

    def put(
        self,
        mount: Mount,
        path: str,
        secret: Plaintext,
        labels: Mapping[str, str],
        *,
        expected_version: int,
    ) -> int:
        """Write the version after `expected_version` (0: none exists) and return its number.

        Raises BackendConflictError, without writing, when another version is the newest.
        """

    def read(self, mount: Mount, path: str, version: int | None = None) -> StoredSecret:
        """Read a version, or the newest. Raises BackendMissingError, BackendInvalidError."""

    def soft_delete(self, mount: Mount, path: str, version: int) -> None:
        """Make a version unreadable until it is undeleted. Repeatable; a missing version is no error."""

    def undelete(self, mount: Mount, path: str, version: int) -> None:
        """Restore a soft-deleted version. Raises BackendMissingError when it is destroyed or never existed."""

    def destroy(self, mount: Mount, path: str, version: int) -> None:
        """Erase a version's material permanently. Repeatable; a missing version is no error."""

    def versions(self, mount: Mount, path: str) -> Sequence[StoredVersion]:
        """Return every version of a path, oldest first; empty when none was ever written."""

    def forget(self, mount: Mount, path: str) -> None:
        """Erase every version of a path and its metadata permanently. Repeatable."""

    def list_paths(self, mount: Mount) -> Iterator[str]:
        """Yield every path of a mount that has or had a version, unordered. Concurrent writes are allowed."""

    def encrypt(self, text: Plaintext) -> str:
        """Encrypt a text with a key that never leaves the backend's host. The caller stores the ciphertext."""

    def decrypt(self, ciphertext: str) -> Plaintext:
        """Decrypt a ciphertext of `encrypt`. Raises BackendInvalidError."""

    def health(self) -> Health:
        """Return the backend's health. Never raises."""
