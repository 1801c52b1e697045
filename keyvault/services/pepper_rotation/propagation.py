"""Decide when a new pepper version starts to make digests: once every live process that judges keys has loaded it.

Until then the version only checks existing digests. A process that cannot reach the secret backend delays the switch,
and no key fails because of it. A process that starts later loads every version before it serves.
"""

from datetime import datetime, timedelta
from typing import Final

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.models import PepperVersion
from keyvault.services.peppers.ring import list_served_sets
from keyvault.services.recording.transaction import recorded
from keyvault.services.usage.recorder import live_reporters

PROPAGATION: Final = timedelta(seconds=30)
"""Minimum time for which a new version only checks digests. Processes look for new versions every few seconds."""


def list_staged() -> list[PepperVersion]:
    """Return the versions of the served sets that do not make digests yet, the oldest first."""
    rows = PepperVersion.objects.filter(
        pepper_set__in=list_served_sets(), retired_at__isnull=True, hashes_from_at__isnull=True
    )
    return [row for row in rows.order_by("pepper_set", "number") if row.is_staged]


def list_lagging(row: PepperVersion) -> list[str]:
    """Return the ids of live reporters that serve the set and have not loaded the version yet."""
    return [
        reporter.reporter_id
        for reporter in live_reporters().order_by("reporter_id")
        if reporter.peppers.get(row.pepper_set, row.number) < row.number
    ]


def is_loaded_everywhere(row: PepperVersion, now: datetime) -> bool:
    """Whether the version may make digests: every process is able to check them."""
    return row.is_staged and now >= row.created_at + PROPAGATION and not list_lagging(row)


def begin_hashing(grant: Grant, row: PepperVersion) -> None:
    """Make new digests with this version from now on; keys move to it when used. Requires `is_loaded_everywhere`.

    Raises StateConflictError if another writer came first.
    """
    with recorded(grant, Permission.KEYS_REHASH, "pepper.in_use", pepper_set=row.pepper_set, number=row.number):
        row.compare_and_swap(hashes_from_at=grant.at)
