"""What the secret backend holds of a rotation's keys, and the upkeep's turn."""

from datetime import timedelta

from django.utils import timezone

from keyvault.models import Key, WorkLease
from keyvault.services import maintenance
from keyvault.services.secrets.backend import MOUNT, secret_backend


def keep_up() -> None:
    """All that the upkeep does about copies, whatever was put off until later."""
    WorkLease.objects.filter(subject__startswith="copy:").update(due_at=None)
    maintenance.destroy_due()
    maintenance.settle_due()


def lose_leases() -> None:
    """As long after a worker died as its leases last."""
    WorkLease.objects.update(until=timezone.now() - timedelta(seconds=1), due_at=None)


def copy_of(key: Key | str | None) -> tuple[str, str | None]:
    """What the row says of the key's copy, and how the copy is."""
    row = Key.objects.select_related("credential__account").get(pk=key.pk if isinstance(key, Key) else key)
    place = MOUNT[row.credential.environment], row.credential.backend_path
    found = (each.state.value for each in secret_backend().versions(*place) if each.version == row.backend_version)
    return row.material, next(found, None)


def versions_of(key: Key) -> list[str]:
    """How every version of the key's credential is, oldest first."""
    credential = key.credential
    return [
        each.state.value for each in secret_backend().versions(MOUNT[credential.environment], credential.backend_path)
    ]
