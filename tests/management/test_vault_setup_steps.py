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

from keyvault.backends.base import Mount
from keyvault.backends.vault.client import VaultServer
from keyvault.backends.vault.kv import VaultBackend
from keyvault.backends.vault.logins import AppRoleLogin
from keyvault.domain.digests import PepperSet as P
from keyvault.domain.plaintext import Plaintext
from tests.backends.receivers import Authority, make_authority
from tests.environment import ROOT
from tests.servers.openbao import RunningVault, find_vault
from tests.servers.throwaway import Place, Plan, free_port, running

README = ROOT / "deploy" / "vault" / "README.md"
OPERATIONS = ROOT / "docs" / "operations.md"
PASSWORD = "administrators-password"
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


def blocks(page: Path = README) -> list[Block]:
    found = re.findall(r'^```(\w+)(?: title="([\w-]+)")?\n(.*?)^```$', page.read_text(encoding="utf-8"), re.M | re.S)
    return [Block(*each) for each in found]


def commands(place: str, page: Path = README) -> str:
    [block] = [block for block in blocks(page) if (block.language, block.place) == ("sh", place)]
    return block.text


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
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return a plain host environment: PATH without the packages, and nothing of the test's settings."""
    tools = tmp_path / "bin"
    tools.mkdir()
    binary = find_vault()
    if binary is not None:
        (tools / "bao").symlink_to(shutil.which(str(binary)) or binary)
    return {
        "PATH": f"{tools}:{os.environ['PATH']}",
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
        at_home = [block.text for block in blocks() if (block.language, block.place) == ("sh", "")]
        output = run("\n".join(at_home), checkout, environment)
        assert "first/" in output
        assert "second/" in output

        environment["KEYVAULT_BACKEND"] = "vault"
        for host in ("setup-1", "web-1", "worker-1"):
            its_own = {**environment, "KEYVAULT_VAULT_CREDENTIALS_DIR": str(checkout / "handover" / host)}
            assert "no problems" in run(commands(host), checkout, its_own)

        with_admin = {**environment, "VAULT_TOKEN": server.root_token}
        its_own = {**environment, "KEYVAULT_VAULT_CREDENTIALS_DIR": str(checkout / "handover" / "host-1")}
        run(f"install() {{ :; }}; rm() {{ :; }}\n{commands('logins', OPERATIONS)}", checkout, with_admin)
        assert "no problems" in run(".venv/bin/python manage.py check_vault --host all", checkout, its_own)

        named = commands("merchant").splitlines()[0]
        put = (
            f"{named}; bao kv put -mount=keyvault-keys-sandbox -cas=0 $ACCOUNT_ID/$CREDENTIAL_ID secret=shown schema=1"
        )
        run(put, checkout, with_admin)
        run(commands("operator"), checkout, with_admin)
        assert run(commands("merchant"), checkout, environment).strip() == "shown"

        run(commands("leak"), checkout, with_admin)
        check = ".venv/bin/python manage.py check_vault --host web || test $? -eq 1"
        its_own = {**environment, "KEYVAULT_VAULT_CREDENTIALS_DIR": str(checkout / "handover" / "web-1")}
        assert run(check, checkout, its_own).count("The login is not accepted") == 2
        run("cp handover/after-leak/* handover/web-1/", checkout, environment)
        assert "no problems" in run(check, checkout, its_own)

        run(commands("administrator"), checkout, with_admin, typed=f"{PASSWORD}\n")
        assert run(_logging_in(commands("login")), checkout, with_admin).strip()
        run(commands("snapshots"), checkout, with_admin)
        _check_snapshots(checkout, environment)
        run(commands("revoke"), checkout, with_admin)
        assert not (checkout / "admin.token").exists()
        assert (checkout / "first.snap").stat().st_size > 0
        for log in server.audit_logs:
            assert json.loads(log.read_text().splitlines()[-1])
        _check_ceremony(server, checkout, environment)


def _logging_in(text: str) -> str:
    """Give the password that the command would ask for: it reads it from a terminal only."""
    assert text.count(" username=anna") == 1
    return text.replace(" username=anna", f" username=anna password={PASSWORD}")


def _check_snapshots(checkout: Path, environment: dict[str, str]) -> None:
    """Take the snapshot of a backup as docs/operations.md says, with the login for snapshots, which may do no more."""
    text = commands("backup-vault", OPERATIONS).replace(
        "/etc/keyvault/snapshot", str(checkout / "handover" / "snapshot")
    )
    text = text.replace("/backup/", f"{checkout}/")
    text = text.replace("unset VAULT_TOKEN", "! bao audit list 2> denied\nunset VAULT_TOKEN")
    written = run(f'kv() {{ echo "$*"; }}\n{text}', checkout, environment).splitlines()[0]
    [name] = re.findall(r"--vault-snapshot (\S+)$", written)
    assert (checkout / name).stat().st_size > 0
    assert "permission denied" in (checkout / "denied").read_text()


def _check_ceremony(server: Empty, checkout: Path, environment: dict[str, str]) -> None:
    """Get an administrator's token with the page's commands, use it, and revoke it with those of step 5.

    Each command runs in the shell of those before it, which sets VAULT_TOKEN.
    """
    log_in, begin, give, save, use = _logging_in(commands("ceremony")).splitlines()
    begun = json.loads(run(f"{log_in}\n{begin} -format=json", checkout, environment))
    give = give.replace("NONCE", begun["nonce"])
    for share in server.shares:
        answer = run(f"{log_in}\n{give} -format=json -", checkout, environment, typed=share)
    save = save.replace("ENCODED", json.loads(answer)["encoded_token"]).replace("OTP", begun["otp"])
    lookup = "bao token lookup -format=json"
    token = json.loads(run(f"{log_in}\n{save}\n{use}\n{lookup}", checkout, environment))["data"]
    assert token["policies"] == ["root"]
    assert (checkout / "admin.token").stat().st_mode & 0o777 == 0o600
    *_, revoke, remove = commands("revoke").splitlines()
    run(f"{use}\n{revoke}\n{remove}\n! VAULT_TOKEN={token['id']} bao token lookup", checkout, environment)


def test_peppers_are_copied_to_a_region_with_their_numbers(
    vault: RunningVault, tmp_path: Path, checkout: Path, environment: dict[str, str]
) -> None:
    """Guarantee: the steps of docs/operations.md give the region's `lookup` login the peppers, each under its number.

    A destroyed version is replaced by a placeholder. A repetition copies what is new. Nothing prints a pepper.
    """
    central, region = tmp_path / "central", tmp_path / "region"
    central.mkdir()
    region.mkdir()
    with empty_server(central) as ours, empty_server(region) as theirs:
        at_ours = environment | {"VAULT_ADDR": ours.address, "VAULT_CACERT": str(ours.ca_file)}
        at_theirs = environment | {"VAULT_ADDR": theirs.address, "VAULT_CACERT": str(theirs.ca_file)}
        (checkout / "admin.token").write_text(ours.root_token)
        log_in = commands("region", OPERATIONS).replace("handover/eu-west --role lookup", "vault --host setup --plain")
        run(log_in, checkout, at_ours)
        (checkout / "admin.token").write_text(theirs.root_token)
        run(commands("region", OPERATIONS), checkout, at_theirs)
        (checkout / "region.token").write_text(theirs.root_token)

        keeper = _backend(ours, checkout / "vault")
        for pepper_set, number in ((P.PRODUCTION, 1), (P.PRODUCTION, 2), (P.PRODUCTION, 3), (P.SERVICE, 1)):
            _put_pepper(keeper, pepper_set, number)
        keeper.destroy(Mount.PEPPERS, P.PRODUCTION, 2)
        copy = commands("peppers", OPERATIONS).replace("/var/lib/keyvault/vault", str(checkout / "vault"))
        for written, here in (
            ("https://vault.eu-west.example:8200", theirs.address),
            ("/etc/keyvault/eu-west-ca.pem", str(theirs.ca_file)),
        ):
            assert copy.count(written) == 1
            copy = copy.replace(written, here)
        printed = run(copy, checkout, at_ours)
        _put_pepper(keeper, P.PRODUCTION, 4)
        printed += run(copy, checkout, at_ours)
        assert "secret of" not in printed

        lookup = _backend(theirs, checkout / "handover" / "eu-west")
        for pepper_set, number in ((P.PRODUCTION, 1), (P.PRODUCTION, 3), (P.PRODUCTION, 4), (P.SERVICE, 1)):
            there = lookup.read(Mount.PEPPERS, pepper_set, number)
            assert there.secret.reveal() == f"secret of {pepper_set} {number}"
            assert there.labels == {"number": str(number)}
        assert lookup.read(Mount.PEPPERS, P.PRODUCTION, 2).secret.reveal() == ""
        assert [each.version for each in lookup.versions(Mount.PEPPERS, P.PRODUCTION)] == [1, 2, 3, 4]


def _backend(server: Empty, logins: Path) -> VaultBackend:
    return VaultBackend(VaultServer(server.address, server.ca_file), lambda name: AppRoleLogin(logins, name))


def _put_pepper(keeper: VaultBackend, pepper_set: P, number: int) -> None:
    secret, labels = Plaintext(f"secret of {pepper_set} {number}"), {"number": str(number)}
    keeper.put(Mount.PEPPERS, pepper_set, secret, labels, expected_version=number - 1)


def test_setup_steps_cover_every_host_kind_and_every_block_is_run() -> None:
    """A block that no test runs may not work."""
    places = [block.place for block in blocks() if block.language == "sh"]
    at_the_end = {"administrator", "login", "snapshots", "revoke", "ceremony"}
    assert set(places) == {"", "setup-1", "web-1", "worker-1", "operator", "merchant", "leak", *at_the_end}
    assert {block.language for block in blocks()} == {"sh", "hcl"}
