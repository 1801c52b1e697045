"""The table of processes as containers run it: as user 65532, on a read-only root, without privileges or a shell.

There is no container daemon here. A private mount namespace stands in for one: its root has the system's libraries,
this checkout and Python, all read-only, and the data folder, the secrets and /tmp at the paths of the image.
"""

import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest
import requests
from psycopg import sql

from tests.architecture.deployment import CONTAINER_SETTINGS, DEPLOY, SECRETS, USER_ID, Process, processes
from tests.backends.receivers import Authority, make_authority
from tests.environment import POSTGRES_URL, ROOT
from tests.servers.nginx import find_nginx, nginx_server
from tests.servers.openbao import find_vault
from tests.servers.throwaway import Place, Plan, free_port, new_directory, running

pytestmark = [pytest.mark.long, pytest.mark.postgres]

DATABASE = "keyvault_processes"
READY_SECONDS = 90
ROTATION_SECONDS = 120
LOOK_SECONDS = 0.2
WEB, CONSOLE = "keys.example", "console.example"

# $1: an empty folder, $2: the folder with data, secrets and tmp, $3: the folder to start in, then the folders to show,
# `--` and the command.
CONTAINER = """\
set -eu
root=$1 place=$2 start=$3; shift 3
mount -t tmpfs -o mode=755 tmpfs "$root"
while [ "$1" != -- ]; do
    mkdir -p "$root$1"
    mount --bind "$1" "$root$1"
    mount -o remount,bind,ro "$root$1"
    shift
done
shift
mkdir -p "$root/proc" "$root/dev" "$root/tmp" "$root/var/lib/keyvault" "$root/run/secrets/keyvault"
mount --bind /proc "$root/proc"
for device in null zero urandom; do : >"$root/dev/$device"; mount --bind "/dev/$device" "$root/dev/$device"; done
mount --bind "$place/data" "$root/var/lib/keyvault"
mount --bind "$place/tmp" "$root/tmp"
mount --bind "$place/secrets" "$root/run/secrets/keyvault"
mount -o remount,bind,ro "$root/run/secrets/keyvault"
mount -o remount,ro "$root"
exec chroot "$root" setpriv --reuid 65532 --regid 65532 --clear-groups --no-new-privs --inh-caps=-all \\
    --bounding-set=-all -- env --chdir "$start" -- "$@"
"""


@pytest.fixture(scope="module")
def namespace() -> None:
    """Skip where no private mount namespace can be made."""
    if not all(shutil.which(tool) for tool in ("unshare", "setpriv", "chroot")):
        pytest.skip("needs unshare, setpriv and chroot (util-linux, coreutils)")
    if ROOT.is_relative_to("/tmp"):  # noqa: S108  where the checkout is
        pytest.skip("the checkout is in /tmp, which the container replaces by a folder of its own")
    check = ["unshare", "--mount", "--propagation", "private", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"needs root with the right to mount (CAP_SYS_ADMIN): {done.stderr.strip()}")
    if find_nginx() is None:
        pytest.skip("needs nginx")


