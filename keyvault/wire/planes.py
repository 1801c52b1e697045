"""The planes of the service: groups of paths, each for other clients."""

from enum import StrEnum

from keyvault.domain.environments import Environment


class Plane(StrEnum):
    INTEGRATION = "integration"
    """For merchants, below an environment's base URL."""
    SERVICE = "service"
    """For backend services and gateways with a service token."""
    CONSOLE = "console"
    """For operators in a browser."""


METRICS = "/metrics"

DOCS = frozenset({"/v1/docs", "/v1/openapi.json"})

_PREFIXES = (
    *((f"/{environment}/", Plane.INTEGRATION) for environment in Environment),
    ("/v1/", Plane.SERVICE),
    ("/admin/", Plane.CONSOLE),
)


def find_plane(path: str) -> Plane | None:
    """Return the plane of a percent-decoded path; None for the documentation, health checks, metrics and static files.

    `path`: with the environment's name in place of its base URL.
    """
    if path in DOCS:
        return None
    return next((plane for prefix, plane in _PREFIXES if path.startswith(prefix)), None)
