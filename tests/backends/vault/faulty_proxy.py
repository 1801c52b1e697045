"""What stands between us and a real server, and fails on demand as the fake does: slow, refusing, losing replies."""

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
class Between(FakeVault):
    """`fail` and `calls` are the fake's; every answer is that of the server at `beyond`."""

    beyond: str = ""

    def answer(self, call: Call) -> Answer:
        found = requests.request(
            call.method,
            f"{self.beyond}/v1/{quote(call.path)}?{call.headers['query']}",
            headers={name: call.headers[name] for name in PASSED_ON if name in call.headers},
            json=call.body,
            timeout=30,
        )
        return found.status_code, found.json() if found.content else None


@contextmanager
def between(
    made: InstalledVault, timeout: tuple[float, float] = (10.0, 30.0)
) -> Iterator[tuple[Between, InstalledVault]]:
    """The same installation, asked through it; nobody is logged in yet."""
    with serving(Between(beyond=made.server.address)) as proxy:
        server = VaultServer(proxy.address, timeout=timeout)
        yield proxy, replace(made, server=server, backend=opened(server, made.logins, made.layout))
