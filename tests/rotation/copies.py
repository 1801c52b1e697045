"""What the secret backend holds of a rotation's keys, a backend with slow writes, and one maintenance run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from keyvault.backends.base import BackendConflictError, BackendUnavailableError
from keyvault.backends.local import LocalKeystore
from keyvault.models import Key, WorkLease
from keyvault.services import maintenance
from keyvault.services.secrets.backend import MOUNT, secret_backend


def run_maintenance() -> None:
    """Perform all pending maintenance of copies, including what was postponed."""
    WorkLease.objects.filter(subject__startswith="copy:").update(due_at=None)
    maintenance.destroy_due()
    maintenance.settle_due()


def lose_leases() -> None:
    """Expire every lease, as if its worker had died long ago."""
    WorkLease.objects.update(until=timezone.now() - timedelta(seconds=1), due_at=None)


def copy_of(key: Key | str | None) -> tuple[str, str | None]:
    """Return the material state of the key's row and the state of its copy in the backend."""
    row = Key.objects.select_related("credential__account").get(pk=key.pk if isinstance(key, Key) else key)
    place = MOUNT[row.credential.environment], row.credential.backend_path
    found = (each.state.value for each in secret_backend().versions(*place) if each.version == row.backend_version)
    return row.material, next(found, None)


def versions_of(key: Key) -> list[str]:
    """Return the state of every version of the key's credential, oldest first."""
    credential = key.credential
    return [
        each.state.value for each in secret_backend().versions(MOUNT[credential.environment], credential.backend_path)
    ]


class DelayedKeystore:
    """The keystore behind a network: `late` has the writes that got no reply and have not arrived yet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.late: list[Callable[[], object]] = []
        self._monkeypatch = monkeypatch

    @contextmanager
    def delaying(self) -> Iterator[None]:
        """Let no write arrive before `arrive`; its caller gets no reply in time."""
        put = LocalKeystore.put

        def delay(*args: Any, **kwargs: Any) -> int:
            self.late.append(lambda: put(*args, **kwargs))
            raise BackendUnavailableError("no answer in time", may_be_applied=True)

        with self._monkeypatch.context() as outage:
            outage.setattr(LocalKeystore, "put", delay)
            yield

    def arrive(self) -> list[type[Exception] | None]:
        """Let the delayed writes arrive; return the error of each."""
        errors: list[type[Exception] | None] = []
        for write in self.late:
            try:
                write()
            except BackendConflictError as error:
                errors.append(type(error))
            else:
                errors.append(None)
        return errors
