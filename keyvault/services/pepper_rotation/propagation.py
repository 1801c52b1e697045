"""When a new pepper version begins to make the digests: once every live process that judges keys has it loaded.

Until then it only proves. A process that cannot reach the secret backend so delays the change, and no key fails it;
one that starts later loads every version before it serves.
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
"""So long at least a new version proves before it makes digests: processes look for new ones every few seconds."""


def list_staged() -> list[PepperVersion]:
    """The versions of the served sets that do not make digests yet, the oldest first."""
    rows = PepperVersion.objects.filter(
        pepper_set__in=list_served_sets(), retired_at__isnull=True, hashes_from_at__isnull=True
    )
    return [row for row in rows.order_by("pepper_set", "number") if row.is_staged]


def list_lagging(row: PepperVersion) -> list[str]:
    """The live reporters that serve its set and have not loaded it yet.

    One that says nothing of peppers, being of an earlier release, is taken for one of them.
    """
    return [
        reporter.reporter_id
        for reporter in live_reporters().order_by("reporter_id")
        if reporter.peppers is None or reporter.peppers.get(row.pepper_set, row.number) < row.number
    ]


def is_everywhere(row: PepperVersion, now: datetime) -> bool:
    """Whether digests may be made with it: nobody would have to say that it cannot judge them."""
    return row.is_staged and now >= row.created_at + PROPAGATION and not list_lagging(row)


def begin_hashing(grant: Grant, row: PepperVersion) -> None:
    """New digests are made with it from now on, and used keys move to it. It has to be everywhere.

    Raises StateConflictError when somebody else was faster.
    """
    with recorded(grant, Permission.KEYS_REHASH, "pepper.in_use", pepper_set=row.pepper_set, number=row.number):
        row.compare_and_swap(hashes_from_at=grant.at)
