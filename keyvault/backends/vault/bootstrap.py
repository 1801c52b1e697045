"""Creates and repairs our mounts, policies, transit keys, roles and logins in Vault or OpenBao.

Repeatable: correct objects are neither written again nor reported. It needs a client with an administrator's token and
is the only module that uses one. A foreign object that has one of our names is reported as a conflict, not changed.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import hvac

import keyvault
from keyvault.backends.base import EVIDENCE_VERSIONS, BackendInvalidError, BackendMissingError
from keyvault.backends.private_files import ensure_private_directory, write_private_file
from keyvault.backends.vault.capabilities import list_hosts
from keyvault.backends.vault.layout import (
    ENCRYPTION_KEY,
    ENGINE_OF,
    MERCHANT_POLICY,
    SIGNING_KEY,
    TRANSIT_ENGINES,
    WRAPPING_KEY,
    Layout,
    SecretsEngine,
    VaultRole,
    scopes_of,
)
from keyvault.domain.digests import PepperSet
from keyvault.domain.errors import StateConflictError

T = TypeVar("T")

POLICY_FILES: Final = Path(keyvault.__file__).resolve().parent.parent / "deploy" / "vault"

KEPT_VERSIONS: Final[Mapping[SecretsEngine, int]] = {
    SecretsEngine.KEYS: 10,
    SecretsEngine.PEPPERS: 100,
    SecretsEngine.EVIDENCE: EVIDENCE_VERSIONS,
}
"""Maximum versions per path; the server erases older ones. An erased pepper would invalidate its keys."""

TOKEN_SECONDS: Final = 3600
"""Period of a login's token, in seconds: it expires unless it is renewed within the period."""

SECRET_ID_DAYS: Final = 90
UPGRADE_SECONDS: Final = 30.0

APPROLE: Final = "approle"
KUBERNETES: Final = "kubernetes"


@dataclass(frozen=True, slots=True)
class BootstrapOptions:
    """Choices of an installation.

    `networks`: the networks from which logins are allowed; None: unchanged. `namespace`: use Kubernetes instead of
    AppRole, for the service accounts `<prefix>-web`, `-worker`, `-setup` and `-keystore` in that namespace.
    """

    networks: tuple[str, ...] | None = None
    secret_id_days: int = SECRET_ID_DAYS
    namespace: str | None = None


def bootstrap(
    admin: hvac.Client,
    layout: Layout,
    environments: Iterable[str],
    report: Callable[[str], None],
    choices: BootstrapOptions | None = None,
    *,
    is_dry_run: bool = False,
) -> None:
    """Create and repair everything of the environments and of scope `service`; pass each change to `report`.

    A dry run only reports. Raises StateConflictError, without a change, when a foreign object has one of our names; and
    errors of `backends.base`.
    """
    scopes = list_scopes(environments)
    run = _BootstrapRun(admin, layout, report, BootstrapOptions() if choices is None else choices, is_dry_run)
    run.refuse_foreign(scopes)
    for scope in scopes:
        for engine in KEPT_VERSIONS:
            if scope in scopes_of(engine):
                run.ensure_secrets(engine, scope)
        run.ensure_key(SecretsEngine.SIGNING, scope, SIGNING_KEY, "ed25519")
        if scope in scopes_of(SecretsEngine.FACTORS):
            run.ensure_key(SecretsEngine.FACTORS, scope, ENCRYPTION_KEY, "aes256-gcm96")
            run.ensure_key(SecretsEngine.WRAPPING, scope, WRAPPING_KEY, "aes256-gcm96")
    for scope in scopes:
        if scope in scopes_of(SecretsEngine.KEYS):
            run.ensure_policy(layout.policy(MERCHANT_POLICY, scope), policy_text(layout, MERCHANT_POLICY, scope))
    run.ensure_method()
    for role, scope in list_logins(scopes):
        run.ensure_policy(layout.login(role, scope), policy_text(layout, role, scope))
        run.ensure_role(role, scope)


def list_scopes(environments: Iterable[str]) -> list[str]:
    return sorted({*environments, PepperSet.SERVICE.value})


def list_logins(scopes: Iterable[str]) -> list[tuple[VaultRole, str]]:
    """Return every role and scope that has a login."""
    wanted = set(scopes)
    return [(role, scope) for role in VaultRole for scope in scopes_of(ENGINE_OF[role]) if scope in wanted]


def secrets_options(engine: SecretsEngine) -> dict[str, Any]:
    """Return the options of a KV mount. Deletion by age is off: it could delete a version in use."""
    return {"cas_required": True, "max_versions": KEPT_VERSIONS[engine], "delete_version_after": "0s"}


def policy_text(layout: Layout, name: str, scope: str) -> str:
    """Return a policy from the files of deploy/vault; a role's policy is the common one and its own."""
    files = ["merchant.hcl"] if name == MERCHANT_POLICY else ["login.hcl", f"{name}.hcl"]
    text = "\n".join((POLICY_FILES / file).read_text(encoding="utf-8") for file in files)
    return text.replace("PREFIX", layout.prefix).replace("ROLE", name).replace("SCOPE", scope)


