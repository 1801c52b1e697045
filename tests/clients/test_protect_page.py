"""The examples of docs/how-to/protect-your-service.md, pasted from the page and run in front of a whole service."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.domain.keystring import KEY_ID_PLACE, StringScope
from keyvault.management.service import find_free_port
from tests.environment import ROOT
from tests.factories import account, issue, make_merchant, make_token
from tests.fuzz.drive import UNLIMITED
from tests.fuzz.served import serving
from tests.servers.gateways import find_gateway, is_configured
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
class ExampleService:
    """A whole service, its sandbox's private key of `acme`, and what an example needs. `stop` ends the service."""

    url: str
    key: str
    token: str
    stop: ExitStack


@pytest.fixture
def service(tmp_path: Path, transactional_db: None) -> Iterator[ExampleService]:
    make_merchant("acme")
    key = issue(account())[1].reveal()
    token = make_token(P.KEYS_VERIFY, name="shop", scope=StringScope.SANDBOX)[1].reveal()
    with ExitStack() as stop:
        folder = tmp_path / "keyvault"
        folder.mkdir()
        port = stop.enter_context(serving(folder, **UNLIMITED))
        yield ExampleService(f"http://127.0.0.1:{port}", key, token, stop)


def variables(service: ExampleService) -> dict[str, str]:
    """Return the environment of a reader of the page who has installed what it says, the Python client included."""
    own = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    return own | {
        "URL": service.url,
        "SHOP_TOKEN": service.token,
        "CHECKOUT": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT / 'clients' / 'python'}:{ROOT}",
        "PYTHONUNBUFFERED": "1",
        "GOFLAGS": "-buildvcs=false",
    }


@dataclass(frozen=True)
class Example:
    """A section that runs: the port that it listens on, and the file with its output."""

    port: int
    log: Path


@contextmanager
def running(section: Section, folder: Path, service: ExampleService) -> Iterator[Example]:
    """Paste the section into a folder and run its commands, on other ports. Yield when they listen."""
    folder.mkdir(exist_ok=True)
    ports = {port: find_free_port() for port in ("9000", "9001") if port == "9000" or "9001" in section.commands}
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
        while not all(map(listens, ports.values())) or not is_configured(ports["9000"]):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield Example(ports["9000"], log)
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


def check_answers(example: Example, service: ExampleService, heading: str) -> None:
    """Guarantee: only a valid key gets through, and refusals are Keyvault's."""
    status, text, headers = ask(example.port, ORDER, service.key)
    assert (status, text.strip()) == (200, "acme"), example.log.read_text()
    # Traefik and REST framework's authentication add no header to the response to an allowed request.
    has_headers = heading not in {"Traefik", REST_FRAMEWORK}
    assert headers.get("ratelimit-policy", "").startswith('"account"') is has_headers
    status, text, headers = ask(example.port, ORDER)
    assert (status, '"credential_missing"' in text) == (401, True)
    assert headers["www-authenticate"].startswith("ApiKey ")
    assert headers["content-type"] == "application/problem+json"
    for path, key, expected in (
        (ORDER, service.key[:-1] + "_", (401, "credential_invalid")),
        ("/nowhere", service.key, (404, "endpoint_unknown")),
        ("/merchants;x/orders/ord_1", service.key, (404, "endpoint_unknown")),
    ):
        status, text, _ = ask(example.port, path, key)
        # Without the middleware, Django itself answers a path without a view.
        is_keyvaults = heading != REST_FRAMEWORK or status != 404
        assert (status, f'"{expected[1]}"' in text) == (expected[0], is_keyvaults), (path, text)


