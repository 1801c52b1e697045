"""Envoy and Traefik, which `make gateways` installs from PyPI, and a temporary one of them in front of an upstream."""

import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from tests.environment import ROOT

from .throwaway import MissingServerError, Place, Plan, running

INSTALLED = ROOT / ".venv" / "gateways"
PLACES = {"envoy": "lib/python3*/site-packages/envoy/_bin/envoy", "traefik": "bin/traefik"}
"""The programs in INSTALLED, as patterns."""

UNCONFIGURED = b"404 page not found\n"
"""Traefik's answer before it has read its configuration."""


def find_gateway(name: str) -> Path | None:
    """Return the program `envoy` or `traefik`; None without one."""
    found = shutil.which(name)
    return Path(found) if found else next(INSTALLED.glob(PLACES[name]), None)


def is_configured(port: int) -> bool:
    """Return whether a server answers there, and is no Traefik that has not read its configuration yet."""
    connection = HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        connection.request("GET", "/")
        return connection.getresponse().read() != UNCONFIGURED
    except TimeoutError:
        return True  # It has asked a silent Keyvault.
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


@contextmanager
def gateway_server(name: str, arguments: Callable[[Place], Sequence[str]]) -> Iterator[str]:
    """Run a gateway and yield its URL. `arguments` writes its files to a place, and returns its arguments."""
    binary = find_gateway(name)
    if binary is None:
        raise MissingServerError(f"no {name} on this machine (looked for {name} on PATH and in {INSTALLED})")

    def plan(place: Place) -> Plan:
        return Plan(
            url=f"http://127.0.0.1:{place.port}",
            serve=[str(binary), *arguments(place)],
            is_ready=lambda: is_configured(place.port),
            stop_signal=signal.SIGTERM,
        )

    with running(f"kv-{name}-", plan) as url:
        yield url
