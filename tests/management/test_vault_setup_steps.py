"""deploy/vault/README.md executed as written: from an empty OpenBao with TLS to hosts that pass `check_vault`."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from cryptography.hazmat.primitives.serialization import Encoding

from tests.backends.receivers import Authority, make_authority
from tests.environment import ROOT
from tests.servers.openbao import RunningVault, find_vault
from tests.servers.throwaway import Place, Plan, free_port, running

README = ROOT / "deploy" / "vault" / "README.md"
TIMEOUT_SECONDS = 300


@dataclass(frozen=True)
class Block:
    """A fenced block of the page; `place` is the second word of its fence, the host on which it runs."""

    language: str
    place: str
    text: str


@dataclass(frozen=True)
class Empty:
    """An initialized, unsealed server with nothing on it."""

    address: str
    ca_file: Path
    root_token: str
    shares: tuple[str, ...]
    """Key shares, as many as unseal the server."""
    audit_logs: tuple[Path, Path]


def blocks() -> list[Block]:
    found = re.findall(r'^```(\w+)(?: title="([\w-]+)")?\n(.*?)^```$', README.read_text(encoding="utf-8"), re.M | re.S)
    return [Block(*each) for each in found]


@contextmanager
def empty_server(folder: Path) -> Iterator[Empty]:
    """Start a server from the page's own configuration, with paths and addresses of this machine."""
    binary = find_vault()
    if binary is None or "OpenBao" not in subprocess.check_output([binary, "version"], text=True):
        pytest.skip("the page's configuration is OpenBao's, and there is no bao on this machine")
    authority, [settings] = make_authority(folder), [block.text for block in blocks() if block.language == "hcl"]
    ca_file = folder / "ca.pem"
    ca_file.write_bytes(authority.certificate.public_bytes(Encoding.PEM))
    logs: list[Path] = []

    def plan(place: Place) -> Plan:
        logs[:] = [place.directory / "first.log", place.directory / "second.log"]
        address = f"https://127.0.0.1:{place.port}"
        return Plan(
            url=address,
            serve=[str(binary), "server", f"-config={place.write('server.hcl', _settled(settings, place, authority))}"],
            is_ready=lambda: _answers(address, ca_file),
            stop_signal=signal.SIGTERM,
        )

    with running("kv-openbao-", plan) as address:
        yield Empty(address, ca_file, *_initialised(address, ca_file), (logs[0], logs[1]))


def _settled(settings: str, place: Place, authority: Authority) -> str:
    authority.server("127.0.0.1")
    pem = (authority.folder / "127.0.0.1.pem").read_text()
    tls = str(place.write("tls.pem", pem))
    (place.directory / "data").mkdir()
    if place.owner:
        os.chown(place.directory / "data", *place.owner)
    for written, here in {
        "/var/lib/openbao": str(place.directory / "data"),
        "0.0.0.0:8200": f"127.0.0.1:{place.port}",
        "/etc/openbao/tls.crt": tls,
        "/etc/openbao/tls.key": tls,
        "https://vault.example.com:8200": f"https://127.0.0.1:{place.port}",
        "https://vault.example.com:8201": f"https://127.0.0.1:{free_port()}",
        "/var/log/openbao/audit.log": str(place.directory / "first.log"),
        "/mnt/second/openbao/audit.log": str(place.directory / "second.log"),
    }.items():
        assert settings.count(written) == 1
        settings = settings.replace(written, here)
    return settings


def _answers(address: str, ca_file: Path) -> bool:
    try:
        return requests.get(f"{address}/v1/sys/seal-status", verify=str(ca_file), timeout=2).status_code == 200
    except requests.exceptions.RequestException:
        return False


def _initialised(address: str, ca_file: Path) -> tuple[str, tuple[str, ...]]:
    """Initialize and unseal, as the holders of the key shares do. Returns the root token and their shares."""

    def ask(path: str, body: dict[str, object]) -> Any:
        answer = requests.put(f"{address}/v1/sys/{path}", json=body, verify=str(ca_file), timeout=30)
        answer.raise_for_status()
        return answer.json()

    made = ask("init", {"secret_shares": 3, "secret_threshold": 2})
    shares = tuple(made["keys"][:2])
    for share in shares:
        ask("unseal", {"key": share})
    while requests.get(f"{address}/v1/sys/health", verify=str(ca_file), timeout=5).status_code != 200:
        pass
    return str(made["root_token"]), shares


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a folder from which `manage.py` can be run and where the steps leave their files."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in ("manage.py", "keyvault", "rotation", "deploy"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return a plain host environment: PATH and nothing of the test's settings."""
    tools = tmp_path / "bin"
    tools.mkdir()
    binary = find_vault()
    if binary is not None:
        (tools / "bao").symlink_to(shutil.which(str(binary)) or binary)
    return {
        "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "KEYVAULT_DATA_DIR": str(tmp_path / "data"),
    }


