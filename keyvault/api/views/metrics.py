"""What there is to watch, in Prometheus' text format: no ids, no merchants, no material."""

import os
from contextlib import suppress
from pathlib import Path

from django.http import HttpResponse
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from rest_framework.request import Request

from keyvault.api.openapi import NOBODY, PUBLIC_CODES, documented
from keyvault.api.public import PublicView
from keyvault.backends import meters  # noqa: F401  its meters are there before their first event


class MetricsView(PublicView):
    """Of this process; with PROMETHEUS_MULTIPROC_DIR of all processes of this host that have it."""

    @documented(
        "metrics",
        summary="Counters and gauges in Prometheus' text format.",
        answers={(200, "text/plain"): str},
        plane=PUBLIC_CODES,
        auth=NOBODY,
        tag="operations",
    )
    def get(self, request: Request) -> HttpResponse:
        return HttpResponse(generate_latest(_registry()), content_type=CONTENT_TYPE_LATEST)


def _registry() -> CollectorRegistry:
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if not folder:
        return REGISTRY
    _forget_the_dead(Path(folder))
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=folder)  # type: ignore[no-untyped-call]  # the library's
    return registry


def _forget_the_dead(folder: Path) -> None:
    """Gauges of processes that have ended say nothing of now."""
    for file in folder.glob("gauge_live*_*.db"):
        pid = int(file.stem.rpartition("_")[2])
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            # Whoever was asked at the same time may have done it.
            with suppress(FileNotFoundError):
                mark_process_dead(pid, path=str(folder))  # type: ignore[no-untyped-call]  # the library's
        except PermissionError:
            continue
