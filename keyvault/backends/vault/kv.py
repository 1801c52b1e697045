"""The `SecretBackend` on KV version 2: check-and-set writes, and a separate role for each kind of call.

Texts that their caller stores are encrypted with a Transit key.

A merchant reads one flat object at its path: `secret`, `schema`, and the labels (key id, credential id, environment,
and the id of the rotation or issuance request). The labels are in the version, since KV's custom metadata is per path.
"""

import base64
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import hvac

from keyvault.backends.base import (
    BackendError,
    BackendInvalidError,
    BackendMissingError,
    Health,
    Mount,
    StoredSecret,
    StoredVersion,
    VersionState,
)
from keyvault.backends.vault.breaker import Breaker
from keyvault.backends.vault.client import VaultClient, VaultServer, open_client
from keyvault.backends.vault.layout import ENCRYPTION_KEY, Layout, SecretsEngine, VaultRole, scopes_of
from keyvault.backends.vault.logins import Login
from keyvault.backends.vault.replies import parsing_reply
from keyvault.domain.plaintext import Plaintext

SCHEMA: Final = "1"

_SECRET: Final = "secret"  # noqa: S105  the name of a field
_OURS: Final = frozenset({_SECRET, "schema"})
_OF_KEYS: Final = frozenset({Mount.SANDBOX, Mount.PRODUCTION})
_WRITERS: Final[Mapping[Mount, VaultRole]] = {Mount.PEPPERS: VaultRole.KEEPER, Mount.EVIDENCE: VaultRole.SIGNING}
"""The roles that write to the mounts other than those of the environments' keys."""


@dataclass(slots=True)
class VaultBackend:
    """A `SecretBackend`. `login` returns the login of this process for a name of the layout."""

    server: VaultServer
    login: Callable[[str], Login]
    layout: Layout = field(default_factory=Layout)
    _clients: dict[tuple[VaultRole, str], VaultClient] = field(default_factory=dict)
    _breakers: dict[str, Breaker] = field(default_factory=dict)
    _pid: int = field(default_factory=os.getpid)

    def client(self, role: VaultRole, scope: str) -> VaultClient:
        """Return this process's client of the role in the scope; the scope's clients share a breaker."""
        if self._pid != os.getpid():
            # After a fork: the connections are the parent's, and a thread of the parent may have held a lock.
            self._clients, self._breakers, self._pid = {}, {}, os.getpid()
        name = self.layout.login(role, scope)
        breaker = self._breakers.setdefault(scope, Breaker())
        made = VaultClient(self.server, self.login(name), name, breaker)
        return self._clients.setdefault((role, scope), made)

    def put(
        self,
        mount: Mount,
        path: str,
        secret: Plaintext,
        labels: Mapping[str, str],
        *,
        expected_version: int,
    ) -> int:
        if _OURS & labels.keys():
            raise ValueError("a label has the name of a field of the payload")
        role = _WRITERS.get(mount, VaultRole.ISSUER)
        scope, engine, place = self._place(mount, path)

        def write(client: hvac.Client) -> Any:
            body = {**labels, "schema": SCHEMA, _SECRET: secret.reveal()}
            return client.secrets.kv.v2.create_or_update_secret(
                place, secret=body, cas=expected_version, mount_point=engine
            )

        answer = self.client(role, scope).call(write)
        with parsing_reply("write", may_be_applied=True):
            return int(answer["data"]["version"])

    def read(self, mount: Mount, path: str, version: int | None = None) -> StoredSecret:
        role = VaultRole.READER if mount in _OF_KEYS else VaultRole.LOOKUP
        scope, engine, place = self._place(mount, path)
        _require_number(version, engine, place)
        answer = self.client(role, scope).call(
            lambda client: client.secrets.kv.v2.read_secret_version(
                place, version=version, mount_point=engine, raise_on_deleted_version=True
            )
        )
        with parsing_reply("read"):
            return _stored(answer["data"])

    def soft_delete(self, mount: Mount, path: str, version: int) -> None:
        scope, engine, place = self._place(mount, path)
        with suppress(BackendMissingError):
            self.client(VaultRole.RETIRER, scope).call(
                lambda client: client.secrets.kv.v2.delete_secret_versions(place, [version], mount_point=engine)
            )

    def undelete(self, mount: Mount, path: str, version: int) -> None:
        scope, engine, place = self._place(mount, path)
        with suppress(BackendMissingError):
            self.client(VaultRole.RETIRER, scope).call(
                lambda client: client.secrets.kv.v2.undelete_secret_versions(place, [version], mount_point=engine)
            )
        if StoredVersion(version, VersionState.LIVE) not in self.versions(mount, path):
            raise BackendMissingError("The version was destroyed.", internal=f"{engine}/{place}@{version}")

    def destroy(self, mount: Mount, path: str, version: int) -> None:
        role = VaultRole.KEEPER if mount is Mount.PEPPERS else VaultRole.DESTROYER
        scope, engine, place = self._place(mount, path)
        with suppress(BackendMissingError):
            self.client(role, scope).call(
                lambda client: client.secrets.kv.v2.destroy_secret_versions(place, [version], mount_point=engine)
            )

    def versions(self, mount: Mount, path: str) -> Sequence[StoredVersion]:
        role = VaultRole.LOOKUP if mount is Mount.PEPPERS else VaultRole.READER
        scope, engine, place = self._place(mount, path)
        try:
            answer = self.client(role, scope).call(
                lambda client: client.secrets.kv.v2.read_secret_metadata(place, mount_point=engine)
            )
        except BackendMissingError:
            return []
        with parsing_reply("versions"):
            known = sorted((int(number), _state(about)) for number, about in answer["data"]["versions"].items())
        return [StoredVersion(number, state) for number, state in known]

    def forget(self, mount: Mount, path: str) -> None:
        scope, engine, place = self._place(mount, path)
        with suppress(BackendMissingError):
            self.client(VaultRole.OFFBOARDER, scope).call(
                lambda client: client.secrets.kv.v2.delete_metadata_and_all_versions(place, mount_point=engine)
            )

    def list_paths(self, mount: Mount) -> Iterator[str]:
        scope, engine, _ = self.layout.place(mount, mount.value)
        client = self.client(VaultRole.RECONCILER, scope)
        folders = [""]
        while folders:
            folder = folders.pop()
            for name in _names(client, engine, folder):
                if name.endswith("/"):
                    folders.append(folder + name)
                else:
                    yield folder + name

    def encrypt(self, text: Plaintext) -> str:
        answer = self._call_factors("encrypt", {"plaintext": base64.b64encode(text.reveal().encode()).decode()})
        with parsing_reply("ciphertext"):
            return str(answer["data"]["ciphertext"])

    def decrypt(self, ciphertext: str) -> Plaintext:
        answer = self._call_factors("decrypt", {"ciphertext": ciphertext})
        with parsing_reply("decrypted text"):
            return Plaintext(base64.b64decode(answer["data"]["plaintext"], validate=True).decode())

    def _call_factors(self, operation: str, body: dict[str, str]) -> Any:
        (scope,) = scopes_of(SecretsEngine.FACTORS)
        return self.call_transit(VaultRole.FACTORS, SecretsEngine.FACTORS, scope, f"{operation}/{ENCRYPTION_KEY}", body)

    def call_transit(
        self, role: VaultRole, engine: SecretsEngine, scope: str, operation: str, body: dict[str, Any]
    ) -> Any:
        """Return the reply of a Transit operation, `<operation>/<key>`.

        Raises BackendUnavailableError, BackendDeniedError, BackendInvalidError.
        """
        url = f"/v1/{self.layout.mount(engine, scope)}/{operation}"
        return self.client(role, scope).call(lambda client: client.adapter.post(url, json=body))

    def health(self) -> Health:
        return read_health(self.server)

    def _place(self, mount: Mount, path: str) -> tuple[str, str, str]:
        """Return scope, mount and path. Raises BackendInvalidError for a path with empty or dot segments."""
        if not {"", ".", ".."}.isdisjoint(path.split("/")):
            raise BackendInvalidError("Not a path of a secret.", internal="an empty or a dot segment")
        return self.layout.place(mount, path)


