"""`check_vault`: it reports each staged fault with a remedy, and no other fault."""

import io
import json
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, cast

import pytest
from django.core.management import CommandError, call_command
from django.test import override_settings

from keyvault.backends.private_files import write_private_file
from keyvault.backends.vault.bootstrap import bootstrap, make_logins, read_path
from keyvault.backends.vault.client import open_client
from keyvault.backends.vault.layout import Layout, VaultRole
from keyvault.backends.vault.logins import AppRoleLogin
from keyvault.domain.plaintext import Plaintext
from keyvault.management.commands import check_vault
from tests.backends.receivers import TlsServer, make_authority
from tests.backends.vault.installation import InstalledVault, installed
from tests.servers.openbao import VaultOnDisk

pytestmark = pytest.mark.django_db

Report = dict[str, Any]


def diagnose(*arguments: str) -> Report:
    """Run the command and return its report; the exit code must match."""
    output, code = io.StringIO(), 0
    try:
        call_command("check_vault", "--json", *arguments, stdout=output)
    except SystemExit as left:
        code = int(left.code or 0)
    report: Report = json.loads(output.getvalue())
    assert report["healthy"] == (report["findings"] == []) == (code == 0)
    assert all(finding["problem"] and finding["cure"] for finding in report["findings"])
    return report


def problems_of(report: Report) -> list[tuple[str, str]]:
    return [(finding["subject"], finding["problem"]) for finding in report["findings"]]


def cure_of(report: Report, subject: str) -> str:
    (cure,) = [finding["cure"] for finding in report["findings"] if finding["subject"] == subject]
    return str(cure)


def list_accessors(made: InstalledVault) -> list[str]:
    return list(cast("Any", made.admin.list("auth/token/accessors"))["data"]["keys"])


# --- healthy installations ----------------------------------------------------------------------------------


def test_check_vault_of_a_healthy_installation_finds_nothing(vault_service: InstalledVault) -> None:
    report = diagnose()
    assert report["findings"] == []
    assert {"server", "pepper sandbox", "pepper production", "pepper service"} <= set(report["checked"])
    assert len(report["checked"]) == 1 + 22 + 3
    assert diagnose() == report  # The run ends its own tokens and nothing else.


def test_check_vault_as_text_reports_no_problems(vault_service: InstalledVault) -> None:
    output = io.StringIO()
    call_command("check_vault", stdout=output)
    assert output.getvalue().endswith(": no problems.\n")


def test_check_vault_leaves_no_token_behind(vault_service: InstalledVault) -> None:
    """Every token of the command is revoked at the end."""
    before = set(list_accessors(vault_service))
    diagnose()
    assert set(list_accessors(vault_service)) == before


def test_check_vault_before_the_switch_reports_that_the_vault_is_unused(installed_vault: InstalledVault) -> None:
    with pointed_at(installed_vault.server.address, installed_vault):
        output = io.StringIO()
        call_command("check_vault", stdout=output)
    assert "The Vault is not in use: KEYVAULT_BACKEND is local" in output.getvalue()


def test_check_vault_before_the_switch_compares_no_pepper(installed_vault: InstalledVault) -> None:
    """With KEYVAULT_BACKEND=local the database's peppers are not in the Vault yet."""
    with pointed_at(installed_vault.server.address, installed_vault):
        report = diagnose()
    assert report["findings"] == []
    assert [name for name in report["checked"] if name.startswith("pepper")] == []


def test_check_vault_before_setup_reports_missing_peppers(installed_vault: InstalledVault) -> None:
    with pointed_at(installed_vault.server.address, installed_vault, IS_VAULT=True):
        report = diagnose()
    assert [problem for _, problem in problems_of(report)] == [
        f"The database has no {pepper_set} pepper." for pepper_set in ("sandbox", "production", "service")
    ]
    assert {finding["cure"] for finding in report["findings"]} == {"Run manage.py setup."}


# --- the server ---------------------------------------------------------------------------------------------


@contextmanager
def pointed_at(address: str, made: InstalledVault | None = None, **more: Any) -> Iterator[None]:
    own = {} if made is None else {"VAULT_PREFIX": made.layout.prefix, "VAULT_CREDENTIALS_DIR": made.logins}
    with override_settings(**{"IS_VAULT": False, "VAULT_ADDRESS": address, **own, **more}):
        yield


