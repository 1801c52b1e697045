"""Diagnosis of a host's connection to its Vault, with a remedy for each problem.

It uses the logins of the host, like the service, and changes nothing on the server. A login itself may unwrap
and store a wrapped secret id on the host.
"""

import base64
import binascii
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final, cast

import hvac

from keyvault.backends.base import (
    BackendDeniedError,
    BackendError,
    BackendInvalidError,
    BackendMissingError,
)
from keyvault.backends.vault.bootstrap import APPROLE, KEPT_VERSIONS, list_logins, read_path, secrets_options
from keyvault.backends.vault.capabilities import list_deviations, list_hosts, wanted_capabilities
from keyvault.backends.vault.client import VaultServer, open_client
from keyvault.backends.vault.layout import (
    ENCRYPTION_KEY,
    PEPPER_PATH,
    SCOPES,
    SIGNING_KEY,
    WRAPPING_KEY,
    Layout,
    SecretsEngine,
    VaultRole,
)
from keyvault.backends.vault.logins import Login
from keyvault.backends.vault.remediation import (
    BOOTSTRAP,
    RESTORE,
    Finding,
    login_advice,
    read_refused,
    read_unreachable,
    read_unready,
    renewal_advice,
    repair_advice,
)
from keyvault.domain.digests import Peppers, PepperSet

CLOCK_SECONDS: Final = 30
"""Maximum difference between the clocks of the server and this host, in seconds."""

ENDING_DAYS: Final = 14
"""Remaining lifetime of a secret id below which it is reported, in days."""