@dataclass
class ContainerInstallation:
    """The processes of the table in a place of their own. `ports`: from the table's to free ones of this machine."""

    place: Path
    settings: dict[str, str]
    ports: dict[int, int]
    started: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def start(self, row: Process) -> None:
        with (self.place / f"{row.name}.log").open("wb") as log:
            self.started[row.name] = subprocess.Popen(
                self._contained(self.arguments(row)),
                env=self._environment(row),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def run(self, row: Process) -> None:
        """Run a process that ends by itself."""
        done = self._run(self.arguments(row), self._environment(row))
        assert done.returncode == 0, f"{row.name}: {done.stdout}{done.stderr}"

    def manage(self, *arguments: str) -> dict[str, Any]:
        """Return the JSON answer of a management command."""
        done = self._run(["python", "manage.py", *arguments, "--json"], self._environment(None))
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def arguments(self, row: Process) -> list[str]:
        """Return the command of a container, at an address of this machine."""
        here = {"0.0.0.0": "127.0.0.1", str(row.port): str(self.ports.get(row.port, 0))}  # noqa: S104  it is replaced
        return [here.get(word, word) if row.port else word for word in row.arguments("container")]

    def until(self, what: str, holds: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            ended = [name for name, process in self.started.items() if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                logs = "\n".join(f"{log.name}:\n{log.read_text()[-3000:]}" for log in sorted(self.place.glob("*.log")))
                pytest.fail(f"{what}: not within {seconds} s; ended: {ended}\n{logs}")
            time.sleep(LOOK_SECONDS)

    def stop_all(self) -> dict[str, int]:
        """Send SIGTERM to the first process of each container, as a supervisor does, and return the exit statuses."""
        for process in self.started.values():
            process.send_signal(signal.SIGTERM)
        limits = {row.name: row.stop_seconds for row in processes()}
        statuses = {}
        for name, process in self.started.items():
            try:
                statuses[name] = process.wait(limits[name])
            except subprocess.TimeoutExpired:
                log = (self.place / f"{name}.log").read_text()
                pytest.fail(f"{name} does not stop within {limits[name]} s\n{log[-3000:]}", pytrace=False)
        return statuses

    def kill_all(self) -> None:
        for process in self.started.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _run(self, command: list[str], environment: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            self._contained(command), env=environment, capture_output=True, text=True, timeout=120, check=False
        )

    def _environment(self, row: Process | None) -> dict[str, str]:
        own = row.own_settings("127.0.0.1") if row else {}
        if row and row.metrics:
            own["KEYVAULT_METRICS"] = f"127.0.0.1:{self.ports[row.metrics]}"
        if row and row.own_origin:
            own["KEYVAULT_ORIGIN"] = f"https://{CONSOLE}"
        path = f"{ROOT}/.venv/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        return {"PATH": path, "HOME": "/", "PYTHONDONTWRITEBYTECODE": "1", **CONTAINER_SETTINGS, **self.settings, **own}

    def _contained(self, command: list[str]) -> list[str]:
        system = [path for path in ("/usr", "/bin", "/lib", "/lib64", "/sbin", "/etc") if Path(path).exists()]
        python = dict.fromkeys((str(ROOT), str((ROOT / ".venv").resolve()), sys.base_prefix))
        return [
            *("unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", CONTAINER, "container"),
            *(str(self.place / "root"), str(self.place), str(ROOT), *system, *python, "--", *command),
        ]


@contextmanager
def openbao_of_the_sample(servers: Path) -> Iterator[tuple[str, str]]:
    """Run OpenBao with the configuration of Compose, and yield its address and the administrator's token."""
    binary = find_vault()
    assert binary is not None

    def plan(place: Place) -> Plan:
        text = (DEPLOY / "compose" / "openbao.hcl").read_text()
        (place.directory / "file").mkdir()
        for name in ("openbao.pem", "openbao.key", "openbao_unseal_key", "openbao_admin_token"):
            (place.directory / name).write_bytes((servers / name).read_bytes())
        if place.owner:
            for path in place.directory.iterdir():
                os.chown(path, *place.owner)
        for shipped, ours in (
            ("/openbao/file", f"{place.directory}/file"),
            ("0.0.0.0:8200", f"127.0.0.1:{place.port}"),
            ("https://openbao:8200", f"https://localhost:{place.port}"),
            ("/run/secrets/servers", str(place.directory)),
        ):
            assert shipped in text, shipped
            text = text.replace(shipped, ours)
        address = f"https://localhost:{place.port}"
        return Plan(
            url=address,
            serve=[str(binary), "server", f"-config={place.write('openbao.hcl', text)}"],
            is_ready=lambda: _status(f"{address}/v1/sys/health", servers / "ca.pem") == 200,
            stop_signal=signal.SIGTERM,
        )

    with running("kv-openbao-", plan) as address:
        yield address, (servers / "openbao_admin_token").read_text()


@pytest.fixture
def installation(namespace: None, redis_url: str, tmp_path: Path) -> Iterator[ContainerInstallation]:
    """An installation that is not set up yet, on PostgreSQL, Redis and, if there is one, OpenBao."""
    server = os.environ[POSTGRES_URL]
    with ExitStack() as stack:
        place = new_directory("kv-processes-", None)
        stack.callback(shutil.rmtree, place, ignore_errors=True)
        for name in ("root", "data", "tmp", "secrets", "servers"):
            (place / name).mkdir(mode=0o700)
        subprocess.run(
            [sys.executable, DEPLOY / "compose" / "make_secrets.py", place / "secrets", place / "servers"], check=True
        )
        database_url = urlunsplit(urlsplit(server)._replace(path=f"/{DATABASE}"))
        for name, text in {"database_url": database_url, "redis_url": redis_url}.items():
            (place / "secrets" / name).chmod(0o600)
            (place / "secrets" / name).write_text(f"{text}\n")
        rows = processes()
        wanted = [port for row in rows for port in (row.port, row.metrics) if port]
        settings = {
            "KEYVAULT_ORIGIN": f"https://{WEB}",
            "KEYVAULT_SANDBOX_BASE_URL": f"https://{WEB}/sandbox",
            "KEYVAULT_PRODUCTION_BASE_URL": f"https://{WEB}/production",
            "KEYVAULT_TRUSTED_PROXIES": "1",
        }
        has_vault = find_vault() is not None
        if has_vault:
            address, _ = stack.enter_context(openbao_of_the_sample(place / "servers"))
            settings |= {"KEYVAULT_BACKEND": "vault", "VAULT_ADDR": address, "VAULT_CACERT": f"{SECRETS}/ca.pem"}
        for folder in ("data", "tmp", "secrets"):
            for path in (place / folder, *(place / folder).iterdir()):
                os.chown(path, USER_ID, USER_ID)
        drop = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(DATABASE))
        connection = stack.enter_context(psycopg.connect(server, autocommit=True))
        connection.execute(drop)
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(DATABASE)))
        stack.callback(connection.execute, drop)
        made = ContainerInstallation(place, settings, {port: free_port() for port in wanted})
        stack.callback(made.kill_all)
        if has_vault:
            token, logins = f"{SECRETS}/openbao_admin_token", f"{CONTAINER_SETTINGS['KEYVAULT_DATA_DIR']}/vault"
            environments = ("--environment", "sandbox", "--environment", "production")
            made.manage("bootstrap_vault", *environments, "--token-file", token, "--logins-folder", logins, "--plain")
        yield made


