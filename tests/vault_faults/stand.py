"""A server on disk with our policies and AppRole logins, a proxy before it, and this process's service on that.

The scene's clock stands still unless it is told; the breakers and the upkeep go by it too, so that what an outage
costs in time is counted and never waited for. The timeouts alone are real, and short.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from django.test import Client, override_settings

from keyvault.access.permissions import Permission as P
from keyvault.backends.base import BackendError, BackendMissingError
from keyvault.backends.vault.bootstrap import bootstrap, list_logins, list_scopes, make_logins
from keyvault.backends.vault.breaker import Breaker
from keyvault.backends.vault.client import VaultServer, open_client
from keyvault.backends.vault.kv import VaultBackend
from keyvault.backends.vault.layout import SCOPES, Layout, SecretsEngine, VaultRole
from keyvault.backends.vault.logins import AppRoleLogin
from keyvault.backends.vault.replies import CONNECT_SECONDS
from keyvault.domain.environments import Environment
from keyvault.domain.plaintext import Plaintext
from keyvault.models import UsageReporter
from keyvault.services import maintenance
from keyvault.services.secrets.backend import secret_backend, vault_backend
from keyvault.services.usage.recorder import UsageLog
from tests.backends.vault.installation import InstalledVault, serving_from
from tests.factories import make_token
from tests.rotation.scene import Clock
from tests.servers.openbao import VaultOnDisk

from .proxy import UNDISTURBED, Proxy, Strike

ENVIRONMENTS = [environment.value for environment in Environment]
SCOPE = Environment.SANDBOX.value
IMPATIENT_SECONDS = 0.4
"""The client's read timeout where it is to be met."""

LIMITED_SECONDS = 30


