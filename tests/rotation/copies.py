"""What the secret backend holds of a rotation's keys, and one maintenance run."""

from datetime import timedelta

from django.utils import timezone

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