def read_health(server: VaultServer) -> Health:
    """Return the server's health, without a login. Never raises."""
    client = open_client(server)
    try:
        # GET: hvac's HEAD drops every parameter.
        answer = client.sys.read_health_status(method="GET")
    except BackendError as error:
        return Health(False, error.internal or error.detail)
    finally:
        client.adapter.close()
    details = {
        200: "the secrets manager answers",
        429: "the secrets manager's node is a standby",
        472: "the secrets manager's node is a recovery standby",
        473: "the secrets manager's node is a performance standby",
        501: "the secrets manager is not initialized",
        503: "the secrets manager is sealed",
    }
    status = 200 if isinstance(answer, dict) else int(answer.status_code)
    return Health(status == 200, details.get(status, f"the secrets manager's health check answers {status}"))


def _require_number(version: int | None, engine: str, place: str) -> None:
    """Reject numbers below 1, which the server treats as the newest version. Raises BackendMissingError."""
    if version is not None and version < 1:
        raise BackendMissingError("No readable secret is stored there.", internal=f"{engine}/{place}@{version}")


def _stored(found: Any) -> StoredSecret:
    """Parse a version. A payload in another format is from a foreign writer; it gets no labels and so has no owner."""
    number, body = int(found["metadata"]["version"]), found["data"] or {}
    text = body.get(_SECRET)
    if body.get("schema") != SCHEMA or not isinstance(text, str):
        return StoredSecret(number, Plaintext(""), {})
    labels = {name: value for name, value in body.items() if name not in _OURS and isinstance(value, str)}
    return StoredSecret(number, Plaintext(text), labels)


def _state(about: Mapping[str, Any]) -> VersionState:
    if about["destroyed"]:
        return VersionState.DESTROYED
    return VersionState.DELETED if about["deletion_time"] else VersionState.LIVE


def _names(client: VaultClient, engine: str, folder: str) -> list[str]:
    try:
        answer = client.call(lambda hvac_client: hvac_client.secrets.kv.v2.list_secrets(folder, mount_point=engine))
    except BackendMissingError:
        return []
    with parsing_reply("list"):
        return list(answer["data"]["keys"])
