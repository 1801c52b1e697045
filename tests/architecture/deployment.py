"""The table of processes, `deploy/processes.toml`, and the files of systemd, Compose and Kubernetes written from it.

`python -m tests.architecture.deployment` writes them. The table has what containers and hosts share, and this module
the rest.
"""

import textwrap
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from keyvault.domain.environments import Environment

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
TABLE = DEPLOY / "processes.toml"
COMPOSE = DEPLOY / "compose" / "compose.yaml"
USER_ID = 65532
WRITTEN = "written from deploy/processes.toml by `python -m tests.architecture.deployment`"
START, END = f"  # --- processes, {WRITTEN}\n", "  # --- end of the processes\n"
SECRETS = "/run/secrets/keyvault"
SECRET_FILES = {
    f"KEYVAULT_{name.upper()}_FILE": f"{SECRETS}/{name}" for name in ("database_url", "redis_url", "secret_key")
}
"""Secrets that all processes share, in containers, by the variable that names the file."""

VAULT_TOKEN = "/run/secrets/vault-token"
"""Folder of the service account's token in the sidecar."""

CONTAINER_SETTINGS = {"KEYVAULT_DATA_DIR": "/var/lib/keyvault", **SECRET_FILES}
PROBE_SECONDS = 10
DRAIN_SECONDS = 5
START_SECONDS = 60
"""Maximum time from the start of a process until it is ready."""


@dataclass(frozen=True, slots=True)
class Process:
    """A row of the table, which explains the fields."""

    name: str
    description: str
    command: list[str]
    login: str
    stop_seconds: int
    memory: int
    cores: float
    files: int
    queues: list[str] = field(default_factory=list)
    listen: Mapping[str, list[str]] = field(default_factory=dict)
    port: int = 0
    metrics: int = 0
    probes: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    own_origin: bool = False
    reaches_out: bool = False
    replicas: int = 1
    once: bool = False

    def arguments(self, place: str) -> list[str]:
        """Return the command on a `host` or in a `container`."""
        queues = ",".join(f"{queue}.{environment}" for queue in self.queues for environment in Environment)
        return [*self.command, *(["-Q", queues] if queues else []), *self.listen.get(place, [])]

    def own_settings(self, host: str) -> dict[str, str]:
        """Return the settings that not all processes share. `host`: the address of the metrics."""
        metrics = {"KEYVAULT_METRICS": f"{host}:{self.metrics}"} if self.metrics else {}
        return {**self.environment, **metrics}


def processes() -> list[Process]:
    rows = tomllib.loads(TABLE.read_text())
    return [Process(name, **row) for name, row in rows.items()]


def files() -> dict[Path, str]:
    """Return the text of each file that is written from the table."""
    rows = processes()
    units = {DEPLOY / "systemd" / f"keyvault-{row.name}.service": unit(row) for row in rows}
    before, rest = COMPOSE.read_text().split(START)
    _, after = rest.split(END)
    services = "".join(compose_service(row) for row in rows)
    return {
        **units,
        COMPOSE: f"{before}{START}{services}{END}{after}",
        DEPLOY / "kubernetes" / "base" / "processes.yaml": kubernetes_objects(rows),
        DEPLOY / "kubernetes" / "sidecar" / "verifier.yaml": sidecar(
            next(row for row in rows if row.name == "verifier")
        ),
    }


# --- systemd ----------------------------------------------------------------------------------------------

_HARDENING = """\
NoNewPrivileges=yes
ProtectSystem=strict
ReadWritePaths=/var/lib/keyvault
ProtectHome=yes
PrivateTmp=yes
PrivateDevices=yes
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectProc=invisible
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
CapabilityBoundingSet=
UMask=0077
# No core dumps: keys pass through the memory of the process.
LimitCORE=0
"""


