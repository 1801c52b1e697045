"""Expose the meters in Prometheus' text format, without ids, merchants or secret material."""

import os
from contextlib import suppress
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from keyvault.backends import meters  # noqa: F401  registers its meters before their first event

CONTENT_TYPE = CONTENT_TYPE_LATEST


def expose_meters() -> bytes:
    """Return this process's meters, or with PROMETHEUS_MULTIPROC_DIR those of all processes that share it."""
    return generate_latest(_registry())


def _registry() -> CollectorRegistry:
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if not folder:
        return REGISTRY
    _remove_dead_processes(Path(folder))
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=folder)  # type: ignore[no-untyped-call]  # the library's
    return registry


def _remove_dead_processes(folder: Path) -> None:
    """Remove the gauges of processes that have ended."""
    for file in folder.glob("gauge_live*_*.db"):
        pid = int(file.stem.rpartition("_")[2])
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            # A concurrent scrape may have removed it.
            with suppress(FileNotFoundError):
                mark_process_dead(pid, path=str(folder))  # type: ignore[no-untyped-call]  # the library's
        except PermissionError:
            continue