@contextmanager
def nginx_in_front(installation: ContainerInstallation, authority: Authority) -> Iterator["TlsClient"]:
    """Run the shipped files for a host in one nginx, with the addresses, certificates and logs of the test."""
    authority.server(WEB, CONSOLE)
    certificate = (authority.folder / f"{WEB}.pem").read_text()
    ports = installation.ports

    def http(place: Place) -> str:
        text = "".join((DEPLOY / "nginx" / name).read_text() for name in ("keyvault-web.conf", "keyvault-console.conf"))
        pem = place.write("server.pem", certificate)
        for shipped, ours in (
            ("server 127.0.0.1:8000;", f"server 127.0.0.1:{ports[8000]};"),
            ("server unix:/run/keyvault/verifier.sock;", f"server 127.0.0.1:{ports[8100]};"),
            ("http://127.0.0.1:8001", f"http://127.0.0.1:{ports[8001]}"),
            ("listen 443 ssl;", f"listen 127.0.0.1:{place.port} ssl;"),
            *((f"/etc/nginx/{name}.{kind};", f"{pem};") for name in (WEB, CONSOLE) for kind in ("pem", "key")),
            ("/var/log/nginx/", f"{place.directory}/"),
        ):
            assert shipped in text, shipped
            text = text.replace(shipped, ours)
        return text

    with nginx_server(http) as url:
        yield TlsClient(urlsplit(url).port or 0, authority.trust())