def unit(row: Process) -> str:
    """Return the systemd unit of a process. The checkout is in /opt/keyvault, its settings are in /etc/keyvault."""
    settings = "".join(f"Environment={name}={value}\n" for name, value in row.own_settings("127.0.0.1").items())
    own_file = f"# This process's own KEYVAULT_ORIGIN.\nEnvironmentFile=/etc/keyvault/{row.name}\n" * row.own_origin
    stays = "Restart=always\nRestartSec=1\n"
    no_limit = "# It starts again for as long as its database is away.\nStartLimitIntervalSec=0\n"
    install = "\n[Install]\nWantedBy=multi-user.target\n"
    socket = (
        "# /run/keyvault is accessible to the group: add nginx's user to it (usermod -aG keyvault www-data).\n"
        "RuntimeDirectory=keyvault\nRuntimeDirectoryMode=0750\n"
    )
    has_socket = "--socket" in row.listen.get("host", [])
    wait = "postgresql.service redis-server.service" + " keyvault-migrate.service" * (row.name != "migrate")
    return f"""\
# {WRITTEN.capitalize()}.

[Unit]
Description=Keyvault: {row.description}
After=network-online.target {wait}
Wants=network-online.target
{"" if row.once else no_limit}
[Service]
Type={"oneshot" if row.once else "exec"}
User=keyvault
Group=keyvault
WorkingDirectory=/opt/keyvault
{settings}# Settings that all processes share; a line there overrides one above.
EnvironmentFile=/etc/keyvault/environment
{own_file}ExecStart={_command_line(row)}

# SIGTERM goes to the first process, which stops its own.
KillMode=mixed
TimeoutStopSec={row.stop_seconds}
{"" if row.once else stays}MemoryMax={row.memory}M
LimitNOFILE={row.files}
{socket if has_socket else ""}
{_HARDENING}{"" if row.once else install}"""


def _command_line(row: Process) -> str:
    """Return the command with the folder of its program, in lines of at most 120 characters. `%` begins a specifier."""
    program, *arguments = (word.replace("%", "%%") for word in row.arguments("host"))
    words = " ".join([f"/opt/keyvault/.venv/bin/{program}", *arguments])
    return " \\\n    ".join(textwrap.wrap(words, 104, break_long_words=False, break_on_hyphens=False))


# --- Compose ----------------------------------------------------------------------------------------------


def compose_service(row: Process) -> str:
    """Return the service. The anchors `keyvault` and `settings` are in the part of the file that is not written."""
    body: dict[str, Any] = {
        "command": [word.replace("$", "$$") for word in row.arguments("container")],
        "environment": {**CONTAINER_SETTINGS, **row.own_settings("0.0.0.0")},  # noqa: S104  in its container
        "stop_grace_period": f"{row.stop_seconds}s",
        "mem_limit": f"{row.memory}m",
        "ulimits": {"nofile": row.files, "core": 0},
        "depends_on": _compose_dependencies(row),
        "networks": ["inside", *(["outside"] if row.reaches_out else [])],
    }
    if row.own_origin:
        body["env_file"] = ["settings.env", f"{row.name}.env"]
    if row.probes or row.metrics:
        body["healthcheck"] = {
            "test": ["CMD", *probe_command(row)],
            "interval": f"{PROBE_SECONDS}s",
            "timeout": "5s",
            "start_period": f"{START_SECONDS}s",
        }
    else:
        body["healthcheck"] = {"disable": True}
    if row.once:
        body["restart"] = "no"
    if row.name == "replay":
        body["profiles"] = ["replay"]
    if row.name == "web":
        # Others that share a data folder gain nothing on one machine, and two verifiers would share their metrics.
        body["deploy"] = {"replicas": row.replicas}
    return f"  {row.name}:\n    <<: *keyvault\n{textwrap.indent(_yaml(body), '    ')}"


def _compose_dependencies(row: Process) -> dict[str, Any]:
    if row.once:
        return {name: {"condition": "service_healthy"} for name in ("postgres", "redis")} | {
            "vault-bootstrap": {"condition": "service_completed_successfully"}
        }
    return {"migrate": {"condition": "service_completed_successfully"}}


def probe_command(row: Process, path: str = "/readyz") -> list[str]:
    """Return a command that exits with 0 if the process answers the probe: it needs neither a shell nor curl.

    A worker or beat, which answers no probes, is ready when it listens for scrapes. The command runs every 10 s: an
    import of `urllib.request` would take ten times the processor time.
    """
    connect = f"socket.create_connection(('127.0.0.1', {row.port or row.metrics}), 4)"
    if not row.probes:
        return ["python", "-c", f"import socket; {connect}"]
    request = rf"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    ask = f"server = {connect}; server.sendall(b'{request}'); sys.exit(server.recv(12) != b'HTTP/1.1 200')"
    return ["python", "-c", f"import socket, sys; {ask}"]


