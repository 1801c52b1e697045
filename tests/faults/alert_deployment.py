"""The programs under experiment with an address each in KEYVAULT_METRICS, their clients, and a real Prometheus."""

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.request import Request, urlopen

import yaml
from django.conf import settings
from django.test import override_settings

from keyvault.access.permissions import Permission as P
from keyvault.backends.vault import bootstrap
from keyvault.domain.keystring import StringKind, StringScope, mint_keystring
from keyvault.domain.plaintext import Plaintext
from keyvault.domain.revocation import RevocationReason
from keyvault.management import service
from keyvault.management.service import ADDRESS, find_free_port
from keyvault.management.supervisor import Program, Supervisor, start_child_process
from keyvault.models import Account, Key
from keyvault.services.keys.lifecycle import revoke_key
from keyvault.services.webhooks.endpoints import add_endpoint
from tests.backends.receivers import LOOPBACK, Receiver, receiver
from tests.backends.vault.installation import installed, serving_from
from tests.environment import ROOT
from tests.factories import grant, make_token
from tests.faults.merchants import gateway_token, make_merchants
from tests.faults.programs import until
from tests.faults.proxy import Proxy
from tests.faults.results import Options, say
from tests.faults.traffic import Merchant
from tests.rotation import scene
from tests.servers.openbao import VaultOnDisk, openbao_on_disk

READY_SECONDS = 60
DISK_BYTES = 384 * 1024 * 1024
RULES = ROOT / "deploy" / "prometheus" / "keyvault.rules.yml"
SCRAPE_SECONDS = 2
CHECKPOINT_SECONDS = 5
TOKEN_SECONDS = 45
"""Period of the Vault's tokens. A token in use is renewed when at least a third of its period is left."""

PROGRAMS = ("server", "worker", "beat")
_ENV = shutil.which("env") or "/usr/bin/env"

SHORTER: Mapping[str, tuple[str, str]] = {
    "KeyvaultQueueDelayed": ("> 60", "> 20"),
    "KeyvaultRevocationAnchorLate": ("> 600", "> 20"),
    "KeyvaultAuditUnsigned": ("> 3600", "> 20"),
    "KeyvaultAlarmsUndelivered": ("> 3", "> 1"),
    "KeyvaultVaultTokenExpires": ("< 60", "< 8"),
    "KeyvaultTaskFailing": ("", ""),
    "KeyvaultVerifySlow": ("", ""),
    "KeyvaultAlarmsUnacknowledged": ("", ""),
}
"""Thresholds of rules that wait for longer than a fault lasts, replaced while their own fault lasts. So is `for`."""

RANGE, PENDING_FOR = "[30s]", "10s"
"""Range of every `increase` and `rate`, so that an alert ends with its fault. `for` of the rules in SHORTER."""


def shorten_rules(alerts: Collection[str]) -> str:
    """Return the shipped rules with short ranges, and with the waits of these alerts shortened."""
    rules = yaml.safe_load(RULES.read_text())
    for rule in rules["groups"][0]["rules"]:
        rule["expr"] = re.sub(r"\[\d+[smh]\]", RANGE, rule["expr"])
        if rule["alert"] in alerts and rule["alert"] in SHORTER:
            old, new = SHORTER[rule["alert"]]
            assert old in rule["expr"], rule["expr"]
            rule |= {"expr": rule["expr"].replace(old, new), "for": PENDING_FOR}
    return str(yaml.safe_dump(rules))


@dataclass
class Deployment:
    """What a fault acts on.

    `account`: of the merchant, which has a webhook endpoint. `disk`: the small file system of the revocation log `log`;
    None: it cannot be mounted. `proxy`: between the server and PostgreSQL. `hooks`: receives all webhooks. `vault`: the
    secret backend; None: it is the local keystore.
    """

    options: Options
    supervisor: Supervisor
    prometheus: "Prometheus"
    port: int
    merchant: Merchant
    account: Account
    log: Path
    clock: Path
    disk: Path | None
    proxy: Proxy
    hooks: Receiver
    responder: Plaintext
    vault: VaultOnDisk | None

    def kill(self, name: str) -> None:
        (child,) = (each for each in self.supervisor._children if each.program.name == name)
        assert child.process is not None
        os.killpg(child.process.pid, signal.SIGKILL)

    def issue_key(self) -> Key:
        """Return another key of the account."""
        return scene.issue(self.account, datetime.now(UTC), label="another key")[0]

    def revoke(self, key: Key) -> None:
        """Revoke a key here: an audit entry, a change for the anchor, and a webhook message."""
        revoke_key(grant(scene.admin(), P.KEYS_REVOKE, self.account), key, RevocationReason.SUPERSEDED)

    def revoke_through_server(self) -> None:
        headers = {"Authorization": f"Bearer {self.responder.reveal()}"}
        path, body = f"/v1/keys/{self.issue_key().key_id}/revoke", {"reason": "superseded"}
        status, text = send(self.port, "POST", path, body, headers)
        if status != http.HTTPStatus.ACCEPTED:
            raise RuntimeError(f"the revocation was answered {status}: {text}")


