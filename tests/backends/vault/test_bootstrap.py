"""`bootstrap` and `make_logins` on a real server: what they create, keep, repair and refuse."""

import json
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hvac
import pytest

from keyvault.backends.base import BackendDeniedError, BackendInvalidError
from keyvault.backends.vault.bootstrap import (
    POLICY_FILES,
    BootstrapOptions,
    bootstrap,
    list_logins,
    list_scopes,
    make_logins,
    policy_text,
    read_path,
)
from keyvault.backends.vault.client import open_client
from keyvault.backends.vault.layout import MERCHANT_POLICY, Layout, VaultRole
from keyvault.backends.vault.logins import AppRoleLogin
from keyvault.domain.errors import StateConflictError

from .installation import InstalledVault

ENVIRONMENTS = ["sandbox", "production"]


def changes(made: InstalledVault, options: BootstrapOptions | None = None, *, is_dry_run: bool = False) -> list[str]:
    lines: list[str] = []
    bootstrap(made.admin, made.layout, ENVIRONMENTS, lines.append, options, is_dry_run=is_dry_run)
    return lines


def snapshot(made: InstalledVault) -> str:
    """Return everything on the server under the test's prefix, as text."""
    prefix, admin = made.layout.prefix, made.admin
    mounts = {name: about for name, about in read_path(admin, "sys/mounts").items() if name.startswith(prefix)}
    policies = {
        name: read_path(admin, f"sys/policies/acl/{name}")
        for name in read_path(admin, "sys/policy")["policies"]
        if name.startswith(prefix)
    }
    names = [made.layout.login(role, scope) for role, scope in list_logins(list_scopes(ENVIRONMENTS))]
    roles = {name: read_path(admin, f"auth/approle/role/{name}") for name in names if name in policies}
    return json.dumps([mounts, policies, roles], sort_keys=True, default=str)


def log_in(made: InstalledVault, name: str, folder: Path | None = None) -> hvac.Client:
    client = open_client(made.server)
    client.token = AppRoleLogin(folder or made.logins, name).log_in(client).text.reveal()
    return client


# --- repetition ---------------------------------------------------------------------------------------------


def test_bootstrap_second_run_changes_and_reports_nothing(installed_vault: InstalledVault) -> None:
    before = snapshot(installed_vault)
    assert changes(installed_vault) == []
    assert changes(installed_vault, is_dry_run=True) == []
    assert snapshot(installed_vault) == before


def test_bootstrap_dry_run_lists_what_a_run_changes(installed_vault: InstalledVault) -> None:
    fresh = InstalledVault(
        installed_vault.backend,
        Layout(f"{installed_vault.layout.prefix}-x"),  # Removed together with the other installation.
        installed_vault.server,
        installed_vault.logins,
        installed_vault.auth,
        installed_vault.admin,
    )
    before = snapshot(installed_vault)
    planned = changes(fresh, is_dry_run=True)
    assert snapshot(installed_vault) == before
    assert changes(fresh) == planned
    assert len(planned) == 2 * 8 + 5 * 2 + 2 + 2 * 23  # KV mounts and their options, transit, merchants, logins


def test_bootstrap_of_one_environment_skips_the_other(installed_vault: InstalledVault) -> None:
    lines: list[str] = []
    layout = Layout(f"{installed_vault.layout.prefix}-y")
    bootstrap(installed_vault.admin, layout, ["sandbox"], lines.append)
    assert any("-sandbox" in line for line in lines)
    assert any("-service" in line for line in lines)
    assert not any("-production" in line for line in lines)


# --- drift --------------------------------------------------------------------------------------------------

Stage = Callable[[hvac.Client, Layout], object]