# --- Kubernetes -------------------------------------------------------------------------------------------


def kubernetes_objects(rows: list[Process]) -> str:
    objects = [_service_account(login) for login in sorted({row.login for row in rows})]
    for row in rows:
        objects += [_job(row)] if row.once else _deployment_and_service(row)
    return f"# {WRITTEN.capitalize()}.\n" + "".join(f"---\n{_yaml(each)}" for each in objects)


def _labels(row: Process) -> dict[str, str]:
    return {"app.kubernetes.io/name": "keyvault", "app.kubernetes.io/component": row.name}


def _reach(row: Process) -> dict[str, str]:
    """Return the label by which the network policy opens the way out."""
    return {"keyvault/reaches-out": "yes"} if row.reaches_out else {}


def _object(version: str, kind: str, name: str, labels: dict[str, str], spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": f"keyvault-{name}", "labels": labels}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _service_account(login: str) -> dict[str, Any]:
    """Return the account that the Vault knows by this name. It has no rights in the cluster."""
    labels = {"app.kubernetes.io/name": "keyvault"}
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": f"keyvault-{login}", "labels": labels},
        "automountServiceAccountToken": False,
    }


def _deployment_and_service(row: Process) -> list[dict[str, Any]]:
    labels = _labels(row)
    deployment = _object(
        "apps/v1",
        "Deployment",
        row.name,
        labels,
        {
            "replicas": row.replicas,
            "selector": {"matchLabels": labels},
            "strategy": {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": {"metadata": {"labels": labels | _reach(row)}, "spec": _pod(row)},
        },
    )
    objects = [deployment]
    if row.port:
        ports = [{"name": "http", "port": row.port, "targetPort": "http"}]
        objects.append(_object("v1", "Service", row.name, labels, {"selector": labels, "ports": ports}))
    if row.replicas > 1:
        budget = {"maxUnavailable": 1, "selector": {"matchLabels": labels}}
        objects.append(_object("policy/v1", "PodDisruptionBudget", row.name, labels, budget))
    return objects


def _job(row: Process) -> dict[str, Any]:
    """Return the job. Replay is a suspended schedule, from which `kubectl create job --from` makes a job."""
    labels = _labels(row)
    pod = {**_pod(row), "restartPolicy": "OnFailure"}
    spec = {"backoffLimit": 10, "template": {"metadata": {"labels": labels}, "spec": pod}}
    if row.name == "migrate":
        return _object("batch/v1", "Job", row.name, labels, spec)
    schedule = {"schedule": "0 0 1 1 *", "suspend": True, "jobTemplate": {"spec": spec}}
    return _object("batch/v1", "CronJob", row.name, labels, schedule)


def _pod(row: Process) -> dict[str, Any]:
    """Return the specification of a pod. The token of the account is mounted for the login to the Vault."""
    sources: list[dict[str, Any]] = [{"configMapRef": {"name": "keyvault"}}]
    if row.own_origin:
        # Of a variable in both, the later one counts.
        sources.append({"configMapRef": {"name": f"keyvault-{row.name}"}})
    settings = {**CONTAINER_SETTINGS, **row.own_settings("0.0.0.0")}  # noqa: S104  in its container
    container: dict[str, Any] = {
        "name": row.name,
        "image": "keyvault",
        "args": row.arguments("container"),
        "envFrom": sources,
        "env": [{"name": name, "value": value} for name, value in settings.items()],
        "resources": {
            "requests": {"cpu": f"{int(row.cores * 1000)}m", "memory": f"{row.memory}Mi"},
            "limits": {"memory": f"{row.memory}Mi"},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "data", "mountPath": "/var/lib/keyvault"},
            {"name": "temporary", "mountPath": "/tmp"},  # noqa: S108  a volume of its own
            {"name": "secrets", "mountPath": SECRETS, "readOnly": True},
            {"name": "vault-ca", "mountPath": "/etc/keyvault/vault", "readOnly": True},
        ],
    }
    ports = {"http": row.port, "metrics": row.metrics}
    if named := [{"name": name, "containerPort": port} for name, port in ports.items() if port]:
        container["ports"] = named
    grace = row.stop_seconds
    if row.port:
        # The cluster still sends requests for a moment after it has decided to stop the pod.
        container["lifecycle"] = {"preStop": {"sleep": {"seconds": DRAIN_SECONDS}}}
        grace += DRAIN_SECONDS
    if row.probes:
        container |= {
            "startupProbe": {**_probe("/healthz"), "periodSeconds": 2, "failureThreshold": START_SECONDS // 2},
            "livenessProbe": {**_probe("/healthz"), "periodSeconds": PROBE_SECONDS},
            "readinessProbe": {**_probe("/readyz"), "periodSeconds": PROBE_SECONDS},
        }
    elif row.metrics:
        # It answers there once the process has started, so that a release that cannot start replaces nothing.
        container["readinessProbe"] = {"tcpSocket": {"port": "metrics"}, "periodSeconds": PROBE_SECONDS}
    # All pods report under one name: that process is lost when none of them runs, and a new pod ends the alarm.
    shared_name = {} if row.port or row.once else {"hostname": f"keyvault-{row.name}"}
    return {
        **shared_name,
        "serviceAccountName": f"keyvault-{row.login}",
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {"name": "data", "emptyDir": {"sizeLimit": "1Gi"}},
            {"name": "temporary", "emptyDir": {"sizeLimit": "64Mi"}},
            {"name": "secrets", "secret": {"secretName": "keyvault", "defaultMode": 0o440}},
            {"name": "vault-ca", "configMap": {"name": "keyvault-vault-ca"}},
        ],
    }


