"""The files in deploy/ agree with the table of processes, with each other, and with what their tools accept."""

import json
import re
import shutil
import subprocess
import sys
import threading
from copy import deepcopy
from dataclasses import replace
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from django.conf import settings

from keyvault.management.service import beat_program, server_program, worker_program
from keyvault.management.supervisor import STOP_SECONDS
from keyvault.project.configuration import SETTINGS
from keyvault.services.work.background_thread import JOIN_SECONDS
from keyvault.wire.planes import Plane
from tests.architecture.deployment import (
    COMPOSE,
    CONTAINER_SETTINGS,
    DEPLOY,
    ROOT,
    SECRETS,
    USER_ID,
    Process,
    files,
    probe_command,
    processes,
)
from tests.servers.nginx import find_nginx

BASE = DEPLOY / "kubernetes" / "base"
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
OVERLAYS = sorted((DEPLOY / "kubernetes" / "overlays").iterdir())
KUBERNETES_VERSION = "1.34"
CONTROLLERS = {"nginx": "ingress-nginx", "nginx-internal": "ingress-nginx-internal"}
"""Namespace of the Ingress controller of each class."""
CONTAINERFILE = DEPLOY / "container" / "Containerfile"
SECONDS_TO_END = 15
"""Time in which a process ends after it stopped its own processes: 10 s were seen at a load of 20 on two cores."""
MAX_EXPOSURE = 25
"""Tenths of the exposure level of `systemd-analyze security`, which goes up to 10."""

TABLE = {row.name: row for row in processes()}
UNITS = [path for path in files() if path.suffix == ".service"]


@cache
def documents(path: Path) -> list[dict[str, Any]]:
    """Return the documents of a file. They are cached: do not change them."""
    return list(yaml.safe_load_all(path.read_text()))


def objects(*folders: Path) -> list[dict[str, Any]]:
    """Return the objects of Kubernetes in these folders."""
    found = [each for folder in folders for path in sorted(folder.glob("*.yaml")) for each in documents(path)]
    return [each for each in found if each["kind"] not in ("Kustomization", "Component")]


def named(kind: str, name: str) -> dict[str, Any]:
    (found,) = (
        each for each in objects(BASE) if each["kind"] == kind and each["metadata"]["name"] == f"keyvault-{name}"
    )
    return found


def your_service() -> dict[str, Any]:
    """Return the smallest Deployment with the patch of the sidecar."""
    (patch,) = objects(DEPLOY / "kubernetes" / "sidecar")
    patched = deepcopy(patch)
    labels = {"app": "your-service"}
    patched["spec"]["selector"] = {"matchLabels": labels}
    patched["spec"]["template"]["metadata"] = {"labels": labels}
    patched["spec"]["template"]["spec"]["containers"] = [{"name": "your-service", "image": "your-service"}]
    return patched


def pod_of(row: Process) -> dict[str, Any]:
    if not row.once:
        return dict(named("Deployment", row.name)["spec"]["template"])
    if row.name == "migrate":
        return dict(named("Job", row.name)["spec"]["template"])
    return dict(named("CronJob", row.name)["spec"]["jobTemplate"]["spec"]["template"])


# --- the table --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", files(), ids=lambda path: path.name)
def test_file_in_deploy_equals_the_table_of_processes(path: Path) -> None:
    """Run `python -m tests.architecture.deployment` to write it."""
    assert path.read_text() == files()[path]


def test_no_unit_lacks_a_process() -> None:
    assert set((DEPLOY / "systemd").glob("*.service")) == set(UNITS)


def test_workers_of_the_table_take_every_queue_once() -> None:
    taken = [queue for row in TABLE.values() for queue in row.queues]
    queues = {queue.name.partition(".")[0] for queue in settings.CELERY_TASK_QUEUES}
    assert sorted(taken) == sorted(queues)


