"""The number and digest of each scope's newest checkpoint, recorded outside the database.

They are in the secret backend, with the signing key, and in this host's revocation log. A person who can only write to
the database can rewrite the audit log and delete its checkpoints, and the worker would sign the result. If the
newest checkpoint is older than a mark, the worker signs nothing, and verification fails.

A mark is written after its checkpoint. After a crash in between it is one checkpoint behind, until the next run.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from django.conf import settings

from keyvault.backends.base import BackendConflictError, BackendInvalidError, BackendMissingError, Mount
from keyvault.backends.vault.layout import CHECKPOINT_PATH
from keyvault.domain.checkpoints import CheckpointMark, SignedCheckpoint
from keyvault.domain.errors import DependencyUnavailableError, KeyvaultError
from keyvault.domain.plaintext import Plaintext
from keyvault.services.recording.revocation_log import append_lines, find_checkpoint_mark
from keyvault.services.secrets.backend import secret_backend

LOGGED_EVERY = timedelta(hours=1)
"""Minimum interval between two marks of a scope in the revocation log, which is read whole at every start."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckpointMarks:
    """The marks of a scope. `version`: version of `stored` in the secret backend; 0: there is none.

    Iterates over the marks that name a checkpoint. A mark names none if operators accepted a log without checkpoints.
    """

    stored: CheckpointMark | None
    version: int
    logged: CheckpointMark | None

    def __iter__(self) -> Iterator[CheckpointMark]:
        return (mark for mark in (self.stored, self.logged) if mark is not None and mark.number > 0)


def read_marks(scope: str, *, needs_log: bool = True) -> CheckpointMarks:
    """Return the marks of a scope. `needs_log`: a missing revocation log is an error, not a log without marks.

    Raises DependencyUnavailableError if the revocation log cannot be read, and the errors of the secret backend.
    """
    logged: CheckpointMark | None = None
    try:
        if needs_log or settings.REVOCATION_LOG.exists():
            logged = find_checkpoint_mark(scope)
    except OSError as error:
        raise DependencyUnavailableError(
            "The revocation log cannot be read.", internal=f"the revocation log cannot be read: {error.strerror}"
        ) from error
    try:
        found = secret_backend().read(Mount.EVIDENCE, _path(scope))
    except BackendMissingError:
        return CheckpointMarks(None, 0, logged)
    try:
        at = datetime.fromisoformat(found.labels["at"])
        stored = CheckpointMark(scope, int(found.labels["number"]), found.labels["digest"], at)
    except (KeyError, ValueError):
        raise BackendInvalidError(
            "The record of the newest checkpoint is malformed.", internal=f"{_path(scope)} of the evidence is malformed"
        ) from None
    return CheckpointMarks(stored, found.version, logged)


def write_marks(signed: SignedCheckpoint, at: datetime, marks: CheckpointMarks) -> None:
    """Record a scope's newest checkpoint. `marks`: the marks as they were before that checkpoint was read.

    Does not raise if it cannot be recorded: the next run tries again.
    """
    mark = CheckpointMark(signed.scope, signed.number, signed.digest.hex(), at)
    try:
        if marks.stored is None or marks.stored.number < mark.number:
            store_mark(mark, marks.version)
        if marks.logged is None or at - marks.logged.at >= LOGGED_EVERY:
            append_lines([mark])
    except BackendConflictError:
        return  # Another worker recorded the same checkpoint, or a later one.
    except (KeyvaultError, OSError) as error:
        why = error.internal if isinstance(error, KeyvaultError) else error.strerror
        _log.warning(
            "the newest checkpoint is not recorded outside the database", extra={"scope": mark.scope, "why": why}
        )


def store_mark(mark: CheckpointMark, version: int) -> None:
    """Store a mark in the secret backend after this version. Raises the errors of the secret backend."""
    # The secret is empty: number and digest may be known, so the labels hold them.
    labels = {"number": str(mark.number), "digest": mark.digest, "at": mark.at.astimezone(UTC).isoformat()}
    secret_backend().put(Mount.EVIDENCE, _path(mark.scope), Plaintext(""), labels, expected_version=version)


def _path(scope: str) -> str:
    return f"{scope}/{CHECKPOINT_PATH}"