def sidecar(row: Process) -> str:
    """Return a patch that adds the verifier to the pods of a service, which reaches it at 127.0.0.1.

    The probes run in the container, because the cluster cannot reach that address. The token for the Vault is mounted
    in this container alone: the pod's other containers must not log in as Keyvault. Kustomize merges lists by name, so
    a volume with a common name would replace one of the service, or be shared with it.
    """
    pod = _pod(replace(row, listen={"container": ["--host", "127.0.0.1", "--port", str(row.port)]}))
    (container,) = pod["containers"]
    healthz, readyz = (
        {"exec": {"command": probe_command(row, path)}, "timeoutSeconds": 5} for path in ("/healthz", "/readyz")
    )
    container |= {
        "restartPolicy": "Always",
        "startupProbe": {**healthz, "periodSeconds": 5, "failureThreshold": START_SECONDS // 5},
        "livenessProbe": {**healthz, "periodSeconds": 30},
        "readinessProbe": {**readyz, "periodSeconds": PROBE_SECONDS},
    }
    container["ports"] = [{"name": "verifier-metric", "containerPort": row.metrics}]
    container["env"].append({"name": "KEYVAULT_VAULT_JWT_FILE", "value": f"{VAULT_TOKEN}/token"})
    container["name"] = f"keyvault-{row.name}"
    container["volumeMounts"].append({"name": "vault-token", "mountPath": VAULT_TOKEN, "readOnly": True})
    token = {"sources": [{"serviceAccountToken": {"path": "token"}}]}
    volumes = [*pod["volumes"], {"name": "vault-token", "projected": token}]
    for each in (*container["volumeMounts"], *volumes):
        each["name"] = f"keyvault-{each['name']}"
    spec = {
        "serviceAccountName": pod["serviceAccountName"],
        "automountServiceAccountToken": False,
        "securityContext": {"fsGroup": USER_ID},
        "initContainers": [container],
        "volumes": volumes,
    }
    own = ("runAsNonRoot", "runAsUser", "runAsGroup", "seccompProfile")
    container["securityContext"] |= {name: pod["securityContext"][name] for name in own}
    patch = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "your-service"},
        "spec": {"template": {"spec": spec}},
    }
    return f"# {WRITTEN.capitalize()}.\n{_yaml(patch)}"


def _probe(path: str) -> dict[str, Any]:
    """Return a probe. The host name is one that every process accepts; the pod's address is none."""
    return {
        "httpGet": {"path": path, "port": "http", "httpHeaders": [{"name": "Host", "value": "localhost"}]},
        "timeoutSeconds": 5,
    }


class _Dumper(yaml.SafeDumper):
    """Writes a mapping that occurs twice in full each time."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _yaml(value: Any) -> str:
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=110, default_flow_style=None)
    return text


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
