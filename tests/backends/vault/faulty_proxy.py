"""A proxy before a real server that fails on demand as the fake does: slow, refusing, losing replies."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from urllib.parse import quote

import requests

from keyvault.backends.vault.client import VaultServer

from .fake import Answer, Call, FakeVault, serving
from .installation import InstalledVault, opened

PASSED_ON = ("x-vault-token", "x-vault-wrap-ttl", "x-vault-request")


@dataclass
class FaultyProxy(FakeVault):
    """Injects the fake's faults and records `calls`; every answer comes from the server at `upstream`."""

    upstream: str = ""

    def answer(self, call: Call) -> Answer:
        found = requests.request(
            call.method,
            f"{self.upstream}/v1/{quote(call.path)}?{call.headers['query']}",
            headers={name: call.headers[name] for name in PASSED_ON if name in call.headers},
            json=call.body,
            timeout=30,
        )
        return found.status_code, found.json() if found.content else None


@contextmanager
def behind_faulty_proxy(
    made: InstalledVault, timeout: tuple[float, float] = (10.0, 30.0)
) -> Iterator[tuple[FaultyProxy, InstalledVault]]:
    """Return the same installation behind the proxy; nothing is logged in yet."""
    with serving(FaultyProxy(upstream=made.server.address)) as proxy:
        server = VaultServer(proxy.address, timeout=timeout)
        yield proxy, replace(made, server=server, backend=opened(server, made.logins, made.layout))