def open_deployment(options: Options, stack: ExitStack, *, on_vault: bool, shortened: Collection[str]) -> Deployment:
    """Start the programs, their clients and Prometheus, with rules in which the waits of `shortened` are short."""
    vault = stack.enter_context(openbao_on_disk()) if on_vault else None
    backend = {} if vault is None else stack.enter_context(_served_from(vault, options.folder))
    (merchant,), token = make_merchants(1), gateway_token()
    account = merchant.credential.account
    hooks = stack.enter_context(receiver())
    with override_settings(WEBHOOK_NETWORKS=LOOPBACK):
        add_endpoint(grant(scene.admin(), P.WEBHOOKS_WRITE, account), account, hooks.url("/merchant"))
    port, ports = find_free_port(), {name: find_free_port() for name in PROGRAMS}
    disk = stack.enter_context(_small_disk(options.folder / "disk"))
    log, clock = (disk or options.folder) / "alerts_log", options.folder / "clock"
    # The keys were made with another log.
    shutil.copy(options.folder / "revocation_log", log)
    clock.write_text("0")
    proxy, through_proxy = Proxy.before(os.environ["KEYVAULT_DATABASE_URL"])
    stack.callback(proxy.close)
    variables = {
        **os.environ,
        "KEYVAULT_ORIGIN": service.local_url(port),
        "KEYVAULT_REDIS_URL": options.servers["redis"].url,
        "KEYVAULT_REVOCATION_LOG": str(log),
        "KEYVAULT_WEBHOOK_NETWORKS": str(LOOPBACK[0]),
        "KEYVAULT_ALARM_WEBHOOK": hooks.url("/alarms"),
        "KEYVAULT_ALARM_WEBHOOK_SECRET": "whsec_" + "A" * 43 + "=",
        "FAULTS_CLOCK": str(clock),
        "FAULTS_CHECKPOINT_SECONDS": str(CHECKPOINT_SECONDS),
        **backend,
    }
    programs = _programs(port, ports, through_proxy)
    supervisor = stack.enter_context(Supervisor(programs, variables, ROOT, options.folder / "logs", say))
    service.wait_until_ready(supervisor, port)
    prometheus = stack.enter_context(
        _running_prometheus(options.folder / "prometheus", ports, shorten_rules(shortened))
    )
    responder = make_token(P.KEYS_REVOKE, name="responder")[1]
    stack.enter_context(_requesting(port, token, next(iter(merchant.keys.values()))))
    return Deployment(
        options, supervisor, prometheus, port, merchant, account, log, clock, disk, proxy, hooks, responder, vault
    )


def _programs(port: int, ports: Mapping[str, int], database_of_server: str) -> list[Program]:
    """Return the programs, each with its own variables. `ports`: of their metrics."""
    server, worker, beat = service.server_program(port), service.worker_program(), service.beat_program()
    commands = {
        "server": (f"KEYVAULT_DATABASE_URL={database_of_server}", *server.command),
        "worker": _patched(worker.command),
        "beat": _patched(beat.command),
    }
    signals = {"server": server.orphan_signal, "worker": worker.orphan_signal, "beat": beat.orphan_signal}
    return [
        Program(name, (_ENV, f"KEYVAULT_METRICS={ADDRESS}:{ports[name]}", *commands[name]), signals[name])
        for name in PROGRAMS
    ]


def _patched(command: tuple[str, ...]) -> tuple[str, ...]:
    options = command[command.index("keyvault.project") + 1 :]
    return (sys.executable, "-m", "tests.faults.skewed", *options)


@contextmanager
def _served_from(vault: VaultOnDisk, folder: Path) -> Iterator[Mapping[str, str]]:
    """Install on the server, with tokens of a short period, and use it here. Yield the environment of the programs."""
    logins = folder / "vault"
    logins.mkdir(mode=0o700)
    with (
        mock.patch.object(bootstrap, "TOKEN_SECONDS", TOKEN_SECONDS),
        installed(vault, logins) as made,
        serving_from(made),
    ):
        yield {
            "KEYVAULT_BACKEND": "vault",
            "VAULT_ADDR": vault.address,
            "KEYVAULT_VAULT_PREFIX": made.layout.prefix,
            "KEYVAULT_VAULT_CREDENTIALS_DIR": str(logins),
        }