@contextmanager
def answering(status: int, body: object, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Serve this answer to every GET and yield the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: Any) -> None:
            pass

    with TlsServer(Handler, tls) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("status", "problem"),
    [
        (307, "The address redirects (307)."),
        (429, "The node is a standby."),
        (472, "The node is a recovery standby."),
        (473, "The node is a performance standby."),
        (501, "The server is not initialized."),
        (503, "The server is sealed."),
        (404, "Its health check answers 404."),
    ],
)
def test_check_vault_names_a_server_that_is_not_ready(status: int, problem: str) -> None:
    with answering(status, {"sealed": status == 503}) as address, pointed_at(address):
        assert problems_of(diagnose()) == [(address, problem)]


def test_check_vault_names_a_server_that_is_not_a_vault() -> None:
    with answering(200, {"hello": "world"}) as address, pointed_at(address):
        assert problems_of(diagnose()) == [(address, "Its health check answers 200.")]


def test_check_vault_names_an_address_without_a_server() -> None:
    with answering(200, {}) as address:
        pass
    with pointed_at(address):
        [(subject, problem)] = problems_of(diagnose())
    assert subject == address
    assert problem.startswith("The server does not answer")


@pytest.mark.parametrize(("seconds", "expected"), [(3600, "ahead of"), (-3600, "behind")])
def test_check_vault_names_a_clock_that_is_off(seconds: int, expected: str, tmp_path: Path) -> None:
    health = {"sealed": False, "server_time_utc": int(time.time()) + seconds}
    with answering(200, health) as address, pointed_at(address, VAULT_CREDENTIALS_DIR=tmp_path / "none"):
        report = diagnose()
    assert [subject for subject, problem in problems_of(report) if expected in problem and "clock" in problem] == [
        address
    ]


def test_check_vault_names_a_certificate_that_is_not_trusted(tmp_path: Path) -> None:
    tls = make_authority(tmp_path).server("127.0.0.1")
    with answering(200, {}, tls) as address, pointed_at(address):
        [(_, problem)] = problems_of(diagnose())
    assert problem.startswith("The server's certificate is not trusted")


def test_check_vault_names_a_missing_ca_file(tmp_path: Path) -> None:
    with pointed_at("https://127.0.0.1:1", VAULT_CA_FILE=tmp_path / "ca.pem"):
        [(_, problem)] = problems_of(diagnose())
    assert problem == f"The CA file {tmp_path / 'ca.pem'} cannot be read."


def test_check_vault_names_a_sealed_server(vault_on_disk: VaultOnDisk, tmp_path: Path) -> None:
    with installed(vault_on_disk, tmp_path / "logins") as made, pointed_at(made.server.address, made):
        assert diagnose()["findings"] == []
        vault_on_disk.seal()
        try:
            assert problems_of(diagnose()) == [(made.server.address, "The server is sealed.")]
        finally:
            vault_on_disk.unseal()
        assert diagnose()["findings"] == []


def test_check_vault_without_an_address_is_a_usage_error() -> None:
    with override_settings(VAULT_ADDRESS=""), pytest.raises(CommandError, match="VAULT_ADDR") as refused:
        call_command("check_vault")
    assert refused.value.returncode == 2


# --- content of the server ----------------------------------------------------------------------------------

Stage = Callable[[InstalledVault, str], object]


def _policy(made: InstalledVault, name: str, text: str) -> None:
    made.admin.sys.create_or_update_acl_policy(f"{made.layout.prefix}-{name}", text, pretty_print=False)


def _wider(made: InstalledVault, prefix: str) -> None:
    text = read_path(made.admin, f"sys/policies/acl/{prefix}-issuer-sandbox")["policy"]
    more = f'path "{prefix}-keys-production/data/*" {{ capabilities = ["read"] }}'
    _policy(made, "issuer-sandbox", f"{text}\n{more}")


def _narrower(made: InstalledVault, prefix: str) -> None:
    text = read_path(made.admin, f"sys/policies/acl/{prefix}-issuer-sandbox")["policy"]
    _policy(made, "issuer-sandbox", text.replace('["create", "update"]', '["update"]'))


def _used_wrapping(made: InstalledVault, prefix: str) -> None:
    name = f"{prefix}-reader-sandbox"
    make_logins(made.admin, made.layout, [name], made.logins, wrap_seconds=60, renew=True)
    wrapping_token = (made.logins / f"{name}.wrapped_secret_id").read_text()
    open_client(made.server, Plaintext(wrapping_token)).write_data("sys/wrapping/unwrap", data={})


