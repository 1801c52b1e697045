"""Readiness: check every dependency that this process needs to judge keys."""

from collections.abc import Mapping

from django.db import DatabaseError, connection

from keyvault.models.triggers import missing_triggers
from keyvault.services.change_feed.follower import is_feed_followed
from keyvault.services.peppers.ring import list_served_sets, pepper_health
from keyvault.services.work.disk_space import is_disk_full

DISK = "disk"


def find_readiness() -> Mapping[str, bool]:
    """Return the state of each dependency by name; never raises.

    The dependencies are the database with its triggers, the peppers, the disk, and the change feed if this process
    follows it.
    """
    checks = {"database": _is_database_ready()}
    # Without the database no pepper can be checked, not even one in memory.
    loaded = pepper_health() if checks["database"] else dict.fromkeys(list_served_sets(), False)
    checks |= {f"peppers_{pepper_set}": ready for pepper_set, ready in loaded.items()}
    checks[DISK] = _has_disk_space()
    followed = is_feed_followed()
    return checks if followed is None else {**checks, "change_feed": followed}


def readiness_body(checks: Mapping[str, bool]) -> tuple[int, dict[str, object]]:
    """Return the status and the body of the reply.

    A process on a full disk stays ready: it judges keys, and writes revocations into its reserve.
    """
    ready = all(fine for name, fine in checks.items() if name != DISK)
    states = {name: "ok" if fine else "failing" for name, fine in checks.items()}
    return 200 if ready else 503, {"status": "ready" if ready else "not_ready", "checks": states}


def _has_disk_space() -> bool:
    try:
        return not is_disk_full()
    except OSError:
        return False


def _is_database_ready() -> bool:
    try:
        return not missing_triggers(connection)
    except DatabaseError:
        return False