def test_planes_of_the_table_are_all_served() -> None:
    served = {plane for row in TABLE.values() for plane in row.environment.get("KEYVAULT_PLANES", "").split(",")} - {""}
    assert served == set(Plane)


def test_ports_of_the_table_are_distinct() -> None:
    """On a host all processes listen at one address."""
    ports = [port for row in TABLE.values() for port in (row.port, row.metrics) if port]
    assert len(set(ports)) == len(ports)


def test_processes_have_time_to_end_after_they_stopped_their_own() -> None:
    """Guarantee: a process that keeps its own timeouts is not killed while it ends, on a busy host neither."""
    for row in TABLE.values():
        kills_workers_after = float(_options(row.command).get("--workers-kill-timeout", 0))
        if row.name == "verifier":
            kills_workers_after = STOP_SECONDS
        assert row.stop_seconds >= max(kills_workers_after, JOIN_SECONDS) + SECONDS_TO_END, row.name


def test_programs_of_make_run_have_the_options_of_the_table() -> None:
    """An option that both name has one value, except for addresses, the time to stop, and the volume of logs."""
    for name, program in (
        ("web", server_program(8000)),
        ("worker-rotations", worker_program()),
        ("beat", beat_program()),
    ):
        ours, theirs = _options(TABLE[name].command), _options(list(program.command))
        both = (set(ours) & set(theirs)) - {"--workers-kill-timeout"}
        assert {option: ours[option] for option in both} == {option: theirs[option] for option in both}
    bounds = {"--backpressure", "--http1-header-read-timeout", "--no-ws", "--http", "--interface"}
    assert bounds <= set(_options(TABLE["web"].command))


def test_settings_of_the_samples_exist() -> None:
    """A process refuses to start with an unknown setting. Lines that are commented out count, too."""
    known = {name for setting in SETTINGS for name in setting.names()}
    for sample in ("systemd/environment", "systemd/console", "compose/settings.env", "compose/console.env"):
        named = re.findall(r"^(?:# )?([A-Z_]+)=", (DEPLOY / sample).read_text(), re.MULTILINE)
        assert named
        assert [name for name in named if name not in known] == []


def _options(command: list[str]) -> dict[str, str]:
    words = [*command, "--"]
    return {
        word.partition("=")[0]: word.partition("=")[2] or ("" if after.startswith("-") else after)
        for word, after in pairwise(words)
        if word.startswith("--")
    }


# --- systemd ----------------------------------------------------------------------------------------------


@pytest.fixture
def units_here(tmp_path: Path) -> list[Path]:
    """The units with a program that exists on this machine, since `verify` looks for it."""
    here = []
    for path in UNITS:
        text = re.sub(r"/opt/keyvault/\.venv/bin/\w+", sys.executable, path.read_text())
        here.append(tmp_path / path.name)
        here[-1].write_text(text.replace("/opt/keyvault", str(tmp_path)))
    return here