DRIFTS: dict[str, tuple[Stage, str]] = {
    "cas_required off": (
        lambda admin, layout: admin.write_data(f"{layout.prefix}-keys-sandbox/config", data={"cas_required": False}),
        "mount P-keys-sandbox: cas_required True",
    ),
    "few versions of peppers": (
        lambda admin, layout: admin.write_data(f"{layout.prefix}-peppers-service/config", data={"max_versions": 3}),
        "mount P-peppers-service: max_versions 100",
    ),
    "deleted by age": (
        lambda admin, layout: admin.write_data(
            f"{layout.prefix}-keys-production/config", data={"delete_version_after": "24h"}
        ),
        "mount P-keys-production: delete_version_after 0s",
    ),
    "shown in the audit log": (
        lambda admin, layout: admin.write_data(
            f"sys/mounts/{layout.prefix}-keys-sandbox/tune", data={"audit_non_hmac_response_keys": ["data"]}
        ),
        "mount P-keys-sandbox: audit_non_hmac_response_keys emptied",
    ),
    "signing key may be deleted": (
        lambda admin, layout: admin.write_data(
            f"{layout.prefix}-anchor-service/keys/audit/config", data={"deletion_allowed": True}
        ),
        "key P-anchor-service/audit: deletion_allowed false",
    ),
    "wider policy": (
        lambda admin, layout: admin.write_data(
            f"sys/policies/acl/{layout.prefix}-issuer-sandbox",
            data={"policy": f'path "{layout.prefix}-keys-sandbox/*" {{ capabilities = ["read", "update"] }}'},
        ),
        "policy P-issuer-sandbox: changed",
    ),
    "no policy": (
        lambda admin, layout: admin.delete(f"sys/policies/acl/{layout.prefix}-merchant-production"),
        "policy P-merchant-production: made",
    ),
    "second policy": (
        lambda admin, layout: admin.write_data(
            f"auth/approle/role/{layout.prefix}-lookup-service", data={"token_policies": ["default", "root-ish"]}
        ),
        "role approle/P-lookup-service: token_policies ['P-lookup-service']",
    ),
    "default policy": (
        lambda admin, layout: admin.write_data(
            f"auth/approle/role/{layout.prefix}-anchor-sandbox", data={"token_no_default_policy": False}
        ),
        "role approle/P-anchor-sandbox: token_no_default_policy True",
    ),
    "no role": (
        lambda admin, layout: admin.delete(f"auth/approle/role/{layout.prefix}-reader-sandbox"),
        "role approle/P-reader-sandbox: made",
    ),
}


@pytest.mark.parametrize("drift", DRIFTS)
def test_bootstrap_repairs_and_reports_drift(installed_vault: InstalledVault, drift: str) -> None:
    stage, planned = DRIFTS[drift]
    stage(installed_vault.admin, installed_vault.layout)
    expected = [planned.replace("P-", f"{installed_vault.layout.prefix}-")]
    assert changes(installed_vault, is_dry_run=True) == expected
    assert changes(installed_vault) == expected
    assert changes(installed_vault) == []


# --- foreign objects -----------------------------------------------------------------------------------------


def test_bootstrap_refuses_a_mount_of_another_type_and_changes_nothing(installed_vault: InstalledVault) -> None:
    """A foreign mount under one of the project's names is never touched."""
    layout, admin = Layout(f"{installed_vault.layout.prefix}-z"), installed_vault.admin
    admin.sys.enable_secrets_engine("kv", path=f"{layout.prefix}-peppers-service", options={"version": "1"})
    before = json.dumps(read_path(admin, "sys/mounts"), sort_keys=True)
    lines: list[str] = []
    with pytest.raises(StateConflictError, match="kv version 1, not kv version 2"):
        bootstrap(admin, layout, ENVIRONMENTS, lines.append)
    assert lines == []
    assert json.dumps(read_path(admin, "sys/mounts"), sort_keys=True) == before


@pytest.mark.parametrize("key", [{"type": "ed25519", "exportable": True}, {"type": "ecdsa-p256"}])
def test_bootstrap_refuses_an_exportable_signing_key(installed_vault: InstalledVault, key: dict[str, Any]) -> None:
    """An exportable signing key proves nothing about the signer."""
    layout, admin = Layout(f"{installed_vault.layout.prefix}-z"), installed_vault.admin
    admin.sys.enable_secrets_engine("transit", path=f"{layout.prefix}-anchor-service")
    admin.write_data(f"{layout.prefix}-anchor-service/keys/audit", data=key)
    with pytest.raises(StateConflictError, match="can be exported"):
        bootstrap(admin, layout, ENVIRONMENTS, lambda _: None)


# --- logins -------------------------------------------------------------------------------------------------


