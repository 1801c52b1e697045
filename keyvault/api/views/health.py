"""Whether the process lives, and whether it can judge: what a load balancer asks."""

from rest_framework.request import Request
from rest_framework.response import Response

from keyvault.api.openapi import NOBODY, PUBLIC_CODES, documented
from keyvault.api.public import PublicView
from keyvault.api.schemas import HealthBody, ReadinessBody
from keyvault.services.startup.readiness import find_readiness, readiness_body


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
    """Each thing that a verdict needs, by name: the database with its rules in force, the peppers, and the
    change feed where the process judges from memory."""

    @documented(
        "readyz",
        summary="Whether the process can judge; what it needs for that, each by name.",
        answers={200: ReadinessBody, 503: ReadinessBody},
        plane=PUBLIC_CODES,
        auth=NOBODY,
        tag="operations",
    )
    def get(self, request: Request) -> Response:
        status, body = readiness_body(find_readiness())
        return Response(body, status=status)