def test_units_pass_the_checks_of_systemd(units_here: list[Path]) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze on this machine")
    done = subprocess.run([analyze, "verify", *units_here], capture_output=True, text=True, check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "keyvault-" in line]) == (0, [])
    for unit in units_here:
        security = [analyze, "security", "--offline=true", f"--threshold={MAX_EXPOSURE}", str(unit)]
        done = subprocess.run(security, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_kv_runs_a_command_as_the_service_does(tmp_path: Path) -> None:
    """Guarantee: an installed `kv` uses the user, the release and the settings of the units, and passes arguments on.

    The page's line installs it, on folders of this test. `systemctl` and `runuser` are replaced.
    """
    [line] = re.findall(r"^install .* (/usr/local/sbin/kv)$", OPERATIONS, re.MULTILINE)
    [install] = [each for each in OPERATIONS.splitlines() if each.endswith(line)]
    programs, release, kv = tmp_path / "bin", tmp_path / "release", tmp_path / "kv"
    python = release / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    programs.mkdir()
    subprocess.run(["/bin/sh", "-ec", install.replace(line, str(kv))], cwd=ROOT, check=True)
    text = kv.read_text()
    for sample in ("environment", "console"):
        assert text.count(f"/etc/keyvault/{sample}") == 1
        text = text.replace(f"/etc/keyvault/{sample}", str(DEPLOY / "systemd" / sample))
    kv.write_text(text)
    for program, script in (
        (programs / "systemctl", f'echo "$*" >&2; echo {release}'),
        (programs / "runuser", 'echo "$1 $2 $3" >&2; shift 3; exec "$@"'),
        (python, 'pwd; echo "$KEYVAULT_ORIGIN $KEYVAULT_DATA_DIR"; printf "%s\\n" "$@"'),
    ):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    def run() -> subprocess.CompletedProcess[str]:
        command = [str(kv), "show_key", "a b"]
        path = {"PATH": f"{programs}:/usr/bin:/bin"}
        return subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True, check=False)

    done = run()
    assert done.stderr.splitlines() == ["show --property WorkingDirectory --value keyvault-web", "-u keyvault --"]
    settings_read = "https://console.example /var/lib/keyvault"
    assert done.stdout.splitlines() == [str(release), settings_read, "manage.py", "show_key", "a b"]
    (programs / "systemctl").write_text("#!/bin/sh\n")
    done = run()
    assert (done.returncode != 0, done.stdout) == (True, "")


