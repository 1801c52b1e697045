"""Where secret material that must be readable again is kept: the contract of every secret backend.

A backend keeps numbered versions of a secret at a path inside a mount. It is I/O to another machine, so no
call happens inside a database transaction, and every write may be repeated after an ambiguous answer: read
back, and decide by the `labels` who won.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from keyvault.domain.errors import DependencyUnavailableError, ErrorCode, KeyvaultError
from keyvault.domain.plaintext import Plaintext


class Mount(StrEnum):
    """Separate stores with nothing shared: one for each environment's keys, one for the peppers.

    `audit` is the local keystore's alone: the keys that sign the audit log. In a Vault they never leave Transit.
    """

    SANDBOX = "sandbox"
    PRODUCTION = "production"
    PEPPERS = "peppers"
    AUDIT = "audit"


class VersionState(StrEnum):
    LIVE = "live"
    DELETED = "deleted"
    DESTROYED = "destroyed"


@dataclass(frozen=True, slots=True)
class StoredSecret:
    """One readable version. `labels` say whose it is (key id, credential id, …); never secret themselves."""

    version: int
    secret: Plaintext
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """What may be known of a version without reading it."""

    version: int
    state: VersionState


@dataclass(frozen=True, slots=True)
class Health:
    """`ready` to read and write; `detail` says in plain words why not."""

    ready: bool
    detail: str


class BackendError(KeyvaultError):
    """What every fault of a backend is. `status`: the HTTP status of its answer, where it gave one."""

    def __init__(self, detail: str, *, internal: str = "", status: int | None = None, **more: int) -> None:
        super().__init__(detail, internal=internal, **more)
        self.status = status


class BackendUnavailableError(BackendError, DependencyUnavailableError):
    """No answer, or none that says what happened: try again, after reading back if it was a write."""


class BackendDeniedError(BackendError):
    """The backend refuses us: a policy or a login is wrong, and trying again will not help."""

    code = ErrorCode.DEPENDENCY_UNAVAILABLE


class BackendConflictError(BackendError):
    """Check-and-set failed: somebody else wrote. Read, and adopt or stop; never overwrite."""

    code = ErrorCode.STATE_CONFLICT


class BackendMissingError(BackendError):
    """Nothing readable there: never written, soft-deleted, or destroyed."""

    code = ErrorCode.NOT_FOUND


class BackendInvalidError(BackendError):
    """What is stored cannot be trusted (moved, altered, made with another master key), or cannot be understood."""


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
        """Writes the version after `expected_version` (0: there is none yet) and returns its number.

        Raises BackendConflictError, having written nothing, when another version is the newest.
        """

    def read(self, mount: Mount, path: str, version: int | None = None) -> StoredSecret:
        """The named version, or the newest. Raises BackendMissingError, BackendInvalidError."""

    def soft_delete(self, mount: Mount, path: str, version: int) -> None:
        """Makes a version unreadable; it can be brought back. Repeatable; a missing version is no error."""

    def undelete(self, mount: Mount, path: str, version: int) -> None:
        """Brings a soft-deleted version back. Raises BackendMissingError when it is destroyed or never was."""

    def destroy(self, mount: Mount, path: str, version: int) -> None:
        """Erases a version's material for ever. Repeatable; a missing version is no error."""

    def versions(self, mount: Mount, path: str) -> Sequence[StoredVersion]:
        """Every version of a path, oldest first; empty where nothing was ever written."""

    def forget(self, mount: Mount, path: str) -> None:
        """Erases every version of a path for ever, and that there ever was one. Repeatable."""

    def list_paths(self, mount: Mount) -> Iterator[str]:
        """Every path of a mount under which there is or was a version, in no order; others may write meanwhile."""

    def health(self) -> Health:
        """Never raises."""