def make_logins(
    admin: hvac.Client,
    layout: Layout,
    names: Iterable[str],
    folder: Path,
    *,
    wrap_seconds: int | None,
    renew: bool = False,
) -> list[str]:
    """Write the login files of each name with mode 0600; return the names that were written.

    The files are `<name>.role_id` and `<name>.wrapped_secret_id`, or `<name>.secret_id` with `wrap_seconds` None. An
    existing login stays unless `renew`: then every secret id of its role is destroyed, on every host, and a new one is
    created. Existing tokens stay valid.
    """
    ensure_private_directory(folder)
    written = []
    for name in names:
        if not name.startswith(f"{layout.prefix}-"):
            raise ValueError(f"{name} is not a name of this installation")
        kept, wrapped, role_id = (folder / f"{name}.{kind}" for kind in ("secret_id", "wrapped_secret_id", "role_id"))
        if not renew and role_id.exists() and (kept.exists() or wrapped.exists()):
            continue
        if renew:
            _destroy_secret_ids(admin, name)
        found = admin.auth.approle.read_role_id(name, mount_point=APPROLE)["data"]["role_id"]
        wrap_ttl = None if wrap_seconds is None else f"{wrap_seconds}s"
        made = admin.auth.approle.generate_secret_id(name, mount_point=APPROLE, wrap_ttl=wrap_ttl)
        write_private_file(role_id, found)
        for stale in (kept, wrapped):
            stale.unlink(missing_ok=True)
        if wrap_seconds is None:
            write_private_file(kept, made["data"]["secret_id"])
        else:
            write_private_file(wrapped, made["wrap_info"]["token"])
        written.append(name)
    return written


def _destroy_secret_ids(admin: hvac.Client, name: str) -> None:
    try:
        accessors = admin.auth.approle.list_secret_id_accessors(name, mount_point=APPROLE)["data"]["keys"]
    except BackendMissingError:
        return
    for accessor in accessors:
        admin.auth.approle.destroy_secret_id_accessor(name, accessor, mount_point=APPROLE)


def read_path(client: hvac.Client, path: str) -> Any:
    """Return the reply's data; hvac's own methods are untyped."""
    return cast("Any", client.read(path))["data"]


