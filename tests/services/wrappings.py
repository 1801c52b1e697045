"""A backend that wraps: the local keystore, with tokens that open once, for tests of what we make of them."""

import secrets
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from keyvault.backends.base import BackendMissingError, Mount, Wrapped
from keyvault.domain.plaintext import Plaintext
from keyvault.services import wrapping
from keyvault.services.secret_backends import secret_backend


@dataclass
class Wrappings:
    """`WrappingBackend`. `unopened`: what each token opens to, by accessor; `tokens`: their accessors."""

    unopened: dict[str, Plaintext] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)

    def wrap(self, mount: Mount, path: str, version: int, *, seconds: int) -> Wrapped:
        token, accessor = f"s.{secrets.token_hex(12)}", secrets.token_hex(12)
        self.unopened[accessor] = secret_backend().read(mount, path, version).secret
        self.tokens[token] = accessor
        ends_at = datetime.now(UTC) + timedelta(seconds=seconds)
        return Wrapped(Plaintext(token), accessor, f"keys-{mount}/data/{path}", ends_at)

    def is_unopened(self, mount: Mount, accessor: str) -> bool:
        return accessor in self.unopened

    def revoke_wrapping(self, mount: Mount, accessor: str) -> bool:
        return self.unopened.pop(accessor, None) is not None

    def open(self, token: Plaintext) -> Plaintext:
        """As whoever holds it does, and once. Raises BackendMissingError."""
        text = self.unopened.pop(self.tokens[token.reveal()], None)
        if text is None:
            raise BackendMissingError("wrapping token is not valid or does not exist")
        return text

    def expire(self) -> None:
        """Every token's time is over."""
        self.unopened.clear()


def begin_wrapping(monkeypatch: pytest.MonkeyPatch, settings: Any) -> Wrappings:
    """From here on the service takes its keystore for a Vault."""
    secret_backend()
    settings.IS_VAULT = True
    made = Wrappings()
    monkeypatch.setattr(wrapping, "wrapping_backend", lambda: made)
    return made
