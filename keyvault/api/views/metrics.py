"""Metrics in Prometheus' text format, without ids, merchants or material."""

from django.http import HttpResponse
from rest_framework.request import Request

from keyvault.api.openapi import NO_CREDENTIAL, PUBLIC_CODES, documented
from keyvault.api.public import PublicView
from keyvault.services.startup.metrics import CONTENT_TYPE, expose_meters


class MetricsView(PublicView):
    """Metrics of this process; with PROMETHEUS_MULTIPROC_DIR, of all processes that share the directory."""

    @documented(
        "metrics",
        summary="Counters and gauges in Prometheus' text format.",
        description="The metrics of this process, without ids, merchants and secrets. Processes that share "
        "PROMETHEUS_MULTIPROC_DIR report a sum.",
        answers={(200, "text/plain"): str},
        plane=PUBLIC_CODES,
        auth=NO_CREDENTIAL,
        tag="operations",
    )
    def get(self, request: Request) -> HttpResponse:
        return HttpResponse(expose_meters(), content_type=CONTENT_TYPE)
