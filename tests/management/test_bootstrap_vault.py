"""`bootstrap_vault`: the options and output that an administrator's script uses."""

import io
import json
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import override_settings

from keyvault.backends.vault.bootstrap import read_path
from keyvault.backends.vault.layout import Layout
from tests.backends.vault.installation import InstalledVault
from tests.servers.openbao import RunningVault

BOTH = ["--environment", "sandbox", "--environment", "production"]


@pytest.fixture
def token_file(vault: RunningVault, tmp_path: Path) -> Path:
    file = tmp_path / "admin.token"
    file.write_text(f"{vault.root_token}\n")
    return file


@pytest.fixture
def fresh(installed_vault: InstalledVault) -> Iterator[Layout]:
    """Point the settings at the server with an unused prefix; the backend is the local keystore."""
    layout = Layout(f"{installed_vault.layout.prefix}-{secrets.token_hex(2)}")
    with override_settings(VAULT_ADDRESS=installed_vault.server.address, VAULT_PREFIX=layout.prefix):
        yield layout


def run(*arguments: str) -> Any:
    output = io.StringIO()
    call_command("bootstrap_vault", *arguments, "--json", stdout=output)
    lines = output.getvalue().splitlines()
    assert len(lines) == 1
    return json.loads(lines[0])


def test_bootstrap_vault_answers_its_changes_once(fresh: Layout, token_file: Path) -> None:
    answer = run(*BOTH, "--token-file", str(token_file), "--dry-run")
    assert answer["dry_run"]
    done = run(*BOTH, "--token-file", str(token_file))
    assert done == {"dry_run": False, "changes": answer["changes"]}
    assert f"policy {fresh.prefix}-issuer-sandbox: made" in done["changes"]
    assert run(*BOTH, "--token-file", str(token_file)) == {"dry_run": False, "changes": []}


def test_bootstrap_vault_as_text_lists_each_change_and_the_count(fresh: Layout, token_file: Path) -> None:
    output = io.StringIO()
    call_command("bootstrap_vault", "--environment", "sandbox", "--token-file", str(token_file), stdout=output)
    lines = output.getvalue().splitlines()
    assert f"mount {fresh.prefix}-keys-sandbox: made, kv" in lines
    assert lines[-1] == f"{len(lines) - 1} changes."
    again = io.StringIO()
    call_command("bootstrap_vault", "--environment", "sandbox", "--token-file", str(token_file), stdout=again)
    assert again.getvalue() == "0 changes.\n"


def test_bootstrap_vault_reads_the_token_from_standard_input(
    fresh: Layout, vault: RunningVault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{vault.root_token}\n"))
    assert run(*BOTH, "--token-file", "-")["changes"]


def test_bootstrap_vault_ignores_a_token_in_the_environment(
    fresh: Layout, vault: RunningVault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller names the token explicitly; ambient tokens are ignored."""
    monkeypatch.setenv("VAULT_TOKEN", vault.root_token)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".vault-token").write_text(vault.root_token)
    (tmp_path / "other.token").write_text("not a token of the server")
    with pytest.raises(CommandError, match="denied access"):
        run(*BOTH, "--token-file", str(tmp_path / "other.token"))


@pytest.mark.parametrize(
    ("host", "count"), [("web", 3 * 2 + 2), ("worker", 8 * 2 + 2), ("setup", 2 * 3 + 1), ("all", 22), ("keystore", 1)]
)
def test_bootstrap_vault_creates_the_logins_of_a_host_kind(
    fresh: Layout, token_file: Path, tmp_path: Path, host: str, count: int
) -> None:
    folder = tmp_path / "handover"
    arguments = [*BOTH, "--token-file", str(token_file), "--logins-folder", str(folder), "--host", host]
    made = run(*arguments)["logins"]
    assert len(made) == count
    assert {path.name for path in folder.iterdir()} == {
        f"{name}.{kind}" for name in made for kind in ("role_id", "wrapped_secret_id")
    }
    assert run(*arguments)["logins"] == []


def test_bootstrap_vault_creates_one_role_unwrapped(fresh: Layout, token_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "handover"
    arguments = ["--environment", "sandbox", "--token-file", str(token_file), "--logins-folder", str(folder)]
    assert run(*arguments, "--role", "destroyer", "--plain")["logins"] == [f"{fresh.prefix}-destroyer-sandbox"]
    first = (folder / f"{fresh.prefix}-destroyer-sandbox.secret_id").read_text()
    run(*arguments, "--role", "destroyer", "--plain", "--renew-logins")
    assert (folder / f"{fresh.prefix}-destroyer-sandbox.secret_id").read_text() != first


def test_bootstrap_vault_options_are_applied_to_the_roles(
    fresh: Layout, token_file: Path, installed_vault: InstalledVault
) -> None:
    run(*BOTH, "--token-file", str(token_file), "--cidr", "10.1.0.0/16", "--secret-id-days", "7")
    role = read_path(installed_vault.admin, f"auth/approle/role/{fresh.prefix}-reader-production")
    assert role["secret_id_bound_cidrs"] == ["10.1.0.0/16"]
    assert role["secret_id_ttl"] == 7 * 86_400
    assert role["token_policies"] == [f"{fresh.prefix}-reader-production"]


def test_bootstrap_vault_prints_no_secret(fresh: Layout, token_file: Path, tmp_path: Path) -> None:
    """The output may be copied into a ticket."""
    output, folder = io.StringIO(), tmp_path / "handover"
    arguments = [*BOTH, "--token-file", str(token_file), "--logins-folder", str(folder), "--plain"]
    call_command("bootstrap_vault", *arguments, stdout=output)
    for path in [token_file, *folder.iterdir()]:
        assert path.read_text().strip() not in output.getvalue()


@pytest.mark.parametrize(
    ("arguments", "returncode"),
    [
        (["--role", "reader"], 2),
        (["--host", "web"], 2),
        (["--plain"], 2),
        (["--renew-logins"], 2),
        (["--logins-folder", "x", "--dry-run"], 2),
        (["--logins-folder", "x", "--kubernetes-namespace", "payments"], 2),
        (["--kubernetes-namespace", "payments,shop"], 1),
        (["--cidr", "10.1.0.1/16"], 1),
        (["--secret-id-days", "0"], 1),
        (["--wrap-seconds", "0", "--logins-folder", "x"], 1),
    ],
)
def test_bootstrap_vault_with_invalid_options_is_refused(tmp_path: Path, arguments: list[str], returncode: int) -> None:
    (tmp_path / "token").write_text("root")
    with override_settings(VAULT_ADDRESS="http://127.0.0.1:1"), pytest.raises(CommandError) as refused:
        run(*BOTH, "--token-file", str(tmp_path / "token"), *arguments)
    assert refused.value.returncode == returncode
    assert not os.path.exists("x")


def test_bootstrap_vault_without_address_or_token_is_refused(tmp_path: Path) -> None:
    with override_settings(VAULT_ADDRESS=""), pytest.raises(CommandError, match="VAULT_ADDR"):
        run(*BOTH, "--token-file", "-")
    (tmp_path / "empty").write_text("\n")
    for name in ("empty", "none"):
        with (
            override_settings(VAULT_ADDRESS="http://127.0.0.1:1"),
            pytest.raises(CommandError, match="/token_file"),
        ):
            run(*BOTH, "--token-file", str(tmp_path / name))
