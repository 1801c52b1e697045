"""The examples of docs/how-to/protect-your-service.md, pasted from the page and run in front of a whole service."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

import pytest
import yaml

from keyvault.access.permissions import Permission as P
from keyvault.domain.keystring import StringScope
from keyvault.management.service import find_free_port
from tests.environment import ROOT
from tests.factories import account, issue, make_merchant, make_token
from tests.fuzz.drive import UNLIMITED
from tests.fuzz.served import serving
from tests.servers.nginx import find_nginx

PAGE = ROOT / "docs" / "how-to" / "protect-your-service.md"
START_SECONDS = 300
"""Maximum time until an example listens, in seconds. A first build of Go's standard library takes minutes."""

ORDER = "/merchants/orders/ord_1"
NODE_MODULES = ROOT / "clients" / "typescript" / "node_modules"
NEEDS_NETWORK = re.compile(r"^(?:npm|pip|python -m pip) ", re.MULTILINE)
"""Lines of an example that install packages, which the tests have installed already."""


@dataclass(frozen=True)
class Section:
    """The files of a section by name, and its last commands."""

    files: dict[str, str]
    commands: str


def read_section(heading: str) -> Section:
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None, heading
    files = dict(re.findall(r"`([\w.]+)`[^`]*?:\n\n```(?!sh)\w+\n(.*?)^```$", found[1], re.MULTILINE | re.DOTALL))
    commands = re.findall(r"^```sh\n(.*?)^```$", found[1], re.MULTILINE | re.DOTALL)
    return Section(files, commands[-1])


@dataclass
class Service:
    """A whole service, its sandbox's private key of `acme`, and what an example needs. `stop` ends the service."""

    url: str
    key: str
    token: str
    stop: ExitStack


@pytest.fixture
def service(tmp_path: Path, transactional_db: None) -> Iterator[Service]:
    make_merchant("acme")
    key = issue(account())[1].reveal()
    token = make_token(P.KEYS_VERIFY, name="shop", scope=StringScope.SANDBOX)[1].reveal()
    with ExitStack() as stop:
        folder = tmp_path / "keyvault"
        folder.mkdir()
        port = stop.enter_context(serving(folder, **UNLIMITED))
        yield Service(f"http://127.0.0.1:{port}", key, token, stop)


def variables(service: Service) -> dict[str, str]:
    """Return the environment of a reader of the page who has installed what it says, the Python client included."""
    own = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    return own | {
        "URL": service.url,
        "SERVICE_TOKEN": service.token,
        "CHECKOUT": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT / 'clients' / 'python'}:{ROOT}",
        "PYTHONUNBUFFERED": "1",
        "GOFLAGS": "-buildvcs=false",
    }


@contextmanager
def running(section: Section, folder: Path, service: Service, ports: dict[str, int]) -> Iterator[str]:
    """Paste the section into a folder and run its commands, on other ports. Yield its log once it listens."""
    folder.mkdir(exist_ok=True)
    for name, text in section.files.items():
        (folder / name).write_text(with_ports(text, ports))
    commands = with_ports(NEEDS_NETWORK.sub("true ", section.commands), ports)
    log = folder / "example.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["/bin/bash", "-euc", commands],
            cwd=folder,
            env=variables(service),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not all(map(listens, ports.values())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield str(log)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(20)


def with_ports(text: str, ports: dict[str, int]) -> str:
    for written, port in ports.items():
        text = re.sub(rf"\b{written}\b", str(port), text)
    return text


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def ask(port: int, path: str, key: str | None = None) -> tuple[int, str, dict[str, str]]:
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path, headers={} if key is None else {"X-Api-Key": key})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), {name.lower(): value for name, value in answer.getheaders()}
    finally:
        connection.close()


def check(port: int, service: Service, log: Path) -> None:
    """Guarantee: only a valid key gets through, refusals are Keyvault's, and no answer of Keyvault's means no."""
    status, text, headers = ask(port, ORDER, service.key)
    assert (status, text.strip()) == (200, "acme"), log.read_text()
    assert headers["ratelimit-policy"].startswith('"account"')
    status, text, headers = ask(port, ORDER)
    assert (status, '"credential_missing"' in text) == (401, True)
    assert headers["www-authenticate"].startswith("ApiKey ")
    assert headers["content-type"] == "application/problem+json"
    for path, key, expected in (
        (ORDER, service.key[:-1] + "_", (401, "credential_invalid")),
        ("/nowhere", service.key, (404, "endpoint_unknown")),
        ("/merchants//orders/ord_1", service.key, (404, "endpoint_unknown")),
        (f"{ORDER}?key={service.key}", service.key, (400, "credential_in_url")),
    ):
        status, text, _ = ask(port, path, key)
        assert (status, f'"{expected[1]}"' in text) == (expected[0], True), (path, text)
    service.stop.close()
    status, text, headers = ask(port, ORDER, service.key)
    assert (status, '"dependency_unavailable"' in text, headers["retry-after"]) == (503, True, "1")
    assert service.key[27:] not in log.read_text()
    assert service.token[27:] not in log.read_text()