# --- Prometheus -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prometheus:
    url: str
    rules: Path

    def load(self, rules: str) -> None:
        """Evaluate these rules from now on. Rules of the same name and text keep their state."""
        self.rules.write_text(rules)
        with urlopen(Request(f"{self.url}/-/reload", method="POST"), timeout=30):  # noqa: S310  the experiment's own
            pass

    def firing(self) -> set[str]:
        alerts = self._get("alerts")["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def are_all_scraped(self) -> bool:
        found = self._get("query?query=sum(up)")["result"]
        return bool(found) and float(found[0]["value"][1]) == len(PROGRAMS)

    def _get(self, path: str) -> Any:
        with urlopen(f"{self.url}/api/v1/{path}", timeout=30) as answer:  # noqa: S310  the experiment's own
            return json.load(answer)["data"]


@contextmanager
def _running_prometheus(home: Path, ports: Mapping[str, int], rules: str) -> Iterator[Prometheus]:
    binary = shutil.which("prometheus")
    assert binary is not None
    home.mkdir()
    jobs = [
        {"job_name": f"keyvault-{name}", "static_configs": [{"targets": [f"{ADDRESS}:{port}"]}]}
        for name, port in ports.items()
    ]
    interval = f"{SCRAPE_SECONDS}s"
    port = find_free_port()
    here = Prometheus(f"http://{ADDRESS}:{port}", home / "rules.yml")
    here.rules.write_text(rules)
    sample = {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
        "rule_files": [str(here.rules)],
        "scrape_configs": jobs,
    }
    (home / "prometheus.yml").write_text(yaml.safe_dump(sample))
    command = [binary, f"--config.file={home / 'prometheus.yml'}", f"--storage.tsdb.path={home / 'data'}"]
    command += [f"--web.listen-address={ADDRESS}:{port}", "--web.enable-lifecycle", "--log.level=warn"]
    process = start_child_process(command, environ=os.environ, folder=home, orphan_signal=signal.SIGKILL)
    try:
        until("Prometheus to be ready", lambda: _answers(f"{here.url}/-/ready"), READY_SECONDS)
        yield here
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=5) as answer:  # noqa: S310  the experiment's own
            return bool(answer.status == http.HTTPStatus.OK)
    except OSError:
        return False


@contextmanager
def _small_disk(folder: Path) -> Iterator[Path | None]:
    """A small file system of its own; None where this user may not mount one."""
    folder.mkdir(mode=0o700)
    unmount = ["umount", "--lazy", str(folder)]
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0700", "keyvault-faults", str(folder)]
    try:
        is_mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        is_mounted = False
    try:
        yield folder if is_mounted else None
    finally:
        if is_mounted:
            subprocess.run(unmount, check=True)


# --- the clients ------------------------------------------------------------------------------------------------


def send(
    port: int, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Send a JSON body over a connection of its own. Return status and body of the response. Raises OSError."""
    with closing(http.client.HTTPConnection(ADDRESS, port, timeout=10)) as connection:
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, {"Content-Type": "application/json", **(headers or {})})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


@contextmanager
def _requesting(port: int, token: Plaintext, key: Plaintext) -> Iterator[None]:
    """Once a second verify the key, verify an unknown one, and create an order.

    The first spends limits, the second takes the slow path, and Django answers the third.
    """
    started = time.time_ns()
    bearer, known = {"Authorization": f"Bearer {token.reveal()}"}, key.reveal()
    context = {"environment": "sandbox", "endpoint": "orders.retrieve"}

    def ask(number: int) -> None:
        send(port, "POST", "/v1/keys/verify", {"key": known, **context}, bearer)
        unknown = mint_keystring(settings.KEY_PREFIX, StringKind.PRIVATE, StringScope.SANDBOX, os.urandom).text.reveal()
        send(port, "POST", "/v1/keys/verify", {"key": unknown, **context}, bearer)
        own = {"X-Api-Key": known, "Idempotency-Key": f"order-{started}-{number}"}
        send(port, "POST", "/sandbox/merchants/orders", {"amount_minor": 1250, "currency": "EUR"}, own)

    with _each_second(ask):
        yield


@contextmanager
def _each_second(ask: Callable[[int], None]) -> Iterator[None]:
    ended = threading.Event()

    def repeat() -> None:
        number = 0
        while not ended.wait(1):
            number += 1
            with suppress(OSError, http.client.HTTPException):
                ask(number)

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(40)
