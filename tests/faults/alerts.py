"""Each fault fires exactly its alerts, in a real Prometheus with the shipped rules; a quiet minute fires none.

A server, a worker and a beat have an address each in KEYVAULT_METRICS, as the documentation says.
"""

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import urlopen

import yaml
from django.db import connections

from keyvault.access.permissions import Permission as P
from keyvault.management import service
from keyvault.management.service import ADDRESS, find_free_port
from keyvault.management.supervisor import Program, Supervisor, start_child_process
from keyvault.services.keys.lifecycle import suspend_key
from rotation.domain.events import RotationState as S
from rotation.models import Rotation
from tests.environment import ROOT
from tests.factories import grant
from tests.faults.campaign import begin_campaign
from tests.faults.merchants import gateway_token, make_merchants
from tests.faults.programs import GaveUpError, until
from tests.faults.results import Options, Result, say
from tests.rotation import scene

WITHIN_SECONDS = 60
"""Maximum time from a fault to its alerts. Each fault lasts that long, so that a wrong alert is seen, too."""

RECOVERY_SECONDS = 120
DISK_BYTES = 384 * 1024 * 1024
RULES = ROOT / "deploy" / "prometheus" / "keyvault.rules.yml"
SCRAPE_SECONDS = 2
PROGRAMS = ("server", "worker", "beat")
_ENV = shutil.which("env") or "/usr/bin/env"


@dataclass
class Deployment:
    """The programs under experiment, and what Prometheus says about them."""

    options: Options
    supervisor: Supervisor
    prometheus: str
    log: Path
    clock: Path
    disk: Path | None
    stopped: set[str] = field(default_factory=set)

    def firing(self) -> set[str]:
        with urlopen(f"{self.prometheus}/api/v1/alerts", timeout=10) as answer:  # noqa: S310  the experiment's own
            alerts = json.load(answer)["data"]["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def kill(self, name: str) -> None:
        (child,) = (each for each in self.supervisor._children if each.program.name == name)
        assert child.process is not None
        os.killpg(child.process.pid, signal.SIGKILL)

    def watch(self, seconds: float, *, is_restarting: bool = True) -> set[str]:
        """Return every alert that fires within the time."""
        seen: set[str] = set()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if is_restarting:
                self.supervisor.restart_ended()
            seen |= self.firing()
            time.sleep(0.5)
        return seen


Fault = Callable[[Deployment], Callable[[], object]]
"""Cause a fault, and return how to undo it."""


def _kill(name: str) -> Fault:
    def cause(deployment: Deployment) -> Callable[[], object]:
        deployment.kill(name)
        return deployment.supervisor.restart_ended

    return cause


def _stop(name: str) -> Fault:
    def cause(deployment: Deployment) -> Callable[[], object]:
        server = deployment.options.servers[name]
        server.stop(signal.SIGINT if name == "postgres" else signal.SIGKILL)
        return server.start

    return cause


def _lose_log(deployment: Deployment) -> Callable[[], object]:
    aside = deployment.log.with_name("aside")
    deployment.log.rename(aside)
    return lambda: aside.rename(deployment.log)


def _step_clock(deployment: Deployment) -> Callable[[], object]:
    deployment.clock.write_text("30")
    return lambda: deployment.clock.write_text("0")


def _fill_disk(deployment: Deployment) -> Callable[[], object]:
    assert deployment.disk is not None
    filler = deployment.disk / "filler"
    with filler.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(1 << 20))
            except OSError:
                break
    return filler.unlink


def _stall_rotation(deployment: Deployment) -> Callable[[], object]:
    begin_campaign()
    until("a delivered replacement", lambda: Rotation.objects.filter(state=S.AWAITING_PROOF).exists(), WITHIN_SECONDS)
    rotation = Rotation.objects.get(state=S.AWAITING_PROOF)
    suspend_key(grant(scene.admin(), P.KEYS_SUSPEND, rotation.credential.account), rotation.predecessor)
    until("the rotation to stall", lambda: Rotation.objects.filter(state=S.STALLED).exists(), WITHIN_SECONDS)
    return lambda: None


FAULTS: Mapping[str, tuple[frozenset[str], Fault]] = {
    "the worker is killed": (frozenset({"KeyvaultProcessLost", "KeyvaultTargetDown"}), _kill("worker")),
    "beat is killed": (frozenset({"KeyvaultProcessLost", "KeyvaultTargetDown"}), _kill("beat")),
    "Redis is lost": (frozenset({"KeyvaultRedisUnavailable", "KeyvaultLimitStoreLost"}), _stop("redis")),
    "PostgreSQL is lost": (
        frozenset({"KeyvaultDatabaseUnavailable", "KeyvaultChangeFeedStale"}),
        _stop("postgres"),
    ),
    "the revocation log is lost": (frozenset({"KeyvaultRevocationLogMissing"}), _lose_log),
    "a clock is wrong": (frozenset({"KeyvaultClockDiffers"}), _step_clock),
    "a disk is full": (frozenset({"KeyvaultDiskFull"}), _fill_disk),
    # The last one: the rotation stays stalled.
    "a rotation stalls": (frozenset({"KeyvaultRotationStalled"}), _stall_rotation),
}