def need(name: str, *, found: bool) -> None:
    if not found:
        pytest.skip(f"no {name} on this machine")


@pytest.mark.long
@pytest.mark.timeout(START_SECONDS + 100)
def test_page_go_example_runs_as_pasted(service: Service, tmp_path: Path) -> None:
    need("go", found=shutil.which("go") is not None)
    ports = {"9000": find_free_port()}
    with running(read_section("Go"), tmp_path / "shop", service, ports) as log:
        check(ports["9000"], service, Path(log))


@pytest.mark.long
@pytest.mark.parametrize("heading", ["Django", "FastAPI", "Flask"])
def test_page_python_example_runs_as_pasted(service: Service, tmp_path: Path, heading: str) -> None:
    ports = {"9000": find_free_port()}
    with running(read_section(heading), tmp_path / "shop", service, ports) as log:
        check(ports["9000"], service, Path(log))


@pytest.mark.long
@pytest.mark.parametrize("heading", ["Node with Express", "Node with Hono", "Node with a fetch handler"])
def test_page_node_example_runs_as_pasted(service: Service, tmp_path: Path, heading: str) -> None:
    need("node", found=shutil.which("node") is not None)
    need("installation of clients/typescript (`make test-clients` makes it)", found=NODE_MODULES.exists())
    shop = tmp_path / "shop"
    (shop / "node_modules").mkdir(parents=True)
    for package in ("express", "hono", "@hono"):
        (shop / "node_modules" / package).symlink_to(NODE_MODULES / package)
    (shop / "node_modules" / "keyvault-client").symlink_to(ROOT / "clients" / "typescript")
    ports = {"9000": find_free_port()}
    with running(read_section(heading), shop, service, ports) as log:
        check(ports["9000"], service, Path(log))


@pytest.mark.long
def test_page_nginx_example_runs_as_pasted(service: Service, tmp_path: Path) -> None:
    need("nginx", found=find_nginx() is not None)
    shop, ports = tmp_path / "shop", {"9000": find_free_port(), "9001": find_free_port()}
    upstream, nginx = read_section("Behind a gateway"), read_section("nginx")
    # The sample's own addresses are on the page, too: only the ones that the page chooses are replaced.
    commands = nginx.commands.replace("nginx -p", f"exec {find_nginx()} -p")
    commands = commands.replace("server 127.0.0.1:9000;|server", "server 127.0.0.1:90[0]0;|server")
    both = Section(upstream.files | nginx.files, upstream.commands + commands)
    with running(both, shop, service, ports):
        check(ports["9000"], service, shop / "example.log")


@pytest.mark.parametrize(
    ("heading", "file", "program"),
    [("Envoy", "envoy.yaml", "envoy"), ("Traefik", "keyvault.yaml", "traefik")],
)
def test_page_gateway_that_was_not_run_is_configured_as_the_page_says(
    tmp_path: Path, heading: str, file: str, program: str
) -> None:
    """The commands before the program make a valid file with the page's addresses. The page says what did not run."""
    section = read_section(heading)
    assert "**Not run here**" in PAGE.read_text().partition(f"## {heading}\n")[2]
    assert shutil.which(program) is None, f"{program} is on this machine: run its example, too"
    commands = "".join(re.findall(r"^sed .*?(?<!\\)\n", section.commands, re.MULTILINE | re.DOTALL))
    sent = {**os.environ, "URL": "http://127.0.0.1:8123", "SERVICE_TOKEN": "kv_svc_text", "CHECKOUT": str(ROOT)}
    subprocess.run(["/bin/bash", "-euc", commands], cwd=tmp_path, env=sent, check=True)
    text = (tmp_path / file).read_text()
    assert yaml.safe_load(text)
    assert "REPLACE_ME" not in text
    found = re.findall(r"127\.0\.0\.1(?::|, port_value: )([0-9]+)", text)
    assert set(found) == ({"8123", "9001", "9000"} if heading == "Envoy" else {"8123", "9001"})
    assert heading == "Traefik" or text.count("kv_svc_text") == 1
    for name, content in section.files.items():
        assert yaml.safe_load(content)["providers"]["file"]["filename"] == file, name
