"""Liveness and readiness checks for load balancers."""

from rest_framework.request import Request
from rest_framework.response import Response

from keyvault.api.openapi import NO_CREDENTIAL, PUBLIC_CODES, documented
from keyvault.api.public import PublicView
from keyvault.api.schemas import HEALTH_BODY, READINESS_BODY
from keyvault.services.startup.readiness import find_readiness, readiness_body


class HealthView(PublicView):
    """Liveness: checks no dependency, so that an outage elsewhere restarts nothing."""

    @documented(
        "healthz",
        summary="Liveness of the process.",
        description="Answers 200 while the process runs. It checks no dependency, so that an outage elsewhere restarts "
        "nothing: use `/readyz` to decide whether to send requests here.",
        answers={200: HEALTH_BODY},
        plane=PUBLIC_CODES,
        auth=NO_CREDENTIAL,
        tag="operations",
    )
    def get(self, request: Request) -> Response:
        return Response({"status": "ok"})


class ReadinessView(PublicView):
    """Readiness, with each dependency of a verdict by name.

    The dependencies are the database with its triggers, the peppers, the disk and, where the process answers from
    memory, the change feed.
    """

    @documented(
        "readyz",
        summary="Readiness of the process, with each dependency by name.",
        description="Answers 200 while the process can judge a key, and 503 otherwise. `checks` names each "
        "dependency: the database with its triggers, the peppers and, where verdicts come from memory, "
        "the change feed. A full `disk` is named, but does not count: the process still judges and revokes keys. "
        "Neither the worker nor the broker counts.",
        answers={200: READINESS_BODY, 503: READINESS_BODY},
        plane=PUBLIC_CODES,
        auth=NO_CREDENTIAL,
        tag="operations",
    )
    def get(self, request: Request) -> Response:
        status, body = readiness_body(find_readiness())
        return Response(body, status=status)