@dataclass(frozen=True, slots=True)
class _BootstrapRun:
    """One run: compare, change unless it is a dry run, and report."""

    admin: hvac.Client
    layout: Layout
    report: Callable[[str], None]
    choices: BootstrapOptions
    is_dry_run: bool

    def refuse_foreign(self, scopes: list[str]) -> None:
        """Check all names before any change. Raises StateConflictError."""
        mounts, methods = self._mounts(), self._methods()
        for scope in scopes:
            for engine in SecretsEngine:
                name = self.layout.mount(engine, scope)
                if scope not in scopes_of(engine) or name not in mounts:
                    continue
                wanted = "transit" if engine in TRANSIT_ENGINES else "kv version 2"
                if (found := _type_of(mounts[name])) != wanted:
                    raise _foreign_error(f"The mount {name} is of type {found}, not {wanted}.")
        method = APPROLE if self.choices.namespace is None else KUBERNETES
        if method in methods and methods[method]["type"] != method:
            raise _foreign_error(f"The auth method at {method} is of type {methods[method]['type']}.")
        if method == KUBERNETES and method not in methods:
            raise StateConflictError(
                "The auth method kubernetes is missing. Enable it, configure it for your cluster, and run this again."
            )

    # --- mounts ---------------------------------------------------------------------------------------------

    def ensure_secrets(self, engine: SecretsEngine, scope: str) -> None:
        """Create or repair a KV mount of version 2."""
        name, wanted = self.layout.mount(engine, scope), secrets_options(engine)
        if self._ensure_mount(name, "kv", {"version": "2"}):
            found = self._when_upgraded(lambda: self.admin.secrets.kv.v2.read_configuration(mount_point=name)["data"])
        else:
            found = {"delete_version_after": "0s"}  # the default of a new mount
        if differing := _differing(found, wanted):
            self._change(
                f"mount {name}: {_format_settings(differing)}",
                lambda: self.admin.secrets.kv.v2.configure(mount_point=name, **wanted),
            )

    def ensure_key(self, engine: SecretsEngine, scope: str, key_name: str, key_type: str) -> None:
        """Create or repair a transit mount with a key that can be neither exported nor deleted."""
        name = self.layout.mount(engine, scope)
        path = f"{name}/keys/{key_name}"
        key = self._read(path) if self._ensure_mount(name, "transit", None) else {}
        if not key:
            self._change(
                f"key {name}/{key_name}: made",
                lambda: self.admin.write_data(
                    path, data={"type": key_type, "exportable": False, "allow_plaintext_backup": False}
                ),
            )
            return
        if key["type"] != key_type or key["exportable"] or key["allow_plaintext_backup"]:
            raise _foreign_error(f"The key {name}/{key_name} is of another type, or can be exported.")
        if key["deletion_allowed"]:
            self._change(
                f"key {name}/{key_name}: deletion_allowed false",
                lambda: self.admin.write_data(f"{path}/config", data={"deletion_allowed": False}),
            )

    def _ensure_mount(self, name: str, kind: str, options: dict[str, str] | None) -> bool:
        """Create or repair a mount; return whether it exists now. A dry run does not create it."""
        mount = self._mounts().get(name)
        if mount is None:
            self._change(
                f"mount {name}: made, {kind}",
                lambda: self.admin.sys.enable_secrets_engine(kind, path=name, options=options),
            )
            return not self.is_dry_run
        if shown := [key for key in mount["config"] if key.startswith("audit_non_hmac_") and mount["config"][key]]:
            # With these settings the server's audit log contains the values of the fields unhashed.
            self._change(
                f"mount {name}: {', '.join(shown)} emptied",
                lambda: self.admin.write_data(f"sys/mounts/{name}/tune", data={key: [] for key in shown}),
            )
        return True

    def _when_upgraded(self, request: Callable[[], T]) -> T:
        """Retry while the server answers 400 because it is still upgrading a new mount to KV version 2."""
        deadline = time.monotonic() + UPGRADE_SECONDS
        while True:
            try:
                return request()
            except BackendInvalidError as error:
                if "pgrading" not in error.internal or time.monotonic() > deadline:
                    raise
            time.sleep(0.05)

    # --- policies and roles ---------------------------------------------------------------------------------

    def ensure_policy(self, name: str, text: str) -> None:
        found = self._read(f"sys/policies/acl/{name}").get("policy")
        if found != text:
            self._change(
                f"policy {name}: {'made' if found is None else 'changed'}",
                lambda: self.admin.sys.create_or_update_acl_policy(name, text, pretty_print=False),
            )

    def ensure_method(self) -> None:
        if self.choices.namespace is None and APPROLE not in self._methods():
            self._change(f"auth method {APPROLE}: made", lambda: self.admin.sys.enable_auth_method(APPROLE))

    def ensure_role(self, role: VaultRole, scope: str) -> None:
        """Create or repair the login's role of the same name, with one policy only."""
        name = self.layout.login(role, scope)
        token = {
            "token_policies": [name],
            "token_no_default_policy": True,
            "token_period": TOKEN_SECONDS,
            "token_type": "service",
        }
        if self.choices.namespace is not None:
            bound = {
                "bound_service_account_names": [f"{self.layout.prefix}-{host}" for host in list_hosts(role)],
                "bound_service_account_namespaces": [self.choices.namespace],
            }
            self._ensure_role(KUBERNETES, name, {**token, **bound})
            return
        secret_id: dict[str, Any] = {
            "bind_secret_id": True,
            "secret_id_ttl": self.choices.secret_id_days * 86_400,
            "secret_id_num_uses": 0,
        }
        if self.choices.networks is not None:
            networks = [str(ip_network(network)) for network in self.choices.networks]
            secret_id |= {"secret_id_bound_cidrs": networks, "token_bound_cidrs": networks}
        self._ensure_role(APPROLE, name, {**token, **secret_id})

    def _ensure_role(self, method: str, name: str, wanted: dict[str, Any]) -> None:
        path = f"auth/{method}/role/{name}"
        found = self._read(path) if method in self._methods() else {}
        if differing := _differing(found, wanted):
            self._change(
                f"role {method}/{name}: {_format_settings(differing) if found else 'made'}",
                lambda: self.admin.write_data(path, data=wanted),
            )

    # --- the server -----------------------------------------------------------------------------------------

    def _mounts(self) -> dict[str, Any]:
        return {name.rstrip("/"): about for name, about in self._read("sys/mounts").items()}

    def _methods(self) -> dict[str, Any]:
        return {name.rstrip("/"): about for name, about in self._read("sys/auth").items()}

    def _read(self, path: str) -> Any:
        """Read a path; empty when nothing is there."""
        try:
            return read_path(self.admin, path)
        except BackendMissingError:
            return {}

    def _change(self, change: str, act: Callable[[], Any]) -> None:
        if not self.is_dry_run:
            act()
        self.report(change)


def _type_of(mount: Mapping[str, Any]) -> str:
    version = (mount.get("options") or {}).get("version")
    return f"{mount['type']} version {version or 1}" if mount["type"] == "kv" else str(mount["type"])


def _differing(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in wanted.items() if _normalize(name, found.get(name)) != value}


def _normalize(name: str, value: Any) -> Any:
    """Normalize a value: the server omits the prefix length of a single address."""
    if name.endswith("_cidrs"):
        return [str(ip_network(network)) for network in value or []]
    return value


def _format_settings(choices: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in choices.items())


def _foreign_error(what: str) -> StateConflictError:
    return StateConflictError(f"{what} It is not Keyvault's: move it, or choose another KEYVAULT_VAULT_PREFIX.")