def run(options: Options) -> Result:
    result = Result("faults")
    (merchant,), token = make_merchants(1), gateway_token()
    with ExitStack() as stack:
        deployment, port = _open(options, stack)
        key = next(iter(merchant.keys.values())).reveal()
        stack.enter_context(_requesting(port, token.reveal(), key))
        until(
            "every target to be scraped", lambda: not deployment.firing() and _is_scraped(deployment), RECOVERY_SECONDS
        )
        fired = deployment.watch(WITHIN_SECONDS)
        result.must_be(not fired, f"a quiet minute fires {sorted(fired)}")
        say(f"a quiet minute: {sorted(fired) or 'no alert'}")
        for name, (expected, cause) in FAULTS.items():
            if name == "a disk is full" and deployment.disk is None:
                say(f"{name}: not caused, no file system can be mounted")
                continue
            try:
                _perform(deployment, result, name, expected, cause)
            except GaveUpError as gave_up:
                result.must_be(False, f"{name}: {gave_up}")
    return result


def _perform(deployment: Deployment, result: Result, name: str, expected: frozenset[str], cause: Fault) -> None:
    until("no alert to fire", lambda: not deployment.firing(), RECOVERY_SECONDS, deployment.supervisor.restart_ended)
    undo = cause(deployment)
    began = time.monotonic()
    first: dict[str, float] = {}
    is_killed = "killed" in name
    while (passed := time.monotonic() - began) < WITHIN_SECONDS:
        for alert in deployment.firing():
            first.setdefault(alert, round(passed))
        deployment.watch(0.5, is_restarting=not is_killed)
    undo()
    connections.close_all()  # this process is no part of the experiment
    say(f"{name}: " + (", ".join(f"{alert} after {at:.0f} s" for alert, at in sorted(first.items())) or "no alert"))
    result.n += 1
    result.must_be(first.keys() == expected, f"{name} fires {sorted(first)}, expected {sorted(expected)}")
    slowest = max(first.values(), default=0)
    result.counts["slowest alert in seconds"] = max(result.counts.get("slowest alert in seconds", 0), slowest)


def _is_scraped(deployment: Deployment) -> bool:
    query = f"{deployment.prometheus}/api/v1/query?query=sum(up)"
    with urlopen(query, timeout=10) as answer:  # noqa: S310  the experiment's own
        found = json.load(answer)["data"]["result"]
    return bool(found) and float(found[0]["value"][1]) == len(PROGRAMS)


# --- the deployment --------------------------------------------------------------------------------------------------


def _open(options: Options, stack: ExitStack) -> tuple[Deployment, int]:
    port, ports = find_free_port(), {name: find_free_port() for name in PROGRAMS}
    disk = stack.enter_context(_small_disk(options.folder / "disk"))
    log, clock = (disk or options.folder) / "revocation_log", options.folder / "clock"
    clock.write_text("0")
    variables = {
        **os.environ,
        "KEYVAULT_ORIGIN": service.local_url(port),
        "KEYVAULT_REDIS_URL": options.servers["redis"].url,
        "KEYVAULT_REVOCATION_LOG": str(log),
        "FAULTS_CLOCK": str(clock),
    }
    # The keys were made with another log.
    shutil.copy(options.folder / "revocation_log", log)
    commands = {
        "server": service.server_program(port),
        "worker": service.worker_program(),
        "beat": service.beat_program(),
    }
    programs = [
        Program(name, (_ENV, f"KEYVAULT_METRICS={ADDRESS}:{ports[name]}", *_skewed(each.command)), each.orphan_signal)
        for name, each in commands.items()
    ]
    supervisor = stack.enter_context(Supervisor(programs, variables, ROOT, options.folder / "logs", say))
    service.wait_until_ready(supervisor, port)
    return Deployment(options, supervisor, _start_prometheus(options.folder, ports, stack), log, clock, disk), port


def _skewed(command: tuple[str, ...]) -> tuple[str, ...]:
    if "keyvault.project" not in command or "worker" not in command:
        return command
    options = command[command.index("keyvault.project") + 1 :]
    return (sys.executable, "-m", "tests.faults.skewed", *options)


def _start_prometheus(folder: Path, ports: Mapping[str, int], stack: ExitStack) -> str:
    binary = shutil.which("prometheus")
    assert binary is not None
    home = folder / "prometheus"
    home.mkdir()
    jobs = [
        {"job_name": f"keyvault-{name}", "static_configs": [{"targets": [f"{ADDRESS}:{port}"]}]}
        for name, port in ports.items()
    ]
    interval = f"{SCRAPE_SECONDS}s"
    sample = {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
        "rule_files": [str(RULES)],
        "scrape_configs": jobs,
    }
    (home / "prometheus.yml").write_text(yaml.safe_dump(sample))
    port = find_free_port()
    command = [binary, f"--config.file={home / 'prometheus.yml'}", f"--storage.tsdb.path={home / 'data'}"]
    command += [f"--web.listen-address={ADDRESS}:{port}", "--log.level=warn"]
    process = start_child_process(command, environ=os.environ, folder=home, orphan_signal=signal.SIGKILL)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    url = f"http://{ADDRESS}:{port}"
    until("Prometheus to be ready", lambda: _answers(f"{url}/-/ready"), WITHIN_SECONDS)
    return url


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


@contextmanager
def _requesting(port: int, token: str, key: str) -> Iterator[None]:
    """Verify the key once a second, so that limits are spent."""
    ended = threading.Event()
    body = json.dumps({"key": key, "environment": "sandbox", "endpoint": "orders.retrieve"}).encode()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}

    def ask() -> None:
        while not ended.wait(1):
            connection = http.client.HTTPConnection(ADDRESS, port, timeout=10)
            try:
                connection.request("POST", "/v1/keys/verify", body, headers)
                connection.getresponse().read()
            except OSError:
                pass
            finally:
                connection.close()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(15)