def test_make_logins_writes_owner_only_files(installed_vault: InstalledVault, tmp_path: Path) -> None:
    """A reader of a login can act as that login."""
    folder, name = tmp_path / "new", installed_vault.layout.login(VaultRole.LOOKUP, "service")
    assert make_logins(installed_vault.admin, installed_vault.layout, [name], folder, wrap_seconds=None) == [name]
    assert sorted(path.name for path in folder.iterdir()) == [f"{name}.role_id", f"{name}.secret_id"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_make_logins_wrapped_is_opened_at_the_first_login(installed_vault: InstalledVault, tmp_path: Path) -> None:
    folder, name = tmp_path / "new", installed_vault.layout.login(VaultRole.LOOKUP, "service")
    make_logins(installed_vault.admin, installed_vault.layout, [name], folder, wrap_seconds=60)
    assert (folder / f"{name}.wrapped_secret_id").exists()
    about = log_in(installed_vault, name, folder).auth.token.lookup_self()["data"]
    assert about["policies"] == [name]
    assert about["period"] == 3600
    assert not (folder / f"{name}.wrapped_secret_id").exists()


def test_make_logins_keeps_existing_logins_and_adds_new_ones(installed_vault: InstalledVault, tmp_path: Path) -> None:
    """A login for another host invalidates none in use."""
    admin, layout = installed_vault.admin, installed_vault.layout
    name = layout.login(VaultRole.READER, "sandbox")
    assert make_logins(admin, layout, [name], installed_vault.logins, wrap_seconds=None) == []
    make_logins(admin, layout, [name], tmp_path / "another host", wrap_seconds=None)
    log_in(installed_vault, name)
    log_in(installed_vault, name, tmp_path / "another host")


def test_make_logins_with_renew_revokes_every_other_secret_id(installed_vault: InstalledVault, tmp_path: Path) -> None:
    """After a leak no earlier secret id is valid."""
    admin, layout = installed_vault.admin, installed_vault.layout
    name = layout.login(VaultRole.READER, "sandbox")
    make_logins(admin, layout, [name], tmp_path / "new", wrap_seconds=None, renew=True)
    with pytest.raises(BackendDeniedError):
        log_in(installed_vault, name)
    log_in(installed_vault, name, tmp_path / "new")


def test_make_logins_with_a_foreign_name_is_refused(installed_vault: InstalledVault, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a name of this installation"):
        make_logins(installed_vault.admin, installed_vault.layout, ["other-role"], tmp_path / "new", wrap_seconds=None)


def test_bootstrap_binds_logins_to_networks_and_keeps_them_bound(installed_vault: InstalledVault) -> None:
    """A stolen login does not work elsewhere, and a later run without networks keeps the restriction."""
    elsewhere = BootstrapOptions(networks=("192.0.2.7/32",))
    assert len(changes(installed_vault, elsewhere)) == 23
    assert changes(installed_vault, elsewhere) == []
    assert changes(installed_vault) == []
    with pytest.raises(BackendInvalidError, match="does not accept"):
        log_in(installed_vault, installed_vault.layout.login(VaultRole.READER, "sandbox"))
    changes(installed_vault, BootstrapOptions(networks=("127.0.0.0/8", "192.0.2.0/24")))
    log_in(installed_vault, installed_vault.layout.login(VaultRole.READER, "sandbox"))


def test_bootstrap_for_kubernetes_binds_each_role_to_the_hosts_that_need_it(installed_vault: InstalledVault) -> None:
    admin, prefix = installed_vault.admin, installed_vault.layout.prefix
    options = BootstrapOptions(namespace="payments")
    with pytest.raises(StateConflictError, match="Enable it"):
        changes(installed_vault, options)
    admin.sys.enable_auth_method("kubernetes")
    try:
        assert len(changes(installed_vault, options)) == 23
        assert changes(installed_vault, options) == []
        destroyer = read_path(admin, f"auth/kubernetes/role/{prefix}-destroyer-production")
        lookup = read_path(admin, f"auth/kubernetes/role/{prefix}-lookup-service")
    finally:
        admin.delete("sys/auth/kubernetes")
    assert destroyer["bound_service_account_names"] == [f"{prefix}-worker"]
    assert lookup["bound_service_account_names"] == [f"{prefix}-{host}" for host in ("web", "worker", "setup")]
    assert (lookup["bound_service_account_namespaces"], lookup["token_policies"]) == (
        ["payments"],
        [f"{prefix}-lookup-service"],
    )


# --- the files ----------------------------------------------------------------------------------------------


def test_policy_files_are_one_for_each_role() -> None:
    assert {path.stem for path in POLICY_FILES.glob("*.hcl")} == {
        *(role.value for role in VaultRole),
        "login",
        "merchant",
    }


@pytest.mark.parametrize("name", [*(role.value for role in VaultRole), MERCHANT_POLICY])
def test_policy_text_has_no_unfilled_placeholder(name: str) -> None:
    text = policy_text(Layout("shop"), name, "sandbox")
    assert re.search(r"PREFIX|SCOPE|ROLE", text) is None
    paths = re.findall(r'path "([^"]+)"', text)
    assert all(path.startswith(("shop-", "auth/token/", "sys/capabilities-self", "auth/approle/")) for path in paths)
    assert any(path.startswith("shop-") and "-sandbox/" in path for path in paths)