@dataclass(frozen=True)
class TlsClient:
    """Speaks TLS with the host name of a server at a port of this machine, and checks its certificate."""

    port: int
    tls: ssl.SSLContext

    def send(
        self, method: str, path: str, headers: Mapping[str, str], body: Mapping[str, Any] | None = None, host: str = WEB
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPSConnection(host, timeout=20)
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        connection.sock = self.tls.wrap_socket(plain, server_hostname=host)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": "application/json", **headers})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def verify(self, token: str, key: str) -> str | None:
        """Return None if the key is allowed, else the code of the denial."""
        status, body = self.send(
            "POST",
            "/v1/keys/verify",
            {"Authorization": f"Bearer {token}"},
            {"key": key, "environment": "sandbox", "endpoint": "orders.create"},
        )
        assert status == 200, body
        answer = json.loads(body)
        assert answer["allowed"] is (answer["code"] is None)
        code: str | None = answer["code"]
        return code


@pytest.mark.timeout(600)
def test_story_of_a_key_on_the_table_of_processes(installation: ContainerInstallation, tmp_path: Path) -> None:
    """Guarantee: each process needs no more than its data folder, its secrets and /tmp, and stops on SIGTERM."""
    rows = {row.name: row for row in processes()}
    installation.run(rows["migrate"])
    installation.manage("seed_demo")
    stays = [row for row in rows.values() if not row.once]
    for row in stays:
        installation.start(row)
    installation.until(
        "the servers are ready", lambda: all(_is_ready(installation, row) for row in stays), READY_SECONDS
    )
    with nginx_in_front(installation, make_authority(tmp_path)) as client:
        _issue_rotate_and_revoke(installation, client)
        status, page = client.send("GET", "/admin/login/", {}, host=CONSOLE)
        assert status == 200
        assert b"password" in page
        assert client.send("GET", "/admin/login/", {})[0] == 404
        assert client.send("GET", "/metrics", {})[0] == 404
    for row in stays:
        if row.metrics:
            scraped = requests.get(f"http://127.0.0.1:{installation.ports[row.metrics]}/metrics", timeout=10)
            assert "keyvault_" in scraped.text
    for name, process in installation.started.items():
        assert _privileges(process.pid) == {"Uid": str(USER_ID), "NoNewPrivs": "1", "CapBnd": "0" * 16}, name
    assert installation.stop_all() == dict.fromkeys(installation.started, 0)
    assert list((installation.place / "tmp").iterdir()) == []
    installation.run(rows["replay"])


def _issue_rotate_and_revoke(installation: ContainerInstallation, client: TlsClient) -> None:
    may = ("--permission", "keys:verify", "--permission", "keys:revoke")
    token = installation.manage("create_service_token", "table", "--environment", "sandbox", *may, "--reveal")["token"]
    people = ("--requested-by", "tam", "--approved-by", "approver")
    kind = ("--merchant", "acme", "--environment", "sandbox", "--kind", "private")
    issued = installation.manage("issue_key", *kind, *people, "--reveal")
    assert client.verify(token, issued["key"]) is None

    plan = ("--proof", "ack", "--quiet-seconds", "1", "--quarantine-seconds", "1")
    rotation = installation.manage("rotate_key", "--credential", issued["credential_id"], *people, *plan)["rotation_id"]

    def is_in(state: str) -> bool:
        shown: str = installation.manage("show_rotation", rotation)["state"]
        return shown == state

    installation.until("the replacement is delivered", lambda: is_in("awaiting_proof"), ROTATION_SECONDS)
    collected = installation.manage("collect_key", "--rotation", rotation, "--by", "tam", "--reveal")
    replacement = {"X-Api-Key": collected["key"]}
    assert client.send("POST", "/sandbox/credentials/acknowledge", replacement)[0] == 204
    installation.until("the rotation completes", lambda: is_in("completed"), ROTATION_SECONDS)
    assert client.verify(token, issued["key"]) == "key_revoked"
    assert client.verify(token, collected["key"]) is None

    status, body = client.send(
        "POST",
        f"/v1/keys/{collected['key_id']}/revoke",
        {"Authorization": f"Bearer {token}", "Prefer": "wait=5"},
        {"reason": "superseded"},
    )
    assert status == 202, body
    assert json.loads(body)["receipt"]["complete"] is True
    assert client.verify(token, collected["key"]) == "key_revoked"


def _is_ready(installation: ContainerInstallation, row: Process) -> bool:
    return not row.probes or _status(f"http://127.0.0.1:{installation.ports[row.port]}/readyz") == 200


def _status(url: str, ca_file: Path | None = None) -> int | None:
    try:
        return requests.get(url, verify=str(ca_file) if ca_file else True, timeout=5).status_code
    except requests.RequestException:
        return None


def _privileges(pid: int) -> dict[str, str]:
    lines = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    return {name: lines[name].split("\t")[0] for name in ("Uid", "NoNewPrivs", "CapBnd")}