def run(text: str, folder: Path, environment: dict[str, str], typed: str = "") -> str:
    done = subprocess.run(
        ["/bin/bash", "-euo", "pipefail", "-c", text],
        input=typed,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_setup_steps_of_the_page_make_an_installation_that_passes_the_doctor(
    vault: RunningVault, tmp_path: Path, checkout: Path, environment: dict[str, str]
) -> None:
    """The `vault` fixture is requested only to skip, or fail, where no server is available."""
    with empty_server(tmp_path) as server:
        environment |= {"VAULT_ADDR": server.address, "VAULT_CACERT": str(server.ca_file)}
        (checkout / "admin.token").write_text(server.root_token)
        shell = [block for block in blocks() if block.language == "sh"]
        at_home = [block.text for block in shell if not block.place]
        before_switch, at_the_end = at_home[:-1], at_home[-1]
        assert "revoke -self" in at_the_end
        output = run("\n".join(before_switch), checkout, environment)
        assert "first/" in output
        assert "second/" in output

        environment["KEYVAULT_BACKEND"] = "vault"
        for host in ("setup-1", "web-1", "worker-1"):
            [block] = [block for block in shell if block.place == host]
            its_own = {**environment, "KEYVAULT_VAULT_CREDENTIALS_DIR": str(checkout / "handover" / host)}
            assert "no problems" in run(block.text, checkout, its_own)

        with_admin = {**environment, "VAULT_TOKEN": server.root_token, "ACCOUNT_ID": "42", "CREDENTIAL_ID": "crd_x"}
        run("bao kv put -mount=keyvault-keys-sandbox -cas=0 42/crd_x secret=shown schema=1", checkout, with_admin)
        [operators] = [block for block in shell if block.place == "operator"]
        [merchants] = [block for block in shell if block.place == "merchant"]
        run(operators.text, checkout, with_admin)
        as_merchant = {name: value for name, value in with_admin.items() if name != "VAULT_TOKEN"}
        assert run(merchants.text, checkout, as_merchant).strip() == "shown"

        [leak] = [block for block in shell if block.place == "leak"]
        run(leak.text, checkout, with_admin)
        check = "python manage.py check_vault --host web || test $? -eq 1"
        its_own = {**environment, "KEYVAULT_VAULT_CREDENTIALS_DIR": str(checkout / "handover" / "web-1")}
        assert run(check, checkout, its_own).count("The login is not accepted") == 2
        run("cp handover/after-leak/* handover/web-1/", checkout, environment)
        assert "no problems" in run(check, checkout, its_own)

        [administrator] = [block for block in shell if block.place == "administrator"]
        run(administrator.text, checkout, with_admin, typed="administrators-password")
        run(at_the_end, checkout, with_admin)
        assert not (checkout / "admin.token").exists()
        assert (checkout / "first.snap").stat().st_size > 0
        for log in server.audit_logs:
            assert json.loads(log.read_text().splitlines()[-1])
        assert _policies(_new_administrator(server, checkout, environment), checkout, environment) == ["root"]


def _new_administrator(server: Empty, checkout: Path, environment: dict[str, str]) -> str:
    """Make a token as the page says, with the administrator's login and the key shares."""
    login = "bao write -field=token auth/userpass/login/anna password=-"
    administrator = {**environment, "VAULT_TOKEN": run(login, checkout, environment, typed="administrators-password")}
    generate = "bao operator generate-root"
    begun = json.loads(run(f"{generate} -init -format=json", checkout, administrator))
    for share in server.shares:
        answer = run(f"{generate} -format=json -nonce={begun['nonce']} -", checkout, administrator, typed=share)
    encoded = json.loads(answer)["encoded_token"]
    return run(f"{generate} -decode={encoded} -otp={begun['otp']}", checkout, administrator).strip()


def _policies(token: str, checkout: Path, environment: dict[str, str]) -> list[str]:
    answer = run("bao token lookup -format=json", checkout, {**environment, "VAULT_TOKEN": token})
    policies: list[str] = json.loads(answer)["data"]["policies"]
    return policies


def test_setup_steps_cover_every_host_kind_and_every_block_is_run() -> None:
    """A block that no test runs may not work."""
    places = [block.place for block in blocks() if block.language == "sh"]
    assert set(places) == {"", "setup-1", "web-1", "worker-1", "operator", "merchant", "leak", "administrator"}
    assert {block.language for block in blocks()} == {"sh", "hcl"}
