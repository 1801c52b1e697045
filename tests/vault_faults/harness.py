"""A server on disk with the policies and AppRole logins, a proxy before it, and this process's service on it.

The scene's clock advances only when a test advances it. The breakers and the maintenance use the same clock, so the
duration of an outage is counted and never waited for. Only the timeouts are real, and short.
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
from tests.clocks import Clock
from tests.factories import make_token
from tests.servers.openbao import VaultOnDisk

from .proxy import NO_FAULT, Injection, VaultProxy

ENVIRONMENTS = [environment.value for environment in Environment]
SCOPE = Environment.SANDBOX.value
SHORT_TIMEOUT_SECONDS = 0.4
"""The client's read timeout for faults that must exceed it, in seconds."""

LIMITED_SECONDS = 30

ADMIN_READ_SECONDS = 60.0
"""The administrator's read timeout, in seconds: on a busy machine an injection takes longer than the service waits."""


class VaultHarness:
    """The system that faults act on. `installed` connects to the server directly, the service only through `proxy`."""

    def __init__(self, server: VaultOnDisk, folder: Path, proxy: VaultProxy) -> None:
        self.server, self.folder, self.proxy = server, folder, proxy
        self.clock = Clock(datetime.now(UTC))
        self.layout = Layout()
        slow_client = VaultServer(server.address, timeout=(CONNECT_SECONDS, ADMIN_READ_SECONDS))
        self.admin = open_client(slow_client, Plaintext(server.root_token))
        self.restore_access()
        self.make_logins()
        direct = VaultBackend(VaultServer(server.address), lambda name: AppRoleLogin(folder, name), self.layout)
        self.installed = InstalledVault(direct, self.layout, VaultServer(proxy.address), folder, "approle", self.admin)
        self.reporter = UsageLog(now=self.clock)

    # --- the service ----------------------------------------------------------------------------------------

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Serve from the server in this process, with the verify endpoint."""
        with ExitStack() as stack:
            stack.enter_context(serving_from(self.installed))
            stack.enter_context(override_settings(ACCOUNT_LIMITS=dict.fromkeys(Environment, (10**6, 1))))
            stack.enter_context(
                mock.patch.object(maintenance, "datetime", SimpleNamespace(now=lambda zone: self.clock()))
            )
            stack.enter_context(mock.patch.object(UsageLog, "start"))
            now = self.clock()
            UsageReporter.objects.create(
                reporter_id=self.reporter.reporter_id, started_at=now, flushed_through_at=now, peppers={}
            )
            self._client, self._token = Client(), make_token(P.KEYS_VERIFY, is_probe=True)[1]
            self.begin_process()
            yield

    def begin_process(self, *, needs_short_timeouts: bool = False) -> None:
        """Create the clients of a fresh process: nothing is logged in. Its breakers use the scene's clock."""
        vault_backend.cache_clear()
        secret_backend.cache_clear()
        backend = vault_backend()
        if needs_short_timeouts:
            backend.server = replace(backend.server, timeout=(CONNECT_SECONDS, SHORT_TIMEOUT_SECONDS))
        backend._breakers |= {scope: Breaker(clock=lambda: self.clock().timestamp()) for scope in SCOPES}

    def verify(self, text: Plaintext) -> tuple[bool, str | None]:
        """Verify through the real endpoint as a probe, so that it counts as no use.

        Returns whether the key is allowed, and the code if not.
        """
        body = {"key": text.reveal(), "environment": SCOPE, "endpoint": "orders.create"}
        answer = self._client.post(
            "/v1/keys/verify",
            json.dumps(body),
            content_type="application/json",
            HTTP_AUTHORIZATION=f"Bearer {self._token.reveal()}",
        )
        assert answer.status_code == 200, answer.content
        verdict = answer.json()
        return verdict["allowed"], verdict["code"]

    # --- server content, as an administrator ----------------------------------------------------------------

    def read_newest(self, path: str) -> tuple[str, Plaintext] | None:
        """Return the key id and the key string that a merchant reads at the path."""
        kv = self.admin.secrets.kv.v2
        try:
            found = kv.read_secret_version(
                path, mount_point=self.layout.mount(SecretsEngine.KEYS, SCOPE), raise_on_deleted_version=True
            )
        except BackendMissingError:
            return None
        return found["data"]["data"]["key_id"], Plaintext(found["data"]["data"]["secret"])

    def live_versions(self, path: str) -> dict[int, str]:
        """Return number and key id of every readable version."""
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

    # --- faults and their repair ------------------------------------------------------------------------------

    def kill(self) -> None:
        self.server.kill()

    def restart(self) -> None:
        self.server.start()
        self.server.unseal()

    def revoke_tokens(self) -> None:
        """Revoke the tokens of every login of this installation."""
        self.admin.write_data("sys/leases/revoke-prefix/auth/approle/login")

    def delete_roles(self) -> None:
        """Delete the roles and revoke their tokens, which would otherwise stay valid."""
        for role, scope in list_logins([SCOPE]):
            self.admin.auth.approle.delete_role(self.layout.login(role, scope))
        self.revoke_tokens()

    def narrow_policies(self) -> None:
        """Restrict every policy: a login may look up its own token and nothing else."""
        text = 'path "auth/token/lookup-self" {\n  capabilities = ["read"]\n}\n'
        for role, scope in list_logins([SCOPE]):
            self.admin.sys.create_or_update_acl_policy(self.layout.login(role, scope), text, pretty_print=False)

    def restore_access(self) -> None:
        bootstrap(self.admin, self.layout, ENVIRONMENTS, lambda change: None)

    def make_logins(
        self, *, renew: bool = False, wrap_seconds: int | None = None, roles: tuple[VaultRole, ...] = ()
    ) -> None:
        pairs = list_logins([SCOPE] if renew else list_scopes(ENVIRONMENTS))
        names = [self.layout.login(role, scope) for role, scope in pairs if not roles or role in roles]
        make_logins(self.admin, self.layout, names, self.folder, wrap_seconds=wrap_seconds, renew=renew)

    def restore_roles(self) -> None:
        self.restore_access()
        self.make_logins(renew=True)

    def limit_rate(self) -> None:
        """Limit the sandbox keys to one request a minute, and use that request up."""
        mount = self.layout.mount(SecretsEngine.KEYS, SCOPE)
        # Without this header the server answers 429 without a Retry-After.
        self.admin.write_data("sys/quotas/config", data={"enable_rate_limit_response_headers": True})
        data = {"path": f"{mount}/", "rate": 1, "interval": f"{LIMITED_SECONDS}s"}
        self.admin.write_data("sys/quotas/rate-limit/faults", data=data)
        self.admin.secrets.kv.v2.list_secrets("", mount_point=mount)

    def lift_limit(self) -> None:
        self.admin.delete("sys/quotas/rate-limit/faults")

    def fill_disk(self) -> None:
        """Make the next write of the server's audit log fail, as on a full disk."""
        self._limit_files(str(self.server.audit_log.stat().st_size))

    def empty_disk(self) -> None:
        self._limit_files("unlimited")
        # After a failed write the server reopens its file, and only the next write succeeds.
        for _ in range(3):
            with suppress(BackendError):
                self.admin.read("sys/mounts")

    def _limit_files(self, size: str) -> None:
        """Set the file size limit as the server's own user, which needs no root."""
        pid = self._pid()
        owner, group = Path(f"/proc/{pid}").stat().st_uid, Path(f"/proc/{pid}").stat().st_gid
        become: dict[str, Any] = {"user": owner, "group": group, "extra_groups": []} if os.geteuid() == 0 else {}
        subprocess.run(["prlimit", f"--pid={pid}", f"--fsize={size}:unlimited"], check=True, **become)  # noqa: S607  of util-linux

    def slow_down(self) -> None:
        """Delay every reply beyond the client's timeout."""
        self.proxy.every = Injection(slow_seconds=1.5 * SHORT_TIMEOUT_SECONDS)

    def restore_speed(self) -> None:
        self.proxy.every = NO_FAULT

    def _pid(self) -> int:
        settings = f"-config={self.server.audit_log.parent / 'server.hcl'}".encode()
        for found in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = found.read_bytes().split(b"\0")
            except OSError:
                continue
            if settings in words and b"server" in words[1:2]:
                return int(found.parent.name)
        raise LookupError("the server is not running")


@contextmanager
def running_harness(server: VaultOnDisk, folder: Path) -> Iterator[VaultHarness]:
    """Install on the server and serve from it; needs a migrated database."""
    with VaultProxy(server.address).running() as proxy:
        harness = VaultHarness(server, folder, proxy)
        with harness.serving():
            yield harness