@pytest.mark.parametrize("page", ["operations", "runbooks", "upgrades"])
def test_commands_that_start_everything_name_every_process(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text().replace("\\\n", " ")
    [units] = re.findall(r"^systemctl (?:enable --now|start|restart) (\S+ \S+ \S+ .*)$", text, re.MULTILINE)
    assert set(units.split()) == {f"keyvault-{name}" for name, row in TABLE.items() if not row.once}


def test_backup_steps_never_replace_the_passphrase(tmp_path: Path) -> None:
    """Guarantee: pasting the page's commands twice keeps the passphrase that earlier archives need."""
    [text] = re.findall(r'^```sh title="passphrase"\n(.*?)^```$', OPERATIONS, re.MULTILINE | re.DOTALL)
    for written, here in (
        ("-o keyvault -g keyvault ", ""),
        ("/etc/keyvault", str(tmp_path)),
        ("/backup\n", f"{tmp_path}/backup\n"),
    ):
        assert written in text
        text = text.replace(written, here)
    file, seen = tmp_path / "backup.passphrase", set()
    for _ in range(2):
        subprocess.run(["/bin/bash", "-euc", text], check=True)
        seen.add(file.read_text())
    assert len(seen) == 1
    assert len(seen.pop()) > 16
    assert file.stat().st_mode & 0o777 == 0o600


def test_units_of_an_upgrade_share_no_address_with_the_servers_in_service(tmp_path: Path) -> None:
    """Guarantee: a second server that docs/upgrades.md starts differs from the first one in its addresses alone.

    Until the migration has succeeded, nothing else of the new release is installed: it would refuse to start.
    The commands run as written, on folders of this test.
    """
    page = (ROOT / "docs" / "upgrades.md").read_text()
    steps = re.findall(r'^```sh title="(migrate|units|standby)"\n(.*?)^```$', page, re.MULTILINE | re.DOTALL)
    assert [title for title, _ in steps] == ["migrate", "units", "standby"]
    script = "\n".join(text for _, text in steps)
    units, standby, commands = tmp_path / "etc", tmp_path / "run", tmp_path / "sbin"
    units.mkdir()
    commands.mkdir()
    for folder, here in (
        ("/etc/systemd/system", units),
        ("/run/systemd/system", standby),
        ("/usr/local/sbin", commands),
    ):
        assert folder in script
        script = script.replace(folder, str(here))

    def run(systemctl: str) -> int:
        functions = f"systemctl() {{ {systemctl}; }}; NEW=/opt/next"
        return subprocess.run(["/bin/bash", "-euc", f"{functions}\n{script}"], cwd=ROOT, check=False).returncode

    assert run('[ "$1" != start ]') != 0
    assert [path.name for path in [*units.iterdir(), *commands.iterdir()]] == ["keyvault-migrate.service"]
    assert run(":") == 0
    assert (commands / "kv").read_text() == (DEPLOY / "systemd" / "kv").read_text()
    assert {path.name: path.read_text() for path in units.iterdir()} == {
        path.name: path.read_text().replace("/opt/keyvault", "/opt/next") for path in UNITS
    }
    address = re.compile(r"(?<=127\.0\.0\.1:)\d+|(?<=--port )\d+|(?<=RuntimeDirectory=).+|(?<=--socket )\S+")
    in_service = {found for path in units.iterdir() for found in address.findall(path.read_text())}
    servers = [name for name, row in TABLE.items() if row.probes]
    assert {path.name for path in standby.iterdir()} == {f"keyvault-standby-{name}.service" for name in servers}
    for name in servers:
        ours, theirs = (
            (folder / file).read_text()
            for folder, file in ((units, f"keyvault-{name}.service"), (standby, f"keyvault-standby-{name}.service"))
        )
        assert len(address.findall(theirs)) == len(address.findall(ours)) >= 2
        assert not set(address.findall(theirs)) & in_service
        assert address.sub("", theirs) == address.sub("", ours)


def test_sample_lives_as_long_as_its_certificates() -> None:
    """Nothing renews the administrator's token and the logins of the sample; `up` needs the token at each start."""
    lifetime = int(re.findall(r"^LIFETIME = timedelta\(days=(\d+)\)", read("make_secrets.py"), re.MULTILINE)[0])
    for key in ("max_lease_ttl", "period"):
        assert re.findall(rf'^ *{key} *= "(\d+)h"', read("openbao.hcl"), re.MULTILINE) == [str(lifetime * 24)], key
    assert f'"--secret-id-days", "{lifetime}"' in read("compose.yaml")


def read(name: str) -> str:
    return (DEPLOY / "compose" / name).read_text()


# --- the image --------------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Containerfile with their continuation lines joined."""
    lines = [line for line in CONTAINERFILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(line.split(None, 1)[0], line.split(None, 1)[1].strip()) for line in joined if line.strip()]


def final_stage() -> list[tuple[str, str]]:
    found = instructions()
    last = max(index for index, (word, _) in enumerate(found) if word == "FROM")
    return found[last:]


def test_image_runs_without_root_and_without_a_shell() -> None:
    final = final_stage()
    assert ("USER", f"{USER_ID}:{USER_ID}") in final
    assert not [line for line in final if line[0] == "RUN"]
    assert dict(final)["STOPSIGNAL"] == "SIGTERM"
    started = json.loads(dict(final)["CMD"])
    assert started == TABLE["web"].arguments("container")
    check = dict(final)["HEALTHCHECK"].partition("CMD ")[2]
    assert json.loads(check) == probe_command(TABLE["web"])


def test_image_creates_private_folders_for_the_volumes() -> None:
    """Guarantee: other users cannot list the volumes. COPY loses the mode of the folder that it names."""
    (made,) = re.findall(r"mkdir -m 0700 (\S+)", CONTAINERFILE.read_text())
    copied = [text.split()[-2:] for word, text in final_stage() if word == "COPY" and "--chown" in text]
    places = {f"{target}/{Path(made).name}" for source, target in copied if source == str(Path(made).parent)}
    assert places == {CONTAINER_SETTINGS["KEYVAULT_DATA_DIR"], SECRETS}


def test_image_installs_the_lock_with_hashes_and_nothing_else() -> None:
    installs = [text for word, text in instructions() if word == "RUN" and "install " in text]
    (install,) = installs
    assert "--require-hashes" in install
    assert "--requirement requirements.txt" in install
    assert "apt-get" not in CONTAINERFILE.read_text()


def test_image_reads_the_bytecode_that_its_build_wrote() -> None:
    """Guarantee: no process compiles modules at its start, which takes as long as the start itself."""
    written, read = re.findall(r"PYTHONPYCACHEPREFIX=(\S+)", CONTAINERFILE.read_text())
    assert written == read
    assert ("COPY", f"--from=build {Path(read).parent} {Path(read).parent}") in final_stage()


def test_image_copies_only_what_the_ignore_file_lets_in() -> None:
    copied = {
        source
        for word, text in instructions()
        if word == "COPY" and not text.startswith("--from")
        for source in text.split()[:-1]
    }
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignore
    assert {line[1:] for line in ignore if line.startswith("!")} == copied
    assert [source for source in copied if not (ROOT / source).exists()] == []


def test_containerfile_passes_hadolint() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("no hadolint for this machine")
    done = subprocess.run([hadolint, "--no-color", CONTAINERFILE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


# --- Compose ----------------------------------------------------------------------------------------------


def test_compose_services_refer_to_what_exists() -> None:
    (compose,) = documents(COMPOSE)
    services = compose["services"]
    for name, service in services.items():
        assert set(service.get("depends_on", ())) <= set(services), name
        assert set(service.get("networks", ())) <= set(compose["networks"]), name
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert source in compose["volumes"] or (COMPOSE.parent / source).exists(), (name, source)
        for file in service.get("env_file", ()):
            assert (COMPOSE.parent / file).exists(), (name, file)
        assert "image" in service, name


def test_compose_waits_for_every_service_that_stays() -> None:
    """Guarantee: `up --wait` ends with 0. Compose 2 fails at a running service whose check is disabled."""
    (compose,) = documents(COMPOSE)
    ends = {name for service in compose["services"].values() for name in _completed(service)} | {"replay"}
    for name, service in compose["services"].items():
        assert (service.get("healthcheck") == {"disable": True}) is (name in ends), name


def _completed(service: dict[str, Any]) -> list[str]:
    needs = service.get("depends_on", {})
    return [name for name, need in needs.items() if need["condition"] == "service_completed_successfully"]


def test_compose_does_not_take_the_creation_of_the_database_for_its_server() -> None:
    """At the first start the image of PostgreSQL runs a server that listens on the Unix socket only."""
    (compose,) = documents(COMPOSE)
    check = compose["services"]["postgres"]["healthcheck"]["test"]
    assert _options(check)["--host"] == "127.0.0.1"


def test_health_check_tells_a_ready_server_from_others() -> None:
    def status_of(row: Process) -> int:
        _, *arguments = probe_command(row)
        return subprocess.run([sys.executable, *arguments], stderr=subprocess.DEVNULL, check=False).returncode

    class Probes(BaseHTTPRequestHandler):
        protocol_version, status = "HTTP/1.1", 200

        def do_GET(self) -> None:
            self.send_response(self.status if self.path == "/readyz" else 404)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Probes) as server:
        threading.Thread(target=server.serve_forever).start()
        web = replace(TABLE["web"], port=server.server_port)
        beat = replace(TABLE["beat"], metrics=server.server_port)
        try:
            assert (status_of(web), status_of(beat)) == (0, 0)
            Probes.status = 503
            assert status_of(web) == 1
        finally:
            server.shutdown()
    assert (status_of(web), status_of(beat)) == (1, 1)


def test_compose_runs_each_process_without_privileges() -> None:
    (compose,) = documents(COMPOSE)
    for name in (*TABLE, "secrets", "vault-bootstrap"):
        service = compose["services"][name]
        assert service["user"] == f"{USER_ID}:{USER_ID}"
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["init"] is True, "a process that is starting would ignore SIGTERM as the first one"
        assert "ports" not in service


def test_compose_publishes_nginx_alone_and_on_this_machine_only() -> None:
    (compose,) = documents(COMPOSE)
    published = {name: service["ports"] for name, service in compose["services"].items() if "ports" in service}
    assert list(published) == ["nginx"]
    assert all(port.startswith("127.0.0.1:") for port in published["nginx"])


def test_nginx_of_compose_has_a_valid_configuration(tmp_path: Path) -> None:
    """It starts without the containers, whose names are unknown here: it looks each one up when it needs it."""
    nginx = find_nginx()
    if nginx is None:
        pytest.skip("no nginx on this machine")
    secrets = tmp_path / "servers"
    secrets.mkdir()
    subprocess.run([sys.executable, DEPLOY / "compose" / "make_secrets.py", tmp_path, secrets], check=True)
    text = (DEPLOY / "compose" / "nginx.conf").read_text()
    text = text.replace("/run/secrets/servers", str(secrets)).replace("/dev/stdout", f"{tmp_path}/log")
    for place in ("pid /tmp", "_path /tmp"):
        assert place in text
        text = text.replace(place, place.replace("/tmp", str(tmp_path)))  # noqa: S108  the folder of the container
    (tmp_path / "nginx.conf").write_text(text)
    command = [str(nginx), "-t", "-q", "-e", "stderr", "-c", str(tmp_path / "nginx.conf")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_secrets_of_the_sample_are_made_once(tmp_path: Path) -> None:
    own, servers = tmp_path / "own", tmp_path / "servers"
    own.mkdir()
    servers.mkdir(mode=0o700)
    texts = []
    for _ in range(2):
        subprocess.run([sys.executable, DEPLOY / "compose" / "make_secrets.py", own, servers], check=True)
        texts.append({path.name: path.read_bytes() for path in (*own.iterdir(), *servers.iterdir())})
    assert texts[0] == texts[1]
    assert {path.stat().st_mode & 0o777 for path in own.iterdir()} == {0o400}
    # The servers run as other users.
    assert servers.stat().st_mode & 0o777 == 0o755
    assert {Path(path).name for name, path in CONTAINER_SETTINGS.items() if name.endswith("_FILE")} <= set(texts[0])


# --- Kubernetes -------------------------------------------------------------------------------------------


def test_kubernetes_objects_are_valid() -> None:
    found = [*objects(BASE, *OVERLAYS), your_service()]
    assert len(found) > 30
    for each in found:
        kubernetes_validate.validate(each, KUBERNETES_VERSION, strict=True)


@pytest.mark.parametrize("row", TABLE.values(), ids=lambda row: row.name)
def test_kubernetes_pod_meets_the_restricted_standard(row: Process) -> None:
    """The namespaces of the overlays enforce it."""
    pod = pod_of(row)["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == USER_ID
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"/var/lib/keyvault", "/tmp"}  # noqa: S108  the folder of the container
    accounts = {each["metadata"]["name"] for each in objects(BASE) if each["kind"] == "ServiceAccount"}
    assert pod["serviceAccountName"] in accounts


def test_kubernetes_sidecar_alone_gets_the_token_for_the_vault() -> None:
    """Guarantee: the container beside it cannot log in to the Vault as Keyvault.

    The other pods mount the token by themselves, because their service accounts do not.
    """
    assert all(pod_of(row)["spec"]["automountServiceAccountToken"] is True for row in TABLE.values())
    pod = your_service()["spec"]["template"]["spec"]
    (verifier,) = pod["initContainers"]
    token = Path({each["name"]: each.get("value", "") for each in verifier["env"]}["KEYVAULT_VAULT_JWT_FILE"])
    (name,) = (each["name"] for each in verifier["volumeMounts"] if each["mountPath"] == str(token.parent))
    (volume,) = (each for each in pod["volumes"] if each["name"] == name)
    assert volume["projected"]["sources"] == [{"serviceAccountToken": {"path": token.name}}]
    assert pod["automountServiceAccountToken"] is False


def test_kubernetes_sidecar_has_names_that_no_service_has() -> None:
    """Guarantee: Kustomize, which merges by name, neither replaces a volume of the service nor shares one with it."""
    pod = your_service()["spec"]["template"]["spec"]
    named = [*pod["volumes"], *pod["initContainers"], *pod["initContainers"][0]["volumeMounts"]]
    assert [each["name"] for each in named if not each["name"].startswith("keyvault-")] == []


def test_kubernetes_sidecar_is_admitted_where_pods_are_restricted() -> None:
    """Guarantee: its container meets the Pod Security Standard by itself, whatever the pod of the service states."""
    (verifier,) = your_service()["spec"]["template"]["spec"]["initContainers"]
    context = verifier["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}


@pytest.mark.parametrize("probe", ["startupProbe", "livenessProbe", "readinessProbe"])
def test_kubernetes_sidecar_answers_the_same_probes_as_the_verifier(probe: str) -> None:
    """Guarantee: an outage of a store restarts neither. It only takes them out of service."""
    (verifier,) = pod_of(TABLE["verifier"])["spec"]["containers"]
    (sidecar,) = your_service()["spec"]["template"]["spec"]["initContainers"]
    path = verifier[probe]["httpGet"]["path"]
    assert path == ("/readyz" if probe == "readinessProbe" else "/healthz")
    assert f"b'GET {path} HTTP/1.1" in sidecar[probe]["exec"]["command"][-1]


def test_kubernetes_pods_of_a_worker_report_under_one_name_and_replace_none_before_they_have_started() -> None:
    """Guarantee: a killed pod's successor ends the alarm, and a release that cannot start stops no worker."""
    for row in TABLE.values():
        if row.once or row.port:
            continue
        spec = pod_of(row)["spec"]
        assert spec["hostname"] == f"keyvault-{row.name}"
        (container,) = spec["containers"]
        assert container["readinessProbe"]["tcpSocket"] == {"port": "metrics"}
        assert {"name": "metrics", "containerPort": row.metrics} in container["ports"]
        assert named("Deployment", row.name)["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


def test_kubernetes_selectors_match_pods() -> None:
    pods = [pod_of(row)["metadata"]["labels"] for row in TABLE.values()]
    for each in objects(BASE):
        if each["kind"] == "NetworkPolicy":
            selector = each["spec"]["podSelector"]
        elif each["kind"] == "Service":
            selector = {"matchLabels": each["spec"]["selector"]}
        elif each["kind"] in ("Deployment", "PodDisruptionBudget"):
            selector = each["spec"]["selector"]
        else:
            continue
        assert any(_selects(selector, labels) for labels in pods), each["metadata"]["name"]


def _selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    plain = selector.get("matchLabels", {}).items() <= labels.items()
    return plain and all(labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", ()))


def test_kubernetes_policies_deny_by_default_and_open_the_way_out_to_those_that_need_it() -> None:
    default = named("NetworkPolicy", "default")["spec"]
    assert (default["policyTypes"], default.get("ingress")) == (["Ingress", "Egress"], None)
    outside = named("NetworkPolicy", "outside")["spec"]["podSelector"]
    for row in TABLE.values():
        labels = pod_of(row)["metadata"]["labels"]
        assert _selects(default["podSelector"], labels)
        assert _selects(outside, labels) is row.reaches_out


def test_prometheus_of_a_cluster_finds_every_process() -> None:
    """Each gets the job of its name. Compared here: Debian's `promtool` cannot load a configuration of a cluster."""
    (scrape,) = documents(DEPLOY / "prometheus" / "kubernetes.yml")[0]["scrape_configs"]
    keep, _, other, job, _ = scrape["relabel_configs"]
    for row in filter(lambda row: not row.once, TABLE.values()):
        pod = pod_of(row)
        labels, ports = pod["metadata"]["labels"], pod["spec"]["containers"][0]["ports"]
        kept = [each for each in ports if re.fullmatch(keep["regex"], f"{labels[_NAME]};{each['name']}")]
        assert [each["containerPort"] for each in kept] == [row.metrics]
        found = re.fullmatch(job["regex"], f"{kept[0]['name']};{labels[_COMPONENT]}")
        assert found is not None
        assert job["replacement"].replace("$1", found[1]) == f"keyvault-{row.name}"
    (sidecar,) = your_service()["spec"]["template"]["spec"]["initContainers"]
    (port,) = sidecar["ports"]
    assert re.fullmatch(keep["regex"], f";{port['name']}")
    assert not re.fullmatch(job["regex"], f"{port['name']};api")
    assert other["replacement"] == "keyvault-verifier"


_NAME, _COMPONENT = "app.kubernetes.io/name", "app.kubernetes.io/component"


@pytest.mark.parametrize("scheme", ["smtp", "smtps"])
def test_kubernetes_policy_lets_alarms_out_to_the_port_of_a_mail_server(scheme: str) -> None:
    (read,) = (setting.read for setting in SETTINGS if setting.name == "KEYVAULT_SMTP_URL")
    port = read(f"{scheme}://mail.example.com").port
    (rule,) = named("NetworkPolicy", "outside")["spec"]["egress"]
    assert any(each["port"] <= port <= each.get("endPort", each["port"]) for each in rule["ports"])


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_kubernetes_policies_admit_each_ingress_controller_to_its_own_backends(overlay: Path) -> None:
    """Guarantee: a controller reaches what its Ingresses route to, and nothing else."""
    admitted = {
        (controller, f"keyvault-{row.name}", port["port"])
        for policy in objects(BASE)
        if policy["kind"] == "NetworkPolicy"
        for row in TABLE.values()
        if _selects(policy["spec"]["podSelector"], pod_of(row)["metadata"]["labels"])
        for rule in policy["spec"].get("ingress", ())
        for peer in rule["from"]
        for port in rule["ports"]
        for controller, namespace in CONTROLLERS.items()
        if _selects(peer["namespaceSelector"], {"kubernetes.io/metadata.name": namespace})
    }
    assert admitted == routes(overlay)


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_kubernetes_overlay_refers_to_what_exists(overlay: Path) -> None:
    (kustomization,) = documents(overlay / "kustomization.yaml")
    for resource in kustomization["resources"]:
        assert (overlay / resource).exists()
    names = {(each["kind"], each["metadata"]["name"]) for each in objects(BASE)}
    for replicas in kustomization["replicas"]:
        assert ("Deployment", replicas["name"]) in names
    for patch in kustomization.get("patches", ()):
        kind, name = patch["target"]["kind"], patch["target"].get("name")
        assert any(kind == its and name in (None, own) for its, own in names)
    generated = {each["name"] for each in kustomization["configMapGenerator"]}
    used = {
        source["configMapRef"]["name"]
        for row in TABLE.values()
        for source in pod_of(row)["spec"]["containers"][0]["envFrom"]
    }
    mounted = {
        volume["configMap"]["name"]
        for row in TABLE.values()
        for volume in pod_of(row)["spec"]["volumes"]
        if "configMap" in volume
    }
    assert used | mounted == generated
    for path in (each for generator in kustomization["configMapGenerator"] for each in generator.get("files", ())):
        assert (overlay / path).exists()
    services = {each["metadata"]["name"] for each in objects(BASE) if each["kind"] == "Service"}
    assert {service for _, service, _ in routes(overlay)} == services


def routes(overlay: Path) -> set[tuple[str, str, str]]:
    """Return the class of each Ingress with the service and the port of each of its backends."""
    return {
        (each["spec"]["ingressClassName"], service["name"], service["port"]["name"])
        for each in objects(overlay)
        if each["kind"] == "Ingress"
        for rule in each["spec"]["rules"]
        for service in (path["backend"]["service"] for path in rule["http"]["paths"])
    }