def _swapped(made: InstalledVault, prefix: str) -> None:
    """Replace the database's pepper by another one."""
    text = "QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVphYmNkZWY="
    made.admin.delete(f"{prefix}-peppers-sandbox/metadata/hmac")
    made.admin.write_data(
        f"{prefix}-peppers-sandbox/data/hmac",
        data={"data": {"secret": text, "schema": "1"}, "options": {"cas": 0}},
    )


FAULTS: dict[str, tuple[Stage, str, str]] = {
    "role deleted": (
        lambda made, p: made.admin.delete(f"auth/approle/role/{p}-lookup-sandbox"),
        "P-lookup-sandbox",
        "The login is not accepted",
    ),
    "secret id wrong": (
        lambda made, p: (made.logins / f"{p}-issuer-sandbox.secret_id").write_text("wrong"),
        "P-issuer-sandbox",
        "The login is not accepted",
    ),
    "secret id destroyed": (
        lambda made, p: make_logins(
            made.admin, made.layout, [f"{p}-anchor-service"], made.logins / "..", wrap_seconds=None, renew=True
        ),
        "P-anchor-service",
        "The login is not accepted",
    ),
    "secret id opened by another party": (_used_wrapping, "P-reader-sandbox", "unwrapped already"),
    "bound to another network": (
        lambda made, p: made.admin.write_data(
            f"auth/approle/role/{p}-issuer-sandbox", data={"secret_id_bound_cidrs": ["192.0.2.1/32"]}
        ),
        "P-issuer-sandbox",
        "The login is not allowed from this host's address",
    ),
    "policy missing": (
        lambda made, p: made.admin.delete(f"sys/policies/acl/{p}-retirer-production"),
        "P-retirer-production",
        "its policy is missing or foreign",
    ),
    "policy narrowed": (_narrower, "P-issuer-sandbox", "It may not create at P-keys-sandbox/data/0/probe."),
    "policy widened": (_wider, "P-issuer-sandbox", "It may read at P-keys-production/data/0/probe"),
    "one policy more": (
        lambda made, p: made.admin.write_data(
            f"auth/approle/role/{p}-issuer-sandbox", data={"token_policies": [f"{p}-issuer-sandbox", "nothing"]}
        ),
        "P-issuer-sandbox",
        "not just its own",
    ),
    "mount missing": (
        lambda made, p: made.admin.delete(f"sys/mounts/{p}-keys-sandbox"),
        "P-keys-sandbox",
        "The mount is missing",
    ),
    "cas_required off": (
        lambda made, p: made.admin.write_data(f"{p}-keys-production/config", data={"cas_required": False}),
        "P-keys-production",
        "cas_required is False, and must be True",
    ),
    "deleted by age": (
        lambda made, p: made.admin.write_data(f"{p}-keys-sandbox/config", data={"delete_version_after": "24h"}),
        "P-keys-sandbox",
        "delete_version_after is 24h0m0s",
    ),
    "few versions": (
        lambda made, p: made.admin.write_data(f"{p}-peppers-service/config", data={"max_versions": 2}),
        "P-peppers-service",
        "max_versions is 2, and must be 100",
    ),
    "few versions at the path": (
        lambda made, p: made.admin.write_data(f"{p}-peppers-service/metadata/hmac", data={"max_versions": 2}),
        "P-peppers-service/hmac",
        "could erase a pepper in use",
    ),
    "signing key deletable": (
        lambda made, p: made.admin.write_data(f"{p}-anchor-service/keys/audit/config", data={"deletion_allowed": True}),
        "P-anchor-service",
        "may be deleted",
    ),
    "signing mount missing": (
        lambda made, p: made.admin.delete(f"sys/mounts/{p}-anchor-sandbox"),
        "P-anchor-sandbox",
        "The mount is missing",
    ),
    "encryption mount missing": (
        lambda made, p: made.admin.delete(f"sys/mounts/{p}-factors-service"),
        "P-factors-service",
        "The mount is missing",
    ),
    "signing key can be taken out": (
        lambda made, p: made.admin.write_data(f"{p}-anchor-sandbox/keys/audit/config", data={"exportable": True}),
        "P-anchor-sandbox",
        "can be exported",
    ),
    "pepper gone": (
        lambda made, p: made.admin.delete(f"{p}-peppers-production/metadata/hmac"),
        "P-peppers-production",
        "Pepper version 1 is missing",
    ),
    "pepper swapped": (_swapped, "P-peppers-sandbox", "is not the one with which the database's keys were hashed"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_check_vault_finds_the_fault_and_no_other(vault_service: InstalledVault, fault: str) -> None:
    stage, subject, problem = FAULTS[fault]
    prefix = vault_service.layout.prefix
    stage(vault_service, prefix)
    [(found_subject, found_problem)] = problems_of(diagnose())
    assert found_subject == subject.replace("P-", f"{prefix}-")
    assert problem.replace("P-", f"{prefix}-") in found_problem


def test_check_vault_finds_nothing_after_the_bootstrap_that_it_recommends(vault_service: InstalledVault) -> None:
    prefix = vault_service.layout.prefix
    for fault in ("policy missing", "policy widened", "one policy more", "cas_required off", "signing key deletable"):
        FAULTS[fault][0](vault_service, prefix)
    assert len(diagnose()["findings"]) == 5
    bootstrap(vault_service.admin, vault_service.layout, ["sandbox", "production"], lambda _: None)
    assert diagnose()["findings"] == []


def test_check_vault_names_a_secret_id_that_ends_soon(vault_service: InstalledVault) -> None:
    name = vault_service.layout.login(VaultRole.LOOKUP, "service")
    vault_service.admin.write_data(f"auth/approle/role/{name}", data={"secret_id_ttl": "72h"})
    make_logins(vault_service.admin, vault_service.layout, [name], vault_service.logins, wrap_seconds=None, renew=True)
    assert problems_of(diagnose()) == [(name, "Its secret id expires in 2 days.")]


@pytest.mark.parametrize(
    ("content", "mode", "cure"), [("vault:v1:AAAA", 0o640, "run: chmod 600"), ("\n", 0o600, "is empty")]
)
def test_check_vault_names_a_file_of_the_master_key_that_cannot_be_used(
    tmp_path: Path, content: str, mode: int, cure: str
) -> None:
    """Guarantee: the remedy repairs the file, and not the Vault, which is in order."""
    file = tmp_path / "master.key"
    file.write_text(content)
    file.chmod(mode)
    with override_settings(DATA_DIR=tmp_path, MASTER_KEY=""):
        (finding,) = check_vault._check_master_key()
    assert cure in finding.remedy
    assert "Vault" not in finding.remedy


# --- files of this host -------------------------------------------------------------------------------------


def test_check_vault_names_a_missing_login_and_the_hosts_that_need_it(vault_service: InstalledVault) -> None:
    name = f"{vault_service.layout.prefix}-destroyer-production"
    (vault_service.logins / f"{name}.secret_id").unlink()
    assert problems_of(diagnose()) == [(name, "This host lacks the login; hosts of kind worker need it (--host).")]


def test_check_vault_names_logins_that_this_host_does_not_need(vault_service: InstalledVault) -> None:
    """An attacker on a web host must find no login that can destroy."""
    report = diagnose("--host", "web")
    assert {problem for _, problem in problems_of(report)} == {"This host has a login that it does not need."}
    assert f"{vault_service.layout.prefix}-destroyer-production" in {subject for subject, _ in problems_of(report)}
    assert len(report["findings"]) == 23 - (3 * 2 + 3)


def test_check_vault_remedy_for_a_login_that_is_not_needed_renews_only_its_role(
    vault_service: InstalledVault, tmp_path: Path
) -> None:
    """Guarantee: the command works as printed, and no other role loses its secret ids."""
    surplus = vault_service.layout.login(VaultRole.DESTROYER, "production")
    cure = cure_of(diagnose("--host", "web"), surplus)
    assert "copy the new files to every host that needs the role" in cure
    token = tmp_path / "token"
    token.write_text(vault_service.admin.token)
    (command,) = re.findall(r"manage\.py (\S[^.]*)\.", cure)
    places = {"ENVIRONMENT": "production", "FILE": str(token), "FOLDER": str(tmp_path / "new")}
    call_command(*(places.get(word, word) for word in command.split()), stdout=io.StringIO())
    [(subject, problem)] = problems_of(diagnose())
    assert subject == surplus
    assert problem.startswith("The login is not accepted")


@pytest.mark.parametrize("name", ["other-issuer-sandbox", "PREFIX-former-sandbox"])
def test_check_vault_renews_no_login_for_one_of_another_prefix_or_release(
    vault_service: InstalledVault, name: str
) -> None:
    surplus = name.replace("PREFIX", vault_service.layout.prefix)
    write_private_file(vault_service.logins / f"{surplus}.token", "text")
    cure = cure_of(diagnose(), surplus)
    assert "--renew-logins" not in cure
    assert f"auth/approle/role/{surplus}" in cure


def test_check_vault_checks_only_the_environments_that_this_host_serves(vault_service: InstalledVault) -> None:
    for path in vault_service.logins.glob("*-production.*"):
        path.unlink()
    with override_settings(ENVIRONMENTS=("sandbox",)):
        assert diagnose()["findings"] == []


def test_check_vault_names_files_that_others_can_access(vault_service: InstalledVault) -> None:
    """A login file that others can read counts as compromised."""
    file = vault_service.logins / f"{vault_service.layout.prefix}-lookup-service.secret_id"
    file.chmod(0o640)
    vault_service.logins.chmod(0o755)
    try:
        assert problems_of(diagnose()) == [
            (str(vault_service.logins), "Other users can access it (mode 755)."),
            (str(file), "Other users can access it (mode 640)."),
        ]
    finally:
        vault_service.logins.chmod(0o700)


def test_check_vault_names_a_missing_folder(vault_service: InstalledVault, tmp_path: Path) -> None:
    with override_settings(VAULT_CREDENTIALS_DIR=tmp_path / "none"):
        found = diagnose()
    assert problems_of(found) == [(str(tmp_path / "none"), "The folder of the logins is missing.")]
    assert found["findings"][0]["cure"].endswith("--host KIND"), "by default there is no login of a host keystore"


def test_check_vault_as_another_user_unwraps_no_secret_id(
    vault_service: InstalledVault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A secret id unwrapped as root would belong to root, and the service could not read it."""
    name = vault_service.layout.login(VaultRole.LOOKUP, "service")
    make_logins(vault_service.admin, vault_service.layout, [name], vault_service.logins, wrap_seconds=60, renew=True)
    monkeypatch.setattr("os.geteuid", lambda: 4711)
    [(subject, problem)] = problems_of(diagnose())
    assert subject == str(vault_service.logins)
    assert "belongs to user" in problem
    assert (vault_service.logins / f"{name}.wrapped_secret_id").exists()


def test_check_vault_with_agent_tokens_finds_an_expired_one_and_revokes_none(
    vault_service: InstalledVault, tmp_path: Path
) -> None:
    folder = tmp_path / "tokens"
    folder.mkdir(mode=0o700)
    names = sorted(path.name.removesuffix(".role_id") for path in vault_service.logins.glob("*.role_id"))
    for name in names:
        token = AppRoleLogin(vault_service.logins, name).log_in(open_client(vault_service.server)).text.reveal()
        write_private_file(folder / f"{name}.token", token)
    with override_settings(VAULT_AUTH="token_file", VAULT_CREDENTIALS_DIR=folder):
        assert diagnose()["findings"] == []
        assert diagnose()["findings"] == []
        dead = (folder / f"{names[0]}.token").read_text()
        vault_service.admin.write_data("auth/token/revoke", data={"token": dead})
        [(subject, problem)] = problems_of(diagnose())
    assert subject == names[0]
    assert "an agent's token has expired" in problem


def test_check_vault_prints_no_secret(vault_service: InstalledVault) -> None:
    """The output may be copied into a ticket."""
    for fault in ("policy missing", "secret id wrong", "secret id opened by another party", "pepper swapped"):
        FAULTS[fault][0](vault_service, vault_service.layout.prefix)
    text = json.dumps(diagnose())
    for path in vault_service.logins.iterdir():
        content = path.read_text().strip()
        assert len(content) < 6 or content not in text


def test_check_vault_with_a_wrong_prefix_reports_the_prefix_and_spares_the_logins(
    vault_service: InstalledVault,
) -> None:
    with override_settings(VAULT_PREFIX=Layout("unused").prefix):
        (finding,) = diagnose()["findings"]
    assert "None of the logins here is of this service: KEYVAULT_VAULT_PREFIX is 'unused'" in finding["problem"]
    assert "change no file before that" in finding["cure"]