def check_without_keyvault(example: Example, service: ExampleService, heading: str) -> None:
    """Guarantee: no answer of Keyvault's means no, and no output has the key or the token."""
    status, text, headers = ask(example.port, ORDER, service.key)
    if heading in {"Envoy", "Traefik"}:
        assert (status, text) in {(503, ""), (500, "")}  # their own answer
    else:
        assert (status, '"dependency_unavailable"' in text, headers["retry-after"]) == (503, True, "1")
    output = example.log.read_text()
    assert service.key[KEY_ID_PLACE.stop :] not in output
    assert service.token[KEY_ID_PLACE.stop :] not in output


def need(name: str, *, found: bool) -> None:
    if not found:
        pytest.skip(f"no {name} on this machine")


def python_example(heading: str, folder: Path) -> Section:
    return read_section(heading)


def go_example(heading: str, folder: Path) -> Section:
    need("go", found=shutil.which("go") is not None)
    return read_section(heading)


def node_example(heading: str, folder: Path) -> Section:
    """Install what the page says from the packages of clients/typescript."""
    need("node", found=shutil.which("node") is not None)
    need("installation of clients/typescript, which `make test-clients` makes,", found=NODE_MODULES.exists())
    modules = folder / "node_modules"
    modules.mkdir(parents=True)
    for package in ("express", "hono", "@hono"):
        (modules / package).symlink_to(NODE_MODULES / package)
    (modules / "keyvault-client").symlink_to(ROOT / "clients" / "typescript")
    return read_section(heading)


def nginx_example(heading: str, folder: Path) -> Section:
    binary = find_nginx()
    need("nginx", found=binary is not None)
    upstream, nginx = read_section("Behind a gateway"), read_section(heading)
    commands = nginx.commands.replace("nginx -p", f"exec {binary} -p")
    # The text that `sed` looks for is the sample's, and not an address of the page.
    commands = commands.replace("server 127.0.0.1:9000;|", "server 127.0.0.1:90[0]0;|")
    return Section(upstream.files | nginx.files, upstream.commands + commands)


def gateway_example(heading: str, folder: Path) -> Section:
    """Run the page's Envoy or Traefik, whose commands replace the same addresses in the sample."""
    binary = find_gateway(heading.lower())
    need(heading, found=binary is not None)
    upstream, gateway = read_section("Behind a gateway"), read_section(heading)
    program = re.compile(rf"^(KEYVAULT_SERVICE_TOKEN=\S+ )?{heading.lower()} ", re.MULTILINE)
    commands = program.sub(rf"\g<1>{binary} ", gateway.commands)
    # The texts that `sed` looks for are the sample's, and not addresses of the page.
    commands = re.sub(r"s\|([^|]*)9000([^|]*)\|", r"s|\g<1>90[0]0\2|", commands)
    return Section(upstream.files | gateway.files, upstream.commands + commands)


REST_FRAMEWORK = "Django REST framework"

EXAMPLES: dict[str, Callable[[str, Path], Section]] = {
    "Django": python_example,
    REST_FRAMEWORK: python_example,
    "FastAPI": python_example,
    "Flask": python_example,
    "Go": go_example,
    "Node with Express": node_example,
    "Node with Hono": node_example,
    "Node with a fetch handler": node_example,
    "nginx": nginx_example,
    "Envoy": gateway_example,
    "Traefik": gateway_example,
}


@pytest.mark.long
@pytest.mark.timeout(2 * START_SECONDS)
def test_page_examples_run_as_pasted(service: ExampleService, tmp_path: Path, subtests: pytest.Subtests) -> None:
    """One service answers all examples, because its start takes most of the time."""
    with ExitStack() as stack:
        examples: dict[str, Example] = {}
        for number, (heading, prepare) in enumerate(EXAMPLES.items()):
            with subtests.test(heading):
                folder = tmp_path / f"shop{number}"
                example = stack.enter_context(running(prepare(heading, folder), folder, service))
                check_answers(example, service, heading)
                examples[heading] = example
        service.stop.close()
        for heading, example in examples.items():
            with subtests.test(f"{heading} without Keyvault"):
                check_without_keyvault(example, service, heading)