@dataclass(slots=True)
class Diagnosis:
    """The diagnosis of one host and one server.

    `folder` None: no login files are needed (Kubernetes). `check_values`: the database's check values of the pepper
    sets that this host loads, by set and version; empty: not compared.
    """

    server: VaultServer
    layout: Layout
    login: Callable[[str], Login]
    folder: Path | None
    needed: list[tuple[VaultRole, str]]
    check_values: Mapping[str, Mapping[int, bytes]]
    now: datetime
    findings: list[Finding] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Fill `findings` and `checked`. Problems of the server or the host are findings, not exceptions."""
        self.checked.append("server")
        if not self._check_server():
            return
        names = {self.layout.login(role, scope): (role, scope) for role, scope in self.needed}
        usable = set(names) if self.folder is None else self._check_folder(self.folder, names)
        for name, (role, scope) in names.items():
            if name in usable:
                self.checked.append(name)
                with self._reported(name), self._logged_in(name) as client:
                    self._check_login(client, name, role, scope)

    # --- the server -----------------------------------------------------------------------------------------

    def _check_server(self) -> bool:
        """Check the server; return whether the logins can be checked."""
        where = self.server.address
        if self.server.ca_file is not None and not self.server.ca_file.is_file():
            self._find(where, f"The CA file {self.server.ca_file} cannot be read.", "Provide it; see VAULT_CACERT.")
            return False
        client = open_client(self.server)
        try:
            answer = client.sys.read_health_status(method="GET")
        except BackendError as error:
            self._find(where, *read_unreachable(error))
            return False
        finally:
            client.adapter.close()
        if not isinstance(answer, dict) or "sealed" not in answer:
            self._find(where, *read_unready(getattr(answer, "status_code", 200)))
            return False
        ahead = int(answer["server_time_utc"]) - self.now.timestamp()
        if abs(ahead) > CLOCK_SECONDS:
            way = "ahead of" if ahead > 0 else "behind"
            self._find(
                where,
                f"The server's clock is {abs(ahead):.0f} s {way} this host's.",
                "Synchronize both with NTP: tokens and secret ids expire by the server's clock.",
            )
        return True

    # --- the files of this host -----------------------------------------------------------------------------

    def _check_folder(self, folder: Path, names: Mapping[str, tuple[VaultRole, str]]) -> set[str]:
        """Check the folder of the logins; return the names with complete files."""
        if not folder.is_dir():
            self._find(str(folder), "The folder of the logins is missing.", login_advice("--host KIND"))
            return set()
        if (owner := folder.stat().st_uid) != os.geteuid():
            self._find(
                str(folder),
                f"The folder of the logins belongs to user {owner}, and this is user {os.geteuid()}.",
                "Run this as the user that the service runs as.",
            )
            return set()
        for path in (folder, *sorted(folder.iterdir())):
            if (mode := path.stat().st_mode & 0o777) & 0o077:
                self._find(str(path), f"Other users can access it (mode {mode:o}).", f"chmod go= {path}")
        found = _names_in(folder)
        if found and not any(name.startswith(f"{self.layout.prefix}-") for name in found):
            self._find(
                str(folder),
                f"None of the logins here is of this service: KEYVAULT_VAULT_PREFIX is {self.layout.prefix!r}, and "
                f"their names are like {min(found)}.",
                "Set KEYVAULT_VAULT_PREFIX to their prefix, or KEYVAULT_VAULT_CREDENTIALS_DIR to this service's own "
                "folder; change no file before that.",
            )
            return set()
        roles = {self.layout.login(role, scope): role for role, scope in list_logins(SCOPES)}
        for name in sorted(found - names.keys()):
            # The command renews only roles of this prefix and release.
            how = f": {renewal_advice(roles[name])}" if name in roles else f" at auth/{APPROLE}/role/{name}."
            self._find(
                name,
                "This host has a login that it does not need.",
                f"Delete {folder / name}.* here, and destroy its secret id{how}",
            )
        for name, (role, _) in names.items():
            if name not in _names_in(folder):
                self._find(
                    name,
                    f"This host lacks the login; hosts of kind {', '.join(list_hosts(role))} need it (--host).",
                    login_advice(f"--role {role}"),
                )
        return names.keys() & _names_in(folder)

    # --- one login ------------------------------------------------------------------------------------------

    @contextmanager
    def _logged_in(self, name: str) -> Iterator[hvac.Client]:
        client, login = open_client(self.server), self.login(name)
        try:
            token = login.log_in(client)
            client.token = token.text.reveal()
            try:
                yield client
            finally:
                if token.is_renewable:  # our own token, not an agent's
                    client.auth.token.revoke_self()
        finally:
            client.adapter.close()

    @contextmanager
    def _reported(self, name: str) -> Iterator[None]:
        try:
            yield
        except BackendError as error:
            self._find(name, *read_refused(name, error))

    def _check_login(self, client: hvac.Client, name: str, role: VaultRole, scope: str) -> None:
        token = client.auth.token.lookup_self()["data"]
        others = sorted({*token["policies"], *(token.get("identity_policies") or ())} - {name})
        if others or name not in token["policies"]:
            self._find(
                name,
                f"Its token has the policies {', '.join(token['policies'])}, not just its own.",
                repair_advice("the role"),
            )
        self._check_capabilities(client, name, role, scope)
        if self.folder is not None and (secret_id := self.folder / f"{name}.secret_id").exists():
            self._check_secret_id(client, name, role, secret_id)
        if role is VaultRole.READER:
            self._check_secrets(client, SecretsEngine.KEYS, scope)
        elif role is VaultRole.LOOKUP:
            self._check_secrets(client, SecretsEngine.PEPPERS, scope)
            self._check_secrets(client, SecretsEngine.EVIDENCE, scope)
            self._check_peppers(client, scope)
            self._check_signing(client, scope)
        elif role is VaultRole.FACTORS:
            # A login may encrypt, and not read the key.
            self._check_encryption(client, SecretsEngine.FACTORS, scope, f"encrypt/{ENCRYPTION_KEY}")
        elif role is VaultRole.UNWRAPPER:
            self._check_encryption(client, SecretsEngine.WRAPPING, scope, f"datakey/wrapped/{WRAPPING_KEY}")

    def _check_capabilities(self, client: hvac.Client, name: str, role: VaultRole, scope: str) -> None:
        wanted = wanted_capabilities(self.layout, role, scope)
        found = _write(client, "sys/capabilities-self", {"paths": list(wanted)})
        for each in list_deviations(wanted, found):
            if each.missing:
                self._find(name, f"It may not {', '.join(each.missing)} at {each.path}.", repair_advice("the policy"))
            if each.excess:
                self._find(
                    name,
                    f"It may {', '.join(each.excess)} at {each.path}, which is more than it needs.",
                    repair_advice("the policy") + " If this remains, check the policies of its entity and groups.",
                )

    def _check_secret_id(self, client: hvac.Client, name: str, role: VaultRole, file: Path) -> None:
        body = {"secret_id": file.read_text(encoding="ascii").strip()}
        found = _write(client, f"auth/{APPROLE}/role/{name}/secret-id/lookup", body)
        ends_at = datetime.fromisoformat(found["expiration_time"])
        left = ends_at - self.now
        if ends_at.year > 1 and left < timedelta(days=ENDING_DAYS):
            self._find(name, f"Its secret id expires in {left.days} days.", login_advice(f"--role {role}"))

    # --- mounts ---------------------------------------------------------------------------------------------

    def _check_secrets(self, client: hvac.Client, engine: SecretsEngine, scope: str) -> None:
        mount = self.layout.mount(engine, scope)
        try:
            found = client.secrets.kv.v2.read_configuration(mount_point=mount)["data"]
        except (BackendMissingError, BackendDeniedError) as error:
            self._report_mount(mount, error)
            return
        for name, value in secrets_options(engine).items():
            if found.get(name) != value:
                self._find(mount, f"{name} is {found.get(name)}, and must be {value}.", repair_advice("the mount"))

    def _check_signing(self, client: hvac.Client, scope: str) -> None:
        mount = self.layout.mount(SecretsEngine.SIGNING, scope)
        try:
            key = read_path(client, f"{mount}/keys/{SIGNING_KEY}")
        except BackendMissingError:
            self._find(mount, f"The signing key {SIGNING_KEY} is missing.", repair_advice("it"))
            return
        except BackendDeniedError as error:
            self._report_mount(mount, error)
            return
        if key["type"] != "ed25519" or key["exportable"] or key["allow_plaintext_backup"]:
            self._find(
                mount,
                f"The signing key {SIGNING_KEY} is not of type ed25519, or can be exported.",
                "Its signatures prove nothing. Move the mount, and run " + BOOTSTRAP + ".",
            )
        elif key["deletion_allowed"]:
            self._find(mount, f"The signing key {SIGNING_KEY} may be deleted.", repair_advice("it"))

    def _check_encryption(self, client: hvac.Client, engine: SecretsEngine, scope: str, use: str) -> None:
        """Use the encryption key once, on one byte or a new data key."""
        mount = self.layout.mount(engine, scope)
        try:
            _write(client, f"{mount}/{use}", {"plaintext": "AA=="})
        except BackendInvalidError:
            self._find(mount, f"The encryption key {use.rpartition('/')[2]} is missing.", repair_advice("it"))
        except (BackendMissingError, BackendDeniedError) as error:
            self._report_mount(mount, error)

    def _report_mount(self, mount: str, error: BackendError) -> None:
        if error.status == 404:
            self._find(mount, "The mount is missing, or of another type.", repair_advice("it"))
        # `_check_capabilities` already reported a refusal (403).

    def _check_peppers(self, client: hvac.Client, scope: str) -> None:
        if scope not in self.check_values:
            return
        mount = self.layout.mount(SecretsEngine.PEPPERS, scope)
        if not self.check_values[scope]:
            self._find(mount, f"The database has no {scope} pepper.", "Run manage.py setup.")
            return
        self.checked.append(f"pepper {scope}")
        for number, check_value in self.check_values[scope].items():
            try:
                found = client.secrets.kv.v2.read_secret_version(
                    PEPPER_PATH, version=number, mount_point=mount, raise_on_deleted_version=True
                )
                pepper = base64.b64decode(found["data"]["data"]["secret"], validate=True)
            except BackendMissingError:
                self._find(mount, f"Pepper version {number} is missing.", RESTORE)
                continue
            except BackendDeniedError:
                continue  # `_check_capabilities` already reported it.
            except (KeyError, TypeError, binascii.Error):
                pepper = b""
            if Peppers(PepperSet(scope), {number: pepper}).check_value(number) != check_value:
                self._find(
                    mount,
                    f"Pepper version {number} is not the one with which the database's keys were hashed.",
                    RESTORE,
                )
        self._check_pepper_path(client, mount)

    def _check_pepper_path(self, client: hvac.Client, mount: str) -> None:
        """Check the path's own options, which override the mount's."""
        try:
            found = client.secrets.kv.v2.read_secret_metadata(PEPPER_PATH, mount_point=mount)["data"]
        except (BackendMissingError, BackendDeniedError):
            return
        fewer = 0 < found["max_versions"] < KEPT_VERSIONS[SecretsEngine.PEPPERS]
        if fewer or found["delete_version_after"] != "0s":
            self._find(
                f"{mount}/{PEPPER_PATH}",
                "The path overrides max_versions or delete_version_after: the server could erase a pepper in use.",
                f"bao kv metadata put -max-versions=0 -delete-version-after=0s -mount={mount} {PEPPER_PATH}",
            )

    def _find(self, subject: str, problem: str, remedy: str) -> None:
        self.findings.append(Finding(subject, problem, remedy))


def _write(client: hvac.Client, path: str, data: dict[str, Any]) -> Any:
    return cast("Any", client.write_data(path, data=data))["data"]


def _names_in(folder: Path) -> set[str]:
    """Return the names of complete logins."""
    stems: dict[str, set[str]] = {}
    for path in folder.iterdir():
        name, _, kind = path.name.rpartition(".")
        stems.setdefault(name, set()).add(kind)
    whole = ({"role_id", "secret_id"}, {"role_id", "wrapped_secret_id"}, {"token"})
    return {name for name, kinds in stems.items() if any(files <= kinds for files in whole)}
