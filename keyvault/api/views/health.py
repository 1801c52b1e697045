"""Whether the process lives, and whether it can judge: what a load balancer asks."""

from django.db import DatabaseError, connection
from rest_framework.request import Request
from rest_framework.response import Response

from keyvault.api.bodies import HealthBody, ReadinessBody
from keyvault.api.openapi import NOBODY, PUBLIC_CODES, documented
from keyvault.api.public import PublicView
from keyvault.models.triggers import missing_triggers
from keyvault.services.peppers import list_served_sets, pepper_health


class HealthView(PublicView):
    """The process answers; nothing else is asked, so that an outage elsewhere restarts nothing."""

    @documented(
        "healthz",
        summary="Whether the process lives.",
        answers={200: HealthBody},
        plane=PUBLIC_CODES,
        auth=NOBODY,
        tag="operations",
    )
    def get(self, request: Request) -> Response:
        return Response({"status": "ok"})


class ReadinessView(PublicView):
    """Each thing that a verdict needs, by name: the database with its rules in force, and the peppers."""

    @documented(
        "readyz",
        summary="Whether the process can judge; what it needs for that, each by name.",
        answers={200: ReadinessBody, 503: ReadinessBody},
        plane=PUBLIC_CODES,
        auth=NOBODY,
        tag="operations",
    )
    def get(self, request: Request) -> Response:
        checks = {"database": _database_is_ready()}
        # Without the database nothing vouches for a pepper, not even for one in memory.
        loaded = pepper_health() if checks["database"] else dict.fromkeys(list_served_sets(), False)
        checks |= {f"peppers_{pepper_set}": ready for pepper_set, ready in loaded.items()}
        ready = all(checks.values()) and bool(loaded)
        states = {name: "ok" if fine else "failing" for name, fine in checks.items()}
        return Response({"status": "ready" if ready else "not_ready", "checks": states}, status=200 if ready else 503)


def _database_is_ready() -> bool:
    try:
        return not missing_triggers(connection)
    except DatabaseError:
        return False
