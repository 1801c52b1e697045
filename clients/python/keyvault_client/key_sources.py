"""Sources of an API key or a service token."""

import json
import os
import ssl
import time
from collections.abc import Callable
from pathlib import Path

from keyvault.domain.plaintext import Plaintext
from keyvault_client.addresses import parse_base_url
from keyvault_client.effects import Failure, KeySource, SendRequest
from keyvault_client.errors import RefusedError
from keyvault_client.keystrings import as_plaintext
from keyvault_client.transport import SyncRunner


class StaticKey:
    """A key that does not change while the process runs."""

    watch_seconds: float | None = None

    def __init__(self, key: str | Plaintext) -> None:
        self._key = as_plaintext(key)

    def read(self, timeout: float) -> Plaintext:
        return self._key


class EnvironmentKey:
    """The value of an environment variable."""

    watch_seconds: float | None = None

    def __init__(self, variable: str) -> None:
        self._variable = variable

    def read(self, timeout: float) -> Plaintext:
        """Raises LookupError when the variable is not set."""
        if self._variable not in os.environ:
            raise LookupError(f"the environment variable {self._variable} is not set")
        return Plaintext(os.environ[self._variable].strip())


class FileKey:
    """The content of a file, without white space at its ends. Replace the file atomically: write another, rename it."""

    def __init__(self, path: str | Path, watch_seconds: float | None = 5) -> None:
        self._path = Path(path)
        self.watch_seconds = watch_seconds

    def read(self, timeout: float) -> Plaintext:
        return Plaintext(self._path.read_text(encoding="ascii").strip())


class CallableKey:
    """What a function returns. It must return within the deadline of a call: the client cannot interrupt it."""

    def __init__(self, function: Callable[[], str | Plaintext], watch_seconds: float | None = 60) -> None:
        self._function = function
        self.watch_seconds = watch_seconds

    def read(self, timeout: float) -> Plaintext:
        return as_plaintext(self._function())


class VaultKey:
    """A field of a secret in a key/value engine (version 2) of Vault or OpenBao.

    Args:
        path: the API path; of a key that Keyvault keeps there, `keyvault-keys-sandbox/data/ACCOUNT_ID/CREDENTIAL_ID`.
        field: the member of the secret that is the key; Keyvault writes `secret`.
        address: default: the environment variable VAULT_ADDR.
        token: source of the Vault token; default: the environment variable VAULT_TOKEN.
        tls: default: the public certificate authorities.
    """

    def __init__(
        self,
        path: str,
        field: str = "secret",
        *,
        address: str | None = None,
        token: KeySource | None = None,
        tls: ssl.SSLContext | None = None,
        watch_seconds: float | None = 60,
    ) -> None:
        self._url = f"{parse_base_url(address or os.environ.get('VAULT_ADDR', ''))}/v1/{path.strip('/')}"
        self._field = field
        self._token = token or EnvironmentKey("VAULT_TOKEN")
        self._tls = tls
        self.watch_seconds = watch_seconds

    def read(self, timeout: float) -> Plaintext:
        """Raises LookupError with the status of the Vault, or when the secret has no such field."""
        deadline = time.monotonic() + timeout
        send = SendRequest("GET", self._url, {"X-Vault-Token": self._token.read(timeout)}, b"", deadline)
        # The next read may be a minute away: keep no idle connection. Other threads may read at the same time.
        runner = SyncRunner(self._tls)
        try:
            reply = runner.send(send)
        finally:
            runner.close()
        if isinstance(reply, Failure):
            raise LookupError(f"no answer of the Vault: {reply.cause}")
        if reply.status != 200:
            raise LookupError(f"the Vault answered {reply.status}")
        try:
            text = json.loads(reply.body)["data"]["data"][self._field]
        except (ValueError, RecursionError, KeyError, TypeError):
            text = None
        if not isinstance(text, str):
            raise LookupError(f"the secret of the Vault has no text field {self._field!a}")
        return Plaintext(text.strip())


def as_key_source(key: "str | Plaintext | KeySource | Callable[[], str | Plaintext]") -> KeySource:
    """Return the source for what a user may give. Raises RefusedError for anything else."""
    if isinstance(key, str | Plaintext):
        return StaticKey(key)
    if callable(key):
        return CallableKey(key)
    if hasattr(key, "read"):
        return key
    raise RefusedError("The client has no key source. Use a key, a function or a key source.", refusal="key")