class Stand:
    """What the faults work on. `installed` reaches the server itself, the service only by the `proxy`."""

    def __init__(self, server: VaultOnDisk, folder: Path, proxy: Proxy) -> None:
        self.server, self.folder, self.proxy = server, folder, proxy
        self.clock = Clock(datetime.now(UTC))
        self.layout = Layout()
        self.admin = open_client(VaultServer(server.address), Plaintext(server.root_token))
        self.mend_access()
        self.make_logins()
        direct = VaultBackend(VaultServer(server.address), lambda name: AppRoleLogin(folder, name), self.layout)
        self.installed = InstalledVault(direct, self.layout, VaultServer(proxy.address), folder, "approle", self.admin)
        self.reporter = UsageLog(now=self.clock)

    # --- the service ----------------------------------------------------------------------------------------

    @contextmanager
    def serving(self) -> Iterator[None]:
        """This process's service on the server, with a door for verification."""
        with ExitStack() as stack:
            stack.enter_context(serving_from(self.installed))
            stack.enter_context(override_settings(ACCOUNT_LIMITS=dict.fromkeys(Environment, (10**6, 1))))
            stack.enter_context(
                mock.patch.object(maintenance, "datetime", SimpleNamespace(now=lambda zone: self.clock()))
            )
            stack.enter_context(mock.patch.object(UsageLog, "start"))
            now = self.clock()
            UsageReporter.objects.create(reporter_id=self.reporter.reporter_id, started_at=now, flushed_through_at=now)
            self._door, self._token = Client(), make_token(P.KEYS_VERIFY, is_probe=True)[1]
            self.begin_process()
            yield

    def begin_process(self, *, is_impatient: bool = False) -> None:
        """The clients of a process that has just begun: nobody is logged in. Its breakers go by the scene's clock."""
        vault_backend.cache_clear()
        secret_backend.cache_clear()
        backend = vault_backend()
        if is_impatient:
            backend.server = replace(backend.server, timeout=(CONNECT_SECONDS, IMPATIENT_SECONDS))
        backend._breakers |= {scope: Breaker(clock=lambda: self.clock().timestamp()) for scope in SCOPES}

    def verify(self, text: Plaintext) -> tuple[bool, str | None]:
        """Through the real door; a probe, so that it is no use of the key. Whether it is allowed, else the code."""
        body = {"key": text.reveal(), "environment": SCOPE, "endpoint": "orders.create"}
        answer = self._door.post(
            "/v1/keys/verify",
            json.dumps(body),
            content_type="application/json",
            HTTP_AUTHORIZATION=f"Bearer {self._token.reveal()}",
        )
        assert answer.status_code == 200, answer.content
        told = answer.json()
        return told["allowed"], told["code"]

    # --- what the server has, seen by an administrator ------------------------------------------------------

    def read_newest(self, path: str) -> tuple[str, Plaintext] | None:
        """What a merchant that reads the path is given: key id and string."""
        kv = self.admin.secrets.kv.v2
        try:
            found = kv.read_secret_version(
                path, mount_point=self.layout.mount(SecretsEngine.KEYS, SCOPE), raise_on_deleted_version=True
            )
        except BackendMissingError:
            return None
        return found["data"]["data"]["key_id"], Plaintext(found["data"]["data"]["secret"])

    def live_versions(self, path: str) -> dict[int, str]:
        """Number and key id of whatever can be read."""
        kv, mount = self.admin.secrets.kv.v2, self.layout.mount(SecretsEngine.KEYS, SCOPE)
        found = kv.read_secret_metadata(path, mount_point=mount)["data"]["versions"]
        numbers = [
            int(number) for number, about in found.items() if not about["destroyed"] and not about["deletion_time"]
        ]
        return {
            number: kv.read_secret_version(path, version=number, mount_point=mount, raise_on_deleted_version=True)[
                "data"
            ]["data"]["key_id"]
            for number in numbers
        }

    # --- what may happen to it ------------------------------------------------------------------------------

    def kill(self) -> None:
        self.server.kill()

    def start_again(self) -> None:
        self.server.start()
        self.server.unseal()

    def revoke_tokens(self) -> None:
        """Of every login of ours."""
        self.admin.write_data("sys/leases/revoke-prefix/auth/approle/login")

    def delete_roles(self) -> None:
        """Their tokens too, which would go on without them."""
        for role, scope in list_logins([SCOPE]):
            self.admin.auth.approle.delete_role(self.layout.login(role, scope))
        self.revoke_tokens()

    def narrow_policies(self) -> None:
        """A login may still look at itself, and nothing else."""
        text = 'path "auth/token/lookup-self" {\n  capabilities = ["read"]\n}\n'
        for role, scope in list_logins([SCOPE]):
            self.admin.sys.create_or_update_acl_policy(self.layout.login(role, scope), text, pretty_print=False)

    def mend_access(self) -> None:
        bootstrap(self.admin, self.layout, ENVIRONMENTS, lambda change: None)

    def make_logins(
        self, *, renew: bool = False, wrap_seconds: int | None = None, roles: tuple[VaultRole, ...] = ()
    ) -> None:
        pairs = list_logins([SCOPE] if renew else list_scopes(ENVIRONMENTS))
        names = [self.layout.login(role, scope) for role, scope in pairs if not roles or role in roles]
        make_logins(self.admin, self.layout, names, self.folder, wrap_seconds=wrap_seconds, renew=renew)

    def mend_roles(self) -> None:
        self.mend_access()
        self.make_logins(renew=True)

    def limit_rate(self) -> None:
        """One request a minute of the sandbox's keys, and somebody else has had it."""
        mount = self.layout.mount(SecretsEngine.KEYS, SCOPE)
        # Without this it says 429, but not when to come back.
        self.admin.write_data("sys/quotas/config", data={"enable_rate_limit_response_headers": True})
        data = {"path": f"{mount}/", "rate": 1, "interval": f"{LIMITED_SECONDS}s"}
        self.admin.write_data("sys/quotas/rate-limit/faults", data=data)
        self.admin.secrets.kv.v2.list_secrets("", mount_point=mount)

    def lift_limit(self) -> None:
        self.admin.delete("sys/quotas/rate-limit/faults")

    def fill_disk(self) -> None:
        """Of its audit log alone: the next write there fails, as on a full disk."""
        self._limit_files(str(self.server.audit_log.stat().st_size))

    def empty_disk(self) -> None:
        self._limit_files("unlimited")
        # After a write that failed the server opens its file anew, and only the write after that goes there.
        for _ in range(3):
            with suppress(BackendError):
                self.admin.read("sys/mounts")

    def _limit_files(self, size: str) -> None:
        """By a process of the server's own user, who may do so without being root."""
        pid = self._pid()
        owner, group = Path(f"/proc/{pid}").stat().st_uid, Path(f"/proc/{pid}").stat().st_gid
        become: dict[str, Any] = {"user": owner, "group": group, "extra_groups": []} if os.geteuid() == 0 else {}
        subprocess.run(["prlimit", f"--pid={pid}", f"--fsize={size}:unlimited"], check=True, **become)  # noqa: S607  of util-linux

    def slow_down(self) -> None:
        """Every answer comes when the client has given up."""
        self.proxy.every = Strike(slow_seconds=1.5 * IMPATIENT_SECONDS)

    def speed_up(self) -> None:
        self.proxy.every = UNDISTURBED

    def _pid(self) -> int:
        settings = f"-config={self.server.audit_log.parent / 'server.hcl'}".encode()
        for found in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = found.read_bytes().split(b"\0")
            except OSError:
                continue
            if settings in words and b"server" in words[1:2]:
                return int(found.parent.name)
        raise LookupError("the server does not run")


@contextmanager
def standing(server: VaultOnDisk, folder: Path) -> Iterator[Stand]:
    """Installed and served from; needs a database that is set up."""
    with Proxy(server.address).running() as proxy:
        stand = Stand(server, folder, proxy)
        with stand.serving():
            yield stand
