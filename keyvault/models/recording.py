"""Base class of rows that only a recorded transaction may write, and the subjects that a write changes.

A service cannot omit its change row or its audit entry: a save, update, create or delete of a `RecordedModel` outside
`services.recording.transaction.recorded` raises, and inside it the model names the changed subject. Raw SQL and
migrations bypass this check, and so does a user with the database's password; the audit chain detects that.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self

from django.db import models
from django.dispatch import Signal

from keyvault.domain.errors import StateConflictError
from keyvault.domain.ids import Subject

_open_subjects: ContextVar[dict[Subject, bool] | None] = ContextVar("open_subjects", default=None)

row_ends = Signal()
"""Sent inside the transaction before a row is written in a final state."""


class UnrecordedWriteError(Exception):
    """A bug: a write without an audit entry and a change row."""


@contextmanager
def collect_subjects() -> Iterator[dict[Subject, bool]]:
    """Allow writes; yield the changed subjects in the order of the writes, and whether each has ended.

    Nested blocks share one dictionary.
    """
    subjects = _open_subjects.get()
    if subjects is not None:
        yield subjects
        return
    subjects = {}
    token = _open_subjects.set(subjects)
    try:
        yield subjects
    finally:
        _open_subjects.reset(token)


def require_recording(model: type[models.Model]) -> dict[Subject, bool]:
    """Return the subjects of the open `collect_subjects` block. Raises UnrecordedWriteError outside of one."""
    subjects = _open_subjects.get()
    if subjects is None:
        raise UnrecordedWriteError(f"{model.__name__} may only be written inside `recorded(...)`")
    return subjects


class RecordedQuerySet(models.QuerySet[Any]):
    """A query set that refuses bulk writes, which cannot name their subjects."""

    def update(self, **kwargs: Any) -> int:
        raise UnrecordedWriteError("write rows one by one: save a new one, or compare_and_swap")

    def delete(self) -> tuple[int, dict[str, int]]:
        raise UnrecordedWriteError("recorded rows are never deleted")

    def bulk_update(self, objs: Iterable[Any], fields: Iterable[str], batch_size: int | None = None) -> int:
        raise UnrecordedWriteError("write rows one by one: save a new one, or compare_and_swap")

    def bulk_create(self, objs: Iterable[Any], *args: Any, **kwargs: Any) -> list[Any]:
        raise UnrecordedWriteError("write rows one by one: save a new one, or compare_and_swap")


class RecordedModel(models.Model):
    """A row with a version counter. `alters` names the verdict subject that a write changes."""

    version = models.PositiveIntegerField(default=1, editable=False)

    objects = RecordedQuerySet.as_manager()

    class Meta:
        abstract = True
        # Django's own writes, such as a related manager's `add`, use this manager; subclasses inherit it.
        base_manager_name = "objects"

    def alters(self) -> Subject | None:
        """Return the subject whose verdicts this row can change; None for a row that no verdict reads."""
        raise NotImplementedError

    def has_ended(self) -> bool:
        """Return whether the row is in a final state, which the revocation log records against restored backups."""
        return False

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Insert a new row. Use `compare_and_swap` to change an existing one."""
        subjects = require_recording(type(self))
        super().save(*args, force_insert=True, **kwargs)
        self._note(subjects)

    def delete(self, *args: Any, **kwargs: Any) -> tuple[int, dict[str, int]]:
        raise UnrecordedWriteError("recorded rows are never deleted")

    def compare_and_swap(self, **changes: Any) -> Self:
        """Write the fields if the row is unchanged since it was read, and increment its version.

        Raises StateConflictError, without a write, when the row has changed.
        """
        subjects = require_recording(type(self))
        if self._with(changes).has_ended():
            row_ends.send(type(self))
        rows: models.QuerySet[Any] = models.QuerySet(type(self)).filter(pk=self.pk, version=self.version)
        if rows.update(version=self.version + 1, **changes) != 1:
            raise StateConflictError(
                "Another request changed this meanwhile. Reload it and try again.",
                internal=f"{type(self).__name__} {self.pk} is no longer at version {self.version}",
            )
        self.version += 1
        for name, value in changes.items():
            setattr(self, name, value)
        self._note(subjects)
        return self

    def swap_beside(self, seen: Mapping[str, Any], **changes: Any) -> bool:
        """Write columns that only this caller writes, if they still have the `seen` values; return whether they had.

        The version is not incremented, so that concurrent writers of other columns succeed.
        """
        subjects = require_recording(type(self))
        rows: models.QuerySet[Any] = models.QuerySet(type(self)).filter(pk=self.pk, **seen)
        if rows.update(**changes) != 1:
            return False
        self._note(subjects)
        return True

    def _with(self, changes: Mapping[str, Any]) -> Self:
        """Return an unsaved copy of the row with these changes."""
        changed = copy.copy(self)
        for name, value in changes.items():
            setattr(changed, name, value)
        return changed

    def _note(self, subjects: dict[Subject, bool]) -> None:
        subject = self.alters()
        if subject is not None:
            subjects[subject] = self.has_ended()
