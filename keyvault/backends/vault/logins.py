"""Authentication to Vault: one login for each role and scope.

`VAULT_TOKEN` and files in the home directory are never read. A process without a role's login cannot act in that role:
a host that only verifies has only the `lookup` logins.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import hvac

from keyvault.backends.base import BackendDeniedError, BackendInvalidError, BackendMissingError
from keyvault.backends.private_files import remove_private_file, write_private_file
from keyvault.backends.vault.replies import parsing_reply
from keyvault.domain.plaintext import Plaintext


@dataclass(frozen=True, slots=True)
class Token:
    """A token. `lease_seconds` 0: it does not expire, or an agent manages its expiry."""

    text: Plaintext
    lease_seconds: int
    is_renewable: bool


class Login(Protocol):
    """An authentication method."""

    def log_in(self, client: hvac.Client) -> Token:
        """Log in with a client that has no token. Raises BackendDeniedError, BackendUnavailableError."""


@dataclass(frozen=True, slots=True)
class AppRoleLogin:
    """AppRole: `<name>.role_id`, and `<name>.secret_id` or at first `<name>.wrapped_secret_id`, in a private folder.

    The first process unwraps the secret id and stores it in the same folder. Raises InterceptedLoginError when the
    wrapping token cannot be unwrapped, or was not created by this role's secret-id endpoint.
    """

    folder: Path
    name: str
    mount: str = "approle"

    def log_in(self, client: hvac.Client) -> Token:
        role_id = _read(self.folder / f"{self.name}.role_id", self.name)
        answer = client.auth.approle.login(
            role_id.reveal(), self._secret_id(client).reveal(), use_token=False, mount_point=self.mount
        )
        return _token(answer)

    def _secret_id(self, client: hvac.Client) -> Plaintext:
        kept, wrapped = (self.folder / f"{self.name}.{kind}" for kind in ("secret_id", "wrapped_secret_id"))
        if not wrapped.exists():
            return _read(kept, self.name)
        try:
            # Lock before unwrapping: in a read-only folder the unwrapped secret id would be lost.
            with _lock(self.folder / f"{self.name}.lock"):
                if wrapped.exists():
                    if not _is_unwrapped(kept, wrapped):
                        secret_id = self._unwrap(client, _read(wrapped, self.name))
                        write_private_file(kept, secret_id.reveal())
                    remove_private_file(wrapped)
        except OSError as error:
            raise _no_login(self.name, f"{self.folder} cannot be written ({type(error).__name__})") from None
        return _read(kept, self.name)

    def _unwrap(self, client: hvac.Client, token: Plaintext) -> Plaintext:
        expected = f"auth/{self.mount}/role/{self.name}/secret-id"
        try:
            found = client.adapter.post("/v1/sys/wrapping/lookup", json={"token": token.reveal()})
            with parsing_reply("lookup"):
                creation_path = found["data"]["creation_path"]
            if creation_path == expected:
                opened = client.adapter.post("/v1/sys/wrapping/unwrap", headers={"X-Vault-Token": token.reveal()})
        except (BackendInvalidError, BackendDeniedError, BackendMissingError) as error:
            raise _intercepted(self.name, "it was unwrapped already, or has expired", error.status) from None
        if creation_path != expected:
            raise _intercepted(self.name, f"it was created by {creation_path!r}, not by {expected!r}")
        with parsing_reply("unwrapping"):
            return Plaintext(opened["data"]["secret_id"])


@dataclass(frozen=True, slots=True)
class KubernetesLogin:
    """Kubernetes: the service account's token, read at each login because Kubernetes rotates it."""

    name: str
    jwt_file: Path
    mount: str = "kubernetes"

    def log_in(self, client: hvac.Client) -> Token:
        jwt = _read(self.jwt_file, self.name)
        return _token(
            client.auth.kubernetes.login(role=self.name, jwt=jwt.reveal(), use_token=False, mount_point=self.mount)
        )


@dataclass(frozen=True, slots=True)
class TokenFileLogin:
    """A token file `<name>.token` that an agent renews. It is read again when the server refuses the current token."""

    folder: Path
    name: str

    def log_in(self, client: hvac.Client) -> Token:
        return Token(_read(self.folder / f"{self.name}.token", self.name), lease_seconds=0, is_renewable=False)


def _read(path: Path, name: str) -> Plaintext:
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise _no_login(name, f"{path} cannot be read ({type(error).__name__})") from None
    if not text:
        raise _no_login(name, f"{path} is empty")
    return Plaintext(text)


def _is_unwrapped(kept: Path, wrapped: Path) -> bool:
    """Return whether the secret id is newer than the wrapping token, which a process then failed to delete."""
    return kept.exists() and kept.stat().st_mtime_ns >= wrapped.stat().st_mtime_ns


def _no_login(name: str, why: str) -> BackendDeniedError:
    return BackendDeniedError(
        "This process has no login to the secrets manager for this operation.", internal=f"no login {name}: {why}"
    )


def _token(answer: Any) -> Token:
    with parsing_reply("login"):
        auth = answer["auth"]
        return Token(Plaintext(auth["client_token"]), int(auth["lease_duration"]), bool(auth["renewable"]))


class InterceptedLoginError(BackendDeniedError):
    """A wrapped secret id was unwrapped by another party, or has the wrong origin."""


def _intercepted(name: str, why: str, status: int | None = None) -> InterceptedLoginError:
    return InterceptedLoginError(
        "A wrapped secret id may have been intercepted.",
        internal=f"{name}: the wrapped secret id is not valid ({why}). manage.py check_vault says what to do",
        status=status,
    )


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive file lock among the processes of this host. It ends with the process."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
